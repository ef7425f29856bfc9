"""Pages of keys and values: who owns which, how often a page is shared, and which are free.

Only bookkeeping: the storage belongs to the ops, and a page is a number here. A `PageTable` is one
sequence's list of pages; tables that begin with the same tokens may share full pages, which nobody
writes to again. Nothing here knows tokens, layers, or who evaluates what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import PAGE_SIZE, pages_for


class OutOfPages(MemoryError):
    """Every page is in use."""


class PagePool:
    """n_pages pages, each free or referenced by one or more tables."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.suspects: set[int] = set()  # may hold NaN or infinity: to be cleared before use
        self._references = [0] * n_pages
        self._free = list(
            range(n_pages - 1, -1, -1)
        )  # the lowest number is taken first: neighbours stay neighbours

    @property
    def n_free(self) -> int:
        """Pages that nobody references."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now referenced once; OutOfPages when there is none."""
        if not self._free:
            size = self.n_pages * PAGE_SIZE
            raise OutOfPages(
                f"all {self.n_pages} pages ({size} positions) of the context are in use: "
                "end a sequence or load with a larger n_ctx"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference to a page in use."""
        if not self._references[page]:
            raise ValueError(f"page {page} is free: it cannot be shared")
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One reference less; the last one frees the page."""
        if not self._references[page]:
            raise ValueError(f"page {page} is already free")
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def references(self, page: int) -> int:
        """How many tables hold the page."""
        return self._references[page]


class PageTable:
    """The pages of one sequence, in the order of positions; `version` changes with them."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.version = 0

    @property
    def capacity(self) -> int:
        """Positions that the pages hold."""
        return len(self.pages) * PAGE_SIZE

    def grow(self, n_positions: int) -> None:
        """Take pages until n_positions fit; on OutOfPages the table is as before."""
        missing = pages_for(n_positions) - len(self.pages)
        if missing > self.pool.n_free:
            raise OutOfPages(
                f"{n_positions} positions need {missing} more pages of {PAGE_SIZE}, "
                f"{self.pool.n_free} of {self.pool.n_pages} are free: "
                "end a sequence or load with a larger n_ctx"
            )
        for _ in range(missing):
            self.pages.append(self.pool.take())
        self.version += 1

    def truncate(self, n_positions: int) -> int:
        """Give back the pages beyond n_positions; how many positions are left.

        Fewer are left when the last page would be written on while another table shares it.
        """
        kept = min(n_positions, self.capacity)
        if kept % PAGE_SIZE and self.pool.references(self.pages[kept // PAGE_SIZE]) > 1:
            kept -= kept % PAGE_SIZE
        for page in self.pages[pages_for(kept) :]:
            self.pool.release(page)
        del self.pages[pages_for(kept) :]
        self.version += 1
        return kept

    def suspect(self, first_position: int) -> None:
        """From this position on, what the pages hold may be NaN; pages of other tables, too, are
        theirs to suspect.
        """
        pages = self.pages[first_position // PAGE_SIZE :]
        self.pool.suspects.update(p for p in pages if self.pool.references(p) == 1)

    def fork(self, n_positions: int) -> PageTable:
        """A table that shares the full pages of the first n_positions."""
        child = PageTable(self.pool)
        for page in self.pages[: n_positions // PAGE_SIZE]:
            self.pool.share(page)
            child.pages.append(page)
        return child

    def release(self) -> None:
        """Give back every page."""
        self.truncate(0)


def stack(tables: Sequence[PageTable]) -> NDArray[np.int32]:
    """page_tables[S, P] of a step, as wide as the longest; unused entries are 0."""
    width = max((len(t.pages) for t in tables), default=0)
    rows = np.zeros((len(tables), max(1, width)), np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table.pages)] = table.pages
    return rows
