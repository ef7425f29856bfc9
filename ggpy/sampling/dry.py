"""DRY ("Don't Repeat Yourself"): a penalty for tokens that would extend a repetition.

Histories and sequence breakers are token ids; `breaker_sequences` makes breakers of texts. Source:
text-generation-webui pull request 5677 by p-e-w; ggml-org/llama.cpp, llama_sampler_dry.

Letters: V vocabulary, n tokens of the history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import log

import numpy as np

from .ranking import Logits

MAX_BREAKER_CHARS = 40
MAX_BREAKER_TAIL = 20  # tokens of a breaker sequence after its first one
MAX_BREAKER_TEXTS = 64
MAX_BREAKERS = 1 << 18  # token sequences: a few short texts make that many in a large vocabulary
FLOAT32_MAX = float(np.finfo(np.float32).max)
LOG_FLOAT32_MAX = 88.7228391


class Breakers(tuple[tuple[int, ...], ...]):
    """Sequence breakers, none of them empty, and what is looked up in them for every token."""

    @classmethod
    def of(cls, given: Iterable[Sequence[int]]) -> Breakers:
        """The same sequences; the same object where they are Breakers."""
        return given if isinstance(given, Breakers) else cls(tuple(tokens) for tokens in given)

    @cached_property
    def single(self) -> frozenset[int]:
        """The tokens that are breakers by themselves."""
        return frozenset(sequence[0] for sequence in self if len(sequence) == 1)

    @cached_property
    def tails(self) -> dict[int, list[tuple[int, ...]]]:
        """First token -> what may follow it."""
        tails: dict[int, list[tuple[int, ...]]] = {}
        for head, *tail in self:
            tails.setdefault(head, []).append(tuple(tail))
        return tails


def dry(
    logits: Logits,
    recent: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Iterable[Sequence[int]] = (),
) -> Logits:
    """Returns logits[V] with multiplier * base^(length - allowed) subtracted from each token that
    would extend a repetition of `length` >= `allowed` tokens at the end of recent[n].

    base is at least 1. The power and the penalty are limited to the range of float32. A token that
    is a breaker by itself is not penalised.
    """
    breakers = Breakers.of(breakers)
    max_power = int(LOG_FLOAT32_MAX / log(base)) if base > 1 else 0  # any power of 1 is 1
    out = logits.copy()
    with np.errstate(over="ignore"):  # a logit may itself be near the end of float32
        for token, length in repetitions(recent, allowed, breakers).items():
            if token not in breakers.single:
                penalty = multiplier * base ** min(length - allowed, max_power)
                out[token] -= np.float32(min(penalty, FLOAT32_MAX))
    return out


def repetitions(
    recent: Sequence[int], allowed: int, breakers: Iterable[Sequence[int]]
) -> dict[int, int]:
    """Returns {token: length}: tokens that would extend a repetition at the end of recent[n], and
    its length so far in tokens, at least `allowed`.
    """
    limit = tokens_since_breaker(recent, breakers)
    if len(recent) <= allowed or limit < allowed or recent.count(recent[-1]) < 2:
        return {}
    longest: dict[int, int] = {}
    for i, match in enumerate(suffix_matches(recent)):
        length = min(match, limit)
        if i > 0 and length >= allowed:
            follower = recent[len(recent) - i]
            longest[follower] = max(length, longest.get(follower, 0))
    return longest


def suffix_matches(recent: Sequence[int]) -> list[int]:
    """Returns z[n]: z[i] is the length of the longest common suffix of recent[:n - i] and recent.

    The Z algorithm over the reversed history, in linear time; z[0] is n.
    """
    s = list(reversed(recent))
    n = len(s)
    z = [n] * n
    left = right = 0  # s[left:right] equals s[:right - left]
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and s[length] == s[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z


def tokens_since_breaker(recent: Sequence[int], breakers: Iterable[Sequence[int]]) -> int:
    """Returns how many tokens follow the last sequence breaker in recent[n]; n without one."""
    tails = Breakers.of(breakers).tails
    for start in range(len(recent) - 1, -1, -1) if tails else ():
        if recent[start] not in tails:
            continue
        after = tuple(recent[start + 1 : start + 1 + MAX_BREAKER_TAIL])
        found = [len(t) for t in tails[recent[start]] if after[: len(t)] == t]
        if found:
            return len(recent) - start - 1 - max(found)
    return len(recent)


class Pieces:
    """The bytes of all tokens, in which texts are looked up."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        every = list(pieces)
        self._ends = np.cumsum([len(piece) for piece in every])
        self._text = np.frombuffer(b"".join(every), np.uint8)
        backwards = [piece[::-1] for piece in every]
        order = sorted(range(len(every)), key=backwards.__getitem__)
        self._backwards = [backwards[token] for token in order]
        self._order = np.array(order, np.int32)

    @classmethod
    def of(cls, given: Iterable[bytes] | Pieces) -> Pieces:
        """The same pieces; the same object where they are Pieces."""
        return given if isinstance(given, Pieces) else cls(given)

    def containing(self, text: bytes) -> list[int]:
        """The tokens that contain the text, in order; all of them for none."""
        if not text:
            return list(range(len(self._ends)))
        at = np.flatnonzero(self._text[: max(0, len(self._text) - len(text) + 1)] == text[0])
        for i, byte in enumerate(text[1:], 1):
            at = at[self._text[at + i] == byte]
        tokens = np.searchsorted(self._ends, at, side="right")
        found: list[int] = np.unique(tokens[at + len(text) <= self._ends[tokens]]).tolist()
        return found

    def ending_with(self, text: bytes) -> list[int]:
        """The tokens that end with the text, in no order."""
        wanted, size = text[::-1], len(text)
        start = bisect_left(self._backwards, wanted)
        end = bisect_right(self._backwards, wanted, start, key=lambda piece: piece[:size])
        found: list[int] = self._order[start:end].tolist()
        return found


def breaker_sequences(
    breakers: Iterable[str],
    pieces: Iterable[bytes] | Pieces,
    encode: Callable[[str], Sequence[int]],
) -> Breakers:
    """Returns the token sequences in which the text of a breaker may appear.

    pieces[V] are the bytes of each token; `encode` turns text into ids without special tokens. A
    token that contains the breaker is a sequence by itself. A token that ends inside the breaker is
    followed by the ids of the rest of the breaker. ValueError for more than MAX_BREAKER_TEXTS
    breakers, or MAX_BREAKERS sequences.
    """
    breakers, pieces = list(breakers), Pieces.of(pieces)
    if len(breakers) > MAX_BREAKER_TEXTS:
        raise ValueError(
            f"{len(breakers)} sequence breakers: at most {MAX_BREAKER_TEXTS} are possible"
        )
    found: set[tuple[int, ...]] = set()
    for text in dict.fromkeys(breaker[:MAX_BREAKER_CHARS] for breaker in breakers):
        containing = set(pieces.containing(text.encode()))
        found.update((token,) for token in containing)
        for i in range(1, len(text)):
            if ending := pieces.ending_with(text[:i].encode()):
                tail = tuple(encode(text[i:]))[:MAX_BREAKER_TAIL]
                found.update((token, *tail) for token in ending if token not in containing)
        if len(found) > MAX_BREAKERS:
            raise ValueError(f"sequence breakers in over {MAX_BREAKERS} forms: give fewer of them")
    return Breakers(sorted(found))
