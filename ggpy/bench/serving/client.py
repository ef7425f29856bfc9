"""Runs a load test: sends requests at their times or as streams become free, and keeps the records.

The client also watches itself, because a client that is short of time measures its own delay. It
knows neither what is sent, nor how the figures are computed.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter

from .connection import ConnectionPool, CutOff
from .http1 import MalformedResponse
from .record import CUT, StreamRecord
from .requests import LoadRequest

WATCH = 0.02  # seconds between two looks at the clock
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@dataclass(frozen=True)
class LoadPlan:
    """When requests are sent: `concurrency` at a time, or at `rate` if that is not None.

    rate: requests per second on average, at times of a Poisson process. timeout: seconds that a
    request may take. fails_fast: the first failure ends the test. keeps_texts: records keep the
    events of their answers.
    """

    path: str
    concurrency: int = 1
    rate: float | None = None
    timeout: float = 600.0
    fails_fast: bool = False
    seed: int = 0
    keeps_texts: bool = False


@dataclass
class LoadRun:
    """The records of a test. Times are seconds of one clock.

    lateness: seconds by which the client's timer was late, every WATCH seconds. signal: the number
    of the signal that ended the test; 0: none did. cpu: seconds of processor time of the client.
    """

    records: list[StreamRecord] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    peak: int = 0  # requests at the same time
    n_connections: int = 0
    lateness: list[float] = field(default_factory=list)
    signal: int = 0

    @property
    def is_failed(self) -> bool:
        return any(record.is_failed for record in self.records)


class LoadClient:
    """Sends requests to one server."""

    def __init__(
        self, pool: ConnectionPool, plan: LoadPlan, step: Callable[[int], None] = lambda n: None
    ) -> None:
        """step: is called each time a request ends, with the number of those that have ended."""
        self.pool, self.plan, self._step = pool, plan, step
        self.run = LoadRun()
        self._n_now = self._n_ended = 0
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def measure(self, requests: Sequence[LoadRequest]) -> LoadRun:
        """Sends all requests; returns the records until the end, a signal, or with fails_fast a
        failure.
        """
        run = self.run
        opened, cpu = self.pool.n_opened, time.process_time()
        run.start = perf_counter()
        watch = asyncio.create_task(self._watch())
        send = self._at_a_rate if self.plan.rate else self._by_streams
        work = asyncio.create_task(send(requests))
        stop = asyncio.create_task(self._stop.wait())
        with self._signals():
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, stop, work, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await work
        run.end = max([run.start, *(record.end for record in run.records)])
        run.cpu = time.process_time() - cpu
        run.n_connections = self.pool.n_opened - opened
        return run

    async def _by_streams(self, requests: Sequence[LoadRequest]) -> None:
        """Sends the requests, plan.concurrency at a time."""
        left = iter(requests)

        async def stream() -> None:
            for request in left:
                await self._send(request, perf_counter())
                if self._stop.is_set():
                    return

        streams = min(self.plan.concurrency, len(requests))
        self._tasks = [asyncio.create_task(stream()) for _ in range(streams)]
        await asyncio.gather(*self._tasks)

    async def _at_a_rate(self, requests: Sequence[LoadRequest]) -> None:
        """Sends each request at its time, however many are in flight; its time to the first token
        counts from this time.
        """
        assert self.plan.rate
        times = arrivals(self.plan.rate, self.plan.seed)
        for request, at in zip(requests, times, strict=False):
            due = self.run.start + at
            await asyncio.sleep(due - perf_counter())
            self._tasks.append(asyncio.create_task(self._send(request, due)))
        await asyncio.gather(*self._tasks)

    async def _send(self, request: LoadRequest, start: float) -> None:
        """Send one request and record its answer."""
        record = StreamRecord(request, start, self.plan.keeps_texts)
        self.run.records.append(record)
        self._n_now += 1
        self.run.peak = max(self.run.peak, self._n_now)
        try:
            await self._exchange(record)
        except asyncio.CancelledError:
            record.end = perf_counter()
            raise
        finally:
            self._n_now -= 1
        self._n_ended += 1
        self._step(self._n_ended)
        if record.is_failed and self.plan.fails_fast:
            self._stop.set()

    async def _exchange(self, record: StreamRecord) -> None:
        request = record.request
        message = self.pool.target.request("POST", self.plan.path, request.body)
        is_early = request.cut_at == 0
        limit = request.cut_delay if is_early else self.plan.timeout
        work = self.pool.exchange(message, record.receive)
        try:
            response = await asyncio.wait_for(work, limit)
            record.close(response, perf_counter())
        except CutOff:
            record.fail(CUT, "", perf_counter())
        except (asyncio.TimeoutError, TimeoutError):
            kind = CUT if is_early else "timeout"
            record.fail(kind, f"no end after {limit:g} s", perf_counter())
        except MalformedResponse as error:
            record.fail("malformed response", str(error), perf_counter())
        except OSError as error:
            kind = "connection lost" if isinstance(error, ConnectionError) else "no connection"
            kind = "no connection" if isinstance(error, ConnectionRefusedError) else kind
            record.fail(kind, str(error), perf_counter())

    async def _watch(self) -> None:
        """Records by how much the event loop wakes this task late."""
        while True:
            due = perf_counter() + WATCH
            await asyncio.sleep(WATCH)
            self.run.lateness.append(max(0.0, perf_counter() - due))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, a signal ends the test, and the records so far stay."""
        loop = asyncio.get_running_loop()
        added = []
        with suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread
            for name in SIGNALS:
                number = getattr(signal, name)
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before = signal.getsignal(number)
                    loop.add_signal_handler(number, self._stopped, number)
                    added.append((number, before))
        try:
            yield
        finally:
            for number, before in added:
                loop.remove_signal_handler(number)
                signal.signal(number, before)

    def _stopped(self, number: int) -> None:
        self.run.signal = number
        self._stop.set()


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process, the first at 0."""
    draws = random.Random(seed)
    at = 0.0
    while True:
        yield at
        at += draws.expovariate(rate)


def allow_connections(n: int) -> None:
    """Raises the limit on open files for n connections, as far as the system allows."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 64
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
