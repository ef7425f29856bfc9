"""Where each compiled kernel is: compiled when it is first asked for.

A format's kernels are made from its declaration. Nothing here knows jobs.
"""

from __future__ import annotations

from typing import Any

from ...formats.base import Format
from . import attention, elementwise, gemm, kv_pages, products
from .blocks import declaration, expansion
from .compiled import address
from .experts import kernels as experts

KERNELS = (
    *(products.add_up, products.quantize_columns, gemm.pack_columns, gemm.unpack_columns),
    *(gemm.multiply_rows, gemm.multiply_few),
    *(elementwise.normalise_rows, elementwise.add_rows, elementwise.add_bias),
    *(elementwise.normalise_heads, elementwise.turn_heads, elementwise.scale_rows),
    elementwise.gated,
    *(kv_pages.spread, kv_pages.write_pages),
    *(attention.attend_token, attention.attend_block),
)
OF_EXPERTS = (
    *(experts.route, experts.weigh_rows, experts.add_chosen, experts.gate_rows),
    *(experts.combine, experts.pack_pairs, experts.multiply_blocks, experts.gated_blocks),
    experts.unpack_pairs,
)
COMMON = {kernel.py_func.__name__: kernel for kernel in (*KERNELS, *OF_EXPERTS)}
ROWS_OF = {32: products.row_of_pairs, 64: products.row_of_64s, 256: products.row_of_superblocks}
EXPANDS = {32: expansion.of_pairs, 64: expansion.of_64s, 256: expansion.of_superblocks}


def common(name: str) -> int:
    """A kernel that knows no format."""
    return address(name, lambda: COMMON[name])


def prepare_common(with_experts: bool) -> None:
    """Compile the kernels that know no format; those of experts only if there are any."""
    for kernel in (*KERNELS, *(OF_EXPERTS if with_experts else ())):
        common(kernel.py_func.__name__)


def can_expand(format: Format) -> bool:
    """Whether there are kernels for the format's blocks."""
    return declaration(format) is not None or format.name in expansion.NUMBERS


def expand(format: Format) -> int:
    """expand(row, first, n, out): weights of a row in float32."""
    return address(f"expand_{format.name}", lambda: _expand(format), 4)


def dot(format: Format, activations: str) -> int | None:
    """Rows times columns of "q8" or "q16"; None for formats without blocks."""
    d = declaration(format)
    if d is None:
        return None

    def make() -> Any:
        return products.rows_of_bytes(ROWS_OF[format.block_size](d, format.nbytes, activations))

    return address(f"dot_{format.name}_{activations}", make)


def prepare(format: Format, activations: str) -> None:
    """Compile what products with the format need."""
    expand(format)
    if activations != "f32":
        dot(format, activations)


def _expand(format: Format) -> Any:
    d = declaration(format)
    if d is None:
        return expansion.of_numbers(format.nbytes, format.name)
    return EXPANDS[format.block_size](d, format.nbytes)
