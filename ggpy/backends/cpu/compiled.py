"""Compiled kernels on disk, in the user's cache folder: numba/<digest>/<name>, as machine code.

The digest is of this folder's sources and of the versions of numba and Python; numba's own cache
would look only at the file of the outermost function. Several processes may use the folder: a file
appears whole or not at all. Nothing is loaded from a folder or a file that others can write to,
because code in it runs as the user. This module does not know what it compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding

from ...util.outcome import one_line
from ...util.output_file import write_whole
from ...util.paths import cache_dir, is_private, make_cache_dir
from ...util.progress import Bar
from . import processor

EXPECTED_SECONDS = 12.0  # for compiling the kernels that a usual model needs


@cache
def folder() -> Path:
    """The cache folder for kernels of these sources."""
    digest = hashlib.sha256(f"{version('numba')} {platform.python_version()}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return cache_dir("numba") / digest.hexdigest()[:16]


@dataclass(frozen=True)
class ObjectCode:
    """An object file: the symbol where the kernel is, and symbols of numba that it refers to."""

    symbol: str
    of_numba: list[str]
    code: bytes

    def load(self) -> int:
        """Links the object file, and returns the kernel's address.

        numba's symbols are for exceptions, which kernels do not raise: if numba is not loaded, they
        are resolved to abort().
        """
        engine = _new_engine()
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        for name in self.of_numba:
            if binding.address_of_symbol(name) is None:
                binding.add_symbol(name, abort)
        engine.add_object_file(binding.ObjectFileRef.from_data(self.code))
        engine.finalize_object()
        address: int = engine.get_function_address(self.symbol)
        return address


_engines: list[Any] = []  # they own the machine code, so they must live


def _new_engine() -> Any:
    """An engine for one object file: numba numbers the functions of a process, so object files of
    two processes may have the same symbol for different functions.
    """
    machine = _target().create_target_machine(jit=True)
    _engines.append(binding.create_mcjit_compiler(binding.parse_assembly(""), machine))
    return _engines[-1]


@cache
def _target() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple()


def is_stored(name: str, n_arguments: int = 5) -> bool:
    """Whether a kernel's machine code is on disk."""
    return _path(name, n_arguments).is_file()


def _path(name: str, n_arguments: int) -> Path:
    machine = repr((n_arguments, processor.name()))
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return folder() / f"{name.replace(' ', '_')}-{digest}"


def _stored(path: Path) -> int | None:
    """The address of the kernel in a file, after linking; None if the file cannot be used.

    The file has a digest of the rest, a line of JSON, and an object file.
    """
    try:
        if not (is_private(folder()) and is_private(path)):
            return None
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        line, _, code = content[32:].partition(b"\n")
        symbol, of_numba = json.loads(line)
        return ObjectCode(symbol, of_numba, code).load()
    except (OSError, ValueError, TypeError, RuntimeError):  # missing, or not such a file
        return None


def _store(path: Path, found: ObjectCode) -> None:
    """Writes the code to the cache; `progress.not_kept` says why that cannot be written."""
    line = json.dumps([found.symbol, found.of_numba]).encode()
    content = line + b"\n" + found.code
    try:
        make_cache_dir(folder())
        write_whole(path, hashlib.sha256(content).digest() + content, alone=False)
    except OSError as error:
        progress.not_kept = one_line(error)
    else:
        if not is_private(folder()):
            progress.not_kept = f"others can write to {folder()}"


class CompileProgress:
    """Seconds of compiling, on a terminal's last line."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self.seconds = 0.0
        self.not_kept = ""  # why the next process must compile again

    def during(self, work: Callable[[], Any]) -> Any:
        """work(), which compiles."""
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


_kernels: dict[str, int] = {}


def address(name: str, n_arguments: int = 5) -> int:
    """The address of the machine code of loops.function(name), which takes `n_arguments` int64."""
    if name not in _kernels:
        _kernels[name] = _kernel(name, n_arguments)
    return _kernels[name]


def called(name: str, n_arguments: int) -> Callable[..., None]:
    """The same kernel as a Python function, which releases the GIL while it runs."""
    type = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_arguments)
    return type(address(name, n_arguments))


def _kernel(name: str, n_arguments: int) -> int:
    path = _path(name, n_arguments)
    return _stored(path) or progress.during(lambda: _compiled(path, name, n_arguments))


def _compiled(path: Path, name: str, n_arguments: int) -> int:
    from . import loops
    from .compiling import machine_code

    found = ObjectCode(*machine_code(loops.function(name), n_arguments))
    _store(path, found)
    return found.load()
