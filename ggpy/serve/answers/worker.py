"""The thread that owns the engine, and the tickets by which the event loop follows sequences.

The event loop hands over prepared sequences and cancellations; the thread steps the engine while it
has sequences, and hands all pieces of a step back in one callback. Nothing here knows HTTP, text or
what is asked of a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import TypeVar

from ...runtime.engine import Engine
from ...runtime.sequence import Finish, Piece, Sequence

MAX_UNREAD = 1 << 16  # pieces that wait for a client that does not read
STOPPED = "the server is stopping: try again later"

Result = TypeVar("Result")
News = tuple["Ticket", list[Piece], "Finish | None"]


class Full(RuntimeError):
    """As many requests wait as may."""


class Ticket:
    """A sequence as the event loop sees it. Only the event loop uses it."""

    def __init__(self, sequence: Sequence, worker: EngineWorker) -> None:
        self.sequence, self._worker = sequence, worker
        self.name = ""  # by which a client may name it while it runs
        self.finish: Finish | None = None
        self._unread: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    async def pieces(self) -> list[Piece]:
        """All pieces that there are, once there is one; [] after the last. Raises the error of a
        sequence that failed.
        """
        while not self._unread and self.finish is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        unread, self._unread = self._unread, []
        if not unread and self.sequence.error is not None:
            raise self.sequence.error
        return unread

    async def ready(self, seconds: float) -> bool:
        """Whether `pieces` would return at once, after some seconds at most."""
        if not self._unread and self.finish is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=seconds)
        return bool(self._unread) or self.finish is not None

    def cancel(self) -> None:
        """End the sequence, if it has not ended; its pages are free before the next step."""
        if self.finish is None:
            self._worker.cancel(self)

    def deliver(self, pieces: list[Piece], finish: Finish | None) -> None:
        """Take the pieces of a step."""
        self._unread += pieces
        self.finish = finish or self.finish
        if len(self._unread) > MAX_UNREAD:
            self.cancel()
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


class EngineWorker:
    """Runs an engine for an event loop. `failed(error)` is called there when a step raises."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        n_waiting: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        """n_waiting: sequences that may wait beside those that run."""
        self.engine, self._loop = engine, loop
        self._most = engine.n_seq + n_waiting
        self._failed = failed
        # of sequences that have not ended; the event loop alone uses it
        self.tickets: set[Ticket] = set()
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._news: dict[Ticket, None] = {}  # with news in this step; the thread alone uses it
        self._stopped = False
        self._thread = Thread(target=self._run, name="ggpy engine", daemon=True)
        self._thread.start()

    # The event loop's side

    def submit(self, sequence: Sequence) -> Ticket:
        """Let a prepared sequence wait for its turn; Full, RuntimeError after `close`."""
        if self._stopped:
            raise RuntimeError(STOPPED)
        if len(self.tickets) >= self._most:
            raise Full(f"{len(self.tickets)} requests run or wait, which is the limit: try later")
        ticket = Ticket(sequence, self)
        sequence.notify = partial(self._news.setdefault, ticket)
        self.tickets.add(ticket)
        self._inbox.put(partial(self.engine.begin, sequence))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a ticket's sequence before the next step."""
        self._inbox.put(partial(self.engine.release, ticket.sequence))

    async def call(self, work: Callable[[], Result]) -> Result:
        """What work() returns or raises in the engine's thread, between two steps."""
        if self._stopped:
            raise RuntimeError(STOPPED)
        done: asyncio.Future[Result] = self._loop.create_future()

        def settle(value: Result | None, error: BaseException | None) -> None:
            if done.done():  # nobody waits any more
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)  # type: ignore[arg-type]

        def request() -> None:
            if done.cancelled():
                return
            try:
                value = work()
            except Exception as error:
                self._loop.call_soon_threadsafe(settle, None, error)
            else:
                self._loop.call_soon_threadsafe(settle, value, None)

        self._inbox.put(request)
        return await done

    def stop(self) -> None:
        """End all sequences after the step that is under way, with an error that says why."""
        self._stopped = True
        self._inbox.put(None)

    def close(self) -> None:
        """End all sequences and the thread."""
        self.stop()
        if current_thread() is not self._thread:
            self._thread.join()

    # The thread's side

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._take_requests()
                if self.engine.busy and not self._stopped:
                    self.engine.step(wait=True)
            except BaseException as error:
                self._fail(error)
            self._deliver()
        self._end()
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._end)  # what it asked for meanwhile

    def _take_requests(self) -> None:
        """Do what the event loop has asked so far; wait for it while there is nothing to evaluate.
        What it asks meanwhile, as a client that has one piece of work after the other, waits for a
        step.
        """
        left = self._inbox.qsize()
        while left > 0 or not (self.engine.busy or self._news or self._stopped):
            request = self._inbox.get()
            left = left - 1 if left > 0 else self._inbox.qsize()
            if request is not None:
                request()

    def _end(self) -> None:
        """Answer whoever still asks, and end all sequences."""
        while not self._inbox.empty():
            request = self._inbox.get()
            if request is not None:
                request()
        with suppress(RuntimeError):  # the event loop is closed: nobody is there to be told
            self.engine.abort(RuntimeError(STOPPED))
            self._deliver()

    def _deliver(self) -> None:
        """Hand the news of a step to the event loop, in one callback."""
        if not self._news:
            return
        news: list[News] = []
        for ticket in self._news:
            s = ticket.sequence
            finish = s.finish  # read before the pieces, so that none of them is missed
            if finish is not None:
                s.notify = None  # which refers to the ticket: no cycle is left
            pieces = [s.pieces.popleft() for _ in range(len(s.pieces))]
            news.append((ticket, pieces, finish))
        self._news.clear()
        self._loop.call_soon_threadsafe(self._hand_out, news)

    def _hand_out(self, news: list[News]) -> None:
        """In the event loop."""
        for ticket, pieces, finish in news:
            if finish is not None:
                self.tickets.discard(ticket)
            ticket.deliver(pieces, finish)

    def _fail(self, error: BaseException) -> None:
        """A step that raised: nobody's sequence can go on, and the process has to end."""
        self._stopped = True
        try:
            self.engine.abort(error)
            self._deliver()
        except BaseException:
            self._loop.call_soon_threadsafe(self._give_up, error)
        self._loop.call_soon_threadsafe(self._failed, error)

    def _give_up(self, error: BaseException) -> None:
        """In the event loop: end all tickets with an error, when the engine cannot."""
        for ticket in tuple(self.tickets):
            ticket.sequence.error = error
            self._hand_out([(ticket, [], "error")])
