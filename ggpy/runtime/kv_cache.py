"""Pages of the KV cache: which of them a sequence holds, in the order of its positions.

Only bookkeeping: the storage belongs to the ops, and a page is a number here. The cache has a pool
of pages for each group of layers, and a sequence has a `PageTable` in each of them. Tables that
begin with the same tokens may share full pages, which nobody writes to again. Where a group's
layers see a window, a table gives back the pages that are behind it. Nothing here knows tokens,
layers, or who evaluates what.
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

    Those before `first` were given back: no token that is still to come sees them.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.first = 0  # the page, in the order of positions, that pages[0] is
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        """The page, in the order of positions, behind the last one."""
        return self.first + len(self.pages)

    @property
    def capacity(self) -> int:
        """Positions up to the end of the last page."""
        return self.end * PAGE_SIZE

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take pages until positions start:stop have some; on OutOfPages the table is as before.

        Pages that no token from `start` on sees are given back if the table would hold more than
        the pool's limit, or the pool has too few. Those of them with positions from n_finite on are
        suspects: what they hold may be NaN.
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
        """How many positions can be left by `truncate`: fewer where the last page would be written
        on while another table shares it, and 0 where a token behind them sees pages that were given
        back.
        """
        n = min(n_positions, self.capacity)
        last = n // PAGE_SIZE - self.first
        if n % PAGE_SIZE and last >= 0 and self.pool.references(self.pages[last]) > 1:
            n -= n % PAGE_SIZE
        return n if self.first <= self.pool.first_seen(n) else 0

    def truncate(self, n_positions: int) -> None:
        """Give back the pages beyond n_positions, which are keepable."""
        kept = max(0, pages_for(n_positions) - self.first)
        self._release(self.pages[kept:])
        del self.pages[kept:]
        if n_positions % PAGE_SIZE and 0 < kept == len(self.pages):
            self.pool.rewrite(self.pages[-1])
        if not n_positions:
            self.first = 0

    def _release(self, pages: Sequence[int]) -> None:
        """The last page first: a cached text is taken from its end."""
        for page in reversed(pages):
            self.pool.release(page)

    def suspect(self, first_position: int) -> None:
        """From this position on, what the pages hold may be NaN; pages of other tables, too, are
        theirs to suspect.
        """
        self.pool.suspect(self.pages[max(0, first_position // PAGE_SIZE - self.first) :])

    def filled(self, start: int, stop: int) -> list[int]:
        """The pages all of whose positions are in start:stop."""
        return self.pages[
            max(0, pages_for(start) - self.first) : max(0, stop // PAGE_SIZE - self.first)
        ]

    def write(self, row: NDArray[np.int32]) -> None:
        """The table as a row[P] of a step; entries without a page are 0."""
        row[: self.first] = 0
        row[self.first : self.end] = self.pages
        row[self.end :] = 0

    def missing(self, n_positions: int) -> int:
        """Pages at most that the table takes to grow up to a position."""
        missing = pages_for(n_positions) - self.end
        return max(0, min(missing, self.pool.limit - len(self.pages)))

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find a full page, given in the order of positions, if it is there still."""
        if page >= self.first:
            number = self.pages[page - self.first]
            self.pool.publish(number, text)
            if finite:
                self.pool.trust(number)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Begin, in an empty table, with the published pages that a token behind them sees."""
        first = self.pool.first_seen(len(texts) * PAGE_SIZE)
        pages = [self.pool.find(text) for text in texts[first:]]
        self.first, self.pages = first, [page for page in pages if page is not None]
        for page in self.pages:
            self.pool.share(page)


class KVCache:
    """The pools of all groups. caches: published pages stay when nobody references them."""

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
        """Empty ones, of a sequence."""
        pairs = zip(self.pools, self._has_states, strict=True)
        return [StateTable(pool) if has else PageTable(pool) for pool, has in pairs]

    @property
    def n_pages(self) -> int:
        """Pages of all groups."""
        return sum(pool.n_pages for pool in self.pools)

    @property
    def n_free(self) -> int:
        """Pages of all groups that nobody references."""
        return sum(pool.n_free for pool in self.pools)

    @property
    def n_cached(self) -> int:
        """Of the free pages: those that hold a published text."""
        return sum(pool.n_cached for pool in self.pools)

    def nbytes(self, usual: str) -> int:
        """Bytes of all pages. usual: the type of what was left open."""
        return sum(group.n_pages * _page_bytes(group, usual) for group in self.shape.groups)

    def describe(self, usual: str) -> list[str]:
        """A line for each group. usual: the type of what was left open."""
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
        """Around a step that writes positions start:stop of some sequences: what may be NaN in
        their pages is cleared before, as far as the step does not write the whole page.
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
        """Whether a new sequence of so many positions finds its pages."""
        n_pages = pages_for(n_positions)
        return all(
            pool.n_free >= (pool.limit if has_states else min(n_pages, pool.limit))
            for pool, has_states in zip(self.pools, self._has_states, strict=True)
        )


class SequencePages:
    """The pages of one sequence in all groups; `version` changes with them."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.version = cache, 0
        self.tables = cache.tables()

    @property
    def capacity(self) -> int:
        """Positions up to the end of the last page of each group."""
        return min(table.capacity for table in self.tables)

    @property
    def n_held(self) -> int:
        """Pages that the sequence holds, in all groups."""
        return sum(len(table.pages) for table in self.tables)

    def grow(self, start: int, stop: int, n_finite: int) -> None:
        """Take pages for the tokens at positions start:stop, which are evaluated next; OutOfPages,
        after which some groups may have more pages than the others. See PageTable.grow.
        """
        self.version += 1
        for table in self.tables:
            table.grow(start, stop, n_finite)

    def truncate(self, n_positions: int) -> int:
        """Give back the pages beyond n_positions; how many positions are left.

        Fewer are left where the last page is shared; none, usually, where a window's pages before
        them are gone.
        """
        kept = n_positions
        while (fewer := min(table.keepable(kept) for table in self.tables)) < kept:
            kept = fewer
        self.version += 1
        for table in self.tables:
            table.truncate(kept)
        return kept

    def suspect(self, first_position: int) -> None:
        """From this position on, what the pages hold may be NaN."""
        for table in self.tables:
            table.suspect(first_position)

    def publish(self, page: int, text: bytes, finite: bool) -> None:
        """Let others find a full page, given in the order of positions, by the hash of the text up
        to its end. finite: it is known that the page holds no NaN.
        """
        for table in self.tables:
            table.publish(page, text, finite)

    def reuse(self, texts: Sequence[bytes]) -> None:
        """Begin, while nothing is held, with published pages; see `prefix.longest`."""
        self.version += 1
        for table in self.tables:
            table.reuse(texts)

    def release(self) -> None:
        """Give back every page."""
        self.truncate(0)


def _seen(spec: StateSpec) -> int:
    """The window of a pool: who goes on behind a page needs no state but that behind it."""
    return PAGE_SIZE + 1 if isinstance(spec, Recurrent) else spec.window


def stack(sequences: Sequence[SequencePages]) -> tuple[NDArray[np.int32], ...]:
    """Step.page_tables: of each group [S, P], as wide as its longest table."""
    return tuple(_stack(tables) for tables in zip(*(s.tables for s in sequences), strict=True))


def _stack(tables: Sequence[PageTable | StateTable]) -> NDArray[np.int32]:
    rows = np.empty((len(tables), max(1, *(table.end for table in tables))), np.int32)
    for row, table in zip(rows, tables, strict=True):
        table.write(row)
    return rows


def _page_bytes(group: CacheGroup, usual: str) -> int:
    """Bytes of a page in all layers of a group."""
    spec = group.spec
    if isinstance(spec, Recurrent):
        return group.n_layer * spec.nbytes
    head = spec.types.resolved(usual).nbytes(spec.key_size, spec.value_size)
    return group.n_layer * PAGE_SIZE * spec.n_head_kv * head
