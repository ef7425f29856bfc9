"""Launches cuda/attention/paged_attention.cu (attention over the paged KV cache) and plans its
tiles: which (token, head) rows a CTA takes, and into how many splits a context is cut.
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
from ..struct_asserts import struct_asserts
from .rope_kv import USUAL_HEAD, AttentionMetadata, Heads, RopeArgs, Rotation, rope_args

ROWS = 16  # (token, head) pairs of a tile
MAX_SPLIT = 16  # splits of one context
STATIC_SHARED = 4 << 10  # bytes of static shared memory of a CTA, besides the queries
POSITIONS_PER_SPLIT = 128  # minimum
DECODE_HEADS = 8  # query heads of a CTA of decode_attention, at most
MUCH_SHARED = 200 << 10  # bytes per CTA: Hopper and the data-centre GPUs after it have as much
DECODE_STRIP = 16  # positions that a warp of decode_attention takes at a time
SHARED_FROM_TOKENS = 2  # tokens from which on K and V pass through shared memory
IN_REGISTERS = 128  # elements of a head up to which a single token keeps K and V in registers
DECODE_WARPS = {8: 1.0, 4: inf, 2: inf}  # warps of a CTA: maximum tiles per SM
WARPS_AT_ONCE = 16  # warps per SM that run at the same time in a large decode batch
# The least number of splits to launch -> the CTAs per SM up to which it holds. Contexts may have
# fewer splits.
LEAST_SPLITS = {8: 0.5, 4: 2.0, 2: 2.0}  # 8 are enough for contexts of 1024 positions
FEW_TILES_PER_SM = 0.25  # up to here, n_split depends on the position alone


class Strips(NamedTuple):
    """Where decode_attention keeps the K and V operands of a warp
    (cuda/attention/decode_attention.cuh): in shared memory, or in registers. odd: the warps take
    remainder strips second, through shared memory.
    """

    in_shared_memory: bool
    odd: bool


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("rope", RopeArgs),
        ("tiles", ctypes.c_uint64),
        ("sinks", ctypes.c_uint64),
        ("gate", ctypes.c_uint64),
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


ASSERTS = struct_asserts(AttentionArgs)


def heads_per_tile(heads: Heads) -> int:
    """Query heads per tile: all that share a KV head, at most ROWS."""
    return min(ROWS, heads.n_head // heads.n_head_kv)


def decode_parts(heads: Heads) -> int:
    """CTAs that share a KV head in decode_attention, at least."""
    return -(-heads.n_head // (heads.n_head_kv * DECODE_HEADS))


def workspace_bytes(heads: Heads, max_split_tiles: int) -> int:
    """Bytes of the partial results of max_split_tiles contexts that are split over CTAs."""
    slots = max_split_tiles * heads.n_head_kv * decode_parts(heads)
    return 4 * slots * MAX_SPLIT * ROWS * (heads.row + 2)


def spans_of(sequences: NDArray[np.int32]) -> list[tuple[int, int]]:
    """(first token, last token + 1) of each sequence of a step."""
    borders = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
    return list(pairwise(borders))


def plan_tiles(
    positions: NDArray[np.int32],
    sequences: NDArray[np.int32],
    heads: Heads,
    below: int | None = None,
    resident_splits: int | None = None,
    max_split_tokens: int | None = None,
) -> NDArray[np.int32]:
    """Returns tiles[n, 4] of int32: first token, tokens, splits, workspace slot (AttentionTile of
    cuda/attention/attention.cuh).

    Tokens of one sequence share a tile of up to ROWS rows. Only a decode token (the only token of
    its sequence in the step) is split. Its number of splits depends on its position alone, or, if
    the step has only decode tokens and `resident_splits` is not None, on its context's fraction of
    `resident_splits`, the number of splits that run at the same time. Sequences with at least
    `below` tokens in the step get no tiles. max_split_tokens: number of tokens for which the
    workspace has slots; later tokens get one split.
    """
    n = len(sequences)
    if n == 1 or (sequences[1:] != sequences[:-1]).all():
        return _tiles_of_one(
            np.arange(n, dtype=np.int32), positions, resident_splits, max_split_tokens
        )
    spans = [span for span in spans_of(sequences) if below is None or span[1] - span[0] < below]
    single = np.array([start for start, stop in spans if stop - start == 1], np.int32)
    per_tile = max(1, ROWS // (heads.n_head // heads.n_head_kv))
    shared = [
        (first, min(per_tile, stop - first), 1, -1)
        for start, stop in spans
        if stop - start > 1
        for first in range(start, stop, per_tile)
    ]
    tiles = np.concatenate(
        [
            _tiles_of_one(single, positions[single], None, max_split_tokens),
            np.array(shared, np.int32).reshape(-1, 4),
        ]
    )
    return tiles[np.argsort(tiles[:, 0])]


def _tiles_of_one(
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    resident_splits: int | None,
    max_split_tokens: int | None,
) -> NDArray[np.int32]:
    """The tiles of decode tokens at these positions; arguments as in plan_tiles."""
    tiles = np.empty((len(tokens), 4), np.int32)
    n_split = tiles[:, 2]
    np.floor_divide(positions, POSITIONS_PER_SPLIT, out=n_split)
    n_split += 1
    if resident_splits is not None:  # in proportion to the context length, at least one each
        np.minimum(n_split, np.maximum(1, n_split * resident_splits // n_split.sum()), out=n_split)
    np.minimum(n_split, MAX_SPLIT, out=n_split)
    split = n_split > 1
    if max_split_tokens is not None:
        split &= np.cumsum(split) <= max_split_tokens
        n_split[~split] = 1
    tiles[:, 0], tiles[:, 1] = tokens, 1
    tiles[:, 3] = np.where(split, np.cumsum(split) - 1, -1)
    return tiles


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of PagedAttention.launch: f16 out[T, H*E] from f16 q[T, H, row] and the pages (K,
    V) of a layer.

    q with neither `rotation` nor `rotated`: q is rotated, and the KV cache holds the step's tokens.
    projected and rotation: tile i is the only token of sequence i in the step; the kernel rotates
        its q, k and v and stores k and v.
    rotated: tile i is the same, but the previous kernel has written q, k and v.
    gate: f32 [T, H*E]; the output is multiplied by sigmoid(gate).
    order: layout of the output for T = n_tokens; PLAIN is rows, other orders need
        PagedAttention.packs.
    """

    q: Address | None
    batch: AttentionMetadata
    pages: tuple[Address, Address]
    out: Address
    scale: float
    window: int = 0  # positions; 0: no window
    soft_cap: float = 0.0  # 0: no cap
    sinks: Address | None = None
    gate: Address | None = None
    projected: Sequence[Address | None] = ()
    rotation: Rotation | None = None
    rotated: bool = False
    order: int = PLAIN
    n_tokens: int = 0
    chunked: bool = False  # a token sees the chunk of `window` positions that it is in
    # a token sees its whole sequence in the step, or half a window to either side
    both_sides: bool = False


class PagedAttention:
    """Attention for heads of one shape. The workspace has max_split_tiles slots: that many
    sequences can have a split context.
    """

    def __init__(
        self,
        device: Device,
        heads: Heads,
        max_split_tiles: int,
        shared: int,
        batch_invariant: bool = False,
    ) -> None:
        """`shared`: bytes of shared memory per CTA, which limit the warps of a CTA.
        batch_invariant: the number of warps does not depend on the number of tokens, so a token's
        bits do not depend on the batch.
        """
        self.device, self.heads, self.batch_invariant = device, heads, batch_invariant
        self.group = heads.n_head // heads.n_head_kv
        self.heads_per_tile = heads_per_tile(heads)
        self.head_tiles = heads.n_head_kv * -(-self.group // self.heads_per_tile)
        self.decode_tiles = heads.n_head_kv * decode_parts(heads)  # CTAs of a token, at least
        wide = heads.row > USUAL_HEAD
        per_team, sharers = ROWS * (heads.row + 2) * 4, 2 if wide else 1
        rest = ROWS * heads.row * 2 + STATIC_SHARED
        self.warps = next(
            w for w in (8, 4, 2, 1) if w // sharers * per_team + rest <= shared and w >= sharers
        )
        self.shared = self.warps // sharers * per_team
        self._much_shared = shared >= MUCH_SHARED
        # elsewhere operands of wide heads in registers would spill
        self.has_decode_kernel = not wide or (heads.is_f16 and self._much_shared)
        available, strips, n = shared - STATIC_SHARED, self.strips(2), self._decode_heads(1)
        fitting = [w for w in DECODE_WARPS if decode_shared_bytes(heads, n, w, strips) <= available]
        self._warps_that_fit = fitting or [1]
        self._max_split_tiles = max_split_tiles
        self._workspace = device.alloc(
            workspace_bytes(heads, max_split_tiles), "attention workspace"
        )
        self._counters = device.zeros(4 * max_split_tiles * self.decode_tiles, "attention counters")

    def launch(self, params: AttentionParams, tiles: Address, n_tiles: int, n_split: int) -> None:
        """Enqueues attention of `n_tiles` tiles with at most n_split splits each."""
        row, fused = self.heads.row, params.rotation is not None
        types = "" if self.heads.is_f16 else f", {self.heads.cpp_types}"
        # only f16 pages can have been written by the kernel before decode_attention, which has no
        # shared memory for rotated queries of wide heads
        alone = fused or (params.rotated and self.heads.is_f16 and row <= USUAL_HEAD)
        if alone and self.has_decode_kernel:
            warps, strips = self.decode_warps(n_tiles), self.strips(n_tiles, n_split)
            heads = self._decode_heads(self._times_as_many(n_tiles, n_split, warps))
            shared = decode_shared_bytes(self.heads, heads, warps, strips)
            choices = (*strips, _has_more(params), params.rotated)
            flags = ", ".join(str(flag).lower() for flag in choices)
            name, sizes = f"decode_attention<{row}, {flags}{types}>", {"DECODE_WARPS": warps}
            if heads + 2 > warps and not (strips.in_shared_memory or params.rotated):
                sizes["TWO_HEADS"] = 1
        else:
            warps, shared, heads = self.warps, self.shared, self.heads_per_tile
            name, sizes = f"paged_attention<{row}, {str(fused).lower()}{types}>", {}
        rotates = params.rotation.defines if params.rotation else {}
        kernel = self._kernel(name, sizes | rotates | variant_defines(params))
        args = self.args(params, tiles, heads)
        grid = self.heads.n_head_kv * args.parts, n_tiles, n_split
        kernel.launch(grid, warps * 32, (args,), smem=shared, pdl=True)

    def _decode_heads(self, times: int) -> int:
        """Query heads of a CTA of decode_attention, with `times` as many CTAs as needed."""
        return -(-self.group // (times * decode_parts(self.heads)))

    def _times_as_many(self, n_tiles: int, n_split: int, warps: int) -> int:
        """CTAs of decode_attention for each one that is needed: while SMs would be idle, CTAs share
        a KV head until a thread merges two elements only. No bits depend on it.
        """
        ctas, found = self.decode_tiles * n_tiles * n_split, 1
        while (
            self._decode_heads(found) * self.heads.row > 64 * warps
            and 2 * found * ctas <= self.device.sm_count
            and 2 * found * n_tiles <= self._max_split_tiles
        ):
            found *= 2
        return found

    def decode_warps(self, n_tokens: int) -> int:
        """Warps per CTA for n_tokens decode tokens. Few tiles get 8 warps, which shortens each
        tile; many tiles get fewer warps, so that an SM runs more CTAs at the same time.
        """
        most = self._warps_that_fit[0]
        if self.batch_invariant:
            return most
        tiles = n_tokens * self.decode_tiles / self.device.sm_count
        return min(most, next(warps for warps, few in DECODE_WARPS.items() if tiles <= few))

    def resident_splits(self, n_tokens: int) -> int | None:
        """Splits that run at the same time for n_tokens decode tokens. None if the tiles are few,
        or if the bits must not depend on the batch: n_split then depends on the position alone.
        """
        sms = self.device.sm_count
        few = n_tokens * self.decode_tiles <= FEW_TILES_PER_SM * sms
        if few or self.batch_invariant or not self.has_decode_kernel:
            return None
        return sms * WARPS_AT_ONCE // (self.decode_warps(n_tokens) * self.decode_tiles)

    def launched_splits(self, n_tokens: int, n_split: int) -> int:
        """Splits to launch for n_tokens decode tokens of n_split splits at most: few distinct
        numbers, so that few CUDA graphs are recorded. CTAs without a split end at once, so some
        are launched while SMs have room. MAX_SPLIT only for n_split = MAX_SPLIT: see `strips`.
        """
        if n_split == MAX_SPLIT:
            return n_split
        tiles, sms = n_tokens * self.decode_tiles, self.device.sm_count
        least = next((n for n, ctas in LEAST_SPLITS.items() if tiles * n <= ctas * sms), 1)
        return min(max(least, 1 << (n_split - 1).bit_length()), MAX_SPLIT - 1)

    def strips(self, n_tokens: int, n_split: int = 1) -> Strips:
        """Operand placement for n_tokens decode tokens with at most n_split splits.

        tokens  elements of a head   K and V pass through
        >= 2    any                  shared memory: more warps fit than the registers allow
        1       > 128                shared memory: registers are short
        1       <= 128               registers; remainder strips: shared memory

        On GPUs with little shared memory, and for KV types other than f16, all strips are in
        registers. Only the longest contexts (n_split == MAX_SPLIT) have remainder strips: elsewhere
        the 128 positions of a split are one round of the CTA's warps.
        """
        if not (self.heads.is_f16 and self._much_shared):
            return Strips(False, False)
        few_registers = self.heads.row <= IN_REGISTERS
        return Strips(
            in_shared_memory=n_tokens >= SHARED_FROM_TOKENS or not few_registers,
            odd=n_split == MAX_SPLIT and few_registers,
        )

    @property
    def packs(self) -> bool:
        """Whether the output can be packed: whole 32-element pieces, no padding columns."""
        size = self.heads.head_size
        return size % 32 == 0 and self.heads.n_head * size % UNIT == 0

    def args(
        self, params: AttentionParams, tiles: Address, heads_per_tile: int | None = None
    ) -> AttentionArgs:
        """Returns the structure of cuda/attention/attention.cuh. heads_per_tile: query heads of a
        tile; None: all of a KV head, up to ROWS. ValueError if the heads cannot be packed in the
        order that `params` asks for.
        """
        heads_per_tile = heads_per_tile or self.heads_per_tile
        if params.order != PLAIN and not self.packs:
            n, size = self.heads.n_head, self.heads.head_size
            raise ValueError(
                f"{n} heads of {size} elements cannot be packed: the head size must be a multiple "
                f"of 32, and {n} x {size} a multiple of {UNIT}"
            )
        a = params
        return AttentionArgs(
            rope=rope_args(self.heads, a.batch, a.pages, a.q, a.projected, a.rotation),
            tiles=address(tiles),
            sinks=address(a.sinks),
            gate=address(a.gate),
            out=address(a.out),
            workspace=self._workspace.address,
            counters=self._counters.address,
            heads_per_tile=heads_per_tile,
            group=self.group,
            parts=-(-self.group // heads_per_tile),
            window=a.window,
            scale=a.scale,
            soft_cap=a.soft_cap,
            order=a.order,
            n_tokens=a.n_tokens,
        )

    def _kernel(self, name: str, more: dict[str, int]) -> Kernel:
        defines = {
            **self.heads.defines,
            "ATTENTION_WARPS": self.warps,
            "DECODE_WARPS": 8,
            **more,
        }
        return self.device.kernel(
            "attention/paged_attention.cu", name, defines=defines, extra_source=ASSERTS
        )


def variant_defines(params: AttentionParams) -> dict[str, int]:
    """The macros of attention in chunks, to later tokens, and with a gated output."""
    gated = params.gate is not None
    named = {"CHUNKED": params.chunked, "BOTH_SIDES": params.both_sides, "GATED": gated}
    return {name: 1 for name, used in named.items() if used}


def _has_more(params: AttentionParams) -> bool:
    """Whether the layer needs the MORE variant: head norms, a soft cap or sinks."""
    norms = params.rotation is not None and any(n is not None for n in params.rotation.norm)
    return norms or params.soft_cap > 0 or params.sinks is not None


def decode_shared_bytes(heads: Heads, n_heads: int, warps: int, strips: Strips) -> int:
    """Bytes of dynamic shared memory of a decode_attention CTA that has n_heads query heads (table
    at the top of cuda/attention/decode_attention.cuh).
    """
    operands = warps * DECODE_STRIP * heads.row * 4 if any(strips) else 0
    parts = warps * n_heads * (heads.row + 2) * 4
    rotated = warps * n_heads if heads.row <= USUAL_HEAD else 0  # by no GEMM
    queries = max(DECODE_HEADS + 2, rotated) * heads.row * 2
    return operands + parts + queries
