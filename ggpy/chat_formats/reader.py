"""Text that arrives in pieces, read by generators that wait for more, and the deltas made of it.

A generator here consumes text and yields where it needs more, so what reads one syntax is written
as if the whole answer were there. It must not keep an index into `AnswerReader.text` over a yield:
text that was read is dropped between pieces. Nothing here knows a syntax.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from .deltas import CallArguments, CallBegin, CallEnd, Delta, ReasoningPart, TextPart

T = TypeVar("T")
Steps = Generator[None, None, T]
_SPACE = re.compile(r"\s*")
MAX_HEADER = 256  # characters of a name, of a key, of what stands around them


class MalformedCall(Exception):
    """What began like a call is none; the reader goes back to where it began."""


@lru_cache(maxsize=1024)
def markers_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of `markers` (group 1), or what may begin one at the end of the text."""
    longest_first = sorted(set(markers), key=len, reverse=True)
    whole = "|".join(re.escape(marker) for marker in longest_first)
    begun = "|".join(_begun(marker) for marker in longest_first if len(marker) > 1)
    return re.compile(f"({whole})|(?:{begun})\\Z" if begun else f"({whole})")


def _begun(marker: str) -> str:
    """A pattern of the beginnings of a marker, the longest that fits."""
    tail = ""
    for char in reversed(marker[1:-1]):
        tail = f"(?:{re.escape(char)}{tail})?"
    return re.escape(marker[0]) + tail


class AnswerReader:
    """The text of one answer. tools: name -> JSON schema of its arguments; None reads no calls."""

    def __init__(self, tools: Mapping[str, Any] | None) -> None:
        self.tools = tools
        self.text, self.pos = "", 0
        self.closed = False  # no more text comes
        self.starved = False  # something waited for text that does not come
        self.deltas: list[Delta] = []
        self.open_call = False  # a call has begun, and has not ended
        self._n_calls = 0
        self._attempt: int | None = None  # where a call may have begun: text from there is kept
        self._held = ""  # white space after text, which a call would swallow
        self._skip_space = False

    def append(self, text: str) -> None:
        """Take more text, drop what was read."""
        cut = self.pos if self._attempt is None else self._attempt
        self.text = self.text[cut:] + text
        self.pos -= cut
        if self._attempt is not None:
            self._attempt = 0

    # Deltas

    def say(self, text: str) -> None:
        """The answer's text; white space at its end waits for what comes."""
        if self._skip_space:
            text = text.lstrip()
        if not text:
            return
        self._skip_space = False
        body = text.rstrip()
        if body:
            self._merge(TextPart(self._held + body))
            self._held = text[len(body) :]
        else:
            self._held += text

    def think(self, text: str) -> None:
        """More reasoning."""
        if text:
            self._merge(ReasoningPart(text))

    def end_of_part(self) -> None:
        """White space around a marker belongs to no text."""
        self._held, self._skip_space = "", True

    def begin_call(self, name: str) -> None:
        """A call of a known tool: from now on it is one, whatever follows."""
        self.end_of_part()
        self._attempt = None
        self.open_call = True
        self.deltas.append(CallBegin(self._n_calls, name))

    def argue(self, text: str) -> None:
        """More JSON of the open call's arguments."""
        if text:
            self._merge(CallArguments(self._n_calls, text))

    def end_call(self) -> None:
        """The open call ends."""
        self.deltas.append(CallEnd(self._n_calls))
        self._n_calls += 1
        self.open_call = False

    def end(self) -> None:
        """The answer ends: what was held back is text."""
        if self.open_call:
            self.end_call()
        if self._held:
            self._merge(TextPart(self._held))
            self._held = ""

    def _merge(self, delta: TextPart | ReasoningPart | CallArguments) -> None:
        last = self.deltas[-1] if self.deltas else None
        if isinstance(last, type(delta)):
            self.deltas[-1] = replace(delta, text=last.text + delta.text)
        else:
            self.deltas.append(delta)

    # Attempts at calls

    def attempt(self, back: int = 0) -> None:
        """What was read from `back` characters ago may be a call: keep it until that is sure."""
        if self._attempt is None:
            self._attempt = self.pos - back

    def settle(self) -> None:
        """The attempt succeeded: what was read stays read."""
        self._attempt = None

    def rewind(self, length: int) -> None:
        """Go back to `length` characters after the beginning of the attempt, which ends."""
        assert self._attempt is not None
        self.pos, self._attempt = self._attempt + length, None

    @property
    def attempting(self) -> bool:
        """Whether text is kept as a possible call."""
        return self._attempt is not None

    def known(self, name: str) -> str:
        """The name, if it is a tool's; else MalformedCall."""
        if self.tools is None or name not in self.tools:
            raise MalformedCall(f"no tool {name!r:.60}")
        return name

    # Reading

    def more(self) -> Steps[bool]:
        """Wait for more text; False where none comes."""
        if self.closed:
            self.starved = True
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, fewer at the end."""
        while len(self.text) - self.pos < count:
            if not (yield from self.more()):
                break
        return self.text[self.pos : self.pos + count]

    def space(self) -> Steps[None]:
        """Skip white space."""
        yield from self.skip(_SPACE)

    def skip(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Skip a run of characters that `pattern` matches; what it was."""
        skipped = ""
        while True:
            match = pattern.match(self.text, self.pos)
            if match:
                skipped += match[0]
                self.pos = match.end()
            if self.pos < len(self.text) or not (yield from self.more()):
                return skipped

    def accept(self, literal: str) -> Steps[bool]:
        """Read `literal` if it is next."""
        while True:
            there = self.text[self.pos : self.pos + len(literal)]
            if len(there) == len(literal) or not literal.startswith(there):
                break
            if not (yield from self.more()):
                return False
        if there == literal:
            self.pos += len(literal)
            return True
        return False

    def expect(self, literal: str) -> Steps[None]:
        """Read `literal`; MalformedCall if something else is next."""
        if not (yield from self.accept(literal)):
            raise MalformedCall(f"no {literal!r}")

    def until(self, markers: tuple[str, ...], most: int | None = None) -> Steps[tuple[str, str]]:
        """Text up to the first of `markers`, and which one, which is read too.

        MalformedCall where none comes, or not within `most` characters.
        """
        pattern, seen = markers_pattern(markers), 0
        while True:
            match = pattern.search(self.text, self.pos + seen)
            if match and match[1] and (most is None or match.start() - self.pos <= most):
                text = self.text[self.pos : match.start()]
                self.pos = match.end()
                return text, match[1]
            seen = (match.start() if match else len(self.text)) - self.pos
            if (most is not None and seen > most) or not (yield from self.more()):
                raise MalformedCall(f"no {markers[0]!r}")
