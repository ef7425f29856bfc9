"""Threads that share the items of a job: kernels by their addresses, without locks or the GIL.

A job is cut into chunks, and each thread gets a part: chunks that are consecutive in memory. A
thread takes one chunk at a time, from its own part and then from the others, so a thread that the
system takes off its core delays only its chunk. A thread computes the results of a chunk in its own
memory and copies them when they are complete. If it does not finish in time, thread 0 computes the
chunk again, and the first copy counts; both have the same bits. Workers wait by spinning during a
step, and sleep between steps. Nothing here knows what kernels compute.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import called
from .sizes import ACTIVE, CLOSED, IN_FLIGHT, LINE, MEMORY, N_THREADS, STOP, THREADS, TICKET

CHUNKS_PER_THREAD = 8


class ThreadPool:
    """n_threads threads, of which the caller's is one; `run` is for one caller at a time."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._shared = aligned(8 * (THREADS + LINE * n_threads))
        self._shared.view(np.int64)[N_THREADS] = n_threads
        self._lines = self._shared.view(np.int64)[THREADS:][: LINE * n_threads]
        self._lines[TICKET::LINE] = CLOSED
        self.address = address_of(self._shared)
        self._scratch: list[NDArray[Any]] = []
        self._run = called("run_jobs", 3)
        self._work = called("work", 2)
        self._asleep = [threading.Semaphore(0) for _ in range(n_threads - 1)]
        self._sleeps = [False] * (n_threads - 1)
        self._threads: list[threading.Thread] = []
        self.reserve(1 << 16)
        self._stop = weakref.finalize(
            self, _stop, self._shared.view(np.int64), self._asleep, self._threads
        )

    def reserve(self, nbytes: int) -> None:
        """Gives each thread at least `nbytes` bytes of its own memory."""
        if self._scratch and len(self._scratch[0]) >= nbytes:
            return
        self.settle()
        self._scratch = [aligned(nbytes) for _ in range(self.n_threads)]
        for thread, memory in enumerate(self._scratch):
            self._lines[LINE * thread + MEMORY] = address_of(memory)

    def chunk(self, n_items: int, least: int = 1) -> int:
        """Items of a chunk: CHUNKS_PER_THREAD chunks for each thread, but `least` items or more."""
        share = -(-n_items // (CHUNKS_PER_THREAD * self.n_threads))
        return max(least, share)

    def settle(self) -> None:
        """Waits until no worker computes anything, not even a late chunk: then memory may go."""
        while self._lines[IN_FLIGHT::LINE].any():
            threading.Event().wait(1e-4)

    def run(self, jobs: int, n: int) -> None:
        """Runs n jobs, whose rows of numbers are at the address `jobs`."""
        self._run(self.address, jobs, n)

    def begin(self) -> None:
        """A step begins: workers wake up."""
        if self.n_threads == 1:
            return
        self._shared.view(np.int64)[ACTIVE] = 1
        if not self._threads:
            self._start()
        for i, wake in enumerate(self._asleep):
            if self._sleeps[i]:
                self._sleeps[i] = False
                wake.release()

    def end(self) -> None:
        """A step ended: workers sleep soon unless another one begins."""
        self._shared.view(np.int64)[ACTIVE] = 0

    def _start(self) -> None:
        shared = self._shared.view(np.int64)
        for i, wake in enumerate(self._asleep):
            given = (self._work, self._shared, self.address, i + 1, wake, self._sleeps)
            thread = threading.Thread(target=_worker, args=given, daemon=True, name=f"ggpy-cpu-{i}")
            thread.start()
            self._threads.append(thread)
        assert shared[STOP] == 0


def _worker(
    work: Callable[[int, int], None],
    memory: NDArray[Any],
    pool: int,
    thread: int,
    wake: threading.Semaphore,
    sleeps: list[bool],
) -> None:
    """The loop of a worker. It holds no reference to the pool, whose finalizer stops it."""
    shared = memory.view(np.int64)
    while not shared[STOP]:
        work(pool, thread)
        sleeps[thread - 1] = True
        if shared[ACTIVE] or shared[STOP]:  # a step began before the caller could see it sleep
            sleeps[thread - 1] = False
        else:
            wake.acquire()


def _stop(
    shared: NDArray[Any], asleep: list[threading.Semaphore], threads: list[threading.Thread]
) -> None:
    shared[STOP] = 1
    for wake in asleep:
        wake.release()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def aligned(nbytes: int) -> NDArray[Any]:
    """Zeroed bytes at a multiple of 64, followed by 64 bytes that may be read."""
    memory = np.zeros(nbytes + 192, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + max(nbytes, 1) + 64]


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first number."""
    return int(array.__array_interface__["data"][0])
