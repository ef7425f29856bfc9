"""What an answer's text turns out to be, piece by piece: text, reasoning, and calls of tools.

The parser makes them; what becomes of them is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of the answer that the user reads."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. index: 0 for the first call of an answer. name: a tool that was offered."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments: the fragments joined are an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. Its arguments are cut off where the answer was, at the token limit."""

    index: int


Delta = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd
