"""Launches prefill attention: cuda/attention/prefill_attention_wgmma.cu on Hopper, or
prefill_attention_wgmma_wide.cu for heads of 512; cuda/attention/prefill_attention.cu on other GPUs.
Plans which rows a CTA takes.

The backend decides which sequences use these kernels, and converts pages of other types to f16
first (pages_to_f16.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, Device, Kernel
from ..address import Address, address
from ..gemm.hopper import has_wgmma
from .paged_attention import (
    ASSERTS,
    AttentionParams,
    PagedAttention,
    heads_per_tile,
    spans_of,
    variant_defines,
)
from .rope_kv import MAX_HEAD, Heads

ROWS = 128  # (token, head) pairs of a tile; of wide heads, two CTAs share a tile
BOX = 64  # elements of a head per shared-memory box of 128-byte rows
WARPS = 8  # of 16 rows each
MAX_ROW = 128  # elements of a head for which the mma kernel has registers
WGMMA_ROWS = (32, 64, 96, 128, 256, MAX_HEAD)  # of the wgmma kernels
WIDE_CLUSTER = 2  # CTAs that share a tile of wide heads
# bytes of shared memory of their CTA: Q, chunks of K and V with two mbarriers each, P and maxima
WIDE_SHARED = (64 << 10) + 9 * ((16 << 10) + 2 * 8) + (18 << 10)


def plan_prefill_tiles(
    positions: NDArray[np.int32], sequences: NDArray[np.int32], heads: Heads, least: int
) -> NDArray[np.int32]:
    """Returns tiles[n, 4] with the columns of plan_tiles, for the sequences with at least `least`
    tokens in the step. Tiles with the longest context come first, so that the last wave of CTAs is
    short.
    """
    per_tile = ROWS // heads_per_tile(heads)
    tiles = [
        (first, min(per_tile, stop - first), 1, -1)
        for start, stop in spans_of(sequences)
        if stop - start >= least
        for first in range(start, stop, per_tile)
    ]
    planned = np.array(tiles, np.int32).reshape(-1, 4)
    return planned[np.argsort(-positions[planned[:, 0]], kind="stable")]


class PrefillAttention:
    """Attention for many tokens of a sequence, with heads of one shape."""

    def __init__(self, paged: PagedAttention, wgmma: bool | None = None) -> None:
        """paged: the attention of decode tokens; it supplies the kernel arguments. wgmma: whether
        to use the Hopper kernel; default: if the GPU has wgmma. ValueError if the kernel is not
        supported.
        """
        self.paged, self.heads = paged, paged.heads
        self.device: Any = paged.device
        self.wgmma = has_wgmma(self.device.arch) if wgmma is None else wgmma
        if not self.is_supported(self.device, self.heads, self.wgmma):
            kind, size = "wgmma" if self.wgmma else "mma", self.heads.head_size
            raise ValueError(f"{self.device.arch} has no {kind} attention for heads of {size}")
        self.is_wide = self.heads.row == MAX_HEAD
        stem = "prefill_attention_wgmma" if self.wgmma else "prefill_attention"
        self.stem = stem + "_wide" if self.is_wide else stem
        self._maps: dict[int, ctypes.Array] = {}
        self._made: dict[tuple[str, ...], Kernel] = {}

    @staticmethod
    def is_supported(device: Device, heads: Heads, wgmma: bool) -> bool:
        """Whether the device and the heads support the kernel: wgmma, or mma for any GPU."""
        if heads.page_size != BOX or (wgmma and not has_wgmma(device.arch)):
            return False
        rows = WGMMA_ROWS if wgmma else range(MAX_ROW + 1)
        return heads.row in rows and shared_bytes(heads, wgmma) <= device.shared_bytes

    @classmethod
    def fits(cls, device: Device, heads: Heads) -> bool:
        """Whether the default kernel of the device is supported."""
        return cls.is_supported(device, heads, has_wgmma(device.arch))

    @property
    def min_tokens(self) -> int:
        """Tokens of a sequence in a step from which on this kernel is faster than
        paged_attention.cu, which has more and smaller tiles; measured on an H200 with long
        contexts, and with wide heads on an H100 with short ones, too.
        """
        if self.is_wide:
            return 32
        return 96 if self.wgmma else 192

    def launch(self, params: AttentionParams, tiles: Address, n_tiles: int) -> None:
        """Enqueues attention of `n_tiles` tiles. q is rotated, and pages are f16."""
        heads, pages = self.heads, params.pages
        args = self.paged.args(params, tiles)
        arguments: tuple = (args,)
        threads = WARPS * 32
        if self.wgmma:
            arguments = args, self._map(pages[0])
            threads += 128  # producer warpgroup
        cluster, shared = WIDE_CLUSTER if self.is_wide else 1, shared_bytes(heads, self.wgmma)
        grid = self.paged.head_tiles * cluster, n_tiles
        kernel = self._kernel(params)
        kernel.launch(grid, threads, arguments, smem=shared, pdl=True, cluster=cluster)

    def _map(self, keys: Address) -> ctypes.Array:
        """The tensor map of a layer's K pages, up to the end of their buffer. ValueError if the
        address has no buffer.
        """
        key = address(keys)
        if key not in self._maps:
            owner = keys if isinstance(keys, Buffer) else keys.owner
            if owner is None:
                raise ValueError("K pages need a buffer: the tensor map ends where the buffer ends")
            row = self.heads.row
            rows = (owner.address + owner.nbytes - key) // (2 * row)
            box = self.heads.page_size, BOX
            self._maps[key] = self.device.tensor_map(keys, (rows, row), box)
        return self._maps[key]

    def _kernel(self, params: AttentionParams) -> Kernel:
        variant = variant_defines(params)
        key = tuple(variant)
        if key not in self._made:
            defines = {"PAGE_SIZE": self.heads.page_size, **variant}
            name = f"{self.stem}<{self.heads.row}>"
            self._made[key] = self.device.kernel(
                f"attention/{self.stem}.cu", name, defines=defines, extra_source=ASSERTS
            )
        return self._made[key]


def shared_bytes(heads: Heads, wgmma: bool) -> int:
    """Bytes of dynamic shared memory of a CTA: stages of K and V pages; Q if heads are large."""
    row, boxes = heads.row, -(-heads.row // BOX)
    if row == MAX_HEAD:
        return WIDE_SHARED
    page = 2 * BOX * (boxes * BOX + row)
    if not wgmma:
        return 2 * page
    stages, queries = (2, ROWS * boxes * BOX * 2) if row > 128 else (4, 0)
    return stages * page + queries + stages * 4 * 8  # four mbarriers per stage
