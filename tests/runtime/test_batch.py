"""Batches: the step of what was added, and page tables that are kept from step to step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ggpy.backends.interface import PAGE_SIZE
from ggpy.runtime.batch import Batch, TableStack, ragged
from ggpy.runtime.kv_cache import SequencePages, stack


@pytest.fixture
def make(make_cache):
    """A sequence of these ids, of which so many are evaluated; in a cache of two groups."""
    cache = make_cache(40, windows=[0, 70], limit=5, n_seq=20)

    def sequence(ids: list[int], n_evaluated: int = 0) -> SimpleNamespace:
        pages = SequencePages(cache)
        for start in range(0, len(ids), PAGE_SIZE):
            pages.grow(start, min(start + PAGE_SIZE, len(ids)), start)
        return SimpleNamespace(ids=ids, n_evaluated=n_evaluated, pages=pages)

    return sequence


def same(a, b) -> None:
    for name in ("ids", "positions", "sequences", "rows"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype == np.int32 and np.array_equal(x, y), name
    for x, y in zip(a.page_tables, b.page_tables, strict=True):
        assert x.dtype == y.dtype == np.int32 and np.array_equal(x, y)


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
    same(batch.step(TableStack()), ragged([(s.pages, ids, p) for s, ids, p in chunks], rows))


def test_a_step_of_single_tokens_alone(make):
    sequences = [make([3] * n, n - 1) for n in (1, 65, 200)]
    batch = Batch()
    batch.add_ones(sequences, [1, 2, ~0])
    chunks = [(s.pages, [id], s.n_evaluated) for s, id in zip(sequences, [1, 2, ~0], strict=True)]
    same(batch.step(TableStack()), ragged(chunks, np.arange(3, dtype=np.int32)))


def test_spans_are_the_positions_of_the_step(make):
    one, long = make([5, 6], 1), make([7] * 70, 3)
    batch = Batch()
    batch.add_ones([one], [6])
    batch.add_prompt(long, 20)
    assert list(batch.spans()) == [(one.pages, 1, 2), (long.pages, 3, 23)]


def test_tables_are_those_of_now_however_they_changed(make, fork):
    sequences, kept = [make([0] * n).pages for n in (10, 100, 500)], TableStack()

    def check() -> None:
        for rows, expected in zip(kept.rows(list(sequences)), stack(sequences), strict=True):
            assert np.array_equal(rows[:, : expected.shape[1]], expected)
            assert not rows[:, expected.shape[1] :].any()

    check()
    check()
    sequences[0].grow(10, 3 * PAGE_SIZE, 0)  # fits beside the longest
    check()
    assert sequences[2].tables[1].first > 0
    sequences[2].grow(8 * PAGE_SIZE, 9 * PAGE_SIZE, 500)  # does not, and a window's page goes
    check()
    sequences[1].truncate(2)
    check()
    sequences[0], sequences[2] = sequences[2], sequences[0]
    check()
    sequences.pop()
    check()
    sequences[0] = fork(sequences[0], 8 * PAGE_SIZE)
    assert sequences[0].n_held
    check()
    sequences[0].release()
    check()
