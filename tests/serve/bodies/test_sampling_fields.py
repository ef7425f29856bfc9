"""llama.cpp's fields of sampling and of the answer's form are the same in all APIs of chats."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import RunningServer
from scripted_service import ScriptedService

from ggpy.serve.api import anthropic, chat, responses
from ggpy.serve.errors import ApiError
from ggpy.serve.events import AnswerOptions, Constraint
from ggpy.serve.fields import Fields

APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SERVICE = ScriptedService()
SAID = [{"role": "user", "content": "hello"}]
FIELDS: dict[str, Any] = {
    "seed": 5,
    "top_k": 30,
    "typical_p": 0.9,
    "repetition_penalty": 1.3,
    "repeat_last_n": 9,
    "presence_penalty": 0.5,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": ["\n", "hello"],
    "xtc_probability": 0.1,
    "samplers": ["penalties", "dry", "top_k", "temperature"],
    "logit_bias": [[7, 1.5], ["hello", False]],
    "ignore_eos": True,
    "stop": ["zz"],
    "cache_prompt": False,
    "n_indent": 2,
    "t_max_predict_ms": 5000,
}


def options_of(path: str, **more: Any) -> AnswerOptions:
    """The options that an API reads."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, **more}
    if path.endswith("completions"):
        fields = Fields({**body, "messages": SAID})
        return chat.read_chat(
            fields, SERVICE.tokenizer, SERVICE.sampling_defaults(), None
        ).request.options
    if path.endswith("responses"):
        return responses.read(Fields({**body, "input": "hello"}), SERVICE).request.options
    return anthropic.read(Fields({**body, "messages": SAID}), SERVICE).request.options


@pytest.mark.parametrize("path", APIS[1:])
def test_the_other_apis_read_what_chat_completions_reads(path: str) -> None:
    assert options_of(path, **FIELDS) == options_of(APIS[0], **FIELDS) != options_of(path)
    grammar = 'root ::= "a"'
    assert options_of(path, grammar=grammar).constraint == Constraint("gbnf", grammar)
    assert options_of(path, json_schema=True).constraint == Constraint("json_schema", "true")


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("name", "value"), [("typical_p", "x"), ("logit_bias", [[9999, 1]]), ("mirostat", 3)]
)
def test_a_wrong_value_is_told_by_its_name(path: str, name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=name) as found:
        options_of(path, **{name: value})
    assert found.value.param == name


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (APIS[1], {"text": {"format": {"type": "json_object"}}}),
        (APIS[2], {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ],
)
def test_two_forms_of_one_answer_are_refused(path: str, own: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="and grammar: give one of them"):
        options_of(path, **own, grammar='root ::= "a"')


def test_the_same_fields_make_the_same_text(server: RunningServer) -> None:
    (text,) = {text_of(server, path) for path in APIS}
    assert text


def text_of(server: RunningServer, path: str) -> str:
    said = {"input": "hello"} if path.endswith("responses") else {"messages": SAID}
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    answer = server.post(path, model="tiny", **said, **{**FIELDS, limit: 20}).json()
    if path.endswith("completions"):
        return str(answer["choices"][0]["message"]["content"])
    found = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return str(found[0]["text"])
