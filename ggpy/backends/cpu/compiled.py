"""Compiled kernels on disk, in the user's cache folder: numba/<digest>/<name>.

The digest is of this folder's sources, numba and Python, because numba itself would look at the
file of the outermost function alone. Several processes may use the folder: a file appears whole or
not at all. Nothing is loaded from a folder or a file that others can write to, because code in it
runs as the user. This module does not know what it compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ...util.output_file import write_whole
from ...util.paths import cache_dir, is_private, make_cache_dir
from ...util.progress import Bar

EXPECTED_SECONDS = 12.0  # of compiling what a usual file needs


@cache
def folder() -> Path:
    """Where kernels of these sources are."""
    digest = hashlib.sha256(f"{numba.__version__} {platform.python_version()}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return cache_dir("numba") / digest.hexdigest()[:16]


class DiskCache:
    """What numba asks of a function's cache."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled function, or None."""
        path = self._path(signature, context)
        try:
            if not (is_private(folder()) and is_private(path)):
                return None
            payload = pickle.loads(path.read_bytes())
            context.refresh()
            return CompileResult._rebuild(context, *payload)
        except Exception:  # a file of another numba or a broken one: whatever it raises
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store it, if it can be stored and the folder can be written."""
        if result.library.has_dynamic_globals:
            return
        with contextlib.suppress(OSError):
            make_cache_dir(folder())
            path = self._path(signature, result.target_context)
            write_whole(path, dumps(result._reduce()), alone=False)

    def _path(self, signature: Any, context: Any) -> Path:
        machine = repr((str(signature), context.codegen().magic_tuple()))
        return folder() / f"{self.name}-{hashlib.sha256(machine.encode()).hexdigest()[:16]}"


class CompileProgress:
    """Seconds of compiling, on a terminal's last line."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self.seconds = 0.0

    def during(self, work: Callable[[], Any]) -> Any:
        """work(), which compiles or loads."""
        self._bar = self._bar or Bar("compiling for this processor", EXPECTED_SECONDS, "s, once")
        self._bar.update(self.seconds)
        start = time.perf_counter()
        result = work()
        self.seconds += time.perf_counter() - start
        return result

    def close(self) -> None:
        """Wipe the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


progress = CompileProgress()


def compiled(dispatcher: Any, signature: Sequence[Any]) -> Callable[..., Any]:
    """The njit function, compiled for arguments of these types or loaded."""
    if not dispatcher.signatures:
        dispatcher._cache = DiskCache(dispatcher.py_func.__name__)
        progress.during(lambda: dispatcher.compile(tuple(signature)))
        dispatcher.disable_compile()
    return dispatcher


_kernels: dict[str, Any] = {}


def address(name: str, make: Callable[[], Any], n_arguments: int = 5) -> int:
    """Where the compiled kernel of this name is: of the njit function that `make` returns."""
    if name not in _kernels:
        _kernels[name] = progress.during(lambda: _kernel(name, make(), n_arguments))
    return int(_kernels[name].address)


def _kernel(name: str, dispatcher: Any, n_arguments: int) -> CFunc:
    signature = ((types.int64,) * n_arguments, types.void)
    made: Any = CFunc(dispatcher.py_func, signature, locals={}, options={"error_model": "numpy"})
    made._cache = DiskCache(name)
    made.compile()
    return made
