"""The progress bar: what it says, and that it never takes more than a line."""

from __future__ import annotations

import io
import os

import pytest

from ggpy.util import progress
from ggpy.util.progress import Bar, columns_of

LONG = "loading SmolLM2-135M-Instruct.Q4_1.gguf"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_wide_line() -> None:
    bar = Bar("loading x", 200.0, "MB")
    assert bar.line(50.0, 80) == "loading x [######------------------] 50 of 200 MB"
    assert Bar("prompt", 12, "tokens").line(6, 80).endswith("] 6 of 12 tokens")
    assert Bar("nothing", 0).line(0, 80).endswith(f"[{'#' * 24}] 0 of 0")


def test_a_narrow_line_loses_the_bar_and_then_the_label() -> None:
    bar = Bar(LONG, 98.4, "MB")
    assert bar.line(49.2, 70) == f"{LONG} [######-----] 49.2 of 98.4 MB"
    assert bar.line(49.2, 60) == f"{LONG} 49.2 of 98.4 MB"
    assert bar.line(49.2, 40) == "loading SmolLM2-135M-In 49.2 of 98.4 MB"
    assert bar.line(49.2, 16) == "49.2 of 98.4 MB"
    assert bar.line(49.2, 9) == "49.2 of "


@pytest.mark.parametrize("label", [LONG, "x", "模型" * 30, "\x1b[2J" * 20, "é" * 70])
def test_no_line_is_wider_than_the_terminal(label: str) -> None:
    bar = Bar(label, 98.4, "MB")
    for columns in range(1, 200):
        line = bar.line(49.2, columns)
        assert columns_of(line) < columns and line.isprintable()


def test_what_was_drawn_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0)
    stream = Terminal()
    with Bar("模型", 10, "MB", stream) as bar:
        bar.update(1)
        drawn = bar.length
        bar.update(9)
    first, second, *wiped = stream.getvalue().split("\r")[1:]
    assert columns_of(first) == columns_of(second) == drawn
    assert wiped == [" " * drawn, ""]


def test_a_file_gets_nothing() -> None:
    stream = io.StringIO()
    with Bar("x", 10, stream=stream) as bar:
        bar.update(5)
    assert stream.getvalue() == ""


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_the_terminal_s_own_width_counts() -> None:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        bar = Bar(LONG, 98.4, "MB", stream)
        bar.update(49.2)
        assert os.read(ours, 1000).decode() == f"\r{LONG[:23]} 49.2 of 98.4 MB"
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        bar.close()  # after the window became narrower
        assert os.read(ours, 1000).decode() == f"\r{' ' * 19}\r"
    os.close(ours)
