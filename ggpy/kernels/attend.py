"""Launches cuda/attend.cu: attention over pages, and plans which rows a block takes and how a context is split."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from ..device.base import Device
from .address import Address, address
from .rope_kv import Heads

WARPS = 4
ROWS = 16  # (token, head) pairs of a tile
STRIP = 32  # positions a warp takes at a time
MAX_SPLIT = 16
POSITIONS_PER_SPLIT = 128  # at least


class _Attend(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k_pages", ctypes.c_uint64),
        ("v_pages", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("sequences", ctypes.c_uint64),
        ("page_tables", ctypes.c_uint64),
        ("sinks", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("n_head", ctypes.c_int),
        ("n_head_kv", ctypes.c_int),
        ("head_size", ctypes.c_int),
        ("heads_per_tile", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("max_split", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


def plan_tiles(positions: NDArray[np.int32], sequences: NDArray[np.int32], heads: Heads) -> NDArray[np.int32]:
    """tiles[n, 4]: first token, tokens, splits, workspace (cuda/attend.cu AttendTile).

    Tokens of one sequence share a tile as far as 16 rows allow. Only a token that is alone with its sequence in the
    step is split, into a number of parts that depends on nothing but its position.
    """
    group = heads.n_head // heads.n_head_kv
    per_tile = max(1, ROWS // group)
    tiles, borders = [], [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
    n_split_tiles = 0
    for start, stop in zip(borders, borders[1:], strict=False):
        if stop - start == 1:
            n_split = min(MAX_SPLIT, int(positions[start]) // POSITIONS_PER_SPLIT + 1)
            tiles.append((start, 1, n_split, n_split_tiles if n_split > 1 else -1))
            n_split_tiles += n_split > 1
        else:
            tiles += [(i, min(per_tile, stop - i), 1, -1) for i in range(start, stop, per_tile)]
    return np.array(tiles, np.int32)


class Attend:
    """Attention for heads of one shape; room for max_split_tiles sequences whose context is split."""

    def __init__(self, device: Device, heads: Heads, max_split_tiles: int) -> None:
        self.heads = heads
        self.heads_per_tile = min(ROWS, heads.n_head // heads.n_head_kv)
        self.head_tiles = heads.n_head_kv * -(-(heads.n_head // heads.n_head_kv) // self.heads_per_tile)
        self._kernel = device.kernel("attend.cu", f"attend<{heads.row}>", defines={"PAGE_SIZE": heads.page_size})
        places = max_split_tiles * self.head_tiles
        self._workspace = device.alloc(places * MAX_SPLIT * ROWS * (heads.row + 2) * 4, "attention workspace")
        self._counters = device.zeros(places * 4, "attention counters")

    def launch(
        self,
        q: Address,
        pages: tuple[Address, Address],
        batch: tuple[Address, Address, Address],
        tiles: Address,
        n_tiles: int,
        table_stride: int,
        out: Address,
        *,
        scale: float,
        split: bool,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Address | None = None,
    ) -> None:
        """Enqueue half out[T, H*E] for q[T, H, row]; split says whether a tile may have more than one part."""
        heads = self.heads
        parameters = _Attend(
            q=address(q),
            k_pages=address(pages[0]),
            v_pages=address(pages[1]),
            tiles=address(tiles),
            positions=address(batch[0]),
            sequences=address(batch[1]),
            page_tables=address(batch[2]),
            sinks=address(sinks),
            out=address(out),
            workspace=self._workspace.address,
            counters=self._counters.address,
            n_head=heads.n_head,
            n_head_kv=heads.n_head_kv,
            head_size=heads.head_size,
            heads_per_tile=self.heads_per_tile,
            table_stride=table_stride,
            max_split=MAX_SPLIT,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
        )
        grid = self.head_tiles, n_tiles, MAX_SPLIT if split else 1
        shared = WARPS * ROWS * (heads.row + 2) * 4
        self._kernel.launch(grid, WARPS * 32, (parameters,), smem=shared, pdl=True)
