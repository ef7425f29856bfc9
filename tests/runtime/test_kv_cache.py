"""Pages: references, sharing, growth, and what happens when they run out."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.backends.interface import PAGE_SIZE, pages_for
from ggpy.runtime.kv_cache import OutOfPages, PagePool, PageTable, stack


def table(pool: PagePool, n: int) -> PageTable:
    t = PageTable(pool)
    t.grow(n)
    return t


@pytest.mark.parametrize("n, pages", [(0, 0), (1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2)])
def test_pages_for(n, pages):
    assert pages_for(n) == pages


def test_grow_takes_neighbours_and_only_what_is_missing():
    pool = PagePool(8)
    t = table(pool, PAGE_SIZE + 1)
    assert t.pages == [0, 1] and pool.n_free == 6
    t.grow(5)
    t.grow(2 * PAGE_SIZE)
    assert t.pages == [0, 1]
    t.grow(2 * PAGE_SIZE + 1)
    assert t.pages == [0, 1, 2] and t.capacity == 3 * PAGE_SIZE


def test_running_out_says_what_is_free_and_changes_nothing():
    pool = PagePool(3)
    t = table(pool, PAGE_SIZE)
    with pytest.raises(
        OutOfPages, match=r"256 positions need 3 more pages of 64, 2 of 3 are free: .*n_ctx"
    ):
        t.grow(4 * PAGE_SIZE)
    assert t.pages == [0] and pool.n_free == 2
    table(pool, 2 * PAGE_SIZE)
    with pytest.raises(OutOfPages, match="all 3 pages"):
        pool.take()


def test_fork_shares_full_pages_only():
    pool = PagePool(8)
    parent = table(pool, 3 * PAGE_SIZE)
    child = parent.fork(2 * PAGE_SIZE + 10)
    assert child.pages == parent.pages[:2]
    assert [pool.references(p) for p in parent.pages] == [2, 2, 1]
    parent.release()
    assert pool.n_free == 8 - 2
    child.release()
    assert pool.n_free == 8


def test_truncate_gives_back_what_is_beyond():
    pool = PagePool(8)
    t = table(pool, 3 * PAGE_SIZE)
    assert t.truncate(PAGE_SIZE + 1) == PAGE_SIZE + 1
    assert len(t.pages) == 2
    assert t.truncate(10**6) == 2 * PAGE_SIZE
    assert t.truncate(0) == 0 and pool.n_free == 8


def test_truncate_does_not_leave_a_shared_page_to_be_written_on():
    pool = PagePool(8)
    parent = table(pool, 2 * PAGE_SIZE)
    child = parent.fork(2 * PAGE_SIZE)
    assert parent.truncate(PAGE_SIZE + 9) == PAGE_SIZE
    assert len(parent.pages) == 1 and pool.references(child.pages[1]) == 1
    assert child.truncate(PAGE_SIZE + 9) == PAGE_SIZE + 9


def test_misuse_is_refused():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 is free"):
        pool.share(1)
    with pytest.raises(ValueError, match="page 0 is already free"):
        pool.release(0)


def test_stack_pads_with_zero():
    pool = PagePool(8)
    a, b = table(pool, 1), table(pool, 2 * PAGE_SIZE)
    rows = stack([a, b])
    assert rows.dtype == np.int32 and rows.tolist() == [[0, 0], [1, 2]]
    assert stack([PageTable(pool)]).shape == (1, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "truncate", "fork", "release"]), st.integers(0, 400))
    )
)
def test_no_page_is_lost_or_freed_twice(actions):
    pool = PagePool(12)
    tables = [PageTable(pool)]
    for action, n in actions:
        t = tables[n % len(tables)]
        if action == "fork":
            tables.append(t.fork(min(n, t.capacity)))
            continue
        with suppress(OutOfPages):
            t.release() if action == "release" else getattr(t, action)(n)
    held = [p for t in tables for p in t.pages]
    assert all(pool.references(p) == held.count(p) for p in range(12))
    assert pool.n_free == 12 - len(set(held))
