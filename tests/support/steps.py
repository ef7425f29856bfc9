"""Steps whose sequences have the same pages in every group of the cache; engines run to the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ggpy.backends.interface import CacheShape, PagedKV, Step
from ggpy.backends.states import NO_STATE
from ggpy.runtime.engine import Engine
from ggpy.runtime.sequence import Sequence


class StatesOf:
    """The two states of each sequence, which its first page identifies, and their positions."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}  # (first page, position) -> state

    def table(self, step: Step) -> np.ndarray:
        """[S, 2]: what each sequence of the step reads, and what it writes."""
        rows = []
        for sequence, pages in enumerate(step.page_tables[0]):
            mine, page = step.positions[step.sequences == sequence], int(pages[0])
            read = self._places[page, int(mine[0])] if mine[0] else NO_STATE
            written = 2 * page + (read == 2 * page)
            self._places[page, int(mine[-1]) + 1] = written
            rows.append((read, written))
        return np.array(rows, np.int32)


def for_groups(step: Step, shape: CacheShape, states: StatesOf | None = None) -> Step:
    """The step with its first page tables for each group of the cache that has pages."""
    paged = [group for group in shape.groups if isinstance(group.spec, PagedKV)]
    tables = step.page_tables[:1] * len(paged)
    if len(paged) < len(shape.groups):
        assert states is not None
        tables += (states.table(step),) * (len(shape.groups) - len(paged))
    return replace(step, page_tables=tables)


def finish(engine: Engine, *sequences: Sequence) -> list[list[int]]:
    """The tokens of sequences, after all that the engine has."""
    while engine.busy:
        engine.step()
    return [[p.id for p in s.pieces] for s in sequences]
