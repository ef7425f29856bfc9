"""Launches cuda/attention/paged_attention.cu: attention over pages, and plans which rows a block takes and how a
context is split.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.pack import PLAIN, UNIT
from .rope_kv import Batch, Heads, RopeParameters, Rotation, parameters

ROWS = 16  # (token, head) pairs of a tile
MAX_SPLIT = 16
STATIC_SHARED = 4 << 10  # bytes of a CTA that kernels declare themselves, beside queries
POSITIONS_PER_SPLIT = 128  # at least
TOKEN_HEADS = 8  # of a key/value head, up to which a token alone has a kernel of its own
MUCH_SHARED = 200 << 10  # bytes of a block, of Hopper and the GPUs of data centres behind it
TOKEN_STRIP = 16  # positions a warp of it takes at a time
SHARES_FROM = 2  # tokens: their keys and values pass through shared memory;
IN_REGISTERS = 128  # elements of a head, up to which one token's do not
TOKEN_WARPS = {8: 1.0, 4: inf, 2: inf}  # of its block: up to so many tiles a multiprocessor
WARPS_AT_ONCE = 16  # that a multiprocessor runs for many of them
FEW_TILES = 0.25  # a multiprocessor: up to so many, parts follow from the position alone


class Strips(NamedTuple):
    """Where a warp that attends for one token has keys and values (cuda/attention/decode_attention.cuh): in
    shared memory, or in registers; odd: there are strips that come second, by shared memory.
    """

    shares: bool
    odd: bool


class AttendParameters(ctypes.Structure):
    _fields_ = (
        ("rope", RopeParameters),
        ("tiles", ctypes.c_uint64),
        ("sinks", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("heads_per_tile", ctypes.c_int),
        ("group", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("order", ctypes.c_int),
        ("n_tokens", ctypes.c_int),
    )


def heads_per_tile(heads: Heads) -> int:
    """Query heads that share a tile: of one key/value head, all if they are few."""
    return min(ROWS, heads.n_head // heads.n_head_kv)


def spans_of(sequences: NDArray[np.int32]) -> list[tuple[int, int]]:
    """The first token of each sequence of a step, and the one behind its last."""
    borders = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
    return list(pairwise(borders))


def plan_tiles(
    positions: NDArray[np.int32],
    sequences: NDArray[np.int32],
    heads: Heads,
    below: int | None = None,
    places: int | None = None,
    most_split: int | None = None,
) -> NDArray[np.int32]:
    """tiles[n, 4]: first token, tokens, splits, workspace (cuda/attention/attention.cuh AttendTile).

    Tokens of one sequence share a tile as far as 16 rows allow. Only a token that is alone with its
    sequence in the step is split, into a number of parts that depends on nothing but its position,
    or, where all tokens are alone, on its share of `places`: parts that run at the same time.
    Sequences with `below` tokens in the step or more are left out. most_split: tokens that there is
    room to split; those behind them have one part.
    """
    n = len(sequences)
    if n == 1 or (sequences[1:] != sequences[:-1]).all():
        return _tiles_of_one(np.arange(n, dtype=np.int32), positions, places, most_split)
    spans = [span for span in spans_of(sequences) if below is None or span[1] - span[0] < below]
    alone = np.array([start for start, stop in spans if stop - start == 1], np.int32)
    per_tile = max(1, ROWS // (heads.n_head // heads.n_head_kv))
    shared = [
        (first, min(per_tile, stop - first), 1, -1)
        for start, stop in spans
        if stop - start > 1
        for first in range(start, stop, per_tile)
    ]
    tiles = np.concatenate(
        [
            _tiles_of_one(alone, positions[alone], None, most_split),
            np.array(shared, np.int32).reshape(-1, 4),
        ]
    )
    return tiles[np.argsort(tiles[:, 0])]


def _tiles_of_one(
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    places: int | None,
    most_split: int | None,
) -> NDArray[np.int32]:
    """The tiles of tokens that are alone with their sequences, at these positions."""
    tiles = np.empty((len(tokens), 4), np.int32)
    n_split = tiles[:, 2]
    np.floor_divide(positions, POSITIONS_PER_SPLIT, out=n_split)
    n_split += 1
    if places is not None:  # as much of them as the context has of all; nobody has fewer than one
        np.minimum(n_split, np.maximum(1, n_split * places // n_split.sum()), out=n_split)
    np.minimum(n_split, MAX_SPLIT, out=n_split)
    split = n_split > 1
    if most_split is not None:
        split &= np.cumsum(split) <= most_split
        n_split[~split] = 1
    tiles[:, 0], tiles[:, 1] = tokens, 1
    tiles[:, 3] = np.where(split, np.cumsum(split) - 1, -1)
    return tiles


@dataclass(frozen=True)
class Asked:
    """Half out[T, H*E] for half q[T, H, row], over the pages (keys, values) of a layer.

    With `projected` and `rotation` instead of q tile i is one token, alone with sequence i in the
    step, and its q, k and v are rotated (and stored) on the way. turned: tile i is that, too, and
    the kernel before has made q, and the token's key and value in its page. order: of the output,
    for T = n_tokens; PLAIN is rows, others need Attend.packs.
    """

    q: Address | None
    batch: Batch
    pages: tuple[Address, Address]
    out: Address
    scale: float
    window: int = 0  # 0: all positions
    soft_cap: float = 0.0  # 0: none
    sinks: Address | None = None
    projected: Sequence[Address] = ()
    rotation: Rotation | None = None
    turned: bool = False
    order: int = PLAIN
    n_tokens: int = 0


class Attend:
    """Attention for heads of one shape; room for max_split_tiles sequences with split context."""

    def __init__(
        self,
        device: Device,
        heads: Heads,
        max_split_tiles: int,
        shared: int,
        batch_invariant: bool = False,
    ) -> None:
        """`shared`: bytes of shared memory that a block may have; it decides the block's warps.
        batch_invariant: the number of tokens does not, so that a token's bits are always the same.
        """
        self.device, self.heads, self.batch_invariant = device, heads, batch_invariant
        self.heads_per_tile = heads_per_tile(heads)
        self.head_tiles = heads.n_head_kv * -(
            -(heads.n_head // heads.n_head_kv) // self.heads_per_tile
        )
        per_warp = ROWS * (heads.row + 2) * 4
        self.warps = next(
            w for w in (8, 4, 2, 1) if w * per_warp + ROWS * heads.row * 2 + STATIC_SHARED <= shared
        )
        self.shared = self.warps * per_warp
        self._much_shared = shared >= MUCH_SHARED
        self.alone = self.heads_per_tile <= TOKEN_HEADS
        room, strips = shared - STATIC_SHARED, self.strips(2)
        fitting = [w for w in TOKEN_WARPS if token_shared(heads, w, strips) <= room]
        self._warps_that_fit = fitting or [1]
        places = max_split_tiles * self.head_tiles
        self._workspace = device.alloc(
            places * MAX_SPLIT * ROWS * (heads.row + 2) * 4, "attention workspace"
        )
        self._counters = device.zeros(places * 4, "attention counters")

    def launch(self, asked: Asked, tiles: Address, n_tiles: int, n_split: int) -> None:
        """Enqueue it for the tokens of the tiles, which have n_split parts at most."""
        args = (self.parameters(asked, tiles),)
        grid = self.head_tiles, n_tiles, n_split
        row, fused = self.heads.row, asked.rotation is not None
        types = "" if self.heads.has_halves else f", {self.heads.structs}"
        if (fused or asked.turned) and self.alone:
            warps, strips = self.token_warps(n_tiles), self.strips(n_tiles, n_split)
            shared = token_shared(self.heads, warps, strips)
            choices = (*strips, _has_more(asked), asked.turned)
            flags = ", ".join(str(flag).lower() for flag in choices)
            kernel = self._kernel(f"decode_attention<{row}, {flags}{types}>", warps)
        else:
            warps, shared = self.warps, self.shared
            kernel = self._kernel(f"paged_attention<{row}, {str(fused).lower()}{types}>")
        kernel.launch(grid, warps * 32, args, smem=shared, pdl=True)

    def token_warps(self, n_tokens: int) -> int:
        """Warps of a block for so many tokens alone: many are ready first, but the fewer they are
        the more blocks a multiprocessor runs at the same time.
        """
        most = self._warps_that_fit[0]
        if self.batch_invariant:
            return most
        tiles = n_tokens * self.head_tiles / self.device.sm_count
        return min(most, next(warps for warps, few in TOKEN_WARPS.items() if tiles <= few))

    def places(self, n_tokens: int) -> int | None:
        """Parts of the contexts of so many tokens alone that run at the same time; None where
        these are few, and their bits shall not depend on each other.
        """
        sms = self.device.sm_count
        few = n_tokens * self.head_tiles <= FEW_TILES * sms
        if few or self.batch_invariant or not self.alone:
            return None
        return sms * WARPS_AT_ONCE // (self.token_warps(n_tokens) * self.head_tiles)

    def strips(self, n_tokens: int, n_split: int = 1) -> Strips:
        """Of so many tokens, whose contexts have n_split parts at most.

        Keys and values pass through shared memory where there is enough of it for more warps than
        there are registers for without. Of one token they do not, unless they take most registers,
        but for odd strips. Those there are in long contexts alone, whatever the number of tokens:
        parts of 128 positions are one round.
        """
        if not (self.heads.has_halves and self._much_shared):
            return Strips(False, False)
        few_registers = self.heads.row <= IN_REGISTERS
        return Strips(
            shares=n_tokens >= SHARES_FROM or not few_registers,
            odd=n_split == MAX_SPLIT and few_registers,
        )

    @property
    def packs(self) -> bool:
        """Whether the output may be packed: in whole pieces, without columns of padding."""
        size = self.heads.head_size
        return size % 32 == 0 and self.heads.n_head * size % UNIT == 0

    def parameters(self, asked: Asked, tiles: Address) -> AttendParameters:
        """The structure of cuda/attention/attention.cuh."""
        if asked.order != PLAIN and not self.packs:
            n, size = self.heads.n_head, self.heads.head_size
            raise ValueError(f"{n} heads of {size} elements are not packed")
        a = asked
        return AttendParameters(
            rope=parameters(self.heads, a.batch, a.pages, a.q, a.projected, a.rotation),
            tiles=address(tiles),
            sinks=address(a.sinks),
            out=address(a.out),
            workspace=self._workspace.address,
            counters=self._counters.address,
            heads_per_tile=self.heads_per_tile,
            group=self.heads.n_head // self.heads.n_head_kv,
            parts=self.head_tiles // self.heads.n_head_kv,
            window=a.window,
            scale=a.scale,
            soft_cap=a.soft_cap,
            order=a.order,
            n_tokens=a.n_tokens,
        )

    def _kernel(self, name: str, token_warps: int = 8) -> Kernel:
        defines = {
            "PAGE_SIZE": self.heads.page_size,
            "ATTEND_WARPS": self.warps,
            "TOKEN_WARPS": token_warps,
        }
        return self.device.kernel("attention/paged_attention.cu", name, defines=defines)


def _has_more(asked: Asked) -> bool:
    """Whether there is what few models have: norms of heads, a cap of scores, sinks."""
    norms = asked.rotation is not None and any(n is not None for n in asked.rotation.norm)
    return norms or asked.soft_cap > 0 or asked.sinks is not None


def token_shared(heads: Heads, warps: int, strips: Strips) -> int:
    """Bytes of shared memory of a block that attends for one token (cuda/attention/decode_attention.cuh)."""
    group = heads.n_head // heads.n_head_kv
    operands = warps * TOKEN_STRIP * heads.row * 4 if any(strips) else 0
    parts = warps * min(group, TOKEN_HEADS) * (heads.row + 2) * 4
    queries = max(TOKEN_HEADS + 2, warps * min(group, TOKEN_HEADS)) * heads.row * 2
    return operands + parts + queries
