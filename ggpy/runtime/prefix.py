"""Hashes of texts by which pages of the KV cache are found again.

A page's keys and values follow from the whole text up to its end, so its hash is one of the hash of
the page before and of its own tokens: a chain. Nothing here knows who holds pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct

from ..backends.interface import PAGE_SIZE
from .page_pool import PagePool

_PAGE = Struct(f"<{PAGE_SIZE}i")
_SIZE = 16  # bytes of a hash: two texts with one hash are not met with


class PrefixHashes:
    """The hashes of the full pages of one text, made as they are asked for.

    salt: texts are found by those of the same salt alone.
    """

    def __init__(self, salt: bytes = b"") -> None:
        self._salt = blake2b(salt, digest_size=_SIZE).digest()
        self._hashes: list[bytes] = []

    def of(self, page: int, ids: Sequence[int]) -> bytes:
        """The hash of the text up to the end of a page; the text begins with these ids."""
        hashes = self._hashes
        while len(hashes) <= page:
            start = len(hashes) * PAGE_SIZE
            tokens = _PAGE.pack(*ids[start : start + PAGE_SIZE])
            before = hashes[-1] if hashes else self._salt
            hashes.append(blake2b(before + tokens, digest_size=_SIZE).digest())
        return hashes[page]

    def cut(self, n_positions: int) -> None:
        """The text has changed from this position on."""
        del self._hashes[n_positions // PAGE_SIZE :]


def longest(pools: Sequence[PagePool], hashes: Iterable[bytes]) -> int:
    """How many of the first pages of a text can be used: in each pool those are published that a
    token behind them sees.
    """
    runs = [0] * len(pools)  # published pages up to this one
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
