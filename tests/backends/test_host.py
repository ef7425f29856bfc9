"""What is asked of the machine, each way of asking with files of its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ggpy.backends import host


def test_available_memory_is_plausible():
    free = host.available_memory()
    assert free is not None and 1 << 20 < free < 1 << 50


def test_container_limit_counts(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 500000\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert host.available_memory() == 2_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host.available_memory() == 8000 * 1024


def test_threads_are_set_in_numpy():
    assert host.set_blas_threads(1), "numpy's wheels carry OpenBLAS"
    paths = host._openblas_paths()
    getters = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
    library = ctypes.CDLL(str(paths[0]))
    counts = [getattr(library, g)() for g in getters if hasattr(library, g)]
    assert counts[:1] == [1]


def test_default_threads_are_modest():
    assert 1 <= host.default_threads() <= max(1, (os.cpu_count() or 1) // 2, 1)


def test_dropped_pages_are_read_again(tmp_path):
    path = tmp_path / "data"
    expected = np.arange(5 * mmap.PAGESIZE, dtype=np.uint8)
    path.write_bytes(expected.tobytes())
    with path.open("rb") as stream:
        mapped = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    host.drop_pages(mapped[100:-100].reshape(-1, 20))
    np.testing.assert_array_equal(mapped, expected)


def test_lazy_zeros_take_memory_where_they_are_written():
    def resident() -> int:  # bytes
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not say how much memory is resident")
    before = resident()
    array = host.lazy_zeros((20, 1 << 20))  # 84 MB
    array[:, 5] = 1
    assert resident() - before < 10_000_000
    assert array.shape == (20, 1 << 20) and array.dtype == np.float32 and array.sum() == 20
    assert host.lazy_zeros((3, 0)).shape == (3, 0)


def test_memory_that_is_no_file_is_left_alone():
    array = np.ones(10 * mmap.PAGESIZE, np.uint8)
    host.drop_pages(array)
    host.drop_pages(array[5000:])
    assert array.all()


SMAPS = """\
7f00-8f00 r--p 00000000 fe:00 12  /usr/lib/libone.so
Rss:                  16 kB
Anonymous:             0 kB
8f00-9f00 r-xp 00001000 fe:00 12  /usr/lib/libone.so
Anonymous:             0 kB
9f00-af00 r--p 00002000 fe:00 12  /usr/lib/libone.so
Anonymous:             4 kB
af00-bf00 rw-p 00003000 fe:00 12  /usr/lib/libone.so
Anonymous:             0 kB
bf00-cf00 r-xp 00000000 fe:00 13  /usr/lib/libtwo.so
Anonymous:             0 kB
cf00-df00 r--p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_pages_of_a_library_are_dropped_if_they_are_those_of_the_file():
    """Not what the loader changed, nor what anyone may change."""
    found = list(host._unchanged_pages(SMAPS, ["libone", "libnone"]))
    assert found == [(0x7F00, 0x1000), (0x8F00, 0x1000)]


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_a_library_works_after_it_was_dropped():
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssFile:")[2].split()[0])  # KB

    x = np.random.default_rng(0).standard_normal((50, 50))
    expected = np.sort(np.exp(x) @ x, axis=0)
    before = resident()
    host.drop_libraries("_multiarray_umath")
    assert resident() < before - 500
    np.testing.assert_array_equal(np.sort(np.exp(x) @ x, axis=0), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names, or no /proc")
def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    """A model's, that is, and the name of a file may be no UTF-8."""
    for name in (b"\xff.gguf", "\u00fc\u2028".encode()):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "wb") as file:
            file.write(b"x" * mmap.PAGESIZE)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert host._mapped_libraries(os.fsdecode(name)) == [Path(os.fsdecode(path))]
            host.drop_libraries("no such library")
