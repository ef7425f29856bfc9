"""Answers in messages to someone, as Muse Glimmer writes them: to=self, to=user, or to=TOOL.

What goes to the model itself is reasoning; what goes to a tool has calls in tags, whose values are
plain text. A message without a recipient goes to the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..reader import AnswerReader, MalformedCall, Steps
from ..xml_calls import Tags
from .messages import MESSAGE, START, Messages

MORE, END = "<|eom|>", "<|eot|>"  # of a message that others follow, and of the last one
CALLS_OPEN, CALLS_CLOSE = "<atem:function_calls>", "</atem:function_calls>"
CALL_OPEN = '<atem:invoke name="'
ATEM = Tags('">', '<atem:parameter name="', '">', "</atem:parameter>", ("</atem:invoke>",))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class Recipients(Messages):
    """The messages of Muse Glimmer, with ATEM's tags for calls."""

    markers: ClassVar[tuple[str, ...]] = (
        *(START, MESSAGE, MORE, END, CALLS_OPEN, CALLS_CLOSE, CALL_OPEN),
        *(ATEM.key_open, ATEM.value_close, *ATEM.closers),
    )
    begins: ClassVar[tuple[str, ...]] = (START,)
    ends: ClassVar[tuple[str, ...]] = (MORE, END, START)
    thought_open: ClassVar[str] = f" to=self{MESSAGE}"
    thought_close: ClassVar[str] = MORE
    thought_header: ClassVar[str] = r"\bto=self\s*"
    text_headers: ClassVar[tuple[str, ...]] = (f" to=user{MESSAGE}",)
    several: ClassVar[bool] = True

    def call_headers(self, name: str) -> tuple[str, ...]:
        """All before the tool's name in its tag."""
        return (f" to={name}{MESSAGE}{CALLS_OPEN}\n{CALL_OPEN}",)

    def call_end(self) -> str:
        """Each message has one call."""
        return f"\n{CALLS_CLOSE}"

    def _message(self, reader: AnswerReader, header: str, reasoning: bool) -> Steps[str]:
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else "user"
        if recipient == "self":
            return (yield from self._thought(reader, header, reasoning))
        if recipient != "user" and reader.tools is not None and (yield from self._calls(reader)):
            return (yield from self._ignored(reader))
        return (yield from self._text(reader))

    def _calls(self, reader: AnswerReader) -> Steps[bool]:
        """The calls of a message; False where text follows, because there was none."""
        reader.attempt()
        try:
            yield from reader.space()
            yield from reader.expect(CALLS_OPEN)
            yield from reader.space()
            yield from reader.expect(CALL_OPEN)
            while True:
                yield from ATEM.read(reader)
                reader.attempt()
                yield from reader.space()
                if not (yield from reader.accept(CALL_OPEN)):
                    break
        except MalformedCall:
            if reader.attempting:
                reader.rewind(0)
                return False
            reader.end_call()
            return True
        reader.settle()
        return True
