"""Compiled kernels on disk, in the user's cache folder: numba/<digest>/<name>, as machine code.

The digest is of this folder's sources, numba and Python, because numba itself would look at the
file of the outermost function alone. Several processes may use the folder: a file appears whole or
not at all. Nothing is loaded from a folder or a file that others can write to, because code in it
runs as the user. This module does not know what it compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import pickle
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import add_symbol
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python

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


@dataclass(frozen=True)
class Code:
    """Machine code of a kernel, and where in memory it begins."""

    library: Any  # what keeps it in memory
    address: int


def _stored(path: Path) -> Code | None:
    """The code of this file, which is a digest and the code; None where it cannot be used."""
    try:
        if not (is_private(folder()) and is_private(path)):
            return None
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        symbol, state = pickle.loads(content[32:])
        return _code(_codegen().unserialize_library(state), symbol)
    except Exception:  # a file of another numba or a broken one: whatever it raises
        return None


def _store(path: Path, library: Any, symbol: str) -> None:
    """Write the code, if it can be stored and the folder can be written."""
    if library.has_dynamic_globals:
        return
    content = pickle.dumps((symbol, library.serialize_using_object_code()))
    with contextlib.suppress(OSError):
        make_cache_dir(folder())
        write_whole(path, hashlib.sha256(content).digest() + content, alone=False)


@cache
def _codegen() -> Any:
    """numba's compiler for this processor, without its tables of functions, which take 35 MB and
    are there when something is compiled; loaded code refers to symbols of its runtime alone.
    """
    for name, at in _nrt_python.c_helpers.items():
        add_symbol(name if name.startswith("_") else f"NRT_{name}", at)
    return cpu_target.target_context.codegen()


def _code(library: Any, symbol: str) -> Code:
    return Code(library, library.get_pointer_to_function(symbol))


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


_kernels: dict[str, Code] = {}


def address(name: str, make: Callable[[], Any], n_arguments: int = 5) -> int:
    """Where the compiled kernel of this name is: of the njit function that `make` returns, whose
    arguments are int64.
    """
    if name not in _kernels:
        _kernels[name] = progress.during(lambda: _kernel(name, make, n_arguments))
    return _kernels[name].address


def called(name: str, make: Callable[[], Any], n_arguments: int) -> Callable[..., None]:
    """The same as a function of Python, which gives Python's lock away while it runs."""
    type = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_arguments)
    return type(address(name, make, n_arguments))


def _kernel(name: str, make: Callable[[], Any], n_arguments: int) -> Code:
    machine = repr((n_arguments, _codegen().magic_tuple()))
    path = folder() / f"{name}-{hashlib.sha256(machine.encode()).hexdigest()[:16]}"
    return _stored(path) or _compiled(path, make(), n_arguments)


def _compiled(path: Path, dispatcher: Any, n_arguments: int) -> Code:
    signature = ((types.int64,) * n_arguments, types.void)
    made: Any = CFunc(dispatcher.py_func, signature, locals={}, options={"error_model": "numpy"})
    made.compile()
    _store(path, made._library, made.native_name)
    return _code(made._library, made.native_name)
