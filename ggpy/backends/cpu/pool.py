"""Threads that share the items of a job: kernels by their addresses, without locks or the GIL.

A job is cut into chunks, which threads take one at a time from a shared counter, so a thread that
the system takes off its core delays nothing but its chunk. Results of a chunk are made in memory of
the thread and copied when they are complete: where a thread does not come back in time, another
one computes its chunk again, and the copy that comes first counts. Both have the same bits. Workers
wait by spinning during a step, and sleep between steps. Nothing here knows what kernels compute.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from . import simd
from .compiled import called
from .simd import atomics

# A job is a row of int64.
FUNCTION, N_ITEMS, GRAIN, WIDTH, OUT, PRIVATE, ARGUMENTS = range(7)
JOB = 32  # numbers of a job
# WIDTH: bytes of an item's results, which go to OUT; 0: the kernel writes where it wants to, and no
# chunk is computed twice. PRIVATE: bytes that the kernel needs for itself.

# The pool's own int64, a cache line of 8 for what is written by different threads.
TICKET, CURRENT, CHUNKS, DONE, ACTIVE, STOP, EPOCH, STATES = 0, 8, 9, 16, 24, 25, 32, 64
MAX_CHUNKS = 1024
IN_FLIGHT = STATES + MAX_CHUNKS  # of each thread a line: it may hold a chunk; its memory
LINE = 8
CLOSED = 0xFFFFFFFF  # a ticket whose chunks are gone
CHUNKS_PER_THREAD = 8

PATIENCE = 400  # looks at a chunk of another thread before it is computed again
POLITE = 2048  # looks for a job before a thread that waits for its core gets it
GRACE = 20000  # looks for a job after a step before a worker sleeps
WAITING, TAKEN, COMPLETE = 0, 1, 2  # states of a chunk, added to 4 * epoch

let_others_run = types.ExternalFunction("sched_yield", types.int32())
load, store, at = simd.load_i64, simd.store, atomics


@njit
def execute_chunk(pool, job, chunk, epoch, thread):
    """Compute a chunk in the thread's memory, and copy it if nobody else did."""
    grain, width = load(job + 8 * GRAIN), load(job + 8 * WIDTH)
    function, out = load(job + 8 * FUNCTION), load(job + 8 * OUT)
    arguments = job + 8 * ARGUMENTS
    begin = chunk * grain
    end = min(begin + grain, load(job + 8 * N_ITEMS))
    scratch = load(pool + 8 * (IN_FLIGHT + LINE * thread + 1))
    state, waiting = pool + 8 * (STATES + chunk), 4 * epoch
    if width == 0:
        if at.exchanged(state, waiting, waiting + TAKEN):
            simd.call_kernel(function, arguments, begin, end, out, scratch)
            at.put(state, waiting + COMPLETE)
            at.added(pool + 8 * DONE, 1)
        return
    result = scratch + load(job + 8 * PRIVATE)
    simd.call_kernel(function, arguments, begin, end, result, scratch)
    if at.exchanged(state, waiting, waiting + TAKEN):
        at.copied(out + begin * width, result, (end - begin) * width)
        at.put(state, waiting + COMPLETE)
        at.added(pool + 8 * DONE, 1)


@njit
def take_chunks(pool, thread):
    """Compute chunks of the job while there are any."""
    ticket = pool + 8 * TICKET
    while True:
        now = at.got(ticket)
        chunk, epoch = now & CLOSED, now >> 32
        job = load(pool + 8 * CURRENT)
        if chunk >= load(pool + 8 * CHUNKS):
            return
        # Job and chunks are those of the ticket if nobody changed it.
        if at.exchanged(ticket, now, now + 1):
            execute_chunk(pool, job, chunk, epoch, thread)


@njit
def run_job(pool, job, n_threads):
    """All items of a job; the caller is thread 0."""
    items, grain = load(job + 8 * N_ITEMS), load(job + 8 * GRAIN)
    chunks = (items + grain - 1) // grain
    if chunks <= 1 or n_threads == 1:
        scratch = load(pool + 8 * (IN_FLIGHT + 1))
        function, out = load(job + 8 * FUNCTION), load(job + 8 * OUT)
        simd.call_kernel(function, job + 8 * ARGUMENTS, 0, items, out, scratch)
        return
    epoch = (load(pool + 8 * EPOCH) + 1) & 0x3FFFFFFF
    store(pool + 8 * EPOCH, epoch)
    at.put(pool + 8 * TICKET, (epoch << 32) | CLOSED)
    store(pool + 8 * CURRENT, job)
    store(pool + 8 * CHUNKS, chunks)
    store(pool + 8 * DONE, 0)
    for chunk in range(chunks):
        store(pool + 8 * (STATES + chunk), 4 * epoch)
    at.put(pool + 8 * TICKET, epoch << 32)
    take_chunks(pool, 0)
    looks = 0
    while at.got(pool + 8 * DONE) != chunks:
        at.relax()
        looks += 1
        if looks >= PATIENCE:
            compute_again(pool, job, chunks, epoch)
            looks = 0


@njit
def compute_again(pool, job, chunks, epoch):
    """The chunks that others have taken and not completed."""
    if load(job + 8 * WIDTH) != 0:
        for chunk in range(chunks):
            if at.got(pool + 8 * (STATES + chunk)) == 4 * epoch:
                execute_chunk(pool, job, chunk, epoch, 0)


@njit
def run_jobs(pool, jobs, n, n_threads):
    """n jobs, one after the other; addresses."""
    for i in range(n):
        run_job(pool, jobs + 8 * JOB * i, n_threads)


@njit
def work(pool, thread):
    """A worker, until no step is being computed."""
    flag = pool + 8 * (IN_FLIGHT + LINE * thread)
    looks = idle = 0
    while looks < GRACE:
        looks += 1
        idle += 1
        if at.got(pool + 8 * ACTIVE):
            looks = 0
        if at.got(pool + 8 * STOP):
            return
        if (at.got(pool + 8 * TICKET) & CLOSED) < load(pool + 8 * CHUNKS):
            at.put(flag, 1)
            take_chunks(pool, thread)
            at.put(flag, 0)
            idle = 0
        if idle >= POLITE:
            idle = 0
            let_others_run()
        at.relax()


class ThreadPool:
    """n_threads threads, of which the caller's is one; `run` is for one caller at a time."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._shared = aligned(8 * (IN_FLIGHT + LINE * n_threads))
        self._shared.view(np.int64)[TICKET] = CLOSED
        self.address = address_of(self._shared)
        self._scratch: list[NDArray[Any]] = []
        self._run = called("run_jobs", lambda: run_jobs, 4)
        self._work = called("work", lambda: work, 2)
        self._asleep = [threading.Semaphore(0) for _ in range(n_threads - 1)]
        self._sleeps = [False] * (n_threads - 1)
        self._threads: list[threading.Thread] = []
        self.reserve(1 << 16)
        self._stop = weakref.finalize(
            self, _stop, self._shared.view(np.int64), self._asleep, self._threads
        )

    def reserve(self, nbytes: int) -> None:
        """Let each thread have so many bytes for itself."""
        if self._scratch and len(self._scratch[0]) >= nbytes:
            return
        self.settle()
        self._scratch = [aligned(nbytes) for _ in range(self.n_threads)]
        for thread, memory in enumerate(self._scratch):
            self._shared.view(np.int64)[IN_FLIGHT + LINE * thread + 1] = address_of(memory)

    def chunk(self, n_items: int, least: int = 1) -> int:
        """Items of a chunk, at least so many where there are enough."""
        share = -(-n_items // (CHUNKS_PER_THREAD * self.n_threads))
        return max(least, share)

    def settle(self) -> None:
        """Wait until no worker computes anything, late chunks included: then memory may go."""
        flags = self._shared.view(np.int64)[IN_FLIGHT::LINE]
        while flags.any():
            threading.Event().wait(1e-4)

    def run(self, jobs: int, n: int) -> None:
        """n jobs, whose rows are at this address."""
        self._run(self.address, jobs, n, self.n_threads)

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
    """A thread's life: compute, sleep, and so on; it must not hold the pool, which stops it."""
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
    """Zeroed bytes at a multiple of 64, with 64 behind them that may be read."""
    memory = np.zeros(nbytes + 192, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + max(nbytes, 1) + 64]


def address_of(array: NDArray[Any]) -> int:
    """Where an array's first number is."""
    return int(array.__array_interface__["data"][0])
