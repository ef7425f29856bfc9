"""Launches cuda/attention/pages_to_f16.cu: pages of keys and values of any type -> pages of halves, for the
attention of prompts; and lists which pages a step's prompts see. Knows neither layers nor memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...device.base import Device, Kernel
from ..address import Address
from .paged_attention import spans_of
from .rope_kv import HALVES, Heads

THREADS = 128


def as_halves(heads: Heads) -> Heads:
    """The same heads, whose pages are of halves."""
    return replace(heads, types=HALVES)


def plan_halves(
    positions: NDArray[np.int32],
    sequences: NDArray[np.int32],
    tables: NDArray[np.int32],
    page_size: int,
    least: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """listed[n, 2], each page that a sequence with at least so many tokens in the step sees, once,
    and from how far back (ListedPage of the kernel); tables[S, P] of where in the list they are.
    """
    seen = []  # of each such sequence: its row, its pages, their distances
    for start, stop in spans_of(sequences):
        if stop - start >= least:
            row, number = sequences[start], np.arange(positions[stop - 1] // page_size + 1)
            distances = positions[start] - (number * page_size + page_size - 1)
            seen.append((row, tables[row, : len(number)], distances))
    made = np.zeros_like(tables)
    if not seen:
        return np.zeros((0, 2), np.int32), made
    pages, places = np.unique(np.concatenate([of for _, of, _ in seen]), return_inverse=True)
    listed = np.column_stack([pages, np.full(len(pages), np.iinfo(np.int32).max)])
    np.minimum.at(listed[:, 1], places, np.concatenate([back for *_, back in seen]))
    ends = np.cumsum([len(of) for _, of, _ in seen])
    for (row, of, _), end in zip(seen, ends, strict=True):
        made[row, : len(of)] = places[end - len(of) : end]
    return listed.astype(np.int32), made


class HalvePages:
    """Pages of heads of one shape and of their types."""

    def __init__(self, device: Device, heads: Heads) -> None:
        self.device, self.heads = device, heads
        self._made: Kernel | None = None

    def launch(
        self,
        pages: tuple[Address, Address],
        halves: tuple[Address, Address],
        listed: Address,
        n_listed: int,
        window: int = 0,
    ) -> None:
        """Enqueue halves (keys, values) of the listed pages of a layer that its window sees; 0 is
        all. There is room for all that are listed.
        """
        grid = n_listed, self.heads.n_head_kv, 2
        self._kernel.launch(grid, THREADS, (*pages, listed, *halves, window), pdl=True)

    @property
    def _kernel(self) -> Kernel:
        if self._made is None:
            name = f"pages_to_f16<{self.heads.row}, {self.heads.structs}>"
            defines = {"PAGE_SIZE": self.heads.page_size}
            self._made = self.device.kernel("attention/pages_to_f16.cu", name, defines=defines)
        return self._made
