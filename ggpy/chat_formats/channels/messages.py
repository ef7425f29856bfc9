"""Answers that are several messages: a header up to <|message|>, a body, and an end.

A header says what its message is: reasoning, text, or a call. The markers are control tokens, so
the text must contain those. What a header says is left to the formats: harmony.py, recipients.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..json_calls import Emit
from ..reader import MAX_HEADER, AnswerReader, MalformedCall, Steps, markers_pattern

START, MESSAGE = "<|start|>", "<|message|>"
_HEADER = re.compile(r"\s*(<\||to=|assistant)")


@dataclass(frozen=True)
class Messages:
    """A format of such answers.

    begins: markers that end a body and begin the header of the next message; ends: all that end a
    body. thought_open, thought_close: around reasoning; thought_header: pattern of all up to
    <|message|> that begins reasoning; text_headers: what may stand before text, for a grammar;
    between: after reasoning, and with thought_close between two calls if `several` calls may stand
    in one answer.
    """

    markers: ClassVar[tuple[str, ...]]
    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]]
    thought_open: ClassVar[str]
    thought_close: ClassVar[str]
    thought_header: ClassVar[str]
    text_headers: ClassVar[tuple[str, ...]]
    between: ClassVar[str] = f"{START}assistant"
    several: ClassVar[bool] = False

    def call_headers(self, name: str) -> tuple[str, ...]:
        """What may stand before the arguments of a call, for a grammar."""
        raise NotImplementedError

    def call_end(self) -> str:
        """What stands after the arguments of a call, for a grammar."""
        return ""

    def read(self, reader: AnswerReader, reasoning: bool) -> Steps[None]:
        """A whole answer with its deltas. `reasoning`: tell it from the text."""
        before = ""  # the marker that ended the last message, if it begins a header
        while (yield from reader.peek()):
            header = yield from self._header(reader, before)
            if header:
                ended = yield from self._message(reader, before + header, reasoning)
            elif reader.starved and (before or reader.text.startswith("<|", reader.pos)):
                reader.pos = len(reader.text)  # cut off amid a header
                return
            else:
                reader.say(before)
                ended = yield from self._body(reader, reader.say)
            before = ended if ended in self.begins else ""

    def _header(self, reader: AnswerReader, before: str) -> Steps[str]:
        """All up to <|message|>; "" where other text follows, or no more."""
        if not before:
            beginning = yield from reader.peek(len("assistant"))
            if beginning.strip() and not _HEADER.match(beginning):
                return ""
        reader.attempt()
        try:
            text, _ = yield from reader.until((MESSAGE,), MAX_HEADER)
        except MalformedCall:
            reader.rewind(0)
            return ""
        reader.settle()
        return text + MESSAGE

    def _message(self, reader: AnswerReader, header: str, reasoning: bool) -> Steps[str]:
        """The message after a header; the marker that ends it, or "" at the end."""
        raise NotImplementedError

    def _thought(self, reader: AnswerReader, header: str, reasoning: bool) -> Steps[str]:
        """A message of reasoning, which is text with its markers where it is not told apart."""
        if reasoning:
            return (yield from self._body(reader, reader.think))
        reader.say(header)
        ended = yield from self._body(reader, reader.say)
        if ended == self.thought_close:
            reader.say(ended)
        return ended

    def _text(self, reader: AnswerReader) -> Steps[str]:
        ended = yield from self._body(reader, reader.say)
        reader.end_of_part()
        return ended

    def _ignored(self, reader: AnswerReader) -> Steps[str]:
        """What follows a call in its message."""
        return (yield from self._body(reader, lambda _: None))

    def _body(self, reader: AnswerReader, emit: Emit) -> Steps[str]:
        """Text up to what ends a message, given to `emit`; the marker, or "" at the end."""
        pattern = markers_pattern(self.ends)
        while True:
            match = pattern.search(reader.text, reader.pos)
            end = match.start() if match else len(reader.text)
            emit(reader.text[reader.pos : end])
            reader.pos = end
            if match and match[1]:
                reader.pos = match.end()
                return match[1]
            if not (yield from reader.more()):
                emit(reader.text[reader.pos :])
                reader.pos = len(reader.text)
                return ""
