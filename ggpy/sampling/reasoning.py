"""A limit of the tokens of reasoning in an answer: a mask that forces the tokens which end it.

The mask reads the answer's bytes, token by token, and forbids nothing until the limit is reached.
It says so in advance (`waits`), so that the engine need not wait for the tokens before. Nothing
here knows a chat format or a tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .mask import WORD_BITS, TokenMask, n_words

MAX_HEADER = 256  # bytes of an opening marker, or of a header that is one
MAX_DELAY = 16  # tokens beyond the limit that may complete a character or a marker
UNLIMITED = 1 << 62  # tokens: a limit that only `end_soon` lowers

# Tells reasoning from the rest of an answer's text: (text, whether it is the last) -> (reasoning,
# text).
Split = Callable[[str, bool], tuple[str, str]]


@dataclass(frozen=True)
class ReasoningMarkers:
    """Where reasoning stands in the bytes of an answer.

    opener: reasoning begins after it. closer: the marker at which it ends; ends: others. start:
    the opener as it is, where reasoning stands at the beginning of an answer alone; b"" where it
    may begin anywhere. begun: the end of a text whose next token may complete an opener; None: of
    any text. spelled: the closer is written in several tokens.
    """

    opener: re.Pattern[bytes]
    closer: bytes
    ends: tuple[bytes, ...] = ()
    start: bytes = b""
    begun: re.Pattern[bytes] | None = None
    spelled: bool = False


class ReasoningBudget:
    """Ends the reasoning of one answer after `limit` tokens: a `TokenMask`.

    ending: the ids that are forced then, a message and the closing marker; closing: the latter
    alone, for reasoning that is opened again. The limit is of all reasoning of the answer together,
    without markers and message. A character that is not complete at the limit, and a closing marker
    that has begun, may be completed. piece: the bytes of an id. opened: the answer begins inside
    reasoning. mask: of a grammar, which is asked first; an ending that it forbids is given up.

    active: whether a token may be forbidden now. waits: whether the token after the next one may
    be forbidden, depending on the next one.
    """

    def __init__(
        self,
        limit: int,
        markers: ReasoningMarkers,
        ending: Sequence[int],
        closing: Sequence[int],
        piece: Callable[[int], bytes],
        n_vocab: int,
        *,
        opened: bool = False,
        mask: TokenMask | None = None,
    ) -> None:
        self._limit, self._markers, self._mask = limit, markers, mask
        self._next, self._closing = tuple(ending), tuple(closing)
        self._piece, self._n_vocab = piece, n_vocab
        self._tail = b""  # what a marker may begin in
        ends = (markers.closer, *markers.ends)
        self._kept = max(4, *map(len, ends))
        self._search_end = re.compile(b"|".join(map(re.escape, ends))).search
        self._inside, self._over = opened, not closing
        self._forced: tuple[int, ...] = ()
        self.n_reasoning = 0  # tokens so far
        if opened:
            self._check_limit()
        self._tell()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        return self._mask is not None and self._mask.finished

    def _tell(self) -> None:
        """Set what others ask in every step."""
        self.active = bool(self._forced) or self._mask is not None
        self.waits = self.active or (not self._over and self._may_be_forced_soon())

    def _may_be_forced_soon(self) -> bool:
        left = self._limit - self.n_reasoning
        if self._inside:
            return left <= 1
        begun = self._markers.begun
        return left <= 0 and (begun is None or begun.search(self._tail) is not None)

    @property
    def current(self) -> TokenMask:
        """What says which tokens may follow: the grammar's mask, unless the end is forced."""
        return self if self._forced or self._mask is None else self._mask

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the bits of the tokens that may follow: while the end is forced, of one."""
        if self._mask is not None:
            self._mask.fill(row)
        else:
            row[:] = 0
            row[: n_words(self._n_vocab)] = -1
            if beyond := -self._n_vocab % WORD_BITS:
                row.view(np.uint32)[n_words(self._n_vocab) - 1] >>= beyond
        if self._forced:
            word, bit = divmod(self._forced[0], WORD_BITS)
            bits = row.view(np.uint32)
            if bits[word] >> bit & 1:
                row[:] = 0
                bits[word] = 1 << bit

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The ids that are forced one day."""
        return self._forced + self._next + self._closing

    def end_soon(self) -> None:
        """Lower the limit to two more tokens, if reasoning goes on now: the engine may have drawn
        one that is not accepted yet, and begun the next one.
        """
        if self._inside and not self._forced:
            self._limit = min(self._limit, self.n_reasoning + 2)
            self._tell()

    def accept(self, token: int) -> None:
        """Takes the next token of the answer; ValueError if the grammar does not allow it."""
        if self._mask is not None:
            self._mask.accept(token)
        if self._forced:
            self._accept_forced(token)
        elif self._over:
            return
        else:
            self._tail += self._piece(token)
            if self._inside:
                self._look_for_end(1)
            else:
                self._look_for_beginning()
        self._tell()

    def _accept_forced(self, token: int) -> None:
        as_forced = token == self._forced[0]
        self._forced = self._forced[1:] if as_forced else ()
        if not as_forced:  # the grammar forbids it
            self._over = True
        elif not self._forced:
            self._close(b"")

    def _look_for_beginning(self) -> None:
        markers = self._markers
        if match := markers.opener.search(self._tail):
            self._inside, self._tail = True, self._tail[match.end() :]
            self._look_for_end(0)
        elif not markers.start:
            self._tail = self._tail[-MAX_HEADER:]
        else:
            self._tail = self._tail.lstrip()
            self._over = not markers.start.startswith(self._tail)

    def _look_for_end(self, n_tokens: int) -> None:
        """In the tail, which has so many tokens of reasoning more, if it does not end there."""
        if found := self._search_end(self._tail):
            self._close(self._tail[found.start() :])
        else:
            self.n_reasoning += n_tokens
            self._check_limit()
            self._tail = self._tail[-self._kept :]

    def _close(self, rest: bytes) -> None:
        """Reasoning ended, after which there is `rest`."""
        self._inside, self._tail, self._over = False, rest, bool(self._markers.start)

    def _check_limit(self) -> None:
        """Force the end if the limit is reached, and nothing is half said."""
        beyond = self.n_reasoning - self._limit
        if beyond >= 0 and (beyond >= MAX_DELAY or not self._is_half_said()):
            self._forced, self._next = self._next, self._closing

    def _is_half_said(self) -> bool:
        if _ends_amid_character(self._tail):
            return True
        closer = self._markers.closer
        lengths = range(1, len(closer)) if self._markers.spelled else ()
        return any(self._tail.endswith(closer[:n]) for n in lengths)


def _ends_amid_character(data: bytes) -> bool:
    """Whether bytes end inside a character of UTF-8."""
    for n, byte in enumerate(reversed(data[-4:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character, which says its length
            return n < (1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
