"""Pages: references, sharing, growth, windows, and what happens when they run out."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.backends.interface import PAGE_SIZE, PagedKV, pages_for
from ggpy.runtime.kv_cache import PageTable, SequencePages, stack
from ggpy.runtime.page_pool import OutOfPages, PagePool

W = 100  # a window that is no whole number of pages


def table(pool: PagePool, n: int) -> PageTable:
    t = PageTable(pool)
    t.grow(0, n, n)
    return t


@pytest.mark.parametrize("n, pages", [(0, 0), (1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2)])
def test_pages_for(n, pages):
    assert pages_for(n) == pages


def test_grow_takes_neighbours_and_only_what_is_missing():
    pool = PagePool(8)
    t = table(pool, PAGE_SIZE + 1)
    assert t.pages == [0, 1] and pool.n_free == 6
    t.grow(0, 5, 0)
    t.grow(PAGE_SIZE, 2 * PAGE_SIZE, 0)
    assert t.pages == [0, 1]
    t.grow(2 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 0)
    assert t.pages == [0, 1, 2] and t.capacity == 3 * PAGE_SIZE


def test_running_out_says_what_is_free_and_changes_nothing():
    pool = PagePool(3)
    t = table(pool, PAGE_SIZE)
    with pytest.raises(
        OutOfPages, match=r"256 positions need 3 more pages of 64, 2 of 3 are free: .*n_ctx"
    ):
        t.grow(PAGE_SIZE, 4 * PAGE_SIZE, 0)
    assert t.pages == [0] and pool.n_free == 2
    table(pool, 2 * PAGE_SIZE)
    with pytest.raises(OutOfPages, match="all 3 pages"):
        pool.take()


def test_misuse_is_refused():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 is free"):
        pool.share(1)
    with pytest.raises(ValueError, match="page 0 is already free"):
        pool.release(0)


# Sequences


@pytest.fixture
def sequence(make_cache):
    """One with n positions in a cache of 8 pages."""

    def make(n: int) -> SequencePages:
        pages = SequencePages(make_cache(8))
        pages.grow(0, n, n)
        return pages

    return make


def test_full_pages_alone_are_shared(sequence, fork):
    parent = sequence(3 * PAGE_SIZE)
    child, pool = fork(parent, 2 * PAGE_SIZE + 10), parent.cache.pools[0]
    assert child.tables[0].pages == parent.tables[0].pages[:2]
    assert child.capacity == 2 * PAGE_SIZE
    assert [pool.references(p) for p in parent.tables[0].pages] == [2, 2, 1]
    parent.release()
    assert pool.n_free == 8 - 2
    child.release()
    assert pool.n_free == 8


def test_truncate_gives_back_what_is_beyond(sequence):
    pages = sequence(3 * PAGE_SIZE)
    assert pages.truncate(PAGE_SIZE + 1) == PAGE_SIZE + 1
    assert pages.n_held == 2
    assert pages.truncate(10**6) == 2 * PAGE_SIZE
    assert pages.truncate(0) == 0 and pages.cache.n_free == 8


def test_truncate_does_not_leave_a_shared_page_to_be_written_on(sequence, fork):
    parent = sequence(2 * PAGE_SIZE)
    child, pool = fork(parent, 2 * PAGE_SIZE), parent.cache.pools[0]
    assert parent.truncate(PAGE_SIZE + 9) == PAGE_SIZE
    assert parent.n_held == 1 and pool.references(child.tables[0].pages[1]) == 1
    assert child.truncate(PAGE_SIZE + 9) == PAGE_SIZE + 9


def test_stack_pads_with_zero(make_cache):
    cache = make_cache(8, [0, W], limit=4, n_seq=2)
    a, b = SequencePages(cache), SequencePages(cache)
    a.grow(0, 1, 0)
    b.grow(0, 2 * PAGE_SIZE, 0)
    for rows in stack([a, b]):
        assert rows.dtype == np.int32 and rows.tolist() == [[0, 0], [1, 2]]
    assert [rows.shape for rows in stack([SequencePages(cache)])] == [(1, 1), (1, 1)]


# Windows


@pytest.mark.parametrize("window", [1, 63, 64, 65, W, 1000])
@pytest.mark.parametrize("n_batch", [1, 7, 64, 200])
def test_a_window_holds_as_many_pages_as_its_spec_says_and_all_that_is_seen(window, n_batch):
    n_ctx = 2000
    limit = PagedKV(1, 1, 8, 8, window).pages(n_ctx, n_batch)
    assert limit <= (window + n_batch + 2 * PAGE_SIZE) // PAGE_SIZE + 1
    pool = PagePool(limit, window, limit)
    t = PageTable(pool)
    for start in range(0, n_ctx, n_batch):
        stop = min(start + n_batch, n_ctx)
        t.grow(start, stop, start)
        assert len(t.pages) <= limit and not pool.suspects
        first_seen = max(0, start - window + 1)
        assert t.first * PAGE_SIZE <= first_seen and t.capacity >= stop
        row = np.full(pages_for(n_ctx) + 3, -1, np.int32)
        t.write(row)
        seen = row[first_seen // PAGE_SIZE : pages_for(stop)]
        assert sorted(set(seen)) == sorted(seen) and seen.min() >= 0, "each position has its page"
        assert not row[: t.first].any() and not row[t.end :].any()
    assert t.first == max(0, pages_for(n_ctx) - limit), "no more is given back than must be"


def test_pages_behind_the_window_go_where_the_pool_needs_them():
    pool = PagePool(5, W, limit=5)
    t = table(pool, 3 * PAGE_SIZE)
    other = table(pool, 2 * PAGE_SIZE)
    t.grow(3 * PAGE_SIZE, 4 * PAGE_SIZE, 0)
    assert (t.first, t.end) == (1, 4) and other.pages == [3, 4]
    with pytest.raises(OutOfPages, match="need 1 more pages of 64, 0 of 5 are free"):
        t.grow(PAGE_SIZE + W, 5 * PAGE_SIZE, 0)  # sees the second page still
    assert (t.first, t.end) == (1, 4)
    other.truncate(0)
    t.grow(4 * PAGE_SIZE, 5 * PAGE_SIZE, 0)
    assert t.first == 1, "there are pages enough: one that may be shared is kept"


def test_a_shared_page_that_is_given_back_frees_nothing():
    pool = PagePool(4, W, limit=4)
    t, child = table(pool, 4 * PAGE_SIZE), PageTable(pool)
    for page in (0, 1):
        t.publish(page, b"%d" % page, finite=True)
    child.reuse([b"0", b"1"])
    assert (child.first, child.pages) == (0, [0, 1])
    with pytest.raises(OutOfPages, match="0 of 4 are free"):
        t.grow(4 * PAGE_SIZE, 5 * PAGE_SIZE, 0)
    child.truncate(0)
    t.grow(4 * PAGE_SIZE, 5 * PAGE_SIZE, 0)
    assert t.first == 1


def test_a_page_that_is_given_back_is_suspect_unless_it_is_known_to_be_finite():
    pool = PagePool(4, W, limit=4)
    t = table(pool, 4 * PAGE_SIZE)
    t.grow(4 * PAGE_SIZE, 6 * PAGE_SIZE, n_finite=2 * PAGE_SIZE - 1)
    assert pool.suspects == {1} and sorted(t.pages) == [0, 1, 2, 3]


@pytest.fixture
def windowed(make_cache):
    """A sequence of n positions, evaluated by 64, with a group that sees everything, and one that
    sees 100 and holds 5 pages.
    """

    def make(n: int, n_seq: int = 2) -> SequencePages:
        pages = SequencePages(make_cache(40, [0, W], limit=5, n_seq=n_seq))
        for start in range(0, n, PAGE_SIZE):
            pages.grow(start, min(start + PAGE_SIZE, n), n)
        return pages

    return make


def test_going_back_a_little_keeps_all_and_far_keeps_nothing(windowed):
    pages = windowed(10 * PAGE_SIZE + 5)
    whole, window = pages.tables
    assert (whole.first, whole.end, window.first, window.end) == (0, 11, 6, 11)
    least = 6 * PAGE_SIZE + W - 1  # the token there sees the first page that is left
    assert pages.truncate(10 * PAGE_SIZE + 2) == 10 * PAGE_SIZE + 2
    assert pages.truncate(least) == least
    assert pages.capacity == whole.capacity == window.capacity == 8 * PAGE_SIZE
    assert pages.truncate(least - 1) == 0
    assert pages.n_held == 0 and pages.capacity == 0
    assert pages.cache.n_free == pages.cache.n_pages


def test_a_prefix_is_shared_as_far_as_the_window_is_there(windowed, fork):
    pages = windowed(10 * PAGE_SIZE)
    assert pages.tables[1].first == 5
    assert fork(pages, 6 * PAGE_SIZE).n_held == 0, "its window begins in the page before"
    child = fork(pages, 7 * PAGE_SIZE + 63)
    assert [(t.first, t.end) for t in child.tables] == [(0, 7), (5, 7)]
    assert child.tables[1].pages == pages.tables[1].pages[:2]
    assert fork(pages, 11 * PAGE_SIZE).capacity == 10 * PAGE_SIZE, "as much as there is"


def test_a_shared_last_page_and_a_window(windowed, fork):
    """Going back to the page's beginning needs the window before that."""
    pages = windowed(9 * PAGE_SIZE)
    children = [fork(pages, 9 * PAGE_SIZE) for _ in range(2)]
    assert (pages.tables[1].first, children[0].tables[1].first) == (4, 7)
    assert pages.truncate(8 * PAGE_SIZE + 9) == 8 * PAGE_SIZE
    last = 9 * PAGE_SIZE - 1  # sees page 7, but 8 * 64 sees page 6
    assert children[0].truncate(last) == 0
    pages.release()
    assert children[1].truncate(last) == last, "nobody shares the page now"


def test_what_one_group_cannot_keep_the_others_may_not_keep_either(windowed, fork):
    """The page is shared in one group alone, and the window before its beginning is gone."""
    pages = windowed(9 * PAGE_SIZE)
    child = fork(pages, 9 * PAGE_SIZE)
    for start in range(9 * PAGE_SIZE, 12 * PAGE_SIZE, PAGE_SIZE):
        child.grow(start, start + PAGE_SIZE, start)
    last = 6 * PAGE_SIZE - 1
    assert [t.keepable(last) for t in pages.tables] == [5 * PAGE_SIZE, last]
    assert pages.truncate(last) == 0


def test_suspects_are_those_that_are_held(windowed):
    pages = windowed(10 * PAGE_SIZE)
    held = [set(t.pages) for t in pages.tables]
    pages.suspect(2 * PAGE_SIZE)
    found = [pool.suspects for pool in pages.cache.pools]
    assert found == [held[0] - set(pages.tables[0].pages[:2]), held[1]]


# Pages that may hold NaN


def test_what_a_step_does_not_write_whole_is_cleared_before_it(windowed):
    old = windowed(3 * PAGE_SIZE)
    cache, calls = old.cache, []
    old.suspect(0)
    old.release()
    pages = SequencePages(cache)
    pages.grow(0, PAGE_SIZE + 5, 0)
    first, second = pages.tables[0].pages
    assert [pool.suspects for pool in cache.pools] == [{0, 1, 2}] * 2

    def step(start, stop, fails=False):
        with cache.cleared(lambda *call: calls.append(call), [(pages, start, stop)]):
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(0, PAGE_SIZE + 5, fails=True)
    assert calls == [(0, [second]), (1, [second])]
    assert all(pool.suspects - {first} == {3 - first - second} for pool in cache.pools)
    assert all(first in pool.suspects for pool in cache.pools), "nobody wrote it"
    step(0, PAGE_SIZE + 5)
    assert len(calls) == 2 and all(len(pool.suspects) == 1 for pool in cache.pools)
    step(PAGE_SIZE + 5, PAGE_SIZE + 6)
    assert len(calls) == 2, "nobody has taken the last one"


# Whatever happens


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([[0], [W], [0, W], [30, 0, 200]]),
    st.lists(
        st.tuples(st.sampled_from(["grow", "truncate", "share", "release"]), st.integers(0, 700))
    ),
)
def test_no_page_is_lost_or_freed_twice(make_cache, fork, caches, windows, actions):
    cache = make_cache(12, windows, limit=6, n_seq=2, caches=caches)
    sequences = [SequencePages(cache)]
    lengths = [0]
    for action, n in actions:
        i = n % len(sequences)
        s = sequences[i]
        if action == "share":
            sequences.append(fork(s, min(n, lengths[i])))
            lengths.append(sequences[-1].capacity)
        elif action == "grow":
            with suppress(OutOfPages):
                stop = lengths[i] + n % 130
                s.grow(lengths[i], stop, n)
                lengths[i] = stop
        else:
            lengths[i] = s.truncate(min(n, lengths[i]) if action == "truncate" else 0)
        assert all(s.capacity >= length for s, length in zip(sequences, lengths, strict=True))
    for group, pool in enumerate(cache.pools):
        held = Counter(p for s in sequences for p in s.tables[group].pages)
        assert all(pool.references(p) == held[p] for p in range(pool.n_pages))
        assert pool.n_free == pool.n_pages - len(held)
        assert caches or not pool.n_cached
        for s, length in zip(sequences, lengths, strict=True):
            assert s.tables[group].first <= pool.first_seen(length), "what is seen is there"
