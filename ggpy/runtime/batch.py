"""What is evaluated together, as a step: tokens of several sequences, one after the other.

Made for every token that is generated, so what does not change from step to step is kept. Nothing
here knows which sequences are chosen, or why.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import Array, Step
from .kv_cache import SequencePages, Span, stack
from .sequence import Sequence


class TableStack:
    """The page tables of the last step: of the same sequences, only what changed is written."""

    def __init__(self) -> None:
        self._sequences: list[SequencePages] = []
        self._versions: list[int] = []
        self._rows: tuple[NDArray[np.int32], ...] = ()

    def rows(self, sequences: list[SequencePages]) -> tuple[NDArray[np.int32], ...]:
        """Step.page_tables; valid until the next call."""
        versions = [s.version for s in sequences]
        if sequences == self._sequences:
            if versions == self._versions:
                return self._rows
            pairs = enumerate(zip(versions, self._versions, strict=True))
            changed = [i for i, (now, before) in pairs if now != before]
            if all(self._fits(sequences[i]) for i in changed):
                for i in changed:
                    for table, rows in zip(sequences[i].tables, self._rows, strict=True):
                        table.write(rows[i])
                self._versions = versions
                return self._rows
        self._sequences, self._versions, self._rows = sequences, versions, stack(sequences)
        return self._rows

    def _fits(self, sequence: SequencePages) -> bool:
        pairs = zip(sequence.tables, self._rows, strict=True)
        return all(table.end <= rows.shape[1] for table, rows in pairs)


class Batch:
    """Tokens of some sequences: first of those that have a single one, then of prompts."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.ids: list[int] = []  # of all
        self.lengths: list[int] = []  # of each sequence
        self.owners: list[Sequence] = []  # whose last tokens are among them
        self.rows: list[int] = []  # where these are
        self.n_ones = 0  # of the sequences: with a single token
        self.n_prompt_tokens = 0

    def add_ones(self, sequences: list[Sequence], ids: list[int], n_prompts: int = 0) -> None:
        """The only token that each of these has to evaluate; before any prompt. n_prompts: of
        these, last tokens of prompts.
        """
        n = len(ids)
        self.sequences, self.ids, self.lengths = sequences, ids, [1] * n
        self.owners, self.rows = sequences.copy(), list(range(n))
        self.n_ones, self.n_prompt_tokens = n, n_prompts

    def add_prompt(self, s: Sequence, limit: int) -> int:
        """Up to `limit` tokens that a sequence has to evaluate; how many these are."""
        tokens = s.ids[s.n_evaluated : s.n_evaluated + limit]
        if not tokens:
            return 0
        self.sequences.append(s)
        self.ids += tokens
        self.lengths.append(len(tokens))
        self.n_prompt_tokens += len(tokens)
        if s.n_evaluated + len(tokens) == len(s.ids):
            self.owners.append(s)
            self.rows.append(len(self.ids) - 1)
        return len(tokens)

    def prompts(self) -> list[Sequence]:
        """The sequences behind those of a single token."""
        return self.sequences[self.n_ones :]

    def spans(self) -> Iterator[Span]:
        """What the step writes of each sequence."""
        for s, length in zip(self.sequences, self.lengths, strict=True):
            yield s.pages, s.n_evaluated, s.n_evaluated + length

    def step(self, tables: TableStack) -> Step:
        """The step; its page tables are valid until the next one is made."""
        n, first = len(self.ids), [s.n_evaluated for s in self.sequences]
        page_tables = tables.rows([s.pages for s in self.sequences])
        ids = np.array(self.ids, np.int32)
        if n == len(first):
            alone = _count(n)
            rows = alone if len(self.rows) == n else np.array(self.rows, np.int32)
            return Step(ids, np.array(first, np.int32), alone, page_tables, rows)
        spans = zip(first, self.lengths, strict=True)
        positions = np.concatenate([np.arange(p, p + t, dtype=np.int32) for p, t in spans])
        sequences = np.repeat(_count(len(first)), self.lengths)
        return Step(ids, positions, sequences, page_tables, np.array(self.rows, np.int32))


@dataclass
class Flight:
    """A step that was handed over and whose tokens nobody has read; logits[R, V] of its rows."""

    owners: list[Sequence]  # of each row
    logits: Array
    ids: Array | None = None  # None until the tokens are drawn
    n_collected: int = 0  # rows whose tokens were accepted, or refused

    @property
    def waits(self) -> bool:
        """Whether some row is drawn under a mask that follows from the step before."""
        return any([s.sampler.mask is not None and s.sampler.waits for s in self.owners])


@lru_cache(maxsize=64)
def _count(n: int) -> NDArray[np.int32]:
    numbers = np.arange(n, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def ragged(chunks: Seq[tuple[SequencePages, list[int], int]], rows: NDArray[np.int32]) -> Step:
    """A step of (pages, tokens, position of the first) for each sequence."""
    lengths = [len(tokens) for _, tokens, _ in chunks]
    return Step(
        ids=np.concatenate([np.array(tokens, np.int32) for _, tokens, _ in chunks]),
        positions=np.concatenate([np.arange(p, p + len(t), dtype=np.int32) for _, t, p in chunks]),
        sequences=np.repeat(_count(len(chunks)), lengths),
        page_tables=stack([pages for pages, _, _ in chunks]),
        rows=rows,
    )
