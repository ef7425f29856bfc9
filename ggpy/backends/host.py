"""The host machine: its free memory and its BLAS threads.

Nothing here knows models. A fact that a platform does not tell is None or False, never a guess.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..util.cores import usable_cores

F32 = np.dtype(np.float32)

SET_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def available_memory() -> int | None:
    """Bytes that are available without swapping, also in a container; None if unknown."""
    known = [n for n in (_meminfo_available(), _cgroup_available()) if n is not None]
    return min(known) if known else _physical_memory()


def default_threads() -> int:
    """OpenBLAS threads: half of the usable cores, at most 4, because these threads spin while they
    wait, which is slow on a busy machine.
    """
    return max(1, min(4, usable_cores() // 2))


def checked_threads(asked: int | None, note: Callable[[str], None]) -> int:
    """The number of threads that was asked for, but at most one per core, because a thread without
    its own core makes the others wait; `note` gets a remark then. None: one per core.
    """
    cores = usable_cores()
    if asked is None:
        return cores
    if asked > cores:
        note(f"{asked} threads are too many: this process has {cores} cores, and uses {cores}")
    return min(asked, cores)


def set_blas_threads(n_threads: int) -> bool:
    """Limit the OpenBLAS that numpy has loaded to n_threads; False with another BLAS."""
    for path in _openblas_paths():
        library = ctypes.CDLL(str(path))  # already in the process: this only finds it again
        for name in SET_THREADS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter(ctypes.c_int(n_threads))
                return True
    return False


def lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any] = F32) -> NDArray[Any]:
    """Zeros that take memory only where they are written; not in huge pages of 2 MB."""
    buffer = mmap.mmap(-1, max(1, dtype.itemsize * prod(shape)))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(buffer, dtype, prod(shape)).reshape(shape)


def drop_pages(view: np.ndarray) -> None:
    """Let the system drop a view of a mapped file from memory; a later use reads it again.

    Does nothing for an array that is no such view, or if the system cannot do it.
    """
    owner: object = view
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(owner, "madvise"):
        return
    begin = (
        view.__array_interface__["data"][0]
        - np.frombuffer(owner, np.uint8).__array_interface__["data"][0]
    )
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: neighbours may be in use
    length = (begin + view.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        owner.madvise(mmap.MADV_DONTNEED, first, length)


def release_free_memory() -> None:
    """Let the allocator give its reserve back to the system, if it can (glibc)."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def drop_libraries(*parts: str) -> None:
    """Let the system drop the code of libraries from memory whose path has one of these parts; a
    later use reads it again. Does nothing if the system cannot do it.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        for begin, length in _unchanged_pages(_mappings("smaps"), parts):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _unchanged_pages(smaps: str, parts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of mappings that are read-only and have no changed page."""
    begin = end = 0
    for fields in (line.split(maxsplit=5) for line in smaps.split("\n") if line):
        if "-" in fields[0]:
            is_code = len(fields) == 6 and "w" not in fields[1]
            is_wanted = is_code and any(part in fields[5] for part in parts)
            begin, end = (int(x, 16) for x in fields[0].split("-")) if is_wanted else (0, 0)
        elif end and fields[0] == "Anonymous:" and fields[1] == "0":
            yield begin, end - begin


def _openblas_paths() -> list[Path]:
    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs", package / ".libs")
    bundled = [
        p for folder in folders if folder.is_dir() for p in sorted(folder.glob("*openblas*"))
    ]
    return bundled + [p for p in _mapped_libraries("openblas") if p not in bundled]


def _mapped_libraries(part: str) -> list[Path]:
    try:
        lines = _mappings("maps").split("\n")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if part in line}
    return [Path(p) for p in sorted(paths) if Path(p).is_file()]


def _mappings(name: str) -> str:
    """What this process has mapped, as Linux says it; names of files may be no UTF-8. OSError."""
    return os.fsdecode(Path("/proc/self", name).read_bytes())


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)


def _cgroup_available() -> int | None:
    """What a container has left (cgroup v2, then v1); file pages can be dropped, so are free."""
    root = Path("/sys/fs/cgroup")
    for limit, used, stat, field in (
        (root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file"),
        (
            root / "memory/memory.limit_in_bytes",
            root / "memory/memory.usage_in_bytes",
            root / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            free = int(limit.read_text()) - int(used.read_text())  # "max" is a ValueError: no limit
            stats = dict(line.split() for line in stat.read_text().splitlines())
            return max(0, free + int(stats.get(field, 0)))
        except (OSError, ValueError):
            continue
    return None


def _physical_memory() -> int | None:
    if sys.platform == "win32":
        return _windows_available()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _windows_available() -> int | None:
    class MemoryStatus(ctypes.Structure):  # MEMORYSTATUSEX
        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *(
                (name, ctypes.c_uint64)
                for name in ("total", "available", "page_total", "page_available")
            ),
            *(
                (name, ctypes.c_uint64)
                for name in ("virtual_total", "virtual_available", "extended")
            ),
        )

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    kernel32 = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
    return status.available if kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
