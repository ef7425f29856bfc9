"""Addresses of compiled kernels, each compiled when it is first asked for.

Kernels are functions of `loops`, which is not imported if their machine code is on disk. Nothing
here knows jobs.
"""

from __future__ import annotations

from functools import cache

from ...formats.base import Format
from .compiled import address, is_stored
from .processor import dot_level

KERNELS = (
    *("add_up", "quantize_columns", "pack_columns", "unpack_columns", "multiply_rows"),
    *("multiply_few", "normalise_rows", "add_rows", "add_bias", "normalise_heads", "turn_heads"),
    *("scale_rows", "gated", "gate_inputs", "spread", "write_pages", "attend_token"),
    *("attend_block", "round_columns"),
)
OF_EXPERTS = (
    *("route", "weigh_rows", "add_chosen", "gate_rows", "combine", "pack_pairs"),
    *("multiply_blocks", "gated_blocks", "unpack_pairs"),
)
OF_STATES = ("convolve", "recur")


def common(name: str) -> int:
    """The address of a kernel that knows no format."""
    return address(name)


def prepare_common(with_experts: bool) -> None:
    """Compile the kernels that know no format; those of experts only if there are any."""
    for name in (*KERNELS, *(OF_EXPERTS if with_experts else ())):
        common(name)


def prepare_states() -> None:
    """Compile the kernels of gated delta nets."""
    for name in OF_STATES:
        common(name)


@cache
def can_expand(format: Format) -> bool:
    """Whether there are kernels for the format's blocks."""
    if is_stored(f"expand {format.name}", 4):
        return True
    from .loops import has_blocks

    return has_blocks(format.name)


def expand(format: Format) -> int:
    """The address of expand(row, first, n, out), which writes weights of a row in float32."""
    return address(f"expand {format.name}", 4)


def has_dot(format: Format) -> bool:
    """Whether rows can be multiplied as whole numbers, which needs blocks of codes."""
    return format.block_size > 1 and can_expand(format)


def dot(format: Format, activations: str) -> int:
    """The address of the kernel for rows times columns of "q8" or "q16"; see `has_dot`."""
    return address(f"dot {format.name} {activations}")


def multiplies_whole(activations: str) -> bool:
    """Whether many columns are multiplied as whole numbers: with VNNI of 512 bits, where 8 bits are
    enough for few of them.
    """
    return activations == "q8" and dot_level() == "vnni512"


def whole(kind: str, format: Format) -> int:
    """The address of the kernel for many columns as whole numbers; kind: "rows", or "blocks" of
    experts.
    """
    return address(f"{kind} {format.name}")


def prepare(format: Format, activations: str, of_experts: bool = False) -> None:
    """Compiles the kernels that products with the format need."""
    expand(format)
    if activations != "f32" and has_dot(format):
        dot(format, activations)
        if multiplies_whole(activations):
            whole("blocks" if of_experts else "rows", format)
