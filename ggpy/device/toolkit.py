"""Finds NVRTC and the CUDA headers on this machine (in wheels or a toolkit), and their versions.

Loading NVRTC takes 0.1 s, so the cache folder stores its version under a digest of the installed
library files. This module compiles nothing and calls no driver.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from ggpy.device import cache
from ggpy.util.paths import cache_dir, is_private

INSTALL = "pip install 'ggpy[cuda]'"


class NvrtcMissing(RuntimeError):
    """NVRTC, the CUDA headers or cuda-python is not installed; the message says what to install."""


@functools.cache
def load_nvrtc() -> Any:
    """The module `cuda.bindings.nvrtc` with its library loaded; NvrtcMissing if it is missing."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise NvrtcMissing(f"cuda-python is not installed: {INSTALL}") from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        detail = str(error).splitlines()[0]
        raise NvrtcMissing(
            f"the CUDA compiler library NVRTC is not installed: {INSTALL} ({detail})"
        ) from None
    return nvrtc


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, such as "13.4"; read from the cache folder as long as the installed
    libraries do not change.
    """
    installed = _nvrtc_files()
    digest = hashlib.sha256(json.dumps(installed).encode()).hexdigest()[:16]
    memo = cache_dir("nvrtc") / f"{digest}.txt"
    if installed and is_private(memo.parent):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = memo.read_text("ascii")
            if re.fullmatch(r"\d+\.\d+", text):
                return text
    _, major, minor = load_nvrtc().nvrtcVersion()
    version = f"{major}.{minor}"
    if installed:
        with contextlib.suppress(OSError):
            cache.write_atomically(memo, version.encode())
    return version


def _nvrtc_files() -> list[tuple[str, int, int]]:
    """(path, bytes, time) of every NVRTC library on the search path, in search order."""
    files = []
    for folder in library_folders():
        for path in sorted(folder.glob("*nvrtc*")):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((str(path), status.st_size, status.st_mtime_ns))
    return files


def library_folders() -> list[Path]:
    """Folders that may contain CUDA libraries: wheels, search paths, toolkits."""
    packages = [Path(entry) / "nvidia" for entry in sys.path if entry]
    wheels = [
        base / part for base in packages for part in ("cu13/lib", "cu13/bin", "cuda_nvrtc/lib")
    ]
    search = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    toolkits = [root / part for root in _toolkit_roots() for part in ("lib64", "bin")]
    return [folder for folder in (*wheels, *search, *toolkits) if folder.is_dir()]


def _toolkit_roots() -> list[Path]:
    names = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return [Path(name) for name in dict.fromkeys(names) if name]


@functools.cache
def header_folders() -> tuple[Path, ...]:
    """The folders of cuda_fp16.h and its companion headers; NvrtcMissing if there are none."""
    found = [_header_wheel(), *(root / "include" for root in _toolkit_roots())]
    usable = [folder for folder in found if folder and (folder / "cuda_fp16.h").is_file()]
    # Some installations lack the crt folder: NVRTC does not need it, a C++ compiler does.
    usable.sort(key=lambda folder: not (folder / "crt" / "host_defines.h").is_file())
    for folder in usable:
        return (folder, folder / "cccl") if (folder / "cccl").is_dir() else (folder,)
    raise NvrtcMissing(f"the CUDA headers (cuda_fp16.h) are not installed: {INSTALL}")


def _header_wheel() -> Path | None:
    """The include folder that cuda-pathfinder finds."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    folder = find_nvidia_header_directory("cudart")
    return Path(folder) if folder else None


@functools.cache
def headers_version() -> str:
    """CUDART_VERSION of the headers, such as "13040"; "unknown" if no header has it."""
    for name in ("cuda_runtime_api.h", "cuda.h"):
        with contextlib.suppress(OSError):
            text = (header_folders()[0] / name).read_text(errors="replace")
            if match := re.search(r"#\s*define\s+CUD(?:ART|A)_VERSION\s+(\d+)", text):
                return match[1]
    return "unknown"
