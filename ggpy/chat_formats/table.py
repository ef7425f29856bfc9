"""The table of chat formats: how families of models mark reasoning and calls of tools.

A row says which markers there are, which syntax stands between them, and how a grammar writes them.
A further format is a row here. Nothing here knows a template or a server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import harmony
from .harmony import Harmony
from .json_calls import JsonObjects, NameThenJson
from .parser import ChatParser
from .python_calls import GemmaCalls, PythonCalls
from .reader import Reader, Steps
from .xml_calls import KeyedTags, Tags

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Syntax = JsonObjects | NameThenJson | Tags | PythonCalls | GemmaCalls


@dataclass(frozen=True)
class ChatFormat:
    """How one family of models writes an answer.

    section_open, section_close: around all calls; call_open, call_close: around each; "" is none.
    bare_calls: first characters of calls that stand at the beginning without an opener.
    gap: white space that is written between the markers of a call and the call, between: between
    calls; listed: calls stand in a JSON list. hints: texts by which a prompt with tools shows the
    format, besides its openers. also: further markers. dropped: markers around text that say
    nothing.
    reasoning_opened: whether the template's generation prompt ends inside reasoning.
    """

    name: str
    syntax: Syntax | None = None
    section_open: str = ""
    section_close: str = ""
    call_open: str = ""
    call_close: str = ""
    bare_calls: str = ""
    gap: str = ""
    between: str = ""
    listed: bool = False
    reasoning_open: str = "<think>"
    reasoning_close: str = "</think>"
    reasoning_anywhere: bool = False
    reasoning_opened: bool = False
    channels: Harmony | None = None
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
        """Markers behind which a call may stand."""
        if self.syntax is None:
            return ()
        return tuple(m for m in (self.section_open, self.call_open) if m)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        if self.channels is not None:
            return harmony.MARKERS
        texts = [self.section_open, self.section_close, self.call_open, self.call_close]
        texts += [self.reasoning_open, self.reasoning_close]
        texts += [*self.also, *self.dropped]
        for name in ("opener", "quote", "key_open", "key_close", "value_open", "value_close"):
            texts.append(getattr(self.syntax, name, ""))
        texts += getattr(self.syntax, "closers", ())
        return tuple(dict.fromkeys(t.strip() for t in texts if t.strip()))

    def read_call(self, reader: Reader) -> Steps[None]:
        """One call of the format's syntax, read from behind its opener."""
        if self.syntax is not None:
            yield from self.syntax.read(reader)

    def continues(self, left: str, following: str) -> bool:
        """Whether a call without an opener follows another: `left` stands between them."""
        if isinstance(self.syntax, JsonObjects):
            return following == "{" and "]" not in left
        if isinstance(self.syntax, PythonCalls):
            return ("," in left or "\n" in left) and "]" not in left
        return False

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the answer begins there."""
        return bool(self.reasoning_open) and prompt.rstrip().endswith(self.reasoning_open)

    def control_markers(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Markers that are one control token of the vocabulary, with its id."""
        found = {}
        for marker in self.markers:
            ids = tokenizer.encode(marker, add_special=False, parse_special=True)
            if len(ids) == 1 and not tokenizer.piece(ids[0]) and tokenizer.piece(ids[0], True):
                found[marker] = ids[0]
        return found

    def needs_special(self, tokenizer: Tokenizer) -> bool:
        """Whether the answer's text must contain control tokens, because markers are some."""
        return bool(self.control_markers(tokenizer))

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message must say of tools, where the template says nothing; else ""."""
        return _INSTRUCTIONS + json.dumps(list(tools)) if self.needs_instructions else ""

    def with_reasoning(self, opener: str, closer: str, opened: bool) -> ChatFormat:
        """The format with other markers of reasoning."""
        return replace(self, reasoning_open=opener, reasoning_close=closer, reasoning_opened=opened)


_INSTRUCTIONS = (
    'To call a tool, answer with a JSON object alone: {"tool_call": {"name": NAME, "arguments":'
    " {...}}}. Otherwise answer in plain text. Tools: "
)
_FUNCTION_LINES = Tags(
    ">", "<parameter=", ">", "</parameter>", ("</function>", "</tool_call>"), lines=True
)
_INVOKE = Tags('">', '<parameter name="', '">', "</parameter>", ("</invoke>",))
_DSML = Tags(
    '">',
    '<\uff5cDSML\uff5cparameter name="',
    ">",
    "</\uff5cDSML\uff5cparameter>",
    ("</\uff5cDSML\uff5cinvoke>",),
    key=r'(?P<key>[^"]*)"(?: string="(?P<string>true|false)")?\s*',
    written_key='{key}" string="{string}"',
)
_DEEPSEEK = {
    "section_open": "<\uff5ctool▁calls▁begin\uff5c>",
    "section_close": "<\uff5ctool▁calls▁end\uff5c>",
    "call_open": "<\uff5ctool▁call▁begin\uff5c>",
    "call_close": "<\uff5ctool▁call▁end\uff5c>",
    "also": ("<\uff5ctool▁sep\uff5c>",),
}
_GLM = KeyedTags(
    "",
    "<arg_key>",
    "</arg_key>",
    "</arg_value>",
    ("</tool_call>",),
    value_open="<arg_value>",
    bare_name=True,
)


def _rows() -> tuple[ChatFormat, ...]:
    objects = JsonObjects()
    return (
        ChatFormat("hermes", objects, call_open="<tool_call>", call_close="</tool_call>",
                   gap="\n", between="\n"),
        ChatFormat("qwen3-coder", _FUNCTION_LINES, "<tool_call>", "</tool_call>", "<function=",
                   gap="\n", between="\n"),
        ChatFormat("seed-oss", replace(_FUNCTION_LINES, closers=("</function>",)),
                   "<seed:tool_call>", "</seed:tool_call>", "<function=", gap="\n", between="\n",
                   reasoning_open="<seed:think>", reasoning_close="</seed:think>"),
        ChatFormat("mistral", objects, "[TOOL_CALLS]", listed=True, between=", ",
                   reasoning_open="[THINK]", reasoning_close="[/THINK]"),
        ChatFormat("mistral-args",
                   NameThenJson("[ARGS]", r"\s*(?P<name>[^\s\[]+)\s*(?:\[CALL_ID\].*)?"),
                   call_open="[TOOL_CALLS]", also=("[CALL_ID]",),
                   reasoning_open="[THINK]", reasoning_close="[/THINK]"),
        ChatFormat("llama3", JsonObjects(first=("name", "type", "function", "id", "parameters",
                                                "arguments")),
                   call_open="<|python_tag|>", bare_calls="{", between="; "),
        ChatFormat("pythonic", PythonCalls(), "<|python_start|>", "<|python_end|>",
                   bare_calls="[", listed=True, between=", "),
        ChatFormat("lfm2", PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>",
                   listed=True, between=", ", hints=("<|tool_list_start|>",)),
        ChatFormat("harmony", objects, reasoning_open="", reasoning_close="", channels=Harmony()),
        ChatFormat("gemma3", PythonCalls(), "```tool_code", "```", bare_calls="[", gap="\n",
                   between="\n", hints=("tool_code",)),
        ChatFormat("gemma4", GemmaCalls(), call_open="<|tool_call>", call_close="<tool_call|>",
                   reasoning_open="<|channel>thought", reasoning_close="<channel|>",
                   reasoning_anywhere=True, also=("<|channel>",), dropped=("<|tool_response>",)),
        ChatFormat("glm", _GLM, call_open="<tool_call>", gap="\n", between="\n"),
        ChatFormat("deepseek-r1",
                   NameThenJson("\n```json\n", r"\w*<\uff5ctool▁sep\uff5c>(?P<name>\S+)",
                                "function<\uff5ctool▁sep\uff5c>{name}"),
                   gap="\n```", between="\n", **_DEEPSEEK),  # type: ignore[arg-type]
        ChatFormat("deepseek-v3.1", NameThenJson("<\uff5ctool▁sep\uff5c>"), **_DEEPSEEK),  # type: ignore[arg-type]
        ChatFormat("deepseek-v3.2", _DSML, "<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>",
                   '<\uff5cDSML\uff5cinvoke name="', gap="\n", between="\n", also=("\uff5cDSML\uff5c",)),
        ChatFormat("deepseek-v4", _DSML, "<\uff5cDSML\uff5ctool_calls>", "</\uff5cDSML\uff5ctool_calls>",
                   '<\uff5cDSML\uff5cinvoke name="', gap="\n", between="\n", also=("\uff5cDSML\uff5c",)),
        ChatFormat("kimi-k2",
                   NameThenJson("<|tool_call_argument_begin|>",
                                r"\s*(?:functions\.)?(?P<name>\S+?)(?::\d+)?\s*",
                                "functions.{name}:0"),
                   "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                   "<|tool_call_begin|>", "<|tool_call_end|>"),
        ChatFormat("minimax-m2", _INVOKE, "<minimax:tool_call>", "</minimax:tool_call>",
                   '<invoke name="', gap="\n", between="\n"),
        ChatFormat("minicpm5",
                   Tags('">', '<param name="', '">', "</param>", ("</function>",)),
                   call_open='<function name="', between="\n"),
        ChatFormat("cohere", JsonObjects(names=("tool_name",)), "<|START_ACTION|>",
                   "<|END_ACTION|>", listed=True, between=", ",
                   reasoning_open="<|START_THINKING|>", reasoning_close="<|END_THINKING|>",
                   dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>",
                            "<|END_TEXT|>")),
        ChatFormat("granite", objects, "<|tool_call|>", "<|/tool_call|>", listed=True,
                   between=", ", hints=("<|tool|>",)),
        ChatFormat("tool-calls-list", objects, "<tool_calls>", "</tool_calls>", listed=True,
                   between=", "),
        ChatFormat("nemotron", objects, "<TOOLCALL>", "</TOOLCALL>", listed=True, between=", "),
        ChatFormat("apertus", JsonObjects(key_is_name=True), "<|tools_prefix|>",
                   "<|tools_suffix|>", listed=True, between=", "),
        ChatFormat("functionary", NameThenJson(">"), call_open="<function=",
                   call_close="</function>"),
        ChatFormat("solar",
                   NameThenJson("<|tool_call:args|>",
                                r".*<\|tool_call:name\|>\s*(?P<name>\S+)\s*",
                                "call<|tool_call:name|>{name}"),
                   "<|tool_calls|>", "", "<|tool_call:begin|>", "<|tool_call:end|>",
                   also=("<|tool_call:name|>",)),
        ChatFormat("generic",
                   JsonObjects(wrappers=("tool_call", "function"),
                               first=("tool_call", "name", "function")),
                   bare_calls="{", needs_instructions=True),
        ChatFormat("content"),
    )  # fmt: skip


TABLE = {row.name: row for row in _rows()}
