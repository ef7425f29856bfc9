"""Rows of weights from one block format to another, on all cores: tasks in, blocks out, in order.

Formats that search for scales spend their time in many short numpy calls, between which threads
wait for the GIL, so each thread hands these to a process of its own; the others are bound by memory
and stay in their threads. Knows formats, but neither files nor which tensor gets which format.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple
from weakref import finalize

import numpy as np

from ..formats import Format, by_name
from ..formats.base import F32, U8
from ..formats.rows import encode_rows, row_scales
from ..util.cores import usable_cores
from ..util.outcome import SIGNALS

SLAB = 1 << 20  # weights of a task, about
SEARCH_SLAB = 1 << 18  # where scales are searched for, which takes twenty times as long


class Task(NamedTuple):
    """Rows of one tensor; they are returned as they are if `target` is `source`, without scales."""

    data: U8  # [rows, bytes of a row]
    source: Format
    target: Format
    importance: F32 | None = None  # [columns]
    first_row: int = 0  # of the tensor, for messages
    tensor: str = ""  # its name, for messages
    scales: F32 | None = None  # [rows]: a weight is the target's value times the scale of its row


class Workers:
    """`n` threads, by default one for each core, and as many processes; use it in a `with`."""

    def __init__(self, n: int | None = None) -> None:
        self.n = usable_cores() if not n or n < 1 else n
        self.ahead = 2 * self.n  # tasks that are submitted before the first result is yielded
        self.search_slab = SEARCH_SLAB
        self._threads = ThreadPoolExecutor(self.n)
        self._processes: list[Process] = []
        self._idle: SimpleQueue[Process] = SimpleQueue()

    def run(self, tasks: Iterable[Task]) -> Iterator[U8]:
        """Each task's rows in its target format, bytes[rows, bytes of a row], in order.

        It takes up to `ahead` tasks more than it has yielded. ValueError names tensor and row;
        OSError where a process has died.
        """
        ahead: deque[tuple[Task, Future[U8]]] = deque()
        try:
            for task in tasks:
                ahead.append((task, self._submit(task)))
                if len(ahead) > self.ahead:
                    yield _result(*ahead.popleft())
            while ahead:
                yield _result(*ahead.popleft())
        finally:
            for _, future in ahead:
                future.cancel()

    def close(self) -> None:
        """End threads and processes, also processes that are at work."""
        self._kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._kill()  # what a thread began meanwhile
        for process in self._processes:
            process.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, task: Task) -> Future[U8]:
        if (task.source is task.target and task.scales is None) or self.n == 1:
            return _done(task)
        call: Callable[..., U8] = _requantize
        if _searches(task.target, task.importance):
            call = self._requantize_elsewhere
        return self._threads.submit(call, *_by_names(task))

    def _requantize_elsewhere(self, *task: object) -> U8:
        """`_requantize` in a process that no other thread uses: there is one for each thread."""
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = Process()
            self._processes.append(process)
        try:
            return process.requantize(task)
        finally:
            self._idle.put(process)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


class Process:
    """A process that quantises, and the pipe to it. No other process has an end of the pipe, so the
    death of the process ends every wait for it. (Processes of a ProcessPoolExecutor share a pipe:
    if one is killed while it sends a result, the executor waits for the rest of it forever.)
    """

    _starting = Lock()  # multiprocessing starts one process at a time

    def __init__(self) -> None:
        # Not forked: a fork of this process would lack the threads of numpy and of ggpy.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with self._starting, _signals_held_back():
            _start_tracker()
            self._process.start()
        finalize(self, self._process.kill)  # if `close` is not called
        theirs.close()

    def requantize(self, task: object) -> U8:
        """The blocks of the task; ValueError names the row with NaN, OSError if it has died."""
        try:
            self._pipe.send(task)
            answer: U8 | ValueError | MemoryError = self._pipe.recv()
        except (EOFError, OSError):
            raise OSError(
                "a process that quantises has died, perhaps for lack of memory: use fewer threads"
            ) from None
        if isinstance(answer, (ValueError, MemoryError)):
            raise answer
        return answer

    def kill(self) -> None:
        """End it at once; `requantize` raises then."""
        self._process.kill()

    def close(self) -> None:
        """Wait until it has ended."""
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """What a process does until its parent closes the pipe, or dies. Signals that end programs are
    blocked in it: a terminal, or `timeout`, sends them to all processes, but it is the parent that
    ends its processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows nothing is blocked
    try:
        while True:
            answer: U8 | ValueError | MemoryError
            task = pipe.recv()
            try:
                answer = _requantize(*task)
            except (ValueError, MemoryError) as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return


def slabs(
    data: U8,
    columns: int,
    source: Format,
    target: Format,
    importance: F32 | None = None,
    tensor: str = "",
    scales: F32 | None = None,
    search_slab: int | None = None,
) -> Iterator[Task]:
    """The tasks for a tensor's data[..., bytes of a row].

    importance[columns], or [experts, columns] for data[experts, rows, bytes of a row]. scales: see
    Task. search_slab: weights of a task whose format searches for scales; None: SEARCH_SLAB.
    """
    if not data.size:
        return
    rows = data.reshape(-1, data.shape[-1])
    by_expert = None if importance is None else importance.reshape(-1, columns)
    per_expert = len(rows) // (1 if by_expert is None else len(by_expert))
    size = (search_slab or SEARCH_SLAB) if _searches(target, importance) else SLAB
    step = max(1, size // columns)
    for start in range(0, len(rows), per_expert):
        weights = None if by_expert is None else by_expert[start // per_expert]
        for first in range(start, start + per_expert, step):
            part = rows[first : min(first + step, start + per_expert)]
            by_row = None if scales is None else scales[first : first + len(part)]
            yield Task(part, source, target, weights, first, tensor, by_row)


def scales_of_rows(tasks: Iterable[Task]) -> F32:
    """The scales [N] of a tensor's rows in the target format of its tasks; ValueError names the
    tensor and row with NaN or infinity.
    """
    found = [np.zeros(0, np.float32)]
    for task in tasks:
        with np.errstate(all="ignore"):
            weights = task.source.dequantize(task.data)
            scales = row_scales(weights, task.target)
        good = np.isfinite(scales)
        if not good.all():
            row = task.first_row + int(good.argmin())
            raise ValueError(f"tensor {task.tensor!r}: row {row} holds NaN or infinity")
        found.append(scales)
    return np.concatenate(found)


def _searches(target: Format, importance: F32 | None) -> bool:
    return target.searches or (importance is not None and target.quantize_weighted is not None)


def _by_names(task: Task) -> tuple[U8, str, str, F32 | None, int, F32 | None]:
    """Arguments of `_requantize`, with names of formats: a Format has functions, which a process
    cannot be sent.
    """
    data, source, target, importance, first_row, _, scales = task
    return data, source.name, target.name, importance, first_row, scales


def requantized(task: Task) -> U8:
    """The blocks of a task, computed in this thread; ValueError names the row with NaN."""
    return _requantize(*_by_names(task))


def _requantize(
    data: U8,
    source: str,
    target: str,
    importance: F32 | None,
    first_row: int,
    scales: F32 | None,
) -> U8:
    with np.errstate(all="ignore"):  # a NaN or an infinity is refused with its row
        weights = data.view("<f4") if source == "F32" else by_name(source).dequantize(data)
    if scales is not None:
        return encode_rows(weights, scales, by_name(target))
    return by_name(target).quantize(weights, importance, first_row)


def _done(task: Task) -> Future[U8]:
    """A future of a task that is computed before this function returns."""
    future: Future[U8] = Future()
    try:
        same = task.source is task.target and task.scales is None
        future.set_result(task.data if same else requantized(task))
    except ValueError as error:
        future.set_exception(error)
    return future


def _result(task: Task, future: Future[U8]) -> U8:
    try:
        return future.result()
    except ValueError as error:
        name = f"tensor {task.tensor!r}: " if task.tensor else ""
        raise ValueError(f"{name}{error}") from None


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Blocks signals that end programs in this thread, and in processes that start in it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    held = [signal.SIGINT, *(getattr(signal, name) for name in SIGNALS)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Starts the process that multiprocessing needs beside others, if that is not running: it knows
    SIGINT and SIGTERM, but would die of SIGHUP and be started again, so that is blocked in it.
    """
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker  # not on Windows

        with _signals_held_back():
            resource_tracker.ensure_running()
