"""The pages of one group of layers: free, referenced by tables, or kept as a prefix cache.

A full page may be published under a hash of the text up to its end. A sequence that begins with
that text takes a reference to the page. After the last reference is gone, a page that is known to
be finite stays cached if the pool caches. When pages run out, the least recently used cached page
is reused first. Nothing here knows tokens, layers, or what is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.interface import PAGE_SIZE


class OutOfPages(MemoryError):
    """Every page is in use."""


class PagePool:
    """The pages of one group.

    window: positions that a token sees, itself included; 0 is all. limit: the most pages that one
    table holds, because it gives back the pages behind its window; 0 is all. caches: published
    pages are kept when nobody references them.
    """

    def __init__(self, n_pages: int, window: int = 0, limit: int = 0, caches: bool = False) -> None:
        self.n_pages, self.window, self.limit = n_pages, window, limit or n_pages
        self.caches = caches
        self.suspects: set[int] = set()  # may hold NaN or infinity: to be cleared before use
        self._references = [0] * n_pages
        # The lowest number is taken first, so that neighbouring positions get neighbouring pages.
        self._free = list(range(n_pages - 1, -1, -1))
        self._hashes: dict[int, bytes] = {}  # published page -> hash
        self._published: dict[bytes, list[int]] = {}  # hash -> published pages
        self._finite: set[int] = set()  # published pages that are known to hold no NaN
        self._cached: dict[int, None] = {}  # pages without a reference, least recently used first

    @property
    def n_free(self) -> int:
        """The number of pages that nobody references."""
        return len(self._free) + len(self._cached)

    @property
    def n_cached(self) -> int:
        """The number of free pages that hold a published text."""
        return len(self._cached)

    def first_seen(self, position: int) -> int:
        """The index, in the order of positions, of the first page that the token at a position
        sees.
        """
        return max(0, position - self.window + 1) // PAGE_SIZE if self.window else 0

    def take(self) -> int:
        """Returns a free page, now referenced once. Raises OutOfPages if there is none."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page = next(iter(self._cached))
            del self._cached[page]
            self._withdraw(page)
        else:
            size = self.n_pages * PAGE_SIZE
            raise OutOfPages(
                f"all {self.n_pages} pages ({size} positions) of the context are in use: "
                "end a sequence or load with a larger n_ctx"
            )
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page that is in use or cached."""
        if page in self._cached:
            del self._cached[page]
        elif not self._references[page]:
            raise ValueError(f"page {page} is free: it cannot be shared")
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Remove a reference; without the last one the page is free, or cached."""
        if not self._references[page]:
            raise ValueError(f"page {page} is already free")
        self._references[page] -= 1
        if self._references[page]:
            return
        alone = page in self._finite and len(self._published[self._hashes[page]]) == 1
        if self.caches and alone:
            self._cached[page] = None
        else:
            self._withdraw(page)
            self._free.append(page)

    def references(self, page: int) -> int:
        """How many tables hold the page."""
        return self._references[page]

    # Published pages

    def publish(self, page: int, text: bytes) -> None:
        """Let others find a full page in use by the hash of the text up to its end. A page that is
        already published, or that may hold NaN, is left as it is.
        """
        if page not in self._hashes and page not in self.suspects:
            self._hashes[page] = text
            self._published.setdefault(text, []).append(page)

    def trust(self, page: int) -> None:
        """Note that a page in use holds no NaN; if it is published, it may stay cached."""
        if page in self._hashes:
            self._finite.add(page)

    def find(self, text: bytes) -> int | None:
        """Returns a page that was published under the hash, in use or cached, or None."""
        pages = self._published.get(text)
        return pages[0] if pages else None

    def suspect(self, pages: Sequence[int]) -> None:
        """Note that pages of one table may hold NaN, and withdraw them; see `doubt` for which."""
        self.suspects.update(self.doubt(pages))

    def doubt(self, pages: Sequence[int]) -> list[int]:
        """Withdraw pages of one table that may hold NaN, so that nobody finds them any more.
        Returns them. Pages that are known to be finite are left alone; so are pages that other
        tables share, which those tables withdraw themselves.
        """
        found = [p for p in pages if self._references[p] == 1 and p not in self._finite]
        for page in found:
            self._withdraw(page)
        return found

    def rewrite(self, page: int) -> None:
        """Note that a page in use is going to hold another text."""
        self._withdraw(page)

    def _withdraw(self, page: int) -> None:
        """Take back the publication of a page: nobody finds it any more."""
        text = self._hashes.pop(page, None)
        if text is None:
            return
        self._finite.discard(page)
        pages = self._published[text]
        pages.remove(page)
        if not pages:
            del self._published[text]
