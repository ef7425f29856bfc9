"""The streaming parser: an answer's text in any pieces, the deltas that it consists of.

A format says which markers there are and which syntax stands between them. The parser never raises
for a text and never gives a part of a marker: what began like a call and is none is text, and a
call that is cut off ends with the arguments that came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .deltas import Delta, TextPart
from .reader import AnswerReader, MalformedCall, Steps, markers_pattern

if TYPE_CHECKING:
    from .chat_format import ChatFormat

_AFTER_CALL = re.compile(r"[\s\]}),;`]*")  # what models leave after a call, and no text begins with
_SPACE = re.compile(r"\s*")  # the same, where markers begin like that
_BETWEEN_CALLS = re.compile(r"[\s\[,;]*")


class ChatParser:
    """Takes the text of one answer. It must contain control tokens where the format needs them.

    tools: name -> JSON schema of the arguments; with None, calls stay text. reasoning: tell it from
    the text; else its markers stay text. reasoning_open: the prompt ended inside reasoning.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Mapping[str, Any] | None = None,
        reasoning: bool = True,
        reasoning_open: bool = False,
    ) -> None:
        self._format = chat_format
        self._reader = AnswerReader(tools)
        self._reasoning = reasoning and chat_format.has_reasoning
        self._in_reasoning = self._reasoning and reasoning_open
        plain = not chat_format.channels and not chat_format.begun
        self._as_it_is = tools is None and not self._reasoning and plain
        self._after_call = _SPACE if chat_format.section_close[:1] == "]" else _AFTER_CALL
        self._opener = ""  # of the call that is attempted
        self._steps = self._channels() if chat_format.channels else self._answer()

    def feed(self, text: str) -> list[Delta]:
        """The deltas that are certain with this piece of text."""
        if self._as_it_is:
            return [TextPart(text)] if text else []
        self._reader.append(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """The deltas of what was held back, and the end of an open call. Nothing is fed then."""
        if self._as_it_is:
            return []
        self._reader.closed = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._reader.deltas = self._reader.deltas, []
        return deltas

    # An answer: reasoning, then text with calls in it.

    def _answer(self) -> Steps[None]:
        reader = self._reader
        if self._reasoning:
            yield from self._begin_with_reasoning()
        if self._format.begun:
            yield from self._after_begun()
        yield from self._bare_calls()
        openers = self._openers()
        while (opener := (yield from self._text_until(openers))) is not None:
            if opener in self._format.dropped:
                reader.end_of_part()
                yield from self._bare_calls()
                continue
            if self._reasoning and opener == self._format.reasoning_open:
                reader.end_of_part()
                yield from self._think()
            else:
                reader.attempt(len(opener))
                yield from self._calls(opener)
        reader.end()

    def _openers(self) -> tuple[str, ...]:
        chat_format = self._format
        calls = chat_format.openers if self._reader.tools is not None else ()
        again = self._reasoning and chat_format.reasoning_anywhere
        thoughts = (chat_format.reasoning_open,) if again else ()
        return (*calls, *thoughts, *chat_format.dropped)

    def _text_until(self, markers: tuple[str, ...]) -> Steps[str | None]:
        """Give text up to a marker, which is read; None at the end."""
        reader = self._reader
        pattern = markers_pattern(markers) if markers else None
        while True:
            match = pattern.search(reader.text, reader.pos) if pattern else None
            end = match.start() if match else len(reader.text)
            reader.say(reader.text[reader.pos : end])
            reader.pos = end
            if match and match[1]:
                reader.pos = match.end()
                return match[1]
            if not (yield from reader.more()):
                reader.say(reader.text[reader.pos :])
                reader.pos = len(reader.text)
                return None

    # Reasoning

    def _begin_with_reasoning(self) -> Steps[None]:
        reader, opener = self._reader, self._format.reasoning_open
        reader.attempt()
        yield from reader.space()
        opened = bool(opener) and (yield from reader.accept(opener))
        if opened or self._in_reasoning:
            reader.settle()
            reader.end_of_part()
            yield from self._think()
        elif (yield from reader.accept(self._format.reasoning_close)):  # of none at all
            reader.settle()
            reader.end_of_part()
        else:
            reader.rewind(0)

    def _think(self) -> Steps[None]:
        """Reasoning up to its closing marker, without white space around it."""
        reader, held, begun = self._reader, "", False
        pattern = markers_pattern((self._format.reasoning_close,))
        while True:
            match = pattern.search(reader.text, reader.pos)
            end = match.start() if match else len(reader.text)
            text = held + reader.text[reader.pos : end]
            reader.pos = end
            text = text if begun else text.lstrip()
            body = text.rstrip()
            begun, held = begun or bool(body), text[len(body) :]
            reader.think(body)
            if match and match[1]:
                reader.pos = match.end()
                break
            if not (yield from reader.more()):
                if rest := reader.text[reader.pos :]:
                    reader.think(held + rest)
                reader.pos = len(reader.text)
                break
        reader.end_of_part()

    # Calls

    def _bare_calls(self) -> Steps[None]:
        """Calls without a marker are the whole answer, so they stand at its beginning, or after a
        marker that says nothing.
        """
        reader = self._reader
        if reader.tools is None or not self._format.bare_calls:
            return
        reader.attempt()
        yield from reader.space()
        first = yield from reader.peek()
        if first and first in self._format.bare_calls:
            yield from self._calls("")
        else:
            reader.rewind(0)

    def _after_begun(self) -> Steps[None]:
        """What the answer begins with, where the prompt has written the first of its marker."""
        reader, begun = self._reader, self._format.begun
        for marker in self._format.dropped:
            reader.attempt()
            if marker.startswith(begun) and (yield from reader.accept(marker[len(begun) :])):
                reader.settle()
                return
            reader.rewind(0)
        if reader.tools is not None and self._format.call_open == begun:
            reader.attempt()
            yield from self._calls("")

    def _calls(self, opener: str) -> Steps[None]:
        """Calls after an opener. The opener of what is no call is text; the rest is read again."""
        reader = self._reader
        self._opener = opener
        try:
            yield from self._several(opener)
        except MalformedCall:
            if reader.attempting:
                reader.rewind(len(self._opener))
                reader.say(self._opener)
                return
            reader.end_call()
            reader.end_of_part()
            if reader.starved:
                reader.pos = len(reader.text)

    def _several(self, opener: str) -> Steps[None]:
        """Calls, from after an opener to after what closes them."""
        reader, chat_format = self._reader, self._format
        opened = not chat_format.section_open or opener != chat_format.section_open
        while True:
            yield from reader.skip(_BETWEEN_CALLS)
            if chat_format.call_open and not opened:
                yield from reader.expect(chat_format.call_open)
                yield from reader.space()
            yield from chat_format.read_call(reader)
            left = yield from reader.skip(self._after_call)
            closed = yield from self._close(chat_format.call_close)
            yield from reader.skip(self._after_call)
            if (yield from self._close(chat_format.section_close)):
                return
            reader.attempt()
            self._opener = chat_format.call_open
            if (yield from self._text_follows()):
                break
            if not (yield from self._close(chat_format.call_open)):
                self._opener = ""
                if closed or not (yield from self._another(left)):
                    break
            opened = True
        reader.rewind(0)

    def _text_follows(self) -> Steps[bool]:
        """Whether what looks like the opener of a call is a marker of text."""
        opener = self._format.call_open
        for marker in self._format.dropped:
            if opener and marker.startswith(opener) and (yield from self._reader.accept(marker)):
                return True
        return False

    def _close(self, marker: str) -> Steps[bool]:
        return bool(marker) and (yield from self._reader.accept(marker))

    def _another(self, left: str) -> Steps[bool]:
        """Whether a further call follows without an opener, after what was `left` by the last."""
        following = yield from self._reader.peek()
        return bool(following) and self._format.continues(left, following)

    # Several messages, as of harmony

    def _channels(self) -> Steps[None]:
        if self._format.channels is not None:
            yield from self._format.channels.read(self._reader, self._reasoning)
        self._reader.end()
