"""Pages of the KV cache: which pages a sequence holds, in the order of its positions.

This module only keeps the books: the backend owns the storage, and a page is a number here. The
cache has a pool of pages for each group of layers, and a sequence has a table in each pool: a
`PageTable`, or a `StateTable` for recurrent states. Tables that begin with the same tokens may
share full pages, which nobody writes to again. If the layers of a group have a window, a table
gives back the pages behind it. Nothing here knows tokens, layers, or the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import PAGE_SIZE, CacheGroup, CacheShape, Recurrent, StateSpec, pages_for
from .page_pool import OutOfPages, PagePool
from .state_table import StateTable

Clear = Callable[[int, Sequence[int]], None]  # Ops.clear_pages
Span = tuple["SequencePages", int, int]  # positions start:stop of a sequence


class PageTable:
    """The pages of one sequence in one group, in the order of positions.

    An index counts pages from the beginning of the sequence: index i holds the positions from
    i * PAGE_SIZE on. The pages before index `first` were given back, because no later token sees
    them.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.first = 0  # the index of pages[0]
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        """The index after the last page."""
        return self.first + len(self.pages)

    @property
    def capacity(self) -> int:
        """The number of positions up to the end of the last page."""
        return self.end * PAGE_SIZE

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take pages until positions start:stop have some. OutOfPages leaves the table unchanged.

        If the table would hold more pages than the pool's limit, or if the pool has too few, pages
        that no token from `start` on sees are given back. Among these, pages with positions from
        n_finite on are suspects: they may hold NaN.
        """
        missing, pool = pages_for(stop) - self.end, self.pool
        if missing <= 0:
            return
        excess = max(len(self.pages) + missing - pool.limit, missing - pool.n_free)
        behind = max(0, min(excess, pool.first_seen(start) - self.first))
        n_free = pool.n_free + sum(pool.references(page) == 1 for page in self.pages[:behind])
        if missing > n_free:
            raise OutOfPages(
                f"{stop} positions need {missing} more pages of {PAGE_SIZE}, "
                f"{n_free} of {pool.n_pages} are free: "
                "end a sequence or load with a larger n_ctx"
            )
        if behind:
            self._drop(behind, n_finite)
        self.pages += [pool.take() for _ in range(missing)]

    def _drop(self, n_pages: int, n_finite: int) -> None:
        """Give back the first pages."""
        known = max(0, min(n_pages, n_finite // PAGE_SIZE - self.first))
        self.pool.suspect(self.pages[known:n_pages])
        self._release(self.pages[:n_pages])
        del self.pages[:n_pages]
        self.first += n_pages

    def keepable(self, n_positions: int) -> int:
        """The most positions up to n_positions that `truncate` can leave. The number is rounded
        down to full pages if another table shares the last page, which would be written to. It is 0
        if the next token would see pages that were given back.
        """
        n = min(n_positions, self.capacity)
        last = n // PAGE_SIZE - self.first
        if n % PAGE_SIZE and last >= 0 and self.pool.references(self.pages[last]) > 1:
            n -= n % PAGE_SIZE
        return n if self.first <= self.pool.first_seen(n) else 0

    def truncate(self, n_positions: int) -> None:
        """Give back the pages after n_positions, which is keepable."""
        kept = max(0, pages_for(n_positions) - self.first)
        self._release(self.pages[kept:])
        del self.pages[kept:]
        if n_positions % PAGE_SIZE and 0 < kept == len(self.pages):
            self.pool.rewrite(self.pages[-1])
        if not n_positions:
            self.first = 0

    def _release(self, pages: Sequence[int]) -> None:
        """Release the last page first, so that a cached text loses its end before its beginning."""
        for page in reversed(pages):
            self.pool.release(page)

    def suspect(self, first_position: int) -> None:
        """The pages may hold NaN from this position on. Pages that other tables share are left to
        those tables.
        """
        self.pool.suspect(self.pages[max(0, first_position // PAGE_SIZE - self.first) :])

    def filled(self, start: int, stop: int) -> list[int]:
        """The pages that lie wholly in positions start:stop."""
        return self.pages[
            max(0, pages_for(start) - self.first) : max(0, stop // PAGE_SIZE - self.first)
        ]

    def write(self, row: NDArray[np.int32]) -> None:
        """Write the table into a row[P] of Step.page_tables; entries without a page are 0."""
        row[: self.first] = 0
        row[self.first : self.end] = self.pages
        row[self.end :] = 0

    def missing(self, n_positions: int) -> int:
        """The most pages that the table takes to hold n_positions."""
        missing = pages_for(n_positions) - self.end
        return max(0, min(missing, self.pool.limit - len(self.pages)))

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find the full page at index `page`, if the table still holds it."""
        if page >= self.first:
            number = self.pages[page - self.first]
            self.pool.publish(number, text)
            if finite:
                self.pool.trust(number)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Fill an empty table with the published pages of these texts that the next token sees."""
        first = self.pool.first_seen(len(texts) * PAGE_SIZE)
        pages = [self.pool.find(text) for text in texts[first:]]
        self.first, self.pages = first, [page for page in pages if page is not None]
        for page in self.pages:
            self.pool.share(page)


class KVCache:
    """The pools of all groups. caches: published pages are kept when nobody references them."""

    def __init__(self, shape: CacheShape, caches: bool = False) -> None:
        self.shape, self.caches = shape, caches
        self.pools = [
            PagePool(group.n_pages, _seen(group.spec), group.limit, caches)
            for group in shape.groups
        ]
        self._has_states = [isinstance(group.spec, Recurrent) for group in shape.groups]

    @property
    def has_states(self) -> bool:
        """Whether some layers have recurrent states, which cannot be cut back to any position."""
        return any(self._has_states)

    def tables(self) -> list[PageTable | StateTable]:
        """Empty tables for a new sequence, one for each group."""
        pairs = zip(self.pools, self._has_states, strict=True)
        return [StateTable(pool) if has else PageTable(pool) for pool, has in pairs]

    @property
    def n_pages(self) -> int:
        """The number of pages of all groups."""
        return sum(pool.n_pages for pool in self.pools)

    @property
    def n_free(self) -> int:
        """The number of pages of all groups that nobody references."""
        return sum(pool.n_free for pool in self.pools)

    @property
    def n_cached(self) -> int:
        """The number of free pages that hold a published text."""
        return sum(pool.n_cached for pool in self.pools)

    def nbytes(self, usual: str) -> int:
        """Bytes of all pages. usual: the type of keys and values that the user did not choose."""
        return sum(group.n_pages * _page_bytes(group, usual) for group in self.shape.groups)

    def describe(self, usual: str) -> list[str]:
        """A line for each group. usual: see `nbytes`."""
        found = []
        for group in self.shape.groups:
            spec = group.spec
            if isinstance(spec, Recurrent):
                size = _page_bytes(group, usual) / 1e6
                found.append(
                    f"recurrent states: {group.n_pages} of {size:.1f} MB for {group.n_layer} layers"
                )
                continue
            types, size = spec.types.resolved(usual), _page_bytes(group, usual) // PAGE_SIZE
            n, seen = group.n_pages * PAGE_SIZE, f", which see {spec.window}" if spec.window else ""
            found.append(
                f"KV cache: {types.k} and {types.v}, {size} bytes a position, "
                f"{n} positions for {group.n_layer} layers{seen}"
            )
        return found

    def cleared(self, clear: Clear, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """The context of a step that writes positions start:stop of some sequences. On entry, pages
        that may hold NaN are cleared, except those that the step writes as a whole.
        """
        for pool in self.pools:
            if pool.suspects:
                return self._cleared(clear, spans)
        return nullcontext()

    @contextmanager
    def _cleared(self, clear: Clear, spans: Iterable[Span]) -> Iterator[None]:
        written = list(spans)
        filled = [
            {page for pages, *span in written for page in pages.tables[group].filled(*span)}
            for group in range(len(self.pools))
        ]
        for group, pool in enumerate(self.pools):
            taken = sorted(p for p in pool.suspects - filled[group] if pool.references(p))
            if taken:
                clear(group, taken)
                pool.suspects.difference_update(taken)
        yield
        for group, pool in enumerate(self.pools):  # only now: an interrupted step writes nothing
            pool.suspects -= filled[group]

    def fits(self, n_positions: int) -> bool:
        """Whether there are enough free pages for a new sequence of n_positions."""
        n_pages = pages_for(n_positions)
        return all(
            pool.n_free >= (pool.limit if has_states else min(n_pages, pool.limit))
            for pool, has_states in zip(self.pools, self._has_states, strict=True)
        )


class SequencePages:
    """The pages of one sequence in all groups; `version` changes whenever they do."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.version = cache, 0
        self.tables = cache.tables()

    @property
    def capacity(self) -> int:
        """The number of positions that have a page in every group."""
        return min(table.capacity for table in self.tables)

    @property
    def n_held(self) -> int:
        """The number of pages that the sequence holds in all groups."""
        return sum(len(table.pages) for table in self.tables)

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take pages for positions start:stop, which are evaluated next; see PageTable.grow. After
        OutOfPages some groups may have more pages than others.
        """
        self.version += 1
        for table in self.tables:
            table.grow(start, stop, n_finite)

    def truncate(self, n_positions: int) -> int:
        """Give back the pages after n_positions; returns how many positions are left.

        Fewer are left if the last page is shared, and usually none if the next token would see
        pages of a window that were given back.
        """
        kept = n_positions
        while (fewer := min(table.keepable(kept) for table in self.tables)) < kept:
            kept = fewer
        self.version += 1
        for table in self.tables:
            table.truncate(kept)
        return kept

    def suspect(self, first_position: int) -> None:
        """The pages may hold NaN from this position on."""
        for table in self.tables:
            table.suspect(first_position)

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find the full page at index `page` by the hash of the text up to its end.
        finite: the page is known to hold no NaN.
        """
        for table in self.tables:
            table.publish(page, text, finite)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Take published pages while the sequence holds none; see `prefix.longest`."""
        self.version += 1
        for table in self.tables:
            table.reuse(texts)

    def release(self) -> None:
        """Give back every page."""
        self.truncate(0)


def _seen(spec: StateSpec) -> int:
    """The window of a pool. With recurrent states, a sequence that continues after a full page
    needs the state at the end of that page only.
    """
    return PAGE_SIZE + 1 if isinstance(spec, Recurrent) else spec.window


def stack(sequences: Sequence[SequencePages]) -> tuple[NDArray[np.int32], ...]:
    """Step.page_tables: for each group [S, P], as wide as its longest table."""
    return tuple(_stack(tables) for tables in zip(*(s.tables for s in sequences), strict=True))


def _stack(tables: Sequence[PageTable | StateTable]) -> NDArray[np.int32]:
    rows = np.empty((len(tables), max(1, *(table.end for table in tables))), np.int32)
    for row, table in zip(rows, tables, strict=True):
        table.write(row)
    return rows


def _page_bytes(group: CacheGroup, usual: str) -> int:
    """Bytes of one page in all layers of a group."""
    spec = group.spec
    if isinstance(spec, Recurrent):
        return group.n_layer * spec.nbytes
    head = spec.types.resolved(usual).nbytes(spec.key_size, spec.value_size)
    return group.n_layer * PAGE_SIZE * spec.n_head_kv * head
