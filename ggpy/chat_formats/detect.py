"""Which format a chat template means, found by rendering: a differential probe.

A conversation in which the assistant calls tools is rendered beside one in which it answers with
text. What differs is how the template writes calls; the row of the table that reads the same calls
from it is the format. Nothing here knows how a template is rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .chat_format import ChatFormat
from .deltas import CallArguments, CallBegin, TextPart
from .json_calls import JsonObjects
from .table import TABLE

Render = Callable[[Sequence[Mapping[str, Any]], Any, Mapping[str, Any]], str]
NAMES = tuple(TABLE)

REASONING = (  # pairs of markers that models were trained with
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<thought>", "</thought>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|think_start|>", "<|think_end|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)

ANSWERS = (  # around the text after reasoning: ERNIE and Granite, Hunyuan
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)

_QUESTION = {"role": "user", "content": "Qmvx"}
_THOUGHT, _TEXT = "Rkwz", "Tjqy"
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"alpha_key": "Vzqx value", "beta_key": 7319},
    {"gamma_key": "62"},
)
_CALLS = [("probe_first", _ARGUMENTS[0]), ("probe_second", _ARGUMENTS[1])]
_TYPES = {"alpha_key": "string", "beta_key": "integer", "gamma_key": "string"}


def _tool(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": _TYPES[key], "description": "A value."} for key in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": "A tool.", "parameters": schema}
    return {"type": "function", "function": function}


_TOOLS = [_tool(name, arguments) for name, arguments in _CALLS]
_SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] for t in _TOOLS}


_RESULTS = [
    {"role": "tool", "content": "Done.", "tool_call_id": f"call{i:05}", "name": name}
    for i, (name, _) in enumerate(_CALLS)
]


def by_name(name: str) -> ChatFormat:
    """The format of a name in NAMES; ValueError lists them."""
    if name not in TABLE:
        raise ValueError(f"no tool format {name!r:.60}: it must be one of {', '.join(NAMES)}")
    return TABLE[name]


def detect(render: Render, name: str | None = None) -> ChatFormat:
    """The format of a chat template. name: of the calls, where it is known; reasoning is probed.

    render: the prompt of messages, tools and template variables, up to where an answer begins; it
    raises ValueError (ChatTemplateError) where the template refuses them.
    """
    found = by_name(name) if name is not None else _calls(render)
    if found.channels is not None:
        return found
    opener, closer, opened = _reasoning(render, found)
    found = replace(found, dropped=(*found.dropped, *_around_text(render)))
    return found.with_reasoning(opener, closer, opened)


def _attempt(render: Render, messages: list[Any], tools: Any, **variables: Any) -> str:
    """What a template writes; "" where it refuses."""
    try:
        return render(messages, tools, variables)
    except ValueError:
        return ""


def _assistant(count: int = 0, content: str | None = _TEXT, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call{i:05}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(_CALLS[:count])
    ]  # fmt: skip
    message = {"role": "assistant", "content": content, **more}
    return {**message, "tool_calls": calls} if calls else message


# Calls


def _calls(render: Render) -> ChatFormat:
    generic, written, in_words = TABLE["generic"], False, False
    for count, answer in _answers(render):
        readers = [
            (left, row)
            for row in TABLE.values()
            if (left := _left_over(row, answer, count)) is not None
        ]
        if len(readers) == 1 and readers[0][1] is generic:
            in_words = True  # the template knows no calls: messages say them in words
            continue
        if readers:
            return min(readers, key=lambda found: found[0])[1]
        derived = _derived(answer)
        if derived is not None and _left_over(derived, answer, count) is not None:
            return derived
        written = written or _CALLS[0][0] in answer
    return generic if written and not in_words else _hinted(render)


def _answers(render: Render) -> Iterator[tuple[int, str]]:
    """How the template writes two calls, one call: what differs from an answer of text.

    Some templates leave out an assistant's message that is the last one, so results follow then.
    """
    text = _attempt(render, [_QUESTION, _assistant()], _TOOLS)
    for count in (2, 1):
        asked = [_QUESTION, _assistant(count, None)]
        for messages in (asked, [*asked, *_RESULTS[:count]]):
            calls = _attempt(render, messages, _TOOLS)
            if calls and text:
                common = _common(calls, text)
                for head in dict.fromkeys((_whole_markers(common), _before_markers(common))):
                    tail = len(_common(calls[head:][::-1], text[head:][::-1]))
                    yield count, calls[head : len(calls) - tail]


def _common(a: str, b: str) -> str:
    """The beginning that two texts share."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if length is None else length]


def _whole_markers(common: str) -> int:
    """Length of a common beginning without a marker that only begins in it."""
    begun = re.search(r"[<\[][^<>\[\]\s]*$", common)
    return begun.start() if begun else len(common)


def _before_markers(common: str) -> int:
    """Length of a common beginning without the markers at its end, which a call may begin with, or
    without what names a recipient there.
    """
    length = _whole_markers(common)
    begun = re.search(r"((<[^<>\s]+>)+| to=)$", common[:length])
    return begun.start() if begun else length


def _left_over(row: ChatFormat, answer: str, count: int) -> int | None:
    """Length of the text beside the calls if the row reads the calls of the probe, else None."""
    parser = replace(row, reasoning_open="", reasoning_close="").parser(_SCHEMAS, reasoning=False)
    names, arguments, text = [], [""] * count, ""
    for delta in parser.feed(answer) + parser.finish():
        if isinstance(delta, CallBegin):
            names.append(delta.name)
        elif isinstance(delta, CallArguments) and delta.index < count:
            arguments[delta.index] += delta.text
        elif isinstance(delta, TextPart):
            text += delta.text
    if names != [name for name, _ in _CALLS[:count]]:
        return None
    try:
        same = [json.loads(a) for a in arguments] == list(_ARGUMENTS[:count])
    except ValueError:
        return None
    return len(text.strip()) if same else None


def _derived(answer: str) -> ChatFormat | None:
    """A format of JSON objects between markers that no row has."""
    match = re.match(r"\s*(\S.{,60}?)\s*(\[?)\s*(\{.*\})\s*\]?\s*(\S*)", answer, re.S)
    if not match:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(match[3])
    except ValueError:
        return None
    names = [key for key, found in value.items() if found == _CALLS[0][0]]
    keys = [key for key, found in value.items() if found == _CALLS[0][1]]
    if not names or not keys:
        return None
    syntax = JsonObjects(names=(names[0],), arguments=(keys[0],))
    listed = bool(match[2])
    return ChatFormat("derived", syntax, match[1], match[4], section_gap="\n", listed=listed,
                      between=", " if listed else "\n")  # fmt: skip


def _hinted(render: Render) -> ChatFormat:
    """By what a prompt with tools says more than one without; the generic format if nothing."""
    with_tools = _attempt(render, [_QUESTION], _TOOLS)
    without = _attempt(render, [_QUESTION], None)
    rows = [row for row in TABLE.values() if row.name != "generic"]
    for row in rows:
        for hint in (*row.openers, *row.hints):
            if hint in with_tools and hint not in without:
                return row
    return TABLE["generic"]


# Reasoning


def _reasoning(render: Render, found: ChatFormat) -> tuple[str, str, bool]:
    """Markers of reasoning, and whether the prompt of a question ends after the first."""
    prompt = _attempt(render, [_QUESTION], None).rstrip()
    thinking = _attempt(render, [_QUESTION], None, enable_thinking=True, thinking=True).rstrip()
    written = _attempt(
        render, [_QUESTION, _assistant(2, None, reasoning_content=_THOUGHT)], _TOOLS
    ) or _attempt(render, [_QUESTION, _assistant(1, None, reasoning_content=_THOUGHT)], _TOOLS)
    written += _attempt(render, [_QUESTION, _assistant(reasoning_content=_THOUGHT)], None)
    pairs = ((found.reasoning_open, found.reasoning_close), *REASONING)
    for opener, closer in pairs:
        around = re.escape(opener) + r"\s*" + _THOUGHT + r"\s*" + re.escape(closer)
        if closer and re.search(around, written):
            return opener, closer, prompt.endswith(opener)
    for opener, closer in pairs:
        if opener and (prompt.endswith(opener) or thinking.endswith(opener)):
            return opener, closer, prompt.endswith(opener)
    tag = re.search(rf"<([\w:.-]+)>\s*{_THOUGHT}\s*</\1>", written)
    if tag:
        opener = f"<{tag[1]}>"
        return opener, f"</{tag[1]}>", prompt.endswith(opener)
    return found.reasoning_open, found.reasoning_close, False


def _around_text(render: Render) -> list[str]:
    """Markers around the text of an answer: the template writes them, asks for them, or takes them
    out of earlier answers.
    """
    asked = _attempt(render, [_QUESTION], None, enable_thinking=True, thinking=True)
    written = _attempt(render, [_QUESTION, _assistant()], None)
    found: list[str] = []
    for opener, closer in ANSWERS:
        marked = _assistant(content=f"{opener}\n{_TEXT}\n{closer}")
        earlier = _attempt(render, [_QUESTION, marked, _QUESTION], None)
        around = re.escape(opener) + r"\s*" + _TEXT + r"\s*" + re.escape(closer)
        taken_out = _TEXT in earlier and opener not in earlier
        if taken_out or opener + closer in asked or re.search(around, written):
            found += [opener, closer]
    return found
