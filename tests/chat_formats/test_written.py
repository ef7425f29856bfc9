"""Calls that are written into the text of messages, where a template has no place for them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_formats.families import CALLS, SCHEMAS, calling, read
from chat_formats.public_templates import PUBLISHED

from ggpy.chat_formats import NAMES, by_name, can_write, with_written_calls

WRITABLE = [name for name in NAMES if can_write(by_name(name))]


def text_of(name: str, **more: Any) -> str:
    (message,) = with_written_calls([calling(**more)], by_name(name))
    assert "tool_calls" not in message
    return str(message["content"])


@pytest.mark.parametrize("name", WRITABLE)
def test_the_parser_reads_them(name: str) -> None:
    assert read(by_name(name), list(text_of(name)), SCHEMAS, reasoning=False).parsed() == CALLS
    assert text_of(name, content="I look.").startswith("I look.")


@pytest.mark.parametrize("name", ["granite", "nemotron"])
def test_they_are_those_of_the_family(name: str) -> None:
    form = by_name(name).fitted(["<|tool_call|>"])  # Granite has no token that closes them
    (message,) = with_written_calls([calling()], form)
    assert message["content"] == PUBLISHED[name].calls


def test_results_keep_the_names_of_their_calls() -> None:
    results = [
        {"role": "tool", "tool_call_id": "call00001", "content": "b"},
        {"role": "tool", "tool_call_id": "other", "content": "c"},
    ]
    found = with_written_calls([calling(), *results], by_name("lfm2"))
    assert [message.get("name") for message in found] == [None, "add_note", None]
    odd = calling([("add_note", {})])
    odd["tool_calls"][0]["function"]["arguments"] = "no JSON"
    (message,) = with_written_calls([odd], by_name("granite"))
    assert '{"arguments": "no JSON"}' in message["content"]


def test_what_is_not_written_here() -> None:
    assert not {"generic", "content", "harmony", "gemma4", "glm"} & set(WRITABLE)
    assert {"lfm2", "granite", "gemma3", "hermes", "deepseek-r1"} <= set(WRITABLE)
