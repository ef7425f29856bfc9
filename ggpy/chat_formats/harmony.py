"""Answers in channels, as gpt-oss writes them: a header, <|message|>, a body, and an end.

The header names the channel (analysis is reasoning) and, for a call, the tool it goes to. The
markers are control tokens, so the text must contain those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .json_calls import Emit, json_value
from .reader import MAX_HEADER, AnswerReader, MalformedCall, Steps, markers_pattern

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
_ENDS = (END, RETURN, CALL, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_HEADER = re.compile(r"\s*(<\||to=|assistant)")


@dataclass(frozen=True)
class Harmony:
    """The channels of harmony, the format of gpt-oss."""

    def read(self, reader: AnswerReader, reasoning: bool) -> Steps[None]:
        """A whole answer with its deltas. `reasoning`: tell analysis from the text."""
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
            before = ended if ended in (START, CHANNEL) else ""

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
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and reader.tools is not None and recipient[1] in reader.tools:
            return (yield from self._call(reader, recipient[1]))
        if not channel or channel[1] != "analysis":
            ended = yield from self._body(reader, reader.say)
            reader.end_of_part()
            return ended
        if reasoning:
            return (yield from self._body(reader, reader.think))
        reader.say(header)
        ended = yield from self._body(reader, reader.say)
        if ended == END:
            reader.say(ended)
        return ended

    def _call(self, reader: AnswerReader, name: str) -> Steps[str]:
        reader.begin_call(name)
        try:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                yield from json_value(reader, reader.argue)
        except MalformedCall:
            pass
        reader.end_call()
        return (yield from self._body(reader, lambda _: None))

    def _body(self, reader: AnswerReader, emit: Emit) -> Steps[str]:
        """Text up to what ends a message, given to `emit`; the marker, or "" at the end."""
        pattern = markers_pattern(_ENDS)
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
