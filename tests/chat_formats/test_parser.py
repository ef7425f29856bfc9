"""The streaming parser: what is text, what is a call, and that no answer is lost or raises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chat_formats.families import SCHEMAS, Answer, read
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.chat_formats import NAMES, CallArguments, CallBegin, CallEnd, TextPart, by_name
from ggpy.tokenizer import Tokenizer

HERMES, QWEN = by_name("hermes"), by_name("qwen3-coder")
GOOD = '<tool_call>\n{"name": "add_note", "arguments": {"text": "x"}}\n</tool_call>'
NOTE = [("add_note", '{"text": "x"}')]


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = HERMES.parser(SCHEMAS)
    assert parser.feed("I look. <tool") == [TextPart("I look.")]
    assert parser.feed('_call>{"name": "add_') == []
    assert parser.feed('note", "arguments": {"te') == [
        CallBegin(0, "add_note"),
        CallArguments(0, '{"te'),
    ]
    assert parser.feed('xt": "a') == [CallArguments(0, 'xt": "a')]
    assert parser.feed('"}}') == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.feed("</tool_call>") == []
    assert parser.finish() == []


def test_strings_of_tags_are_streamed() -> None:
    parser = QWEN.parser(SCHEMAS)
    parser.feed("<tool_call>\n<function=add_note>\n<parameter=text>\n")
    assert parser.feed('one "') == [CallArguments(0, 'one \\"')]
    assert parser.feed("two\n") == [CallArguments(0, "two")]
    assert parser.feed("three\n</para") == [CallArguments(0, "\\nthree")]
    assert parser.feed("meter>\n</function>") == [CallArguments(0, '"}'), CallEnd(0)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "rm"}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None),
        ("hermes", "a <tool_cal b <tool_call", None),
        ("hermes", "<tool_call>" * 3, None),
        ("llama3", '{"name": "rm", "parameters": {}}', None),
        ("llama3", '{"temperature": 3}', None),
        ("llama3", "{", None),
        ("pythonic", "[1, 2]", None),
        ("pythonic", "[rm(x=1)]", None),
        ("qwen3-coder", "<function=rm>\n</function>", None),
        ("qwen3-coder", "<tool_call>\nf(x)\n</tool_call>", None),
        ("mistral-args", "[TOOL_CALLS]add_note{}", None),
        ("mistral-args", "[TOOL_CALLS]add_note[ARGS]x", None),
        ("glm", "<tool_call>rm\n</tool_call>", None),
        ("gemma4", "<|tool_call>add_note{}", None),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str, said: str | None) -> None:
    chat_format = by_name(name)
    assert read(chat_format, [text]) == Answer(said or text)
    assert read(chat_format, list(text)) == Answer(said or text)


def test_a_name_may_end_without_its_separator() -> None:
    argument = "<arg_key>text</arg_key><arg_value>x</arg_value>"
    for name, tags in (("hy3-preview", argument), ("hy3", argument.replace(">", ":opensource>"))):
        opener, closer = by_name(name).call_open, by_name(name).call_open.replace("<", "</")
        section = by_name(name).section_open + opener
        text = f"{section}add_note{tags}{closer}{opener}add_note{closer}"
        expected = Answer(calls=[*NOTE, ("add_note", "{}")], ended=2)
        assert read(by_name(name), list(text)) == expected


def test_a_call_after_what_was_none_is_read() -> None:
    text = '<tool_call>{"name": "rm"}</tool_call> then ' + GOOD
    answer = read(HERMES, [text])
    assert answer.calls == NOTE
    assert answer.text == '<tool_call>{"name": "rm"}</tool_call> then'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"text": "x"}, "name": "add_note"}', '{"text": "x"}'),
        ('{"name": "add_note", "arguments": "{\\"text\\": \\"x\\"}"}', '{"text": "x"}'),
        ('{"name": "add_note", "parameters": {"text": "x"}}', '{"text": "x"}'),
        ('{"type": "function", "function": {"name": "add_note", "arguments": {}}}', "{}"),
        ('{"name": "add_note"}', "{}"),
        ('{"name": "add_note", "arguments": null}', "{}"),
        ('{"name": "add_note", "arguments": {"text": "a\nb"}}', '{"text": "a\\nb"}'),
        ('{"id": [1, {"a": "}"}], "name": "add_note", "arguments": {}}', "{}"),
        ('{"name": "add_note", "arguments": {"text": "}\\"]"}}}', '{"text": "}\\"]"}'),
    ],
)
def test_objects_may_differ(body: str, arguments: str) -> None:
    for pieces in ([f"<tool_call>{body}</tool_call>"], list(f"<tool_call>{body}</tool_call>")):
        assert read(HERMES, pieces) == Answer(calls=[("add_note", arguments)], ended=1)


def test_broken_arguments_end_the_call_and_the_rest_is_text() -> None:
    answer = read(HERMES, ['<tool_call>{"name": "add_note", "arguments": {"a": <b> c'])
    assert answer == Answer("<b> c", calls=[("add_note", '{"a": ')], ended=1)


def test_text_between_calls_is_kept_without_white_space_at_markers() -> None:
    answer = read(HERMES, [f"  One.\n\n{GOOD}\n\nTwo. \n{GOOD}\n"])
    assert answer == Answer("  One.Two.", calls=NOTE * 2, ended=2)


def test_without_tools_calls_are_text() -> None:
    assert read(HERMES, list(f"a {GOOD} "), None) == Answer(f"a {GOOD} ")
    assert read(HERMES, list(f"<think>r</think>{GOOD}"), None) == Answer(GOOD, "r")


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nab c\n</think>\n\nText ", False, Answer("Text ", "ab c")),
        ("\n<think></think>Text", False, Answer("Text")),
        ("ab\n</think>\nText", True, Answer("Text", "ab")),
        ("<think>ab</think>Text", True, Answer("Text", "ab")),
        ("ab <th", True, Answer("", "ab <th")),
        ("Text <think>ab</think>", False, Answer("Text <think>ab</think>")),
        ("ab</think>", False, Answer("ab</think>")),
    ],
)
def test_reasoning(text: str, opened: bool, expected: Answer) -> None:
    assert read(HERMES, [text], reasoning_open=opened) == expected
    assert read(HERMES, list(text), None, reasoning_open=opened) == expected
    assert read(HERMES, list(text), None, reasoning=False, reasoning_open=opened) == Answer(text)


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    assert HERMES.opens_reasoning("<|assistant|><think>\n")
    assert not HERMES.opens_reasoning("<|assistant|><think>\n\n</think>\n\n")


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
    given_values = {
        "s": "5", "n": "5", "b": "True", "o": "{'a': [1, None]}", "maybe": "null",
        "free": "7", "other": "x y",
    }  # fmt: skip
    parts = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given_values.items()]
    text = "<tool_call>\n<function=f>\n" + "".join(parts) + "</function>\n</tool_call>"
    answer = read(QWEN, list(text), {"f": schema})
    assert json.loads(answer.calls[0][1]) == {
        "s": "5", "n": 5, "b": True, "o": {"a": [1, None]}, "maybe": None,
        "free": 7, "other": "x y",
    }  # fmt: skip


def test_python_calls() -> None:
    text = "[add_note(text='a, b) \\'c\\''), add_note(\"x\"), "
    text += 'get_weather(city="y", days=-1, tags=[])]'
    expected = [
        ("add_note", {"text": "a, b) 'c'"}),
        ("add_note", {"text": "x"}),
        ("get_weather", {"city": "y", "days": -1, "tags": []}),
    ]
    assert read(by_name("pythonic"), list(text)).parsed() == expected
    fenced = "Look:\n```tool_code\nprint(add_note(text='x'))\n```"
    answer = read(by_name("gemma3"), list(fenced))
    assert (answer.text, answer.parsed()) == ("Look:", [("add_note", {"text": "x"})])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add_note", "parameters": {"text": "x"}}',
        '<|python_start|>[add_note(text="x")]<|python_end|>',
        '<|python_start|>{"name": "add_note", "parameters": {"text": "x"}}<|python_end|>',
        '[add_note(text="x")]',
    ],
)
def test_llama_4_calls_in_json_and_in_python(text: str) -> None:
    assert read(by_name("llama4"), list(text)) == Answer(calls=NOTE, ended=1)
    said = read(by_name("llama4"), list("Look: [1] " + text))
    assert said.text.startswith("Look: [1]") and len(said.calls) == text.startswith("<")


def test_gemma_calls_nest() -> None:
    text = '<|tool_call>call:get_weather{city:<|"|>a{,"<|"|>,tags:[<|"|>x<|"|>,{k:<|"|>]<|"|>}]}'
    answer = read(by_name("gemma4"), list(text + "<tool_call|><|tool_response>"))
    assert answer.parsed() == [("get_weather", {"city": 'a{,"', "tags": ["x", {"k": "]"}]})]
    assert answer.text == ""


def test_harmony_without_reasoning_keeps_the_channel_in_the_text() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    harmony = by_name("harmony")
    assert read(harmony, list(text)) == Answer("Hi", "Hm.")
    kept = read(harmony, list(text), reasoning=False)
    assert kept == Answer("<|channel|>analysis<|message|>Hm.<|end|>Hi")
    assert read(harmony, ["plain text"]) == Answer("plain text")


def test_names_of_formats() -> None:
    assert {"hermes", "harmony", "generic", "content"} <= set(NAMES)
    assert all(by_name(name).name == name for name in NAMES)
    with pytest.raises(ValueError, match="no tool format 'nope': it must be one of hermes, "):
        by_name("nope")


def test_markers_that_are_control_tokens_are_needed(tiny_path: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_gguf(tiny_path("llama"))
    assert not HERMES.needs_special(tokenizer)
    special = replace(HERMES, call_open="<|im_start|>")
    assert special.needs_special(tokenizer)
    marked = special.control_markers(tokenizer)
    assert [tokenizer.text(i) for i in marked.values()] == list(marked) == ["<|im_start|>"]


def test_only_the_generic_format_has_instructions() -> None:
    tools = [{"type": "function", "function": {"name": "add_note"}}]
    assert '"add_note"' in by_name("generic").instructions(tools)
    assert not HERMES.instructions(tools)
    said = 'Sure: {"tool_call": {"name": "add_note", "arguments": {}}}'
    assert read(by_name("generic"), [said]).calls == []
    assert read(by_name("generic"), list(said[6:])).calls == [("add_note", "{}")]


# Anything


WORDS = (
    "\n", " ", "text", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "=", "add_note",
    '{"name": "add_note", "arguments": ', '{"text": "x"}', "text='x'", "`", "<", "\u00e9", "12",
    "to=functions.add_note", "analysis", "call:add_note{", "\0",
)  # fmt: skip


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_text_raises_or_is_lost(data: st.DataObject) -> None:
    chat_format = by_name(data.draw(st.sampled_from(NAMES)))
    words = st.sampled_from((*chat_format.markers, *WORDS))
    text = "".join(data.draw(st.lists(words, max_size=16)))
    options = {"reasoning": data.draw(st.booleans()), "reasoning_open": data.draw(st.booleans())}
    tools = data.draw(st.sampled_from([None, SCHEMAS]))
    whole = read(chat_format, [text], tools, **options)
    assert read(chat_format, list(text), tools, **options) == whole
    if not whole.calls and not chat_format.channels:
        dropped = [chat_format.reasoning_open, chat_format.reasoning_close, *chat_format.dropped]
        pattern = r"\s|" + "|".join(re.escape(marker) for marker in dropped if marker)
        assert re.sub(pattern, "", whole.reasoning + whole.text) == re.sub(pattern, "", text)
