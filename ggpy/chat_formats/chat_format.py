"""What is known of one chat format: its markers, the syntax between them, how calls are written.

The table has a `ChatFormat` for each family of models. Nothing here knows a template or a server.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .channels.messages import Messages
from .json_calls import JsonObjects, NameThenJson
from .nested_tags import NestedTags
from .parser import ChatParser
from .python_calls import GemmaCalls, PythonCalls
from .reader import AnswerReader, Steps
from .xml_calls import Tags

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Syntax = JsonObjects | NameThenJson | Tags | NestedTags | PythonCalls | GemmaCalls


_INSTRUCTIONS = (
    'To call a tool, answer with a JSON object alone: {"tool_call": {"name": NAME, "arguments":'
    " {...}}}. Otherwise answer in plain text. Tools: "
)


@dataclass(frozen=True)
class ChatFormat:
    """How one family of models writes an answer.

    section_open, section_close: around all calls; call_open, call_close: around each; "" is none.
    bare_calls: first characters of calls that stand at the beginning without an opener.
    section_gap: white space between the markers of a section and its calls; call_gap: what is
    written after call_open and before call_close; between: what is written between calls;
    listed: calls stand in a list; section_each: every call has a section.
    hints: texts by which a prompt with tools shows the format, besides its openers.
    also: further markers. dropped: markers around text that say nothing.
    reasoning_anywhere: reasoning stands after text too, not at the beginning alone.
    after_reasoning: what a call that follows reasoning must have before it; "" is white space.
    reasoning_opened: whether the template's generation prompt ends inside reasoning.
    begun: a marker that the generation prompt ends with, so that the answer begins after it.
    channels: the answer is several messages, which have markers of their own.
    needs_instructions: the template says nothing of tools, so a system message must.
    """

    name: str
    syntax: Syntax | None = None
    section_open: str = ""
    section_close: str = ""
    call_open: str = ""
    call_close: str = ""
    bare_calls: str = ""
    section_gap: str = ""
    call_gap: tuple[str, str] = ("", "")
    between: str = ""
    listed: bool = False
    section_each: bool = False
    reasoning_open: str = "<think>"
    reasoning_close: str = "</think>"
    reasoning_anywhere: bool = False
    after_reasoning: str = ""
    reasoning_opened: bool = False
    begun: str = ""
    channels: Messages | None = None
    hints: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    needs_instructions: bool = False

    def parser(
        self,
        tools: Mapping[str, Any] | None = None,
        reasoning: bool = True,
        reasoning_open: bool | None = None,
    ) -> ChatParser:
        """A parser of one answer. tools: name -> JSON schema of its arguments; None: no calls.

        reasoning_open: whether the prompt ended inside reasoning (`opens_reasoning`); None is as
        the template does by default.
        """
        opened = self.reasoning_opened if reasoning_open is None else reasoning_open
        return ChatParser(self, tools, reasoning, opened)

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be told from the text."""
        return bool(self.reasoning_close) or self.channels is not None

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers after which a call may stand."""
        if self.syntax is None:
            return ()
        return tuple(m for m in (self.section_open, self.call_open) if m)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        if self.channels is not None:
            return self.channels.markers
        texts = [self.section_open, self.section_close, self.call_open, self.call_close]
        texts += [self.reasoning_open, self.reasoning_close]
        texts += [*self.also, *self.dropped]
        for name in ("opener", "quote", "key_open", "key_close", "value_open", "value_close"):
            texts.append(getattr(self.syntax, name, ""))
        texts += getattr(self.syntax, "closers", ())
        return tuple(dict.fromkeys(t.strip() for t in texts if t.strip()))

    def read_call(self, reader: AnswerReader) -> Steps[None]:
        """One call of the format's syntax, read from after its opener."""
        if self.syntax is not None:
            yield from self.syntax.read(reader)

    def continues(self, left: str, following: str) -> bool:
        """Whether a call without an opener follows another: `left` stands between them."""
        syntax = self.syntax
        return isinstance(syntax, JsonObjects | PythonCalls) and syntax.continues(left, following)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the answer begins there."""
        return bool(self.reasoning_open) and prompt.rstrip().endswith(self.reasoning_open)

    def without_reasoning(self, prompt: str) -> str:
        """The rendered prompt; if it ends inside reasoning, that is closed, and empty."""
        if not self.opens_reasoning(prompt):
            return prompt
        return f"{prompt.rstrip()}\n\n{self.reasoning_close}\n\n"

    def control_markers(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Markers that are one control token of the vocabulary, with its id."""
        found = {}
        for marker in self.markers:
            ids = tokenizer.encode(marker, add_special=False, parse_special=True)
            if len(ids) == 1 and not tokenizer.piece(ids[0]) and tokenizer.piece(ids[0], True):
                found[marker] = ids[0]
        return found

    def fitted(self, special: Collection[str]) -> ChatFormat:
        """The format without the end of a section that a model does not have, though it has the
        beginning. special: markers that are control tokens.
        """
        missing = self.section_open in special and self.section_close not in special
        return replace(self, section_close="") if missing and self.section_close else self

    def needs_special(self, tokenizer: Tokenizer) -> bool:
        """Whether the answer's text must contain control tokens, because markers are some."""
        return bool(self.control_markers(tokenizer))

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message must say of tools, where the template says nothing; else ""."""
        return _INSTRUCTIONS + json.dumps(list(tools)) if self.needs_instructions else ""

    def with_reasoning(self, opener: str, closer: str, opened: bool) -> ChatFormat:
        """The format with other markers of reasoning."""
        return replace(self, reasoning_open=opener, reasoning_close=closer, reasoning_opened=opened)
