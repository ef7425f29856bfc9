"""Bytes of tokens to text, as they come: a character is returned when its last byte has come."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Text of one answer, token by token; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, piece: Callable[[int], bytes], drop_blank: bool) -> None:
        """`piece` returns a token's bytes; `drop_blank` removes a blank before the text."""
        self._piece = piece
        self._drop_blank = drop_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """The text that this token completes: "" while its last character is incomplete."""
        piece = self._piece(id)
        if piece and self._drop_blank:
            self._drop_blank = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """The rest of an answer that ends here: U+FFFD for an incomplete character, or ""."""
        return self._decoder.decode(b"", final=True)
