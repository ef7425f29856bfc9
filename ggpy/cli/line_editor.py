"""Reads what a user says in a chat: with an editor on a terminal, line by line elsewhere.

The editor is prompt_toolkit's: Enter sends, Alt-Enter or Ctrl-J starts a new line, a pasted text of
several lines stays one message, and the arrow keys recall earlier messages, which are kept in a
file that only the user can read. This module knows neither the model nor the commands of a chat
but by name.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..util.outcome import Stopped, one_line
from ..util.output_file import OutputFile
from ..util.paths import cache_dir, make_cache_dir
from .prompts import decode

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import AnyFormattedText
    from prompt_toolkit.key_binding import KeyBindings

MOST_HISTORY = 1 << 20  # bytes of the history file, of which the newer half stays when it has more


class Reader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """A message of one line or several; EOFError at the end, with the reason if nothing can be
        read any more, KeyboardInterrupt on Ctrl-C, ValueError where it is not UTF-8.
        """


def open_reader(commands: Sequence[str]) -> Reader:
    """The editor, which completes `commands`, if stdin and stdout are a terminal; else lines."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Editor(commands)
    return Lines()


class Lines:
    """Lines of stdin; one that ends in a backslash goes on in the next line."""

    def __init__(self) -> None:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")

    def read(self) -> str:
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        return decode("\n".join(lines).encode("utf-8", "surrogateescape"), "the line")

    def _line(self, prompt: str) -> str:
        """A line; the prompt is for a terminal, and never goes into the file that stdout may be."""
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except OSError as error:  # a terminal that is gone, or that another program reads
            raise EOFError(one_line(error)) from None
        if not line:
            if sys.stdin.isatty():
                print(file=sys.stderr)  # ends the line of the prompt
            raise EOFError
        return line.removesuffix("\n")


class Editor:
    """A line editor with history."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.shortcuts import CompleteStyle
        from prompt_toolkit.styles import Style

        self.history = History(cache_dir("chat") / "history.jsonl")
        self.session: Any = PromptSession(
            [("class:prompt", "> ")],
            prompt_continuation=_continuation,
            multiline=True,
            key_bindings=_keys(),
            history=InMemoryHistory(self.history.load()),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            style=Style.from_dict(_style()),
        )

    def read(self) -> str:
        restore = _terminal_restorer()
        try:
            text = str(self.session.prompt())
        except Stopped:
            restore()  # the signal may come while the editor changes the terminal's mode
            # The signal may come before a coroutine of the editor is awaited, or while one of its
            # tasks waits. The program ends now, so Python need not warn about either.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            logging.getLogger("asyncio").disabled = True
            raise
        if text.strip():
            self.history.add(text)
        return decode(text.encode("utf-8", "surrogateescape"), "the message")


def _terminal_restorer() -> Callable[[], None]:
    """A function that gives the terminal of stdin its present mode again."""
    if sys.platform == "win32":
        return lambda: None
    import termios

    try:
        terminal = sys.stdin.fileno()
        mode = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # no terminal
        return lambda: None
    return lambda: termios.tcsetattr(terminal, termios.TCSANOW, mode)


def _continuation(width: int, line_number: int, wrap_count: int) -> AnyFormattedText:
    """What stands before a further line; a line that is too long for the terminal is indented."""
    return [("class:prompt", "  " if wrap_count else ". ")]


def _style() -> dict[str, str]:
    """What tells questions from answers; no colours where NO_COLOR is set (no-color.org)."""
    return {} if os.environ.get("NO_COLOR") else {"prompt": "ansigreen bold", "": "bold"}


def _keys() -> KeyBindings:
    """Enter sends a message; Alt-Enter, Ctrl-J, or Enter after a backslash start a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class History:
    """Messages in a file, a JSON string in each line; a file that cannot be written is no error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = ""  # message

    def load(self) -> list[str]:
        """The messages, oldest first; of a file that is too large only the newer half stays."""
        try:
            data = self.path.read_bytes()
            if len(data) > MOST_HISTORY:
                data = data[-MOST_HISTORY // 2 :].partition(b"\n")[2]
                self._replace(data)
        except OSError:
            return []
        found = [text for line in data.splitlines() if (text := _message(line)) is not None]
        self.last = found[-1] if found else ""
        return found

    def add(self, text: str) -> None:
        """Append a message, unless it repeats the last one."""
        if text == self.last:
            return
        self.last = text
        with suppress(OSError):
            make_cache_dir(self.path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(os.open(self.path, flags, 0o600), "wb") as file:
                _close_to_others(file.fileno())
                file.write(json.dumps(text).encode() + b"\n")

    def _replace(self, data: bytes) -> None:
        with OutputFile(self.path) as out:
            _close_to_others(out.stream.fileno())
            out.write(data)


def _message(line: bytes) -> str | None:
    """The text in a line of the history; None for anything else, as half a line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _close_to_others(descriptor: int) -> None:
    if hasattr(os, "fchmod"):  # Windows: a user's folders are the user's own
        os.fchmod(descriptor, 0o600)
