"""CUDA C++ to machine code: NVRTC compiles a file of the `cuda` folder for one architecture, once
per content.

Every call reads the source, so an edited kernel takes effect at the next call. No GPU is needed.
The cache key is made of contents alone (sources, options, versions), never of paths, so a cache may
be moved. This module does not know what kernels do or how they are launched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ggpy.device import cache, toolkit
from ggpy.device.cubin import Cubin, parse_resources
from ggpy.util.paths import cuda_dir

_OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
_PTX = "--gpu-architecture=compute_"  # this option makes PTX instead of machine code
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


# NVRTC 13.0 loses the report of ptxas if two threads compile at the same time
_compile_lock = threading.Lock()


class CompileError(RuntimeError):
    """A CUDA source does not compile; the message is the compiler's log with files and lines."""


def compile_cubin(
    source_name: str,
    arch: str,
    *,
    defines: Mapping[str, str | int] | None = None,
    expressions: Sequence[str] = (),
    extra_source: str = "",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    folder: Path | None = None,
    on_compile: Callable[[], None] = lambda: None,
) -> Cubin:
    """Machine code of `source_name` in `folder` (default `cuda`) for `arch` ("sm_90a"), or PTX
    ("compute_80"); cached.

    expressions: template instances to compile ("k<4, float>"); extern "C" kernels are always
        compiled.
    extra_source: source text that is compiled as if it stood at the end of the file.
    headers: path -> text of files to #include that exist on no disk.
    on_compile: called before a compilation, but not for a cache hit.

    CompileError if the source does not compile; toolkit.NvrtcMissing without NVRTC.
    """
    given = _given(source_name, arch, defines, expressions, extra_source, options, headers, folder)
    key = cache_key(*given)
    cubin = cache.load(key)
    if cubin is None:
        on_compile()
        cubin = _compile(*given)
        cache.store(key, cubin)
    return cubin


def is_compiled(source_name: str, arch: str, **options: Any) -> bool:
    """Whether `compile_cubin` with the same arguments finds its result in the cache."""
    return cache.load(cache_key(*_given(source_name, arch, **options))) is not None


def _given(
    source_name: str,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    expressions: Sequence[str] = (),
    extra_source: str = "",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Path, str, bytes, list[str], Sequence[str], dict[str, bytes]]:
    """The arguments of cache_key and _compile."""
    folder = folder or cuda_dir()
    made = {path: text.encode() for path, text in (headers or {}).items()}
    source = read_source(folder, source_name, extra_source)
    macros = [f"-D{name}={value}" for name, value in (defines or {}).items()]
    flags = [f"--gpu-architecture={arch}", *_OPTIONS, *macros, *options]
    return folder, source_name, source, flags, expressions, made


def read_source(folder: Path, name: str, extra_source: str) -> bytes:
    """The file, followed by the extra source, which has its own name in error messages."""
    source = (folder / name).read_bytes()
    if extra_source:
        source += f'\n#line 1 "{name} (extra source)"\n{extra_source}\n'.encode()
    return source


def cache_key(
    folder: Path,
    name: str,
    source: bytes,
    flags: Sequence[str],
    expressions: Sequence[str],
    made: Mapping[str, bytes] | None = None,
) -> str:
    """The digest of everything that determines the machine code: contents, options and versions, no
    paths.
    """
    headers = sorted(included_files(folder, name, source, made).items())
    parts = {
        "name": name,
        "source": hashlib.sha256(source).hexdigest(),
        "headers": [(path, hashlib.sha256(text).hexdigest()) for path, text in headers],
        "flags": list(flags),
        "expressions": sorted(expressions),
        "nvrtc": toolkit.nvrtc_version(),
        "cuda headers": toolkit.headers_version(),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def included_files(
    root: Path, name: str, source: bytes, made: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Path under `root` -> contents of every file that `source` reaches by #include "..."
    (textually).

    Headers in `made`, which exist on no disk, count as reached and as files in `root`.
    """
    found: dict[str, bytes] = dict(made or {})
    waiting = [
        (Path(name).parent, source),
        *((Path(path).parent, text) for path, text in found.items()),
    ]
    while waiting:
        folder, text = waiting.pop()
        for match in _INCLUDE.finditer(text):
            relative = _resolve(root, folder, match[1].decode())
            if relative is not None and relative not in found:
                found[relative] = (root / relative).read_bytes()
                waiting.append((Path(relative).parent, found[relative]))
    return found


def _resolve(root: Path, folder: Path, name: str) -> str | None:
    """The path under `root` of an included file: beside the including file, or from `root`."""
    for candidate in (root / folder / name, root / name):
        if candidate.is_file():
            path = Path(os.path.normpath(candidate))
            return path.relative_to(root).as_posix() if path.is_relative_to(root) else None
    return None


def _compile(
    folder: Path,
    name: str,
    source: bytes,
    flags: Sequence[str],
    expressions: Sequence[str],
    made: Mapping[str, bytes],
) -> Cubin:
    nvrtc = toolkit.load_nvrtc()
    includes = [f"--include-path={path}" for path in (folder, *toolkit.header_folders())]
    options = [text.encode() for text in (*flags, *includes)]
    headers = list(made.values()), [path.encode() for path in made]
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, name.encode(), len(made), *headers))
    try:
        for expression in expressions:
            _checked(nvrtc, nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        with _compile_lock:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"{folder.name}/{name} does not compile ({' '.join(flags)}):\n{log or status.name}"
            )
        mangled = {text: _symbol(nvrtc, program, text) for text in expressions}
        code = _code(nvrtc, program, ptx=any(flag.startswith(_PTX) for flag in flags))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(code, mangled, parse_resources(log, mangled), log)


def _code(nvrtc: Any, program: Any, ptx: bool) -> bytes:
    """A compiled program's machine code, or its PTX, which ends with a zero byte."""
    kind = "PTX" if ptx else "CUBIN"
    code = bytearray(_checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
    return bytes(code)


def _symbol(nvrtc: Any, program: Any, expression: str) -> str:
    symbol: bytes = _checked(nvrtc, nvrtc.nvrtcGetLoweredName(program, expression.encode()))
    return symbol.decode()


def _text(nvrtc: Any, program: Any) -> str:
    log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    return bytes(log).rstrip(b"\0 \n").decode(errors="replace")


def _checked(nvrtc: Any, result: tuple) -> Any:
    """The value of an NVRTC call that returned (status, value); CompileError if the call failed."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) > 1 else None
