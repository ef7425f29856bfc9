"""The numbers of a step that kernels read (positions, pages, angles), at addresses that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..interface import PAGE_SIZE, AttentionTemperature, Rope, Step
from ..numpy.delta import GroupStates
from ..numpy.functions import angles, sharpness
from ..numpy.kv_pages import GroupPages
from .jobs import Buffers

BLOCK = 16  # tokens that attend together
LONE = 4  # the most tokens of a sequence that attend one by one

Numbers = NDArray[Any]
Memory = GroupPages | GroupStates  # of a group of layers


@dataclass(frozen=True)
class Sight:
    """The positions that a token sees: see Attention."""

    window: int
    causal: bool
    chunked: bool

    def span(self, positions: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
        """The first and the last position [T] that each token sees.

        positions[T]: of the tokens. last[T]: the last position of each token's sequence.
        """
        window = self.window
        if self.chunked:
            return positions // window * window, positions
        if self.causal:
            return np.maximum(0, positions - window + 1) if window else 0 * positions, positions
        if not window:
            return 0 * positions, last
        side = window // 2
        return np.maximum(0, positions - side), np.minimum(last, positions + side)


Table = Rope | AttentionTemperature | Sight
Tables = dict[str, Table]  # the sources of numbers of a step, by name


class StepArrays:
    """A step's numbers as int64, copied to buffers so that their addresses can be in programs."""

    def __init__(
        self, step: Step, buffers: Buffers, tables: Tables, groups: Sequence[Memory]
    ) -> None:
        """tables: those that earlier steps asked for, whose numbers are computed at once, because
        programs that are kept read them; `angles`, `sharpness` and `seen` add to it. groups: of the
        cache.
        """
        self.step, self._buffers, self._tables = step, buffers, tables
        self.n_tokens = len(step.ids)
        self.offsets = self._put("offsets", step.positions % PAGE_SIZE)
        self._groups: dict[int, tuple[int, int]] = {}
        self._states: dict[int, int] = {}
        self._borders = [0, *(np.flatnonzero(np.diff(step.sequences)) + 1), self.n_tokens]
        self.n_runs = len(self._borders) - 1
        self.runs = self._put("runs", self._runs())
        self._made = {name: self._numbers(name, table) for name, table in tables.items()}
        for group, memory in enumerate(groups):
            if isinstance(memory, GroupStates):
                self.states(group)
            else:
                self.pages(group)
        self.blocks = self._blocks()

    def pages(self, group: int) -> tuple[int, int]:
        """Addresses of two arrays: the page of each token, and the address of its page table."""
        if group not in self._groups:
            tables = np.ascontiguousarray(self.step.page_tables[group], np.int32)
            at = self._put(f"tables {group}", tables, np.int32)
            where = at + self.step.sequences.astype(np.int64) * tables.strides[0]
            self._groups[group] = (
                self._put(f"pages {group}", self.step.pages(group)),
                self._put(f"where {group}", where),
            )
        return self._groups[group]

    def states(self, group: int) -> int:
        """The address of [runs, 2]: the state that each run begins with, and the one it writes."""
        if group not in self._states:
            tables = self.step.page_tables[group][self.step.sequences[self._borders[:-1]]]
            self._states[group] = self._put(f"states {group}", tables)
        return self._states[group]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers that programs depend on, besides those in buffers."""
        return self.n_tokens, self.n_runs, self.n_blocks

    def angles(self, rope: Rope) -> tuple[int, ...]:
        """Addresses of cosines and sines [T, pairs]."""
        return self._table(f"{rope.inv_freq.tobytes().hex()} {rope.magnitude}", rope)

    def sharpness(self, temperature: AttentionTemperature) -> int:
        """The address of the factors [T] of queries."""
        return self._table(repr(temperature), temperature)[0]

    def seen(self, sight: Sight) -> tuple[int, ...]:
        """Addresses of the first and the last positions [T] that tokens see."""
        return self._table(repr(sight), sight)

    def _table(self, name: str, table: Table) -> tuple[int, ...]:
        if name not in self._made:
            self._tables[name] = table
            self._made[name] = self._numbers(name, table)
        return self._made[name]

    def _numbers(self, name: str, table: Table) -> tuple[int, ...]:
        made, type = self._computed(table), np.int64 if isinstance(table, Sight) else np.float32
        return tuple(self._put(f"{name} {i}", x, type) for i, x in enumerate(made))

    def _computed(self, table: Table) -> tuple[Numbers, ...]:
        at = self.step.positions
        if isinstance(table, Rope):
            return angles(table, at)
        if isinstance(table, AttentionTemperature):
            return (sharpness(table, at),)
        ends = np.array(self._borders[1:])
        return table.span(at, np.repeat(at[ends - 1], np.diff(self._borders)))

    @property
    def n_blocks(self) -> int:
        """Blocks of tokens that attend together; 0 where each attends alone."""
        return len(self.blocks)

    def _runs(self) -> NDArray[np.int64]:
        """[n, 2]: the first token of each sequence, and how many it has."""
        return np.stack([self._borders[:-1], np.diff(self._borders)], axis=1)

    def _blocks(self) -> NDArray[np.int64]:
        """[n, 2]: the first token of each block of a sequence, and how many it has."""
        if np.diff(self._borders).max() <= LONE:
            return np.zeros((0, 2), np.int64)
        found = [
            (start, min(BLOCK, stop - start))
            for begin, stop in pairwise(self._borders)
            for start in range(begin, stop, BLOCK)
        ]
        blocks = np.array(found, np.int64)
        self.block_address = self._put("blocks", blocks)
        return blocks

    def _put(self, name: str, values: NDArray[Any], type: Any = np.int64) -> int:
        array = np.ascontiguousarray(values, type)
        at = self._buffers.bytes(name, max(array.nbytes, 256))
        self._buffers.raw(name)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        return at
