"""Workers: the same bytes from threads, processes and none, in order, and errors with their row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from format_cases import hashed_weights

from ggpy.formats import by_name
from ggpy.quantization import workers
from ggpy.quantization.workers import Task, Workers, slabs

F32, F16, Q8_0, Q4_K = (by_name(name) for name in ("F32", "F16", "Q8_0", "Q4_K"))
ROWS = 600
COLUMNS = 1024


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2) as found:
        yield found


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    return hashed_weights("workers", ROWS, COLUMNS)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_do_not_depend_on_who_works(two, weights, name, weighted, monkeypatch) -> None:
    monkeypatch.setattr(workers, "SLAB", 1 << 16)
    monkeypatch.setattr(workers, "SEARCH_SLAB", 1 << 16)
    format, importance = by_name(name), None
    if weighted:
        importance = np.square(hashed_weights("importance", 1, COLUMNS)[0])
    expected = format.quantize(weights, importance)
    data = weights.view(np.uint8)
    for pool in (Workers(1), two):
        parts = list(pool.run(slabs(data, COLUMNS, F32, format, importance)))
        assert len(parts) == -(-ROWS // 64)
        assert (np.concatenate(parts) == expected).all()


def test_many_tensors_come_in_order(two, weights) -> None:
    halves = weights.astype("<f2").view(np.uint8)

    def tasks() -> Iterator[Task]:
        for format in (Q4_K, Q8_0, F16, Q4_K):
            yield from slabs(halves[:100], COLUMNS, F16, format)

    found = list(two.run(tasks()))
    same = weights[:100].astype("<f2").astype(np.float32)
    for format, data in zip((Q4_K, Q8_0, F16, Q4_K), found, strict=True):
        assert (data == format.quantize(same)).all()


def test_experts_have_importances_of_their_own(two, weights) -> None:
    cube = weights[:12].reshape(3, 4, COLUMNS)
    importance = np.square(hashed_weights("experts", 3, COLUMNS))
    tasks = slabs(cube.view(np.uint8), COLUMNS, F32, Q4_K, importance)
    found = np.concatenate(list(two.run(tasks)))
    expected = [Q4_K.quantize(x, i) for x, i in zip(cube, importance, strict=True)]
    assert (found == np.concatenate(expected)).all()


def test_few_tasks_are_ahead(weights) -> None:
    """Memory stays bounded: what is not asked for is not begun."""
    taken = []

    def tasks() -> Iterator[Task]:
        for i in range(100):
            taken.append(i)
            yield Task(weights[:1].view(np.uint8), F32, Q8_0)

    with Workers(2) as pool:
        results = pool.run(tasks())
        for _ in range(10):
            next(results)
        assert len(taken) <= 10 + 2 * 2
        results.close()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("n", [1, 2])
def test_tensor_and_row_of_a_nan_are_named(two, weights, name, n, monkeypatch) -> None:
    monkeypatch.setattr(workers, "SLAB", 1 << 16)
    monkeypatch.setattr(workers, "SEARCH_SLAB", 1 << 16)
    bad = weights.copy()
    bad[333, 5] = np.nan
    tasks = slabs(bad.view(np.uint8), COLUMNS, F32, by_name(name), tensor="blk.0.attn_q.weight")
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_q\.weight': row 333 holds NaN"):
        for _ in (two if n == 2 else Workers(1)).run(tasks):
            pass


def test_the_same_format_is_handed_through(two, weights) -> None:
    data = weights[:4].view(np.uint8)
    (part,) = two.run(slabs(data, COLUMNS, F32, F32))
    assert np.shares_memory(part, data)


def test_no_rows_are_no_tasks() -> None:
    assert not list(slabs(np.zeros((0, 128), np.uint8), 32, F32, Q8_0))


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP"])
def test_processes_end_with_the_one_that_started_them(name: str) -> None:
    """It tells their ids when they have worked; each holds its stdout, which ends with the last."""
    code = """
import os, sys, time
from ggpy.util.outcome import ended
def work():
    import numpy as np
    from ggpy.formats import by_name
    from ggpy.quantization.workers import Task, Workers
    data = np.zeros((64, 4096), np.uint8)
    with Workers(2) as found:
        tasks = [Task(data, by_name("F32"), by_name("Q4_K"))] * 4
        for _ in found.run(tasks): pass
        print("worked", flush=True)
        time.sleep(60)
    return 0
if __name__ == "__main__":
    sys.exit(ended(work))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(workers.__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "worked\n"
    number = getattr(signal, name)
    child.send_signal(number)
    child.communicate(timeout=30)  # until all of them have closed it
    assert child.returncode == (-number if name == "SIGKILL" else 128 + number)


def test_a_program_that_closes_nothing_ends() -> None:
    code = """
if __name__ == "__main__":
    import numpy as np
    from ggpy.formats import by_name
    from ggpy.quantization.workers import Task, Workers
    pool = Workers(2)
    task = Task(np.zeros((64, 4096), np.uint8), by_name("F32"), by_name("Q4_K"))
    assert len([*pool.run([task] * 4)]) == 4
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(workers.__file__).parents[2], timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_process_that_dies_ends_the_work(name: str) -> None:
    """SIGKILL may come while the process sends a result. SIGTERM is blocked in the process."""
    data = np.zeros((64, 4096), np.uint8)
    tasks = [Task(data, F32, by_name("Q4_K"))] * 400
    begin = time.monotonic()
    with Workers(2) as found:
        results = found.run(tasks)
        next(results)
        pid = found._processes[0]._process.pid
        assert pid
        os.kill(pid, getattr(signal, name))
        if name == "SIGTERM":
            assert len([*results]) == 399
        else:
            with pytest.raises(OSError, match="a process that quantises has died"):
                list(results)
    assert time.monotonic() - begin < 60
