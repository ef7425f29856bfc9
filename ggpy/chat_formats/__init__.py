"""How models write tool calls and reasoning, and a streaming parser that tells them from text.

`detect` finds the format of a chat template, `ChatFormat.parser` makes a parser of one answer, and
`call_grammar` writes the grammar that forces calls. Nothing here knows HTTP or the engine.
"""

from __future__ import annotations

from .chat_format import ChatFormat
from .deltas import CallArguments, CallBegin, CallEnd, Delta, ReasoningPart, TextPart
from .detect import NAMES, by_name, detect
from .parser import ChatParser
from .reasoning.budget import reasoning_budget
from .reasoning.limit import ReasoningLimit, mask_and_split
from .written import can_write, with_written_calls

__all__ = [
    "NAMES",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatFormat",
    "ChatParser",
    "Delta",
    "ReasoningLimit",
    "ReasoningPart",
    "TextPart",
    "by_name",
    "can_write",
    "detect",
    "mask_and_split",
    "reasoning_budget",
    "with_written_calls",
]
