"""The editor of the chat: keys, pasted text, history; and lines where there is no terminal."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggpy.cli import line_editor
from ggpy.cli.line_editor import Editor, History, Lines, open_reader

UP, TAB = b"\x1b[A", b"\t"
Typed = Callable[[bytes], str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ggpy" / "chat"


@pytest.fixture
def typed(cache: Path) -> Iterator[Typed]:
    """What a new editor makes of keys."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keyboard:

        def read(keys: bytes) -> str:
            with create_app_session(input=keyboard, output=DummyOutput()):
                keyboard.send_bytes(keys)
                return Editor(["/help", "/save", "/system"]).read()

        yield read


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (b"hello\r", "hello"),
        (b"\x1b[200~one\rtwo\r\nthree\nfour\x1b[201~\r", "one\ntwo\nthree\nfour"),
        (b"\x1b[200~one\n\x1b[201~two\r", "one\ntwo"),
        (b"one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        (b"one\ntwo\r", "one\ntwo"),  # Ctrl-J
        (b"one\\\rtwo\r", "one\ntwo"),
        (b"two\x01one \r", "one two"),  # Ctrl-A
        ("naïve 模型\r".encode(), "naïve 模型"),
        (b"/sa" + TAB + b" x\r", "/save x"),
        (b"say /sa" + TAB + b"\r", "say /sa"),  # commands are at the beginning only
        (b"\r", ""),
    ],
)
def test_keys(typed: Typed, keys: bytes, message: str) -> None:
    assert typed(keys) == message


def test_ctrl_c_and_ctrl_d(typed: Typed) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed(b"half a line\x03")
    with pytest.raises(EOFError):
        typed(b"\x04")


def test_bytes_that_are_no_text_are_refused(typed: Typed) -> None:
    with pytest.raises(ValueError, match="the message is not UTF-8: byte 0xff"):
        typed(b"a\xff\r")
    assert typed(UP + b"\x08b\r") == "ab"  # and remembered, to be corrected


def test_the_history_outlives_the_editor(typed: Typed, cache: Path) -> None:
    typed(b"first\r")
    typed(b"two\nlines\r")
    typed(b" \r")
    assert typed(UP + b"\r") == "two\nlines"
    assert typed(UP + UP + UP + b"\r") == "first"
    if os.name == "posix":
        assert stat.S_IMODE((cache / "history.jsonl").stat().st_mode) == 0o600
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_a_history_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.touch(0o644)
    path.chmod(0o644)
    History(path).add("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_history_that_is_damaged_or_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'"good"\nnonsense\n\xff\n{"a": 1}\n5\n"half')
    assert History(path).load() == ["good"]
    lost = History(tmp_path / "history.jsonl" / "in a file")
    lost.add("x")
    assert lost.load() == []


def test_a_history_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_editor, "MOST_HISTORY", 100)
    path = tmp_path / "history.jsonl"
    history = History(path)
    for i in range(20):
        history.add(f"message {i}")
    assert history.load() == [f"message {i}" for i in range(17, 20)]
    assert path.stat().st_size <= 50 and History(path).load() == history.load()
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    said = b"one\ntwo \\\nthree\n\xff\nlast"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="ascii"))
    reader = open_reader([])
    assert isinstance(reader, Lines)
    assert [reader.read(), reader.read()] == ["one", "two \nthree"]
    with pytest.raises(ValueError, match="the line is not UTF-8"):
        reader.read()
    assert reader.read() == "last"
    with pytest.raises(EOFError):
        reader.read()
    assert capsys.readouterr() == ("", "")  # prompts are for terminals


def test_a_reason_is_told_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "the terminal is gone")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Gone())))
    with pytest.raises(EOFError, match="the terminal is gone"):
        open_reader([]).read()


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_a_terminal_whose_output_is_a_file_is_asked_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import pty

    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        reader = open_reader([])
        os.write(ours, b"one\\\ntwo\n\x04")
        assert isinstance(reader, Lines) and reader.read() == "one\ntwo"
        with pytest.raises(EOFError):
            reader.read()
    os.close(ours)
    assert capsys.readouterr() == ("", "> . > \n")
