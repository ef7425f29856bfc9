"""Hashes of texts, by which pages of the KV cache are found again.

The keys and values of a page depend on the whole text up to its end. Hashes therefore form a chain:
the hash of a page is made from the hash of the page before and from its own tokens. Nothing here
knows who holds pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct

from ..backends.interface import PAGE_SIZE
from .page_pool import PagePool

_PAGE = Struct(f"<{PAGE_SIZE}i")
_SIZE = 16  # bytes of a hash, enough that two texts never have the same one in practice


class PrefixHashes:
    """The hashes of the full pages of one text, computed on demand.

    salt: only texts with the same salt find each other.
    """

    def __init__(self, salt: bytes = b"") -> None:
        self._salt = blake2b(salt, digest_size=_SIZE).digest()
        self._hashes: list[bytes] = []

    def of(self, page: int, ids: Sequence[int]) -> bytes:
        """The hash of the text up to the end of the page at index `page`. ids: the tokens of the
        text, at least up to there.
        """
        hashes = self._hashes
        while len(hashes) <= page:
            start = len(hashes) * PAGE_SIZE
            tokens = _PAGE.pack(*ids[start : start + PAGE_SIZE])
            before = hashes[-1] if hashes else self._salt
            hashes.append(blake2b(before + tokens, digest_size=_SIZE).digest())
        return hashes[page]

    def cut(self, n_positions: int) -> None:
        """Forget the hashes of pages that contain this position or a later one: the text changed
        there.
        """
        del self._hashes[n_positions // PAGE_SIZE :]


def longest(pools: Sequence[PagePool], hashes: Iterable[bytes]) -> int:
    """How many pages at the beginning of a text can be reused. A number n is usable if every pool
    has published those of the first n pages that the token after them sees.
    """
    runs = [0] * len(pools)  # for each pool, consecutive published pages up to this one
    found = 0
    for n, text in enumerate(hashes, 1):
        usable = True
        for i, pool in enumerate(pools):
            runs[i] = runs[i] + 1 if pool.find(text) is not None else 0
            if not runs[i] and not pool.window:
                return found
            usable = usable and runs[i] >= n - pool.first_seen(n * PAGE_SIZE)
        found = n if usable else found
    return found
