"""An interactive chat: questions from a terminal or a pipe, answers to stdout.

Ctrl-C stops an answer, Ctrl-D ends the chat. The KV cache of the last answer is kept, so that only
what is new in a conversation is evaluated.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..util.outcome import one_line
from .answer import AnswerSettings, Figures, stream
from .options import PROGRAM

if TYPE_CHECKING:
    from ..runtime.engine import Engine, Sequence
    from ..tokenizer.conversation import Conversation

WELCOME = "Ask something. /help lists commands and keys, Ctrl-D ends the chat."
RESTART = (
    "or start again with a larger -c, or with --context-shift, which forgets the oldest questions"
)


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
        settings: AnswerSettings,
        write: Callable[[str], None],
    ):
        self.engine = engine
        self.conversation = conversation
        self.settings = settings
        self.write = write
        self.figures = Figures()
        self.last: Sequence | None = None  # whose pages are kept
        self.is_over = False

    def loop(self, first: str | None = None) -> Figures:
        """Answer `first`, then what the user says; the figures of all answers."""
        from . import commands  # later, because --help needs none of this
        from .line_editor import open_reader

        reader = open_reader(commands.names())
        if sys.stdin.isatty():
            self.remark(WELCOME)
        if first is not None:
            self.ask(first)
        while not self.is_over:
            try:
                self.handle(reader.read())
            except KeyboardInterrupt:
                self.remark("(/exit or Ctrl-D ends the chat)")
            except EOFError as end:
                if end.args:
                    self.refuse(str(end))
                break
            except BrokenPipeError:  # the reader of stdout has ended
                raise
            except (ValueError, OSError) as error:
                self.refuse(one_line(error))
        return self.figures

    def handle(self, text: str) -> None:
        """Do what a message says: a command, a question, or nothing; ValueError, OSError."""
        from . import commands

        if text.strip() and not commands.run(self, text):
            self.ask(text)

    def remark(self, text: str) -> None:
        """Say something that is not an answer."""
        print(text, file=sys.stderr, flush=True)

    def refuse(self, reason: str) -> None:
        """Say why something was not done."""
        self.remark(f"{PROGRAM}: error: {reason}")

    def ask(self, question: str) -> bool:
        """Answer a question; one that cannot be answered is taken back, and False returned."""
        self.conversation.say("user", question)
        try:
            answer = self.answer()
        except ValueError as error:  # too long for the context, or refused by the template
            self.conversation.take_back("user")
            self.refuse(one_line(error))
            return False
        self.conversation.say("assistant", answer)
        return True

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
        # On a terminal an empty line stands between an answer and the next question.
        self.write("\n\n" if sys.stdout.isatty() else "\n")
        if sequence and sequence.finish == "context":
            self.remark(
                f"(the context of {self.engine.n_ctx} tokens is full, and the answer ends here: "
                f"/clear forgets the conversation, {RESTART})"
            )
        return "".join(parts)

    def _sequence(self) -> Sequence:
        """A sequence that answers the conversation; ValueError says what the user can do."""
        from ..runtime.engine import ContextOverflow

        while True:
            ids = self.conversation.ids()
            try:
                return self.settings.add(self.engine, ids, previous=self.last, keep=True)
            except ContextOverflow:
                if not (self.settings.context_shift and self.conversation.forget_oldest()):
                    raise ValueError(self._overflow(len(ids))) from None

    def _overflow(self, n_tokens: int) -> str:
        n_ctx = self.engine.n_ctx
        questions = sum(message["role"] == "user" for message in self.conversation.messages)
        if questions > 1:
            return (
                f"the conversation has {n_tokens} tokens, the context {n_ctx}: /clear forgets the "
                f"conversation, {RESTART}"
            )
        return (
            f"the question has {n_tokens} tokens, the context {n_ctx}: ask a shorter one, or start "
            "again with a larger -c"
        )
