"""Answers in channels, as gpt-oss writes them.

A header names the channel (analysis is reasoning) and, for a call, the tool it goes to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..json_calls import json_value
from ..reader import AnswerReader, MalformedCall, Steps
from .messages import MESSAGE, START, Messages

CHANNEL, CONSTRAIN, END = "<|channel|>", "<|constrain|>", "<|end|>"
RETURN, CALL = "<|return|>", "<|call|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(frozen=True)
class Harmony(Messages):
    """The channels of harmony, the format of gpt-oss. An answer has one call."""

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
    begins: ClassVar[tuple[str, ...]] = (START, CHANNEL)
    ends: ClassVar[tuple[str, ...]] = (END, RETURN, CALL, START, CHANNEL)
    thought_open: ClassVar[str] = f"{CHANNEL}analysis{MESSAGE}"
    thought_close: ClassVar[str] = END
    thought_header: ClassVar[str] = r"<\|channel\|>\s*analysis\s*"
    text_headers: ClassVar[tuple[str, ...]] = (
        f"{CHANNEL}final{MESSAGE}",
        f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}",
    )

    def call_headers(self, name: str) -> tuple[str, ...]:
        """The channel with the tool, or the role with it."""
        return (
            f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}",
            f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}",
        )

    def _message(self, reader: AnswerReader, header: str, reasoning: bool) -> Steps[str]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and reader.tools is not None and recipient[1] in reader.tools:
            return (yield from self._call(reader, recipient[1]))
        if channel and channel[1] == "analysis":
            return (yield from self._thought(reader, header, reasoning))
        return (yield from self._text(reader))

    def _call(self, reader: AnswerReader, name: str) -> Steps[str]:
        reader.begin_call(name)
        try:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                yield from json_value(reader, reader.argue)
        except MalformedCall:
            pass
        reader.end_call()
        return (yield from self._ignored(reader))
