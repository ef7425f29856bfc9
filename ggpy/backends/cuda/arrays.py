"""What the ops of a GPU hand to each other: activations, weights and sampled ids in device memory.

Only where things lie and how long they are; nothing here launches or allocates.
"""

from __future__ import annotations

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
    """x + norm(y), floats [T, D]."""

    x: Memory
    y: Memory
    norm: Norm


@dataclass(frozen=True)
class Array:
    """An activation: `row` elements of it from row to row, of which shape[-1] count.

    order: not PLAIN where it is packed for a product (kernels/pack.py), and has no rows. late: the
    kernel that makes it takes longer than the next one's first weights. sum: what the next product
    makes it of.
    """

    data: Memory
    dtype: type
    shape: tuple[int, ...]
    row: int
    order: int = PLAIN
    late: bool = False
    sum: Sum | None = None


@dataclass(frozen=True)
class Projected:
    """q, k, v before their rotation, left to attention: floats [T, H*E], [T, G*E], [T, G*E]."""

    parts: list[Memory]
    rotation: Rotation


@dataclass(frozen=True)
class Matrix:
    """A weight [n_rows, k], in tiles or in the file's blocks: the other one is None.

    Blocks are for formats that have no tiles, and for tables of which only rows are used. With a
    scale, float [n_rows], it is in tiles, which know it, too. activations: see Ops.weight.
    """

    n_rows: int
    k: int
    tiles: TiledMatrix | None
    blocks: BlockMatrix | None
    scale: Buffer | None = None
    activations: ActivationType = "f16"

    @property
    def in_blocks(self) -> BlockMatrix:
        """The blocks, where there are no tiles."""
        if self.blocks is None:
            raise RuntimeError("a matrix in tiles is used as if it were in blocks")
        return self.blocks


@dataclass
class Sampled:
    """Ids that a step sampled: int32[R], NO_TOKEN where none could be chosen. They are pinned, and
    valid once the event is reached, or kept.
    """

    ids: NDArray[np.int32]
    event: Any

    def read(self) -> NDArray[np.int32]:
        """The ids, once they are there."""
        self.keep()
        return self.ids

    def keep(self) -> None:
        """Wait for the ids, and take them out of memory that another step will have."""
        if self.event is not None:
            self.event.synchronize()
            self.ids, self.event = self.ids.copy(), None


def one_layout(weights: list[Matrix]) -> bool:
    """Whether one launch can multiply all of them: their tiles are of one layout."""
    first = weights[0].tiles
    if first is None:
        return False
    return all(w.tiles is not None and w.tiles.layout == first.layout for w in weights[1:])
