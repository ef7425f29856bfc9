"""Launches cuda/attend.cu: attention over pages, and plans which rows a block takes and how a
context is split.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..device.base import Device
from .address import Address, address
from .rope_kv import Batch, Heads, RopeParameters, Rotation, parameters

ROWS = 16  # (token, head) pairs of a tile
STRIP = 32  # positions a warp takes at a time
MAX_SPLIT = 16
POSITIONS_PER_SPLIT = 128  # at least


class _Attend(ctypes.Structure):
    _fields_ = (
        ("rope", RopeParameters),
        ("tiles", ctypes.c_uint64),
        ("sinks", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("heads_per_tile", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


def plan_tiles(
    positions: NDArray[np.int32], sequences: NDArray[np.int32], heads: Heads
) -> NDArray[np.int32]:
    """tiles[n, 4]: first token, tokens, splits, workspace (cuda/attend.cu AttendTile).

    Tokens of one sequence share a tile as far as 16 rows allow. Only a token that is alone with its
    sequence in the step is split, into a number of parts that depends on nothing but its position.
    """
    group = heads.n_head // heads.n_head_kv
    per_tile = max(1, ROWS // group)
    tiles, borders = [], [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
    n_split_tiles = 0
    for start, stop in pairwise(borders):
        if stop - start == 1:
            n_split = min(MAX_SPLIT, int(positions[start]) // POSITIONS_PER_SPLIT + 1)
            tiles.append((start, 1, n_split, n_split_tiles if n_split > 1 else -1))
            n_split_tiles += n_split > 1
        else:
            tiles += [(i, min(per_tile, stop - i), 1, -1) for i in range(start, stop, per_tile)]
    return np.array(tiles, np.int32)


class Attend:
    """Attention for heads of one shape; room for max_split_tiles sequences with split context."""

    def __init__(self, device: Device, heads: Heads, max_split_tiles: int, shared: int) -> None:
        """`shared`: bytes of shared memory that a block may have; it decides the block's warps."""
        self.device, self.heads = device, heads
        self.heads_per_tile = min(ROWS, heads.n_head // heads.n_head_kv)
        self.head_tiles = heads.n_head_kv * -(
            -(heads.n_head // heads.n_head_kv) // self.heads_per_tile
        )
        per_warp = ROWS * (heads.row + 2) * 4
        self.warps = next(
            w for w in (8, 4, 2, 1) if w * per_warp + ROWS * heads.row * 2 + 4096 <= shared
        )
        self.shared = self.warps * per_warp
        places = max_split_tiles * self.head_tiles
        self._workspace = device.alloc(
            places * MAX_SPLIT * ROWS * (heads.row + 2) * 4, "attention workspace"
        )
        self._counters = device.zeros(places * 4, "attention counters")

    def launch(
        self,
        q: Address | None,
        batch: Batch,
        pages: tuple[Address, Address],
        tiles: Address,
        n_tiles: int,
        out: Address,
        *,
        scale: float,
        split: bool,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Address | None = None,
        projected: Sequence[Address] = (),
        rotation: Rotation | None = None,
    ) -> None:
        """Enqueue half out[T, H*E] for half q[T, H, row].

        split: whether a tile may have more than one part. With `projected` and `rotation` instead
        of q every tile is one token, alone with its sequence in the step, and its q, k and v are
        rotated (and stored) here.
        """
        heads, fused = self.heads, rotation is not None
        args = _Attend(
            rope=parameters(heads, batch, pages, q, projected, rotation),
            tiles=address(tiles),
            sinks=address(sinks),
            out=address(out),
            workspace=self._workspace.address,
            counters=self._counters.address,
            heads_per_tile=self.heads_per_tile,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
        )
        defines = {"PAGE_SIZE": heads.page_size, "ATTEND_WARPS": self.warps}
        kernel = self.device.kernel(
            "attend.cu", f"attend<{heads.row}, {str(fused).lower()}>", defines=defines
        )
        grid = self.head_tiles, n_tiles, MAX_SPLIT if split else 1
        kernel.launch(grid, self.warps * 32, (args,), smem=self.shared, pdl=True)
