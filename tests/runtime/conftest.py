"""A KV cache without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ggpy.backends.interface import CacheGroup, CacheShape, PagedKV
from ggpy.runtime.kv_cache import KVCache


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., KVCache]:
    """A group for each window, of n_pages, or of limit * n_seq pages where it is not 0."""

    def make(
        n_pages: int, windows: Sequence[int] = (0,), limit: int = 0, n_seq: int = 1
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
        return KVCache(CacheShape(tuple(groups)))

    return make
