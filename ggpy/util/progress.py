"""Progress on a terminal's last line; nothing where stderr is a file or a pipe.

The line is never wider than the terminal, because a line that wraps cannot be drawn over. This
module knows nothing about the work. It writes to stderr alone: stdout is for text.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO
from unicodedata import east_asian_width

from .messages import escaped

WIDTH, LEAST_WIDTH = 24, 8  # characters of a bar at most and at least; with less room there is none
USUAL_COLUMNS = 80  # of a terminal whose size is not known
INTERVAL = 0.1  # seconds between two drawings


class Bar:
    """`label [####----] 1.2 of 3.4 unit`, drawn while a task runs, and wiped when it ends.

    total: in `unit`; an int for things that are counted, as tokens: these are shown without
    decimals.
    """

    def __init__(self, label: str, total: float, unit: str = "", stream: TextIO | None = None):
        self.label = escaped(label)
        self.total = total
        self.unit = unit
        self.stream = stream or sys.stderr
        self.drawn_at = 0.0
        self.length = 0  # columns on the line
        self.is_terminal = self.stream.isatty()

    def update(self, done: float) -> None:
        """Draws that `done` of `total` units are done, at most once in INTERVAL seconds."""
        now = time.monotonic()
        if self.is_terminal and now - self.drawn_at >= INTERVAL:
            self.drawn_at = now
            self._draw(self.line(done, self._columns()))

    def close(self) -> None:
        """Wipe the bar."""
        if self.length:
            self._draw("")

    def line(self, done: float, columns: int = USUAL_COLUMNS) -> str:
        """The text to draw; on a narrow terminal without [##--], then with less of the label."""
        digits = 0 if self.total >= 100 or isinstance(self.total, int) else 1
        amount = f"{done:.{digits}f} of {self.total:.{digits}f} {self.unit}".rstrip()
        room = columns - 1  # in the last column some terminals wrap already
        width = min(WIDTH, room - columns_of(self.label) - len(amount) - len(" [] "))
        if width >= LEAST_WIDTH:
            return f"{self.label} {self._bar(done, width)} {amount}"
        return _cut(f"{_cut(self.label, room - len(amount) - 1)} {amount}".lstrip(), room)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bar(self, done: float, width: int) -> str:
        share = min(max(done / self.total, 0.0), 1.0) if self.total else 1.0
        filled = round(share * width)
        return f"[{'#' * filled}{'-' * (width - filled)}]"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or USUAL_COLUMNS
        except (OSError, ValueError):
            return USUAL_COLUMNS

    def _draw(self, text: str) -> None:
        length = columns_of(text)
        blanks = " " * (min(self.length, self._columns() - 1) - length)
        self.stream.write(f"\r{text}{blanks}" + ("" if text else "\r"))
        self.stream.flush()
        self.length = length


def columns_of(text: str) -> int:
    """The most columns that a text takes on a terminal."""
    return sum(map(_width, text))


def _width(character: str) -> int:
    return 2 if east_asian_width(character) in "WF" else 1


def _cut(text: str, columns: int) -> str:
    """The beginning of a text that fits in so many columns."""
    end = used = 0
    for character in text:
        used += _width(character)
        if used > columns:
            break
        end += 1
    return text[:end]
