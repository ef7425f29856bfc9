"""Launches cuda/attention/pages_to_f16.cu, which converts KV cache pages of any type to f16 pages
for prefill attention, and lists the pages that a step's prefill needs. This module knows neither
layers nor device memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...device.base import Device, Kernel
from ..address import Address
from .paged_attention import spans_of
from .rope_kv import F16_KV, Heads

THREADS = 128


def as_f16(heads: Heads) -> Heads:
    """The same heads with an f16 KV cache."""
    return replace(heads, types=F16_KV)


def plan_f16_pages(
    positions: NDArray[np.int32],
    sequences: NDArray[np.int32],
    tables: NDArray[np.int32],
    page_size: int,
    least: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lists the pages that prefill attention reads in a step.

    Returns listed[n, 2] (ListedPage of the kernel) and f16_tables[S, P]. listed has each page once
    that a sequence with at least `least` tokens in the step sees, and its distance to the first
    token that sees it. f16_tables are page tables whose entries are indices into `listed`.
    """
    seen = []  # per sequence: its row, its pages, their distances
    for start, stop in spans_of(sequences):
        if stop - start >= least:
            row, number = sequences[start], np.arange(positions[stop - 1] // page_size + 1)
            distances = positions[start] - (number * page_size + page_size - 1)
            seen.append((row, tables[row, : len(number)], distances))
    f16_tables = np.zeros_like(tables)
    if not seen:
        return np.zeros((0, 2), np.int32), f16_tables
    pages, indices = np.unique(np.concatenate([of for _, of, _ in seen]), return_inverse=True)
    listed = np.column_stack([pages, np.full(len(pages), np.iinfo(np.int32).max)])
    np.minimum.at(listed[:, 1], indices, np.concatenate([back for *_, back in seen]))
    ends = np.cumsum([len(of) for _, of, _ in seen])
    for (row, of, _), end in zip(seen, ends, strict=True):
        f16_tables[row, : len(of)] = indices[end - len(of) : end]
    return listed.astype(np.int32), f16_tables


class PagesToF16:
    """Converts pages of heads of one shape and one pair of KV types."""

    def __init__(self, device: Device, heads: Heads) -> None:
        self.device, self.heads = device, heads
        self._made: Kernel | None = None

    def launch(
        self,
        pages: tuple[Address, Address],
        f16_pages: tuple[Address, Address],
        listed: Address,
        n_listed: int,
        window: int = 0,
    ) -> None:
        """Enqueues the conversion of n_listed pages (K, V) of a layer to f16_pages, which must hold
        n_listed pages. Pages outside the layer's window are skipped; window 0: none are.
        """
        grid = n_listed, self.heads.n_head_kv, 2
        self._kernel.launch(grid, THREADS, (*pages, listed, *f16_pages, window), pdl=True)

    @property
    def _kernel(self) -> Kernel:
        if self._made is None:
            name = f"pages_to_f16<{self.heads.row}, {self.heads.cpp_types}>"
            defines = {"PAGE_SIZE": self.heads.page_size}
            self._made = self.device.kernel("attention/pages_to_f16.cu", name, defines=defines)
        return self._made
