"""Matrices of GGUF quant blocks in device memory, and kernels that are templates over the format.

The .cu file of such a kernel includes FORMAT_HEADER. This module generates that header: it includes
cuda/formats/<stem>.cuh, with the stem of the Python file that declares the format, and asserts that
the struct matches the numpy dtype. So NVRTC compiles only the formats in use, and there is no list
of formats to maintain. The grids of the IQ types are generated from the numpy grids. This module
knows no kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from ...device.base import Device, Kernel, Ptr
from ...device.compile import included_files
from ...formats import Format, all_formats, cuda_asserts
from ...util.paths import cuda_dir
from ..address import Address

HEADER = "formats/selected.cuh"
_GRID = re.compile(rb'^#include "grids/(\w+)\.cuh"', re.MULTILINE)
_kernels: WeakKeyDictionary[Device, dict[tuple, Kernel]] = WeakKeyDictionary()


@dataclass(frozen=True)
class BlockMatrix:
    """w[rows, columns] as in a GGUF file: rows of quant blocks of `format`, at address `data`."""

    format: Format
    rows: int
    columns: int
    data: Address

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1:
            raise ValueError(f"a matrix of {self.rows} x {self.columns} weights is empty")
        require(self.data, self.nbytes, f"{self.format.name} matrix [{self.rows}, {self.columns}]")

    @property
    def nbytes(self) -> int:
        """Bytes of all quant blocks."""
        return self.rows * self.format.row_bytes(self.columns)


def require(memory: Address, nbytes: int, what: str) -> None:
    """Raise ValueError unless the buffer has at least `nbytes` bytes from the address on."""
    owner = memory.owner if isinstance(memory, Ptr) else memory
    if owner is None:
        return
    start = memory.ptr if isinstance(memory, Ptr) else owner.address
    available = owner.address + owner.nbytes - (start or 0)
    if available < nbytes:
        raise ValueError(f"{what}: {nbytes} bytes are needed, {owner!r} has {available}")


def offset(memory: Address, nbytes: int) -> Ptr:
    """The address plus `nbytes`."""
    return memory + nbytes if isinstance(memory, Ptr) else memory.at(nbytes)


def block_kernel(device: Device, source: str, name: str, format: Format, *arguments: Any) -> Kernel:
    """The kernel `name<block, *arguments>` of `source`, compiled at the first call and cached."""
    known = _kernels.setdefault(device, {})
    key = (source, name, format.name, *arguments)
    if key not in known:
        known[key] = device.kernel(
            source, expression(name, format, *arguments), **compile_options(format)
        )
    return known[key]


def expression(name: str, format: Format, *arguments: Any) -> str:
    """The C++ name of a template instance: `dequantize<block_q4_K, float>`."""
    return f"{name}<{', '.join([format.struct, *map(str, arguments)])}>"


def compile_options(*formats: Format) -> dict[str, Any]:
    """The defines and headers that compile kernels for these formats.

    Raises ValueError if a format has no CUDA declaration.
    """
    includes = dict.fromkeys(f'#include "formats/{stem(format)}.cuh"' for format in formats)
    headers = {HEADER: "\n".join(["#pragma once", *includes, *map(cuda_asserts, formats)])}
    for format in formats:
        headers.update({f"grids/{name}.cuh": grid_header(name) for name in _grids(stem(format))})
    return {"defines": {"FORMAT_HEADER": f'"{HEADER}"'}, "headers": headers}


def supported_formats() -> list[Format]:
    """The formats with a CUDA declaration: all but F64 and integers of more than one byte."""
    return [format for format in all_formats() if _declares(format)]


def stem(format: Format) -> str:
    """The stem of a format's Python and CUDA files ("q4_k").

    Raises ValueError if the format has no CUDA declaration.
    """
    if not _declares(format):
        raise ValueError(
            f"{format.name} cannot be used on a GPU: cuda/formats/{_stem(format)}.cuh declares no "
            f"{format.struct}"
        )
    return _stem(format)


def _stem(format: Format) -> str:
    return format.dequantize_blocks.__module__.rpartition(".")[2]


def _declares(format: Format) -> bool:
    path = cuda_dir() / "formats" / f"{_stem(format)}.cuh"
    return path.is_file() and f"struct {format.struct} {{" in path.read_text()


def _grids(stem: str) -> list[str]:
    """Names of the grids that formats/<stem>.cuh includes, directly or through other files."""
    path = f"formats/{stem}.cuh"
    source = (cuda_dir() / path).read_bytes()
    texts = [source, *included_files(cuda_dir(), path, source).values()]
    return [name.decode() for text in texts for name in _GRID.findall(text)]


@cache
def grid_header(name: str) -> str:
    """The C++ source of the grid of format `name` ("iq2_xxs").

    A point is a uint2, for IQ3 types a uint32_t. Each byte is a magnitude; for the ternary IQ1
    types, whose points have signs, each byte is the digit plus 1.
    """
    from ...formats.grids import grid

    points = grid(name.upper())
    words = (points + 1 if points.min() < 0 else points).astype("u1").view("<u4")
    if words.shape[1] == 1:
        kind, values = "uint32_t", [f"{word:#x}" for word in words[:, 0]]
    else:
        kind, values = "uint2", [f"{{{low:#x}, {high:#x}}}" for low, high in words]
    table = ",\n".join(", ".join(values[i : i + 8]) for i in range(0, len(values), 8))
    return f"#pragma once\n__device__ const {kind} grid_{name}[{len(values)}] = {{\n{table}}};\n"
