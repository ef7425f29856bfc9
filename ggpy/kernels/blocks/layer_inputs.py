"""Launches cuda/blocks/layer_inputs.cu: the inputs of all layers, from a table of quant blocks and
the projected embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...device.base import Device
from ..address import Address
from .block_kernel import BlockMatrix, block_kernel, require

WARPS = 4
UNIT = 8  # elements of a lane at a time


@dataclass(frozen=True)
class EmbeddedTokens:
    """int ids[T] of tokens, of which a negative one ~r stands for sampled[r], and f32 y[T, L*I],
    what the projection makes of their embeddings.
    """

    ids: Address
    sampled: Address | None
    y: Address
    n_tokens: int


def layer_inputs(
    device: Device,
    table: BlockMatrix,
    tokens: EmbeddedTokens,
    norm: tuple[Address, float],
    out: Address,
    size: int,
) -> None:
    """Enqueue f32 out[L, T, I] of the table [V, L*I], which may lie in host memory; norm: weights
    [I] and eps; size: I. ValueError unless I is a multiple of UNIT.
    """
    n_layer, n = table.columns // size, tokens.n_tokens
    if size % UNIT or table.columns % size:
        raise ValueError(f"inputs of {size} elements: a multiple of {UNIT} is needed")
    require(out, 4 * n * table.columns, f"floats [{n_layer}, {n}, {size}]")
    kernel = block_kernel(device, "blocks/layer_inputs.cu", "layer_inputs", table.format)
    memory = table.data, tokens.ids, tokens.sampled, tokens.y, norm[0], out
    args = (*memory, table.rows, n_layer, size, float(norm[1]))
    kernel.launch((-(-n_layer // WARPS), n), 32 * WARPS, args, pdl=True)
