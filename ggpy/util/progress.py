"""Progress on a terminal's last line; a single line per task where stderr is a file or a pipe.

This module knows nothing about what progresses. It writes to stderr alone: stdout is for text.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24  # characters of a bar
INTERVAL = 0.1  # seconds between two drawings


class Bar:
    """`label [####----] 1.2 of 3.4 unit`, drawn while a task runs, and wiped when it ends."""

    def __init__(self, label: str, total: float, unit: str = "", stream: TextIO | None = None):
        self.label = label
        self.total = total
        self.unit = unit
        self.stream = stream or sys.stderr
        self.drawn_at = 0.0
        self.length = 0  # characters on the line
        self.is_terminal = self.stream.isatty()

    def update(self, done: float) -> None:
        """Draw that `done` of `total` units are done, unless that was just drawn."""
        now = time.monotonic()
        if self.is_terminal and now - self.drawn_at >= INTERVAL:
            self.drawn_at = now
            self._draw(self.line(done))

    def close(self) -> None:
        """Wipe the bar."""
        if self.length:
            self._draw("")

    def line(self, done: float) -> str:
        """The text of the bar."""
        share = min(max(done / self.total, 0.0), 1.0) if self.total else 1.0
        filled = round(share * WIDTH)
        bar = "#" * filled + "-" * (WIDTH - filled)
        digits = 0 if self.total >= 100 else 1
        return f"{self.label} [{bar}] {done:.{digits}f} of {self.total:.{digits}f} {self.unit}"

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, text: str) -> None:
        blanks = " " * max(0, self.length - len(text))
        self.stream.write(f"\r{text}{blanks}" + ("" if text else "\r"))
        self.stream.flush()
        self.length = len(text)
