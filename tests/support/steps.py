"""Steps whose sequences have the same pages in every group of the cache."""

from __future__ import annotations

from dataclasses import replace

from ggpy.backends.interface import CacheShape, Step


def for_groups(step: Step, shape: CacheShape) -> Step:
    """The step with its first page tables for each group of the cache."""
    return replace(step, page_tables=step.page_tables[:1] * len(shape.groups))
