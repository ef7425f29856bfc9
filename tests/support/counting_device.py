"""A device that only counts memory: kernels do nothing, and downloads return zeros.

It records what a backend allocates, in order, for models of any size, without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from ggpy.device import Buffer, OutOfMemory, Ptr


class Nothing:
    """A kernel, stream, event or graph whose methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class CountingDevice:
    """A device with `total` bytes of memory; see ggpy.device.base.Device."""

    arch, sm_count, shared_bytes = "sm_80", 4, 227 << 10

    @property
    def target(self) -> str:
        return self.arch

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.used_bytes = self.most_bytes = self.host_bytes = 0
        self.allocated: Counter[str] = Counter()  # name -> bytes, including freed memory
        self._addresses = count(1 << 50, 1 << 42)
        self.stream = Nothing()

    @property
    def free_bytes(self) -> int:
        return self.total - self.used_bytes

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        if nbytes > self.free_bytes:
            raise OutOfMemory(name, nbytes, self.free_bytes)
        self.used_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        self.allocated[name] += nbytes
        return Buffer(next(self._addresses), nbytes, name, self._release)

    zeros = alloc

    def alloc_host(self, nbytes: int, name: str = "") -> Buffer:
        self.host_bytes += nbytes
        self.allocated[name] += nbytes
        return Buffer(next(self._addresses), nbytes, name, self._release_host)

    def _release(self, ptr: int, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def _release_host(self, ptr: int, nbytes: int) -> None:
        self.host_bytes -= nbytes

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def mapped(self, nbytes: int) -> tuple[np.ndarray, Ptr]:
        return self.pinned(nbytes), Ptr(0)

    def upload(self, *_: Any, **__: Any) -> None:
        pass

    copy = fill = upload

    def download(self, source: Any, dtype: Any, shape: Any, offset: int = 0) -> np.ndarray:
        return np.zeros(shape, dtype)

    def kernel(self, *_: Any, **__: Any) -> Nothing:
        return Nothing()

    def kernels(self, source: str, names: Sequence[str], **__: Any) -> list[Nothing]:
        return [Nothing() for _ in names]

    def event(self, timing: bool = False) -> Nothing:
        return Nothing()

    def new_stream(self) -> Nothing:
        return Nothing()

    @contextmanager
    def capture(self) -> Iterator[Nothing]:
        yield Nothing()

    def synchronize(self) -> None:
        pass


class LaunchesOnHopper(CountingDevice):
    """A Hopper device that records the launched kernels and whether each used PDL."""

    arch, sm_count = "sm_90a", 132

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, bool]] = []

    def kernel(self, source: str, name: str, **_: Any) -> Any:
        note = self.launched.append
        short = name.partition("<")[0]
        return SimpleNamespace(launch=lambda *_, pdl=False, **__: note((short, pdl)))

    def kernels(self, source: str, names: Sequence[str], **_: Any) -> list[Any]:
        return [self.kernel(source, name) for name in names]

    def times(self, kernel: str) -> int:
        """The number of launches of a kernel."""
        return sum(name == kernel for name, _ in self.launched)
