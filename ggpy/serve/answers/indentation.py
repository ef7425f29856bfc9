"""Where a text leaves the block of code that it continues: llama.cpp's n_indent, for editors.

Nothing here knows a model or a request.
"""

from __future__ import annotations

BLANKS = " \t"


class Indentation:
    """Ends a text at the first line after its first that begins with fewer than `least` blanks.

    As in llama-server, an empty line is such a line, and the blanks of the line stay.
    """

    def __init__(self, least: int) -> None:
        self.ended = False
        self._least = least
        self._n_blanks: int | None = None  # of the line so far; None after its other characters

    def feed(self, text: str) -> str:
        """What belongs to the text of more of it."""
        for i, char in enumerate("" if self.ended else text):
            if self._n_blanks is not None and char in BLANKS:
                self._n_blanks += 1
            elif self._n_blanks is not None and self._n_blanks < self._least:
                self.ended = True
                return text[:i]
            else:
                self._n_blanks = 0 if char == "\n" else None
        return "" if self.ended else text
