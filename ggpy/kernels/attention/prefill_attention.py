"""Launches cuda/attention/prefill_attention.cu, on Hopper cuda/attention/prefill_attention_wgmma.cu: attention of prompts.

Plans which rows a block takes; whose attention is computed here is ops' business, and so is that
pages of another type than f16 become halves first (pages_to_f16.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, Device, Kernel
from ..address import Address, address
from ..gemm.hopper import has_wgmma
from .paged_attention import Asked, Attend, heads_per_tile, spans_of
from .rope_kv import Heads

ROWS = 128  # (token, head) pairs of a tile
BOX = 64  # elements of a head that stand together in shared memory
WARPS = 8  # of 16 rows each
MAX_ROW = 128  # elements of a head that the kernel for any GPU has registers for
WGMMA_ROWS = (32, 64, 96, 128, 256)  # of Hopper's


def plan_prompts(
    positions: NDArray[np.int32], sequences: NDArray[np.int32], heads: Heads, least: int
) -> NDArray[np.int32]:
    """tiles[n, 4] as plan_tiles has them, of the sequences with at least so many tokens in the
    step; those with the most to do come first.
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


class AttendPrompt:
    """Attention of many tokens of a sequence, for heads of one shape."""

    def __init__(self, attend: Attend, wgmma: bool | None = None) -> None:
        """attend: the same for single tokens, whose parameters these are. wgmma: whether Hopper's
        kernel is taken; by default where the GPU has it. ValueError where it is not supported.
        """
        self.attend, self.heads = attend, attend.heads
        self.device: Any = attend.device
        self.wgmma = has_wgmma(self.device.arch) if wgmma is None else wgmma
        if not self.is_supported(self.device, self.heads, self.wgmma):
            kind, size = "wgmma" if self.wgmma else "mma", self.heads.head_size
            raise ValueError(f"{self.device.arch} has no {kind} attention for heads of {size}")
        self._maps: dict[int, ctypes.Array] = {}
        self._made: Kernel | None = None

    @staticmethod
    def is_supported(device: Device, heads: Heads, wgmma: bool) -> bool:
        """Whether the device has a kernel for such heads: Hopper's, or that for any GPU."""
        if heads.page_size != BOX or (wgmma and not has_wgmma(device.arch)):
            return False
        rows = WGMMA_ROWS if wgmma else range(MAX_ROW + 1)
        return heads.row in rows and shared_bytes(heads, wgmma) <= device.shared_bytes

    @classmethod
    def fits(cls, device: Device, heads: Heads) -> bool:
        """Whether the kernel that is taken by default is supported."""
        return cls.is_supported(device, heads, has_wgmma(device.arch))

    @property
    def from_tokens(self) -> int:
        """Tokens of a sequence in a step from which on this is faster than paged_attention.cu, whose tiles
        are more; measured on an H200, in deep contexts.
        """
        return 96 if self.wgmma else 192

    def launch(self, asked: Asked, tiles: Address, n_tiles: int) -> None:
        """Enqueue it for the tokens of the tiles; q is rotated, and pages are of halves."""
        heads, pages = self.heads, asked.pages
        parameters = self.attend.parameters(asked, tiles)
        arguments: tuple = (parameters,)
        threads = WARPS * 32
        if self.wgmma:
            arguments = parameters, self._map(pages[0])
            threads += 128  # that copy
        grid, shared = (self.attend.head_tiles, n_tiles), shared_bytes(heads, self.wgmma)
        self._kernel.launch(grid, threads, arguments, smem=shared, pdl=True)

    def _map(self, keys: Address) -> ctypes.Array:
        """How copies find a page's head in a layer's keys, to the end of their memory."""
        key = address(keys)
        if key not in self._maps:
            owner = keys if isinstance(keys, Buffer) else keys.owner
            if owner is None:
                raise ValueError("pages without a buffer have no end")
            row = self.heads.row
            rows = (owner.address + owner.nbytes - key) // (2 * row)
            box = self.heads.page_size, BOX
            self._maps[key] = self.device.tensor_map(keys, (rows, row), box)
        return self._maps[key]

    @property
    def _kernel(self) -> Kernel:
        if self._made is None:
            stem = "prefill_attention_wgmma" if self.wgmma else "prefill_attention"
            defines = {"PAGE_SIZE": self.heads.page_size}
            name = f"{stem}<{self.heads.row}>"
            self._made = self.device.kernel(f"attention/{stem}.cu", name, defines=defines)
        return self._made


def shared_bytes(heads: Heads, wgmma: bool) -> int:
    """Dynamic shared memory of a block: pages of keys and values; queries where heads are large."""
    row, boxes = heads.row, -(-heads.row // BOX)
    page = 2 * BOX * (boxes * BOX + row)
    if not wgmma:
        return 2 * page
    stages, queries = (2, ROWS * boxes * BOX * 2) if row > 128 else (4, 0)
    return stages * page + queries + stages * 4 * 8  # four barriers a stage
