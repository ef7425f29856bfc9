"""The recurrent states of one sequence in one group: behind its last step, before it, and one to
which it can be taken back.

A page of such a group holds a whole state. A step takes the state behind the tokens before it, and
leaves the new one on another page, so that it can be repeated, or undone by a token. A state behind
a full page of keys and values may be published as that page is, and is not written to any more as
long as somebody holds it. Knows numbers of pages, no tokens and no layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import PAGE_SIZE
from ..backends.states import NO_STATE
from .page_pool import PagePool

WIDTH = 2  # of a row of a step: the page that is read, the page that is written


class StateTable:
    """The states that a sequence holds, by the position behind which they are: a table like
    kv_cache.PageTable.
    """

    capacity = 1 << 62  # a state is as large at any position
    end = WIDTH

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._held: dict[int, int] = {}  # position -> page
        self._kept = 0  # the position to which the sequence can be taken back; 0: there is none
        self._row = NO_STATE, 0

    @property
    def pages(self) -> list[int]:
        """All pages that the table holds."""
        return list(self._held.values())

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take a page for the state behind the tokens at start:stop; that behind start stays, and
        so does the one that was published last. OutOfPages.
        """
        if start and start not in self._held:
            raise ValueError(f"there is no state behind position {start}: {sorted(self._held)}")
        for position in set(self._held) - {start, self._kept}:
            self._drop(position)
        self._held[stop] = self.pool.take()
        self._row = self._held.get(start, NO_STATE), self._held[stop]

    def keepable(self, n_positions: int) -> int:
        """The last position up to n_positions behind which there is a state; 0 without one."""
        return max((p for p in self._held if p <= n_positions), default=0)

    def truncate(self, n_positions: int) -> None:
        """Give back the states behind n_positions, which is keepable."""
        for position in [p for p in self._held if p > n_positions]:
            self._drop(position)

    def _drop(self, position: int) -> None:
        if position == self._kept:
            self._kept = 0
        self.pool.release(self._held.pop(position))

    def suspect(self, first_position: int) -> None:
        """From this position on, what was evaluated may be NaN. A page needs no clearing: it is
        written as a whole before it is read.
        """
        self.pool.doubt([page for p, page in self._held.items() if p > first_position])

    def filled(self, start: int, stop: int) -> list[int]:
        """None that would have to be cleared."""
        return []

    def write(self, row: NDArray[np.int32]) -> None:
        """The last step's pages: what is read, or NO_STATE, and what is written."""
        row[:WIDTH] = self._row
        row[WIDTH:] = 0

    def missing(self, n_positions: int) -> int:
        """Pages at most that the table still takes."""
        return max(0, self.pool.limit - len(self._held))

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find the state behind a page of keys and values, if the table holds it; the
        sequence, too, can be taken back to it from now on. Of an answer, whose pages are known to
        be finite when they are published, none is kept: who goes on does so behind its prompt.
        """
        position = (page + 1) * PAGE_SIZE
        if finite and position == self._kept:
            self.pool.trust(self._held[position])
        elif not finite and position in self._held:
            self._kept = max(self._kept, position)
            self.pool.publish(self._held[position], text)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Begin, in an empty table, with the published state behind the last of these texts."""
        page = self.pool.find(texts[-1])
        assert page is not None
        self.pool.share(page)
        self._kept = len(texts) * PAGE_SIZE
        self._held[self._kept] = page
