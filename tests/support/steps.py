"""Steps whose sequences have the same pages in every group of the cache; engines run to the end."""

from __future__ import annotations

from dataclasses import replace

from ggpy.backends.interface import CacheShape, Step
from ggpy.runtime.engine import Engine
from ggpy.runtime.sequence import Sequence


def for_groups(step: Step, shape: CacheShape) -> Step:
    """The step with its first page tables for each group of the cache."""
    return replace(step, page_tables=step.page_tables[:1] * len(shape.groups))


def finish(engine: Engine, *sequences: Sequence) -> list[list[int]]:
    """The tokens of sequences, after all that the engine has."""
    while engine.busy:
        engine.step()
    return [[p.id for p in s.pieces] for s in sequences]
