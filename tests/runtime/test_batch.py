"""Batches: the step of what was added, and page tables that are kept from step to step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ggpy.backends.interface import PAGE_SIZE
from ggpy.runtime.batch import Batch, TableStack, ragged
from ggpy.runtime.kv_cache import PagePool, PageTable, stack


@pytest.fixture
def make():
    """A sequence of these ids, of which so many are evaluated."""
    pool = PagePool(40)

    def sequence(ids: list[int], n_evaluated: int = 0) -> SimpleNamespace:
        table = PageTable(pool)
        table.grow(len(ids))
        return SimpleNamespace(ids=ids, n_evaluated=n_evaluated, table=table)

    return sequence


def same(a, b) -> None:
    for name in ("ids", "positions", "sequences", "page_tables", "rows"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype == np.int32 and np.array_equal(x, y), name


def test_single_tokens_come_first_then_prompts_as_far_as_there_is_room(make):
    one, late, long, longer = make([5, 6], 1), make([7] * 70, 70), make([8] * 90, 3), make([9] * 99)
    batch = Batch()
    batch.add_ones([one, late], [6, ~3])
    for s in (long, longer):
        batch.add_prompt(s, 100 - len(batch.ids))
    batch.add_prompt(make([1, 2]), 0)
    chunks = [(one, [6], 1), (late, [~3], 70), (long, [8] * 87, 3), (longer, [9] * 11, 0)]
    rows = np.array([0, 1, 88], np.int32)
    assert batch.owners == [one, late, long], "the last prompt goes on in the next step"
    same(batch.step(TableStack()), ragged([(s.table, ids, p) for s, ids, p in chunks], rows))


def test_a_step_of_single_tokens_alone(make):
    sequences = [make([3] * n, n - 1) for n in (1, 65, 200)]
    batch = Batch()
    batch.add_ones(sequences, [1, 2, ~0])
    chunks = [(s.table, [id], s.n_evaluated) for s, id in zip(sequences, [1, 2, ~0], strict=True)]
    same(batch.step(TableStack()), ragged(chunks, np.arange(3, dtype=np.int32)))


def test_tables_are_those_of_now_however_they_changed(make):
    tables, kept = [make([0] * n).table for n in (10, 100, 300)], TableStack()

    def check() -> None:
        rows, expected = kept.rows(list(tables)), stack(tables)
        assert np.array_equal(rows[:, : expected.shape[1]], expected)
        assert not rows[:, expected.shape[1] :].any()

    check()
    check()
    tables[0].grow(3 * PAGE_SIZE)  # fits beside the longest
    check()
    tables[1].grow(8 * PAGE_SIZE)  # does not
    check()
    tables[1].truncate(2)
    check()
    tables[0], tables[2] = tables[2], tables[0]
    check()
    tables.pop()
    check()
    tables[0] = tables[0].fork(2 * PAGE_SIZE)
    check()
