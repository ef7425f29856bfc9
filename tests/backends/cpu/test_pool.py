"""Threads that share jobs: every item once, late threads, sleep, and the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from ggpy.backends.cpu.compiled import ObjectCode
from ggpy.backends.cpu.compiling import machine_code
from ggpy.backends.cpu.loops import simd
from ggpy.backends.cpu.loops.simd import atomics
from ggpy.backends.cpu.pool import ThreadPool, address_of, aligned
from ggpy.backends.cpu.sizes import JOB, MAX_CHUNKS

ROOT = Path(__file__).resolve().parents[3]


@njit
def count_items(arguments, begin, end, out, scratch):
    """Arguments: how long an item takes. An item is its number, plus 1."""
    for i in range(begin, end):
        total = 0.0
        for j in range(simd.load_i64(arguments)):
            total += j * 1e-9
        simd.store(out, i + 1 + (0 if total >= 0 else 1))
        out += 8


@njit
def add_one(arguments, begin, end, out, scratch):
    """Arguments: int64 numbers, to which 1 is added in place."""
    for i in range(begin, end):
        at = simd.load_i64(arguments) + 8 * i
        simd.store(at, simd.load_i64(at) + 1)


@njit
def wait_for_another(arguments, begin, end, out, scratch):
    """Arguments: the caller's own memory, and a word for each item. A worker does not come back
    until the caller has computed its items.
    """
    for i in range(begin, end):
        word = simd.load_i64(arguments + 8) + 8 * i
        if scratch == simd.load_i64(arguments):
            atomics.put(word, 1)
        else:
            atomics.put(simd.load_i64(arguments + 16), 1)
            while atomics.got(word) == 0:
                atomics.relax()
        simd.store(out, i + 1)
        out += 8


@cache
def compiled(kernel: Any) -> int:
    return ObjectCode(*machine_code(kernel, 5)).load()


def job(kernel, n: int, grain: int, width: int, out: int, *arguments: int) -> list[int]:
    where = compiled(kernel)
    return [where, n, grain, width, out, 64, *arguments]


def rows(*jobs: list[int]) -> np.ndarray:
    array = aligned(8 * JOB * len(jobs)).view(np.int64)
    for i, numbers in enumerate(jobs):
        array[JOB * i : JOB * i + len(numbers)] = numbers
    return array


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_every_item_is_computed(n_threads: int) -> None:
    pool = ThreadPool(n_threads)
    out = aligned(8 * 5000).view(np.int64)
    for n in (1, 2, 7, 64, 1000, 4999):
        program = rows(job(count_items, n, max(3, -(-n // MAX_CHUNKS)), 8, address_of(out), 50))
        pool.begin()
        for _ in range(20):
            out[:] = 0
            pool.run(address_of(program), 1)
            assert (out[:n] == np.arange(1, n + 1)).all() and not out[n:5000].any()
        pool.end()


def test_what_a_thread_does_not_finish_is_computed_again() -> None:
    """Workers are kept in their chunks until the caller has computed these."""
    pool = ThreadPool(3)
    out, words = (aligned(8 * 4000).view(np.int64) for _ in range(2))
    caught = aligned(64).view(np.int64)
    own = address_of(pool._scratch[0])
    given = own, address_of(words), address_of(caught)
    program = rows(job(wait_for_another, 4000, 4, 8, address_of(out), *given))
    pool.begin()
    deadline = time.monotonic() + 60
    while not caught[0] and time.monotonic() < deadline:
        out[:], words[:] = 0, 0
        pool.run(address_of(program), 1)
        assert (out[:4000] == np.arange(1, 4001)).all()
        pool.settle()
    pool.end()
    assert caught[0], "no worker ever took a chunk"


def test_what_writes_in_place_runs_once() -> None:
    """20 000 jobs on threads that overtake each other."""
    pool, numbers = ThreadPool(4), aligned(8 * 64).view(np.int64)
    program = rows(*[job(add_one, 64, 4, 0, 0, address_of(numbers))] * 100)
    pool.begin()
    for _ in range(200):
        pool.run(address_of(program), 100)
    pool.end()
    assert (numbers[:64] == 20_000).all()


def test_threads_sleep_between_steps_and_wake() -> None:
    """A pool that waits takes no time of any core."""
    pool, out = ThreadPool(3), aligned(8 * 300).view(np.int64)
    program = rows(job(count_items, 300, 3, 8, address_of(out), 50))
    for _ in range(3):
        pool.begin()
        pool.run(address_of(program), 1)
        pool.end()
        deadline = time.monotonic() + 20
        while not all(pool._sleeps) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(pool._sleeps)
    spent = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - spent < 0.1


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    before = set(threading.enumerate())
    pool = ThreadPool(3)
    pool.begin()
    pool.end()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del pool
    gc.collect()
    for thread in started:
        thread.join(20)
    assert not started & set(threading.enumerate())


def test_a_process_ends_while_threads_wait() -> None:
    code = (
        "from ggpy.backends.cpu.pool import ThreadPool\n"
        "pools = [ThreadPool(4) for _ in range(3)]\n"
        "for pool in pools: pool.begin()\n"
        "print('done')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
