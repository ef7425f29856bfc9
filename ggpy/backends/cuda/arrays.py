"""Operands of the CUDA ops: activations, weights and sampled ids in device memory.

They are addresses, types and sizes; nothing here launches or allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, Ptr
from ...kernels.attention.rope_kv import Rotation
from ...kernels.blocks.block_kernel import BlockMatrix
from ...kernels.layout.pack import PLAIN
from ...kernels.layout.tile import TiledMatrix
from ..interface import ActivationType, Norm

Memory = Buffer | Ptr


@dataclass(frozen=True)
class Sum:
    """The pending sum x + norm(y), f32 [T, D]."""

    x: Memory
    y: Memory
    norm: Norm


@dataclass(frozen=True)
class Array:
    """An activation in device memory: rows are `row` elements apart, of which shape[-1] are used.

    | field | meaning |
    |---|---|
    | layout | PLAIN, or the packed order of a GEMM's input (kernels/layout/pack.py) without rows |
    | slow_producer | its kernel takes longer than the next GEMM needs to fill its weight pipeline |
    | sum | the pending sum that the next GEMM computes in its prologue and stores here |
    | scale | the true values are the stored ones times this (ends/scales.py) |
    """

    data: Memory
    dtype: type
    shape: tuple[int, ...]
    row: int
    layout: int = PLAIN
    slow_producer: bool = False
    sum: Sum | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Projected:
    """q, k and v before RoPE, which the attention kernel applies: f32 [T, H*E], [T, G*E], [T,
    G*E]; None for keys and values of another layer.
    """

    parts: list[Memory | None]
    rotation: Rotation


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [n_rows, k], either in tiles or in the file's quant blocks; the other one is None.

    Formats without tiles stay in blocks, and so do tables of which only rows are read. A weight
    with a scale (f32 [n_rows], or [n_experts]) is in tiles, which refer to the scale, too.
    activations: see Ops.weight. Experts [n_experts, n_rows, k] are contiguous. on_host: the weight
    is in host memory that kernels can read.
    """

    n_rows: int
    k: int
    tiles: TiledMatrix | None
    blocks: BlockMatrix | None
    scale: Buffer | None = None
    activations: ActivationType = "f16"
    n_experts: int = 1
    on_host: bool = False

    @property
    def in_blocks(self) -> BlockMatrix:
        """The blocks; RuntimeError if the weight is in tiles."""
        if self.blocks is None:
            raise RuntimeError("a matrix in tiles is used as if it were in blocks")
        return self.blocks

    @property
    def in_tiles(self) -> TiledMatrix:
        """The tiles; RuntimeError if the weight is in blocks."""
        if self.tiles is None:
            raise RuntimeError("a matrix in blocks is used as if it were in tiles")
        return self.tiles

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles of all experts."""
        return self.n_experts * self.in_tiles.layout.nbytes(self.n_rows, self.k)


def blocks_of(w: Matrix | None) -> Memory | None:
    """The memory of a matrix in blocks, such as the biases of experts; None for None."""
    return None if w is None else w.in_blocks.data


@dataclass
class Sampled:
    """The ids int32 [R] that a step sampled, NO_TOKEN for rows without a token. `ids` is
    page-locked memory that is valid after `event`, or a copy of it (event is None).
    """

    ids: NDArray[np.int32]
    event: Any

    def read(self) -> NDArray[np.int32]:
        """Wait for the ids and return them."""
        self.keep()
        return self.ids

    def keep(self) -> None:
        """Wait for the ids and copy them out of memory that a later step reuses."""
        if self.event is not None:
            self.event.synchronize()
            self.ids, self.event = self.ids.copy(), None


def one_layout(weights: Sequence[Matrix]) -> bool:
    """Whether all weights are in tiles of the same layout."""
    first = weights[0].tiles
    if first is None:
        return False
    return all(w.tiles is not None and w.tiles.layout == first.layout for w in weights[1:])
