"""The recurrent states of one sequence in one group.

| state | use |
|---|---|
| after the last step | the next step reads it |
| before the last step | the last step can be repeated, or a token be undone |
| after a full page of keys and values | the sequence can return to it; others may begin with it |

A page of a recurrent group holds one whole state. A step reads the state after the tokens before it
and writes the new state to another page. A state after a full page of keys and values may be
published like that page, and is not written to while somebody holds it. This module knows page
numbers, but no tokens and no layers.
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
    """The states that a sequence holds. The key of a state is the number of tokens that it has
    seen. The interface is that of kv_cache.PageTable.
    """

    capacity = 1 << 62  # a state is as large at any position
    end = WIDTH

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._held: dict[int, int] = {}  # position -> page
        self._kept = 0  # the published position that the sequence can return to; 0: none
        self._row = NO_STATE, 0

    @property
    def pages(self) -> list[int]:
        """All pages that the table holds."""
        return list(self._held.values())

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take a page for the state after the tokens start:stop. The state at start stays, and so
        does the state that was published last; all others are given back. Raises OutOfPages.
        """
        if start and start not in self._held:
            raise ValueError(f"there is no state after position {start}: {sorted(self._held)}")
        for position in set(self._held) - {start, self._kept}:
            self._drop(position)
        self._held[stop] = self.pool.take()
        self._row = self._held.get(start, NO_STATE), self._held[stop]

    def keepable(self, n_positions: int) -> int:
        """The last position up to n_positions at which there is a state; 0 if there is none."""
        return max((p for p in self._held if p <= n_positions), default=0)

    def truncate(self, n_positions: int) -> None:
        """Give back the states after n_positions, which is keepable."""
        for position in [p for p in self._held if p > n_positions]:
            self._drop(position)

    def _drop(self, position: int) -> None:
        if position == self._kept:
            self._kept = 0
        self.pool.release(self._held.pop(position))

    def suspect(self, first_position: int) -> None:
        """What was evaluated from this position on may be NaN, and so may the states after it.
        Their pages need no clearing, because a step writes a whole page before anyone reads it.
        """
        self.pool.doubt([page for p, page in self._held.items() if p > first_position])

    def filled(self, start: int, stop: int) -> list[int]:
        """Always empty: no page of states has to be cleared."""
        return []

    def write(self, row: NDArray[np.int32]) -> None:
        """Write the pages of the last step into its row: the page that it reads, or NO_STATE, and
        the page that it writes.
        """
        row[:WIDTH] = self._row
        row[WIDTH:] = 0

    def missing(self, n_positions: int) -> int:
        """The most pages that the table may still take."""
        return max(0, self.pool.limit - len(self._held))

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find the state after a page of keys and values, if the table holds it; from
        now on this sequence can return to that state, too. The pages of an answer are known to be
        finite when they are first published; their states are not kept, because whoever continues
        the text does so from the end of its prompt.
        """
        position = (page + 1) * PAGE_SIZE
        if finite and position == self._kept:
            self.pool.trust(self._held[position])
        elif not finite and position in self._held:
            self._kept = max(self._kept, position)
            self.pool.publish(self._held[position], text)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Fill an empty table with the published state after the last of these texts."""
        page = self.pool.find(texts[-1])
        assert page is not None
        self.pool.share(page)
        self._kept = len(texts) * PAGE_SIZE
        self._held[self._kept] = page
