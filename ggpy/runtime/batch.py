"""What is evaluated together, as a step: tokens of several sequences, one after the other.

Made for every token that is generated, so what does not change from step to step is kept. Nothing
here knows which sequences are chosen, or why.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import Step
from .kv_cache import PageTable, stack
from .sequence import Sequence


class TableStack:
    """The page tables of the last step: of the same sequences, only what changed is written."""

    def __init__(self) -> None:
        self._tables: list[PageTable] = []
        self._versions: list[int] = []
        self._rows: NDArray[np.int32] = stack([])

    def rows(self, tables: list[PageTable]) -> NDArray[np.int32]:
        """page_tables[S, P]; valid until the next call."""
        versions = [t.version for t in tables]
        if tables == self._tables:
            if versions == self._versions:
                return self._rows
            pairs = enumerate(zip(versions, self._versions, strict=True))
            changed = [i for i, (now, before) in pairs if now != before]
            if max(len(tables[i].pages) for i in changed) <= self._rows.shape[1]:
                for i in changed:
                    pages = tables[i].pages
                    self._rows[i, : len(pages)] = pages
                    self._rows[i, len(pages) :] = 0
                self._versions = versions
                return self._rows
        self._tables, self._versions, self._rows = tables, versions, stack(tables)
        return self._rows


class Batch:
    """Tokens of some sequences: first of those that have a single one, then of prompts."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.ids: list[int] = []  # of all
        self.lengths: list[int] = []  # of each sequence
        self.owners: list[Sequence] = []  # whose last tokens are among them
        self.rows: list[int] = []  # where these are

    def add_ones(self, sequences: list[Sequence], ids: list[int]) -> None:
        """The only token that each of these has to evaluate; before any prompt."""
        n = len(ids)
        self.sequences, self.ids, self.lengths = sequences, ids, [1] * n
        self.owners, self.rows = sequences.copy(), list(range(n))

    def add_prompt(self, s: Sequence, room: int) -> None:
        """Up to `room` of what a sequence has to evaluate."""
        tokens = s.ids[s.n_evaluated : s.n_evaluated + room]
        if not tokens:
            return
        self.sequences.append(s)
        self.ids += tokens
        self.lengths.append(len(tokens))
        if s.n_evaluated + len(tokens) == len(s.ids):
            self.owners.append(s)
            self.rows.append(len(self.ids) - 1)

    def step(self, tables: TableStack) -> Step:
        """The step; its page tables are valid until the next one is made."""
        n, first = len(self.ids), [s.n_evaluated for s in self.sequences]
        page_tables = tables.rows([s.table for s in self.sequences])
        ids = np.array(self.ids, np.int32)
        if n == len(first):
            alone = _count(n)
            rows = alone if len(self.rows) == n else np.array(self.rows, np.int32)
            return Step(ids, np.array(first, np.int32), alone, page_tables, rows)
        spans = zip(first, self.lengths, strict=True)
        positions = np.concatenate([np.arange(p, p + t, dtype=np.int32) for p, t in spans])
        sequences = np.repeat(_count(len(first)), self.lengths)
        return Step(ids, positions, sequences, page_tables, np.array(self.rows, np.int32))


@lru_cache(maxsize=64)
def _count(n: int) -> NDArray[np.int32]:
    numbers = np.arange(n, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def ragged(chunks: Seq[tuple[PageTable, list[int], int]], rows: NDArray[np.int32]) -> Step:
    """A step of (table, tokens, position of the first) for each sequence."""
    lengths = [len(tokens) for _, tokens, _ in chunks]
    return Step(
        ids=np.concatenate([np.array(tokens, np.int32) for _, tokens, _ in chunks]),
        positions=np.concatenate([np.arange(p, p + len(t), dtype=np.int32) for _, t, p in chunks]),
        sequences=np.repeat(_count(len(chunks)), lengths),
        page_tables=stack([table for table, _, _ in chunks]),
        rows=rows,
    )
