"""Helpers for tests of the numpy backend: tensors, steps, and a cache of one group."""

from __future__ import annotations

import numpy as np

from ggpy.backends.interface import CacheGroup, CacheShape, PagedKV, Step
from ggpy.formats import by_name
from ggpy.gguf import Tensor


def tensor(array: np.ndarray, kind: str = "F32") -> Tensor:
    format = by_name(kind)
    rows = format.quantize(array.reshape(-1, array.shape[-1]))
    return Tensor("t", array.shape, format, rows.reshape(*array.shape[:-1], -1))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def step(positions: list[int], sequences: list[int], *tables: list[list[int]], rows=()) -> Step:
    """A step; `tables` are the page tables of each group."""
    as_int = [np.array(x, np.int32) for x in (positions, sequences, list(rows))]
    groups = tuple(np.array(x, np.int32) for x in tables)
    return Step(np.zeros(len(positions), np.int32), *as_int[:2], groups, as_int[2])


def shape_of(n_pages: int, *specs: PagedKV) -> CacheShape:
    """A cache with one group of one layer per spec."""
    return CacheShape(tuple(CacheGroup(spec, (i,), n_pages) for i, spec in enumerate(specs)))
