"""Batches: the tokens of several sequences that one step evaluates together.

A batch is made for every generated token, so parts that do not change between steps are kept.
Nothing here knows which sequences are chosen, or why.
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
    """The page tables of the last step. If the next step has the same sequences, only the rows that
    changed are written.
    """

    def __init__(self) -> None:
        self._sequences: list[SequencePages] = []
        self._versions: list[int] = []
        self._rows: tuple[NDArray[np.int32], ...] = ()

    def rows(self, sequences: list[SequencePages]) -> tuple[NDArray[np.int32], ...]:
        """Returns Step.page_tables, valid until the next call."""
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
    """Tokens of some sequences: those with a single token come first, then chunks of prompts."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.ids: list[int] = []  # tokens of all sequences
        self.lengths: list[int] = []  # tokens of each sequence
        self.owners: list[Sequence] = []  # sequences whose last token is in the batch
        self.rows: list[int] = []  # indices of these last tokens
        self.n_ones = 0  # sequences with a single token
        self.n_prompt_tokens = 0

    def add_ones(self, sequences: list[Sequence], ids: list[int], n_prompts: int = 0) -> None:
        """Add sequences that have one token each to evaluate; call this before `add_prompt`.
        n_prompts: how many of the tokens are the last of a prompt.
        """
        n = len(ids)
        self.sequences, self.ids, self.lengths = sequences, ids, [1] * n
        self.owners, self.rows = sequences.copy(), list(range(n))
        self.n_ones, self.n_prompt_tokens = n, n_prompts

    def add_prompt(self, s: Sequence, limit: int) -> int:
        """Add up to `limit` tokens that a sequence has to evaluate; returns how many were added."""
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
        """The sequences that `add_prompt` added."""
        return self.sequences[self.n_ones :]

    def spans(self) -> Iterator[Span]:
        """The positions that the step writes in each sequence."""
        for s, length in zip(self.sequences, self.lengths, strict=True):
            yield s.pages, s.n_evaluated, s.n_evaluated + length

    def step(self, tables: TableStack) -> Step:
        """Returns the step; its page tables are valid until the next step is made."""
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
    """A step that the backend has got and whose tokens nobody has read yet."""

    owners: list[Sequence]  # the sequence of each row
    logits: Array  # [R, V]
    ids: Array | None = None  # None until the tokens are drawn
    n_collected: int = 0  # rows whose tokens were accepted or refused

    @property
    def waits(self) -> bool:
        """Whether the mask of some row depends on the tokens of the step before."""
        return any([s.sampler.mask is not None and s.sampler.waits for s in self.owners])


@lru_cache(maxsize=64)
def _count(n: int) -> NDArray[np.int32]:
    numbers = np.arange(n, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def ragged(chunks: Seq[tuple[SequencePages, list[int], int]], rows: NDArray[np.int32]) -> Step:
    """A step of one chunk (pages, tokens, position of the first token) for each sequence."""
    lengths = [len(tokens) for _, tokens, _ in chunks]
    return Step(
        ids=np.concatenate([np.array(tokens, np.int32) for _, tokens, _ in chunks]),
        positions=np.concatenate([np.arange(p, p + len(t), dtype=np.int32) for _, t, p in chunks]),
        sequences=np.repeat(_count(len(chunks)), lengths),
        page_tables=stack([pages for pages, _, _ in chunks]),
        rows=rows,
    )
