"""Compiles kernels ahead of use, in several processes: NVRTC compiles one source at a time in each.

`Wishes` replaces a GPU while kernel wrappers launch, and records the sources they would compile. As
a program, this module compiles the sources that stdin lists into the user's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from ..device.base import Buffer
from ..util.cores import usable_cores

Wish = dict[str, Any]  # arguments of compile_cubin


class Wishes:
    """A device that allocates and runs nothing, and records sources to compile.

    The methods are those of ggpy.device.base.Device.
    """

    def __init__(self, device: Any) -> None:
        """Copies only properties of `device`."""
        self.arch, self.sm_count = device.arch, device.sm_count
        self.shared_bytes, self.free_bytes = device.shared_bytes, 1 << 40
        self.wishes: list[Wish] = []
        self._known: set[str] = set()
        self._addresses = count(1 << 50, 1 << 42)

    def kernel(self, source: str, name: str, **options: Any) -> Any:
        """Record the source. Returns a kernel that does nothing."""
        return self.kernels(source, [name], **options)[0]

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[Any]:
        """Record the source, once for equal arguments. Returns kernels that do nothing."""
        expressions = [name for name in names if not name.isidentifier()]
        wish = {"source_name": source, "expressions": expressions, **options}
        text = json.dumps(wish)
        if text not in self._known:
            self._known.add(text)
            self.wishes.append(wish)
        return [_Nothing() for _ in names]

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        """Return a unique address without memory."""
        return Buffer(next(self._addresses), nbytes, name, lambda ptr, nbytes: None)

    zeros = alloc

    def upload(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    copy = fill = upload

    def download(self, source: Any, dtype: Any, shape: Any, offset: int = 0) -> np.ndarray:
        """Return zeros."""
        return np.zeros(shape, dtype)

    def tensor_map(self, *_: Any) -> bytes:
        """Return an empty tensor map."""
        return b""

    def event(self, timing: bool = False) -> Any:
        """Return an event that does nothing."""
        return _Nothing()

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Yield a graph that does nothing."""
        yield _Nothing()

    def synchronize(self) -> None:
        """Return at once: nothing runs."""


class _Nothing:
    """An object whose methods all do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def compile_ahead(
    wishes: Sequence[Wish], arch: str, processes: int | None, say: Callable[[str], None]
) -> None:
    """Compile all wishes into the cache.

    Compile errors are printed, not raised: the compilation fails again when the kernel is used.
    """
    n = min(processes or usable_cores(), 1 + len(wishes) // 4)
    say(f"compiling {len(wishes)} sources for {arch} in {n} processes, where the cache has none")
    command = [sys.executable, "-m", __name__, arch]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(n)]
    for i, process in enumerate(running):
        assert process.stdin is not None
        for wish in wishes[i::n]:
            process.stdin.write(json.dumps(wish) + "\n")
        process.stdin.close()
    try:
        for process in running:
            process.wait()
    finally:
        for process in running:  # a process is still running if a signal ended the wait
            process.kill()
            process.wait()


def main() -> None:
    """Compile the source that each line of stdin describes in JSON."""
    from ..device.compile import CompileError, compile_cubin
    from ..util.messages import lines

    for line in sys.stdin.readlines():
        wish = json.loads(line)
        try:
            compile_cubin(wish.pop("source_name"), sys.argv[1], **wish)
        except CompileError as error:
            print(lines(str(error)), file=sys.stderr)


if __name__ == "__main__":
    main()
