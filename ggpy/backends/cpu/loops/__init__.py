"""The functions that numba compiles: kernels, the loops of the pool's threads, and their vectors.

A function is found by the name of its machine code. Importing this folder imports numba, so it is
imported when something must be compiled, and not when all machine code is on disk.
"""

from __future__ import annotations

from typing import Any

from ....formats import by_name
from . import attention, chunks, delta, elementwise, experts, gemm, kv_pages, products, whole
from .blocks import declaration, expansion

MODULES = (attention, chunks, delta, elementwise, experts, gemm, kv_pages, products, whole)
ROWS_OF = {
    **{32: products.row_of_pairs, 64: products.row_of_64s, 128: products.row_of_128s},
    256: products.row_of_superblocks,
}
EXPANDS = {
    **{32: expansion.of_pairs, 64: expansion.of_64s, 128: expansion.of_128s},
    256: expansion.of_superblocks,
}
WHOLE_EXPANDS = {
    **{32: expansion.whole_of_pairs, 64: expansion.whole_of_64s, 128: expansion.whole_of_128s},
    256: expansion.whole_of_superblocks,
}
WHOLE_KERNELS = {"rows": whole.rows, "blocks": whole.blocks}


def function(name: str) -> Any:
    """The njit function of this name: "dot FORMAT ACTIVATIONS", "rows FORMAT", "blocks FORMAT" and
    "expand FORMAT" are made for the format, any other is a function of one of MODULES.
    """
    kind, _, rest = name.partition(" ")
    if kind in WHOLE_KERNELS:
        return _whole(kind, rest)
    if kind == "dot":
        return _dot(*rest.split())
    if kind == "expand":
        return _expand(rest)
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def has_blocks(name: str) -> bool:
    """Whether rows of a format can be expanded."""
    return declaration(by_name(name)) is not None or name in expansion.NUMBERS


def _dot(name: str, activations: str) -> Any:
    format = by_name(name)
    d = declaration(format)
    assert d is not None, f"{name} has no blocks"
    return products.rows_of_bytes(ROWS_OF[format.block_size](d, format.nbytes, activations))


def _whole(kind: str, name: str) -> Any:
    format = by_name(name)
    d = declaration(format)
    assert d is not None, f"{name} has no blocks"
    group = {32: 32, 64: 16, 128: 32}.get(format.block_size, d.group)
    expand = WHOLE_EXPANDS[format.block_size](d, format.nbytes)
    return WHOLE_KERNELS[kind](expand, whole.panel_of(group, d.minimums is not None))


def _expand(name: str) -> Any:
    format = by_name(name)
    d = declaration(format)
    if d is None:
        return expansion.of_numbers(format.nbytes, name)
    return EXPANDS[format.block_size](d, format.nbytes)
