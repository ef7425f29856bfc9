"""An interactive chat on the terminal: questions from stdin, answers to stdout.

A line that ends in a backslash goes on in the next one. Ctrl-C stops an answer, Ctrl-D ends the
chat. Pages of the last answer are kept, so that only what is new of a conversation is evaluated.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..util.outcome import one_line
from .answer import Figures, Settings, stream
from .prompts import Conversation, decode

if TYPE_CHECKING:
    from ..runtime.engine import Engine, Sequence

HELP = """\
/help   this page
/clear  forget the conversation
/regen  answer the last question again
/exit   end the chat, as Ctrl-D does
End a line with \\ to go on in the next one. Ctrl-C stops an answer."""


def remark(text: str) -> None:
    """Say something that is not an answer."""
    print(text, file=sys.stderr, flush=True)


class Interrupt:
    """While this is open, the first Ctrl-C only sets `asked`; the second raises KeyboardInterrupt.

    So a step of the engine that is under way is finished, unless that takes too long for the user.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Chat:
    """A conversation with its engine; `loop` runs it until the user leaves."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        settings: Settings,
        write: Callable[[str], None],
    ):
        self.engine = engine
        self.conversation = conversation
        self.settings = settings
        self.write = write
        self.figures = Figures()
        self.last: Sequence | None = None  # whose pages are kept

    def loop(self, first: str | None = None) -> Figures:
        """Answer `first`, then what the user says; the figures of all answers."""
        _prepare_terminal()
        if first is not None:
            self.ask(first)
        while True:
            try:
                text = read_message()
            except KeyboardInterrupt:
                remark("\n(/exit or Ctrl-D ends the chat)")
                continue
            except EOFError:
                if sys.stdin.isatty():
                    remark("")  # ends the line of the prompt
                return self.figures
            except ValueError as error:
                remark(f"ggpy: error: {one_line(error)}")
                continue
            if text.strip() in ("/exit", "/quit"):
                return self.figures
            self.handle(text)

    def handle(self, text: str) -> None:
        """Do what a line says: a command, a question, or nothing."""
        word = text.strip()
        if word == "/clear":
            self.conversation.clear()
            remark("(the conversation is forgotten)")
        elif word == "/regen":
            self.regenerate()
        elif word == "/help":
            remark(HELP)
        elif word.startswith("/") and " " not in word and "/" not in word[1:]:
            remark(f"unknown command {word}; /help lists them")
        elif word:
            self.ask(text)

    def regenerate(self) -> None:
        """Answer the last question again."""
        self.conversation.take_back("assistant")
        question = self.conversation.take_back("user")
        if question is None:
            remark("nothing was asked yet")
        else:
            self.ask(question)

    def ask(self, question: str) -> None:
        """Answer a question; one that cannot be answered is taken back."""
        self.conversation.say("user", question)
        try:
            answer = self.answer()
        except ValueError as error:  # too long for the context, or refused by the template
            self.conversation.take_back("user")
            remark(f"ggpy: error: {one_line(error)}")
        else:
            self.conversation.say("assistant", answer)

    def answer(self) -> str:
        """Generate and show the answer to the conversation so far; as much of it as came."""
        parts: list[str] = []

        def show(text: str) -> None:
            parts.append(text)
            self.write(text)

        sequence = None
        with Interrupt() as interrupt:
            try:
                sequence = self._sequence()
                self.figures.add(stream(self.engine, sequence, show, lambda: interrupt.asked))
                self.last = sequence
            except KeyboardInterrupt:
                if sequence:
                    self.engine.release(sequence)  # its pages may hold half of a step
                self.last = None
        self.write("\n")
        if sequence and sequence.finish == "context":
            remark("(the context is full: /clear, raise -c, or use --context-shift)")
        return "".join(parts)

    def _sequence(self) -> Sequence:
        from ..runtime.engine import ContextOverflow

        while True:
            try:
                ids = self.conversation.ids()
                return self.settings.add(self.engine, ids, previous=self.last, keep=True)
            except ContextOverflow:
                if not (self.settings.context_shift and self.conversation.forget_oldest()):
                    raise


def _prepare_terminal() -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history of this chat for `input`)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if sys.stdin.isatty():
        remark("Say something; /help lists commands.")


def read_message() -> str:
    """One message of the user, of several lines if they end in a backslash; EOFError at the end."""
    lines = [read_line("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(". "))
    return "\n".join(lines)


def read_line(prompt: str) -> str:
    """A line of stdin; the prompt is shown on a terminal only, and never goes into a file."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        line = line.removesuffix("\n")
    elif sys.stdout.isatty():
        line = input(prompt)
    else:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = input()
    return decode(line.encode("utf-8", "surrogateescape"), "the line")
