"""Every field of every endpoint with every odd value: never a 500, and an error names the field.

A full valid body of each endpoint is walked; each value in it, however deep, is replaced by values
of other types and by extremes. What is served must be an answer, what is refused a 400 of that API.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from clients_of_servers import Clock, function
from running_server import RunningServer, eventually, idle

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**64, -(2**70), 10**400, 0.5, -1e308, 1e-320),
    *("", "x", "\ud800", "\x00", "<|im_end|>", "é" * 3000, "9" * 400, "{{ 1/0 }}"),
    *([], [[]], [None], [0], ["x"], [{}], [[0, 0]], [-1], [2**70], ["\udc00"], list(range(70))),
    *({}, {"": None}, {"x": "x"}, {"type": "x"}, {"0": 1e308}, {"text": 1}, {"type": "object"}),
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "a", "name": "s"},
    {"role": "user", "content": [{"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "Clock", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "d"},
    {"role": "user", "content": "e"},
]
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repeat_penalty": 1.1,
    "repeat_last_n": 8,
    "dry_multiplier": 0.5,
    "dry_base": 1.5,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ["\n"],
    "xtc_probability": 0.1,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "samplers": ["top_k"],
    "logit_bias": {"5": 1.5},
    "ignore_eos": False,
    "stop": ["zz"],
    "cache_prompt": True,
    "t_max_predict_ms": 5000,
    "n_probs": 1,
    "post_sampling_probs": True,
    "n_indent": 2,
    "return_progress": False,
    "sse_ping_interval": 9,
    "timings_per_token": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "strict": True, "schema": {"enum": [1, 2]}},
}
CHAT: dict[str, Any] = {
    "temperature": 0.5,
    "model": "tiny",
    "messages": [{"role": "user", "content": "e"}],
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": FORMAT,
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "reasoning_format": "auto",
    "user": "me",
    "metadata": {"a": "b"},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "reasoning_control": True,
    "verbose": True,
}
CALLS: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": [function(Clock)],
    "tool_choice": {"type": "function", "function": {"name": "Clock"}},
    "parallel_tool_calls": True,
    "max_tokens": 2,
}
FUNCTIONS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "e"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "Clock", "arguments": "{}"},
        },
        {"role": "function", "name": "Clock", "content": "d"},
    ],
    "functions": [function(Clock)["function"]],
    "function_call": {"name": "Clock"},
    "max_tokens": 2,
}
COMPLETION = {**SAMPLING, "n_cmpl": 1, "prompt": "ab", "n_predict": 2, "grammar": 'root ::= "a"'}
SCHEMA = {"json_schema": {"type": "integer", "minimum": 0, "maximum": 3}}
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "Clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "d"},
    {"role": "user", "content": "e"},
]
RESPONSE_TOOL = {"type": "function", "name": "W", "parameters": {"type": "object"}, "strict": True}
MESSAGES_TOOL = {"name": "W", "description": "x", "input_schema": Clock.model_json_schema()}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions?calls": CALLS,
    "/v1/chat/completions?functions": FUNCTIONS,
    "/v1/completions": {
        "model": "tiny",
        "prompt": ["ab"],
        "max_tokens": 2,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": 1,
        "suffix": "",
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    "/completion": {**COMPLETION, "stream": False},
    "/completions": {**SCHEMA, "prompt": [1, 5, 6], "n_predict": 2},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "prompt": "c",
        "input_extra": [{"filename": "f", "text": "t"}],
        "n_predict": 2,
    },
    "/v1/responses": {
        "model": "tiny",
        "instructions": "i",
        "input": ITEMS,
        "max_output_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "tools": [RESPONSE_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "store": False,
        "stream": False,
        "truncation": "disabled",
    },
    "/v1/messages": {
        "model": "tiny",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "W", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}],
            },
        ],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["zz"],
        "tools": [MESSAGES_TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "stream": False,
    },
    "/v1/embeddings": {
        "model": "tiny",
        "input": ["a", "b"],
        "encoding_format": "float",
        "dimensions": 8,
        "user": "u",
    },
    "/v1/rerank": {
        "model": "tiny",
        "query": "q",
        "documents": ["a", {"text": "b"}],
        "top_n": 1,
        "return_documents": True,
    },
    "/embedding": {"content": ["ab", [5, "a"]], "embd_normalize": 2},
    "/embeddings": {"input": {"content": [{"type": "text", "text": "a"}]}},
    "/v1/chat/completions/control": {"id": "a", "action": "reasoning_end"},
    "/tokenize": {
        "content": "a b",
        "add_special": True,
        "parse_special": True,
        "with_pieces": True,
    },
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": MESSAGES[-1:], "chat_template_kwargs": {"a": 1}},
    "/v1/messages/count_tokens": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "b"}],
        "tools": [MESSAGES_TOOL],
    },
    "/v1/responses/input_tokens": {"model": "tiny", "input": "a"},
}

Path = tuple[Any, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all values in a body."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def replaced(body: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The body with another value at a path."""
    found: Any = copy.deepcopy(body)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found  # type: ignore[no-any-return]


def cases(path: Path) -> Iterator[Any]:
    """Odd values of a place: every second one at the top, every seventh one deeper, in turn."""
    step = 2 if len(path) == 1 else 7
    yield from ODD[sum(map(len, map(str, path))) % step :: step]


@pytest.fixture
def able(roomy: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server whose model has tokens for infill and can rank documents."""
    service: Any = roomy.process.server.service

    async def relevance(query: str, documents: list[str], client: str) -> list[Any]:
        return [(float(len(document)), 1) for document in documents]

    monkeypatch.setattr(service, "relevance", relevance)
    monkeypatch.setattr(service.infill, "_tokens", {"pre": 5, "suf": 6, "mid": 7})
    return roomy


@pytest.mark.parametrize("url", BODIES)
def test_odd_values_are_answered_or_refused_by_name(able: RunningServer, url: str) -> None:
    whole = BODIES[url]
    assert able.client.post(url, json=whole).status_code == 200
    for path in places(whole):
        for value in cases(path):
            body = json.dumps(replaced(whole, path, value))
            answer = able.client.post(url, content=body)
            shown = f"{path} = {value!r:.80}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code in (200, 400), shown
            if answer.status_code == 400:
                assert names_field(answer.json()["error"], path), shown
    assert eventually(lambda: idle(able))


def names_field(error: dict[str, Any], path: Path) -> bool:
    """Whether an error says which field of the body is wrong, or that the prompt is too long."""
    told = f"{error.get('param')} {error['message']}"
    return str(path[0]) in told or "context" in told
