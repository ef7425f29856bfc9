"""Schemas of tools that a chat template cannot write, made simpler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggpy.tokenizer import ChatTemplateError, Tokenizer
from ggpy.tokenizer.tool_schemas import simpler_tools

USER = [{"role": "user", "content": "Hi"}]
SIGNATURE = """
{%- macro kind(s) -%}
{%- if s.type in ['string', 'integer'] -%}{{ s.type }}
{%- elif s.type == 'array' -%}list[{{ kind(s['items']) }}]
{%- elif s.type == 'object' -%}{{ 'dict[' + kind(s.additionalProperties) + ']' }}
{%- elif s.type is iterable -%}{%- for t in s.type -%}{{ kind({'type': t}) }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for t in tools or [] -%}
{%- for k, s in t.function.parameters.properties.items() -%}{{ k }}: {{ kind(s) }}; {% endfor -%}
{%- endfor -%}
{{ messages[0].content }}
"""


def tool(properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_path("llama"))


def test_types_that_may_be_null_are_written(tokenizer: Tokenizer) -> None:
    properties = {
        "a": {"type": ["null", "string"]},
        "b": {"type": "array", "items": {"type": ["integer", "null"]}},
        "c": {"type": "null"},
        "d": {"type": "object"},
    }
    tools = [tool(properties)]
    before = repr(tools)
    text = tokenizer.apply_chat_template(USER, SIGNATURE, tools=tools)
    assert text.split("; ") == ["a: string", "b: list[integer]", "c: ", "d: dict[]", "Hi"]
    assert repr(tools) == before


def test_what_a_template_can_write_stays(tokenizer: Tokenizer) -> None:
    tools = [tool({"a": {"type": ["null", "string"]}})]
    text = tokenizer.apply_chat_template(USER, "{{ tools | tojson }}", tools=tools)
    assert '["null", "string"]' in text


def test_another_refusal_is_told_as_it_was(tokenizer: Tokenizer) -> None:
    source = "{{ raise_exception(tools[0].function.parameters.properties.a.type | tojson) }}"
    with pytest.raises(ChatTemplateError, match='"null"'):
        tokenizer.apply_chat_template(
            USER, source, tools=[tool({"a": {"type": ["null", "string"]}})]
        )


def test_what_is_no_schema_stays() -> None:
    for odd in (None, "x", {"function": 3}, {"function": {"name": "f"}}, tool({"a": True})):
        assert simpler_tools([odd]) == [odd]
