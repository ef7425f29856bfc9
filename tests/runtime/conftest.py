"""A KV cache without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ggpy.backends.interface import PAGE_SIZE, CacheGroup, CacheShape, PagedKV
from ggpy.runtime.kv_cache import KVCache, SequencePages
from ggpy.runtime.prefix import longest


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., KVCache]:
    """A group for each window, of n_pages, or of limit * n_seq pages where it is not 0."""

    def make(
        n_pages: int,
        windows: Sequence[int] = (0,),
        limit: int = 0,
        n_seq: int = 1,
        caches: bool = False,
    ) -> KVCache:
        groups = [
            CacheGroup(
                PagedKV(1, 1, 8, 8, window),
                (i,),
                limit * n_seq if window else n_pages,
                limit if window else 0,
            )
            for i, window in enumerate(windows)
        ]
        return KVCache(CacheShape(tuple(groups)), caches)

    return make


@pytest.fixture(scope="session")
def fork() -> Callable[[SequencePages, int], SequencePages]:
    """Pages that begin with those of the first n positions, as far as these are full and there; the
    text of a page is its place and its number.
    """

    def of(parent: SequencePages, n_positions: int) -> SequencePages:
        texts = []
        for at in range(min(n_positions, parent.capacity) // PAGE_SIZE):
            held = [t.pages[at - t.first] for t in parent.tables if t.first <= at]
            number = held[0] if held else -1  # the page is behind the windows of all groups
            texts.append(b"%d of %d" % (at, number))
            parent.publish(at, texts[-1], finite=True)
        child = SequencePages(parent.cache)
        child.reuse(texts[: longest(parent.cache.pools, texts)])
        return child

    return of
