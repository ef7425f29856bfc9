"""The loops of the pool's threads: they take chunks of a job, compute them and wait for them.

pool.py describes chunks and threads; sizes.py has the places of the numbers in shared memory.
Nothing here knows what kernels compute.
"""

from __future__ import annotations

from numba import njit, types

from ..sizes import (
    ACTIVE,
    ARGUMENTS,
    CLOSED,
    CURRENT,
    DONE,
    EPOCH,
    FUNCTION,
    GRAIN,
    IN_FLIGHT,
    JOB,
    LAST,
    LINE,
    MEMORY,
    N_ITEMS,
    N_THREADS,
    OUT,
    PRIVATE,
    STATES,
    STOP,
    THREADS,
    TICKET,
    WIDTH,
)
from . import simd
from .simd import atomics

PATIENCE = 400  # polls for chunks of other threads before thread 0 computes them again
POLITE = 2048  # polls for a job before a worker yields its core to other threads
GRACE = 20000  # polls for a job after a step before a worker sleeps
WAITING, TAKEN, COMPLETE = 0, 1, 2  # states of a chunk, added to 4 * epoch

let_others_run = types.ExternalFunction("sched_yield", types.int32())
load, store, at = simd.load_i64, simd.store, atomics


@njit
def line(pool, thread):
    """The address of a thread's line of words."""
    return pool + 8 * (THREADS + LINE * thread)


@njit
def execute_chunk(pool, job, chunk, epoch, thread):
    """Computes a chunk in the thread's memory, and copies it unless another thread did."""
    grain, width = load(job + 8 * GRAIN), load(job + 8 * WIDTH)
    function, out = load(job + 8 * FUNCTION), load(job + 8 * OUT)
    arguments = job + 8 * ARGUMENTS
    begin = chunk * grain
    end = min(begin + grain, load(job + 8 * N_ITEMS))
    scratch = load(line(pool, thread) + 8 * MEMORY)
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
    """Computes chunks of the job while there are any, those of the thread's own part first."""
    n_threads = load(pool + 8 * N_THREADS)
    for i in range(n_threads):
        owner = line(pool, (thread + i) % n_threads)
        while True:
            now = at.got(owner + 8 * TICKET)
            chunk, epoch = now & CLOSED, now >> 32
            job = load(pool + 8 * CURRENT)
            if chunk >= load(owner + 8 * LAST):
                break
            # If the ticket is still the same, the job and the part belong to it.
            if at.exchanged(owner + 8 * TICKET, now, now + 1):
                execute_chunk(pool, job, chunk, epoch, thread)


@njit
def run_job(pool, job):
    """Computes all items of a job; the caller is thread 0."""
    n_threads = load(pool + 8 * N_THREADS)
    items, grain = load(job + 8 * N_ITEMS), load(job + 8 * GRAIN)
    chunks = (items + grain - 1) // grain
    if chunks <= 1 or n_threads == 1:
        scratch = load(line(pool, 0) + 8 * MEMORY)
        function, out = load(job + 8 * FUNCTION), load(job + 8 * OUT)
        simd.call_kernel(function, job + 8 * ARGUMENTS, 0, items, out, scratch)
        return
    epoch = (load(pool + 8 * EPOCH) + 1) & 0x3FFFFFFF
    store(pool + 8 * EPOCH, epoch)
    for thread in range(n_threads):
        at.put(line(pool, thread) + 8 * TICKET, (epoch << 32) | CLOSED)
    store(pool + 8 * CURRENT, job)
    store(pool + 8 * DONE, 0)
    for chunk in range(chunks):
        store(pool + 8 * (STATES + chunk), 4 * epoch)
    for thread in range(n_threads):
        store(line(pool, thread) + 8 * LAST, chunks * (thread + 1) // n_threads)
        at.put(line(pool, thread) + 8 * TICKET, (epoch << 32) | (chunks * thread // n_threads))
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
    """Computes the chunks that other threads have taken and not completed."""
    if load(job + 8 * WIDTH) != 0:
        for chunk in range(chunks):
            if at.got(pool + 8 * (STATES + chunk)) == 4 * epoch:
                execute_chunk(pool, job, chunk, epoch, 0)


@njit
def run_jobs(pool, jobs, n):
    """Runs n jobs one after the other. pool, jobs: addresses."""
    for i in range(n):
        run_job(pool, jobs + 8 * JOB * i)


@njit
def work(pool, thread):
    """The loop of a worker; it returns when no step has been computed for a while."""
    mine = line(pool, thread)
    looks = idle = 0
    while looks < GRACE:
        looks += 1
        idle += 1
        if at.got(pool + 8 * ACTIVE):
            looks = 0
        if at.got(pool + 8 * STOP):
            return
        if (at.got(mine + 8 * TICKET) & CLOSED) < load(mine + 8 * LAST):
            at.put(mine + 8 * IN_FLIGHT, 1)
            take_chunks(pool, thread)
            at.put(mine + 8 * IN_FLIGHT, 0)
            idle = 0
        if idle >= POLITE:
            idle = 0
            let_others_run()
        at.relax()
