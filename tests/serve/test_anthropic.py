"""Anthropic's Messages API over scripted answers: through its SDK, and body by body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from scripted_service import (
    CALLED,
    CALLS,
    CUT,
    END,
    TEXT,
    TIMES,
    USAGE,
    ScriptedService,
    field_of,
    odd_bodies,
    replaced,
    sse,
)

from ggpy.serve.api import anthropic as api
from ggpy.serve.api.reading import UNREAD
from ggpy.serve.errors import ApiError
from ggpy.serve.events import CallDelta, CallStart, Constraint, Finished, TextDelta, Usage
from ggpy.serve.fields import Fields

sdk = pytest.importorskip("anthropic")

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": ASK}


@pytest.fixture(scope="module")
def client(scripted: tuple[ScriptedService, str]) -> Iterator[Any]:
    with sdk.Anthropic(base_url=scripted[1], api_key="none", max_retries=0) as client:
        yield client


def read(**more: Any) -> Any:
    """What a body becomes."""
    return api.read(Fields({**BODY, **more}), ScriptedService()).request


def messages_of(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return list(read(messages=list(messages), **more).messages)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


# Answers, through the SDK


def test_a_message(client: Any, service: ScriptedService) -> None:
    message = client.messages.create(**BODY)
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (12, 8), "20 tokens, 8 cached"
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert message.id.startswith("msg_")


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        (END, "end_turn", None),
        (CUT, "max_tokens", None),
        (CALLED, "tool_use", None),
        (Finished("stop", USAGE, TIMES, stop="\n\n"), "stop_sequence", "\n\n"),
    ],
)
def test_why_an_answer_ends(
    client: Any, service: ScriptedService, end: Finished, reason: str, stop: str | None
) -> None:
    service.script = (TextDelta("a"), end)
    message = client.messages.create(**BODY)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    with client.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, stop)


def test_a_stream_of_text(client: Any, service: ScriptedService) -> None:
    with client.messages.stream(**BODY) as stream:
        assert list(stream.text_stream) == ["Hel", "lo"]
        message = stream.get_final_message()
    assert message.content[0].text == "Hello"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (12, 8)
    assert message.usage.output_tokens == 5


def test_a_stream_has_all_that_a_whole_message_has(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    whole = client.messages.create(**BODY, tools=[WEATHER])
    with client.messages.stream(**BODY, tools=[WEATHER]) as stream:
        streamed = stream.get_final_message()
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    for one, other in zip(whole.content, streamed.content, strict=True):
        assert one.to_dict() == other.to_dict()
    assert whole.content[0].thinking == "Two cities."
    assert whole.content[0].signature
    assert (whole.content[2].id, whole.content[2].name) == ("call_a", "weather")
    assert whole.content[2].input == {"city": "Üsküp"}
    assert whole.content[3].input == {}
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.to_dict() == streamed.usage.to_dict()


def test_the_order_of_events(service: ScriptedService) -> None:
    writer = api.MessageWriter("tiny", Usage(n_prompt=20, n_cached=8))
    body = writer.start() + b"".join(map(writer.write, CALLS))
    events = sse(body)
    assert all(name == data["type"] for name, data in events)
    blocks = [(name, data["index"]) for name, data in events if "index" in data]
    start, delta, stop = (f"content_block_{what}" for what in ("start", "delta", "stop"))
    thinking = [(start, 0), (delta, 0), (delta, 0), (delta, 0), (stop, 0)]
    said = [(start, 1), (delta, 1), (stop, 1)]
    calls = [(start, 2), (delta, 2), (delta, 2), (stop, 2), (start, 3), (delta, 3), (stop, 3)]
    assert blocks == thinking + said + calls
    names = [name for name, data in events if "index" not in data]
    assert names == ["message_start", "message_delta", "message_stop"]
    deltas = [data["delta"]["type"] for name, data in events if name == delta]
    assert deltas[:4] == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    assert set(deltas[4:]) == {"input_json_delta"}
    begun = events[0][1]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None
    assert begun["usage"]["input_tokens"] == 12 and begun["usage"]["output_tokens"] == 0


def test_the_round_trip_of_a_tool(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    first = client.messages.create(**BODY, tools=[WEATHER])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"result {i}"}
        for i, block in enumerate(b for b in first.content if b.type == "tool_use")
    ]
    service.script = TEXT
    turns = [*ASK, {"role": "assistant", "content": first.content}, user(*results)]
    second = client.messages.create(model="tiny", max_tokens=5, messages=turns, tools=[WEATHER])
    assert second.content[0].text == "Hello"
    request = service.requests[-1]
    assert [m["role"] for m in request.messages] == ["user", "assistant", "tool", "tool"]
    calling = request.messages[1]
    assert (calling["content"], calling["reasoning_content"]) == ("I look.", "Two cities.")
    functions = [call["function"] for call in calling["tool_calls"]]
    assert [f["name"] for f in functions] == ["weather", "time"]
    assert json.loads(functions[0]["arguments"]) == {"city": "Üsküp"}
    assert request.messages[3] == {
        "role": "tool",
        "tool_call_id": "call_b",
        "content": "result 1",
    }


def test_an_answer_that_must_match_a_schema(client: Any, service: ScriptedService) -> None:
    class City(BaseModel):
        name: str
        people: int

    service.script = (TextDelta('{"name": "Bonn", '), TextDelta('"people": 330000}'), END)
    message = client.messages.parse(**BODY, output_format=City)
    assert message.parsed_output == City(name="Bonn", people=330000)
    constraint = service.requests[0].options.constraint
    assert constraint is not None and constraint.kind == "json_schema"
    assert set(json.loads(constraint.text)["properties"]) == {"name", "people"}


def test_arguments_that_max_tokens_cut_off_are_kept(client: Any, service: ScriptedService) -> None:
    service.script = (CallStart(0, "call_a", "weather"), CallDelta(0, '{"city": "B'), CUT)
    message = client.messages.create(**BODY, tools=[WEATHER])
    assert message.stop_reason == "max_tokens"
    assert message.content[0].input == {"INVALID_JSON": '{"city": "B'}


def test_an_answer_of_nothing(client: Any, service: ScriptedService) -> None:
    service.script = (TextDelta(""), END)
    assert client.messages.create(**BODY).content == []
    with client.messages.stream(**BODY) as stream:
        assert stream.get_final_message().content == []


def test_tokens_are_counted(client: Any, service: ScriptedService) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=ASK, tools=[WEATHER], system="x")
    assert counted.input_tokens == 17
    assert [m["role"] for m in service.requests[0].messages] == ["system", "user"]


# Errors


@pytest.mark.parametrize(
    ("refusal", "raised", "kind"),
    [
        (ApiError(400, "bad template"), "BadRequestError", "invalid_request_error"),
        (ApiError(401, "no key"), "AuthenticationError", "authentication_error"),
        (ApiError(404, "no model"), "NotFoundError", "not_found_error"),
        (ApiError(429, "full", retry_after=3), "RateLimitError", "rate_limit_error"),
        (ApiError(500, "broken"), "InternalServerError", "api_error"),
        (ApiError(503, "loading"), "ServiceUnavailableError", "overloaded_error"),
    ],
)
def test_the_sdk_knows_the_errors(
    client: Any, service: ScriptedService, refusal: ApiError, raised: str, kind: str
) -> None:
    service.refusal = refusal
    kinds = (getattr(sdk, raised, sdk.APIStatusError), sdk.InternalServerError)
    for streamed in (False, True):
        with pytest.raises(kinds if refusal.status == 503 else kinds[0]) as caught:
            client.messages.create(**BODY, stream=streamed)
        error = caught.value.body["error"]
        assert error == {"type": kind, "message": refusal.message}
        assert caught.value.status_code == refusal.status
    if refusal.retry_after:
        assert caught.value.response.headers["retry-after"] == "3"


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know() -> None:
    more = {"n_prompt_tokens": 9000, "n_ctx": 8192}
    told = api.error_body(ApiError(400, "raise -c or shorten it", more=more))
    assert told["error"]["message"].startswith("prompt is too long: 9000 tokens > 8192 maximum")
    assert "raise -c" in told["error"]["message"]


def test_an_error_midway_ends_the_stream(client: Any, service: ScriptedService) -> None:
    service.script = (TextDelta("a"), ApiError(503, "the GPU is lost"))
    with (
        pytest.raises(sdk.APIStatusError, match="the GPU is lost"),
        client.messages.stream(**BODY) as stream,
    ):
        list(stream.text_stream)
    assert service.n_closed == 1


def test_what_nobody_foresaw_ends_the_stream_and_is_raised(service: ScriptedService) -> None:
    service.script = (TextDelta("a"), ZeroDivisionError("secret"))

    async def run() -> bytes:
        body = b""
        with pytest.raises(ZeroDivisionError):
            async for told in api.stream(await service.chat(read(), ""), "tiny"):
                body += told
        return body

    name, data = sse(asyncio.run(run()))[-1]
    assert name == "error" and data["error"]["type"] == "api_error"
    assert "secret" not in data["error"]["message"]


def test_a_reader_that_leaves_closes_the_events(service: ScriptedService) -> None:
    async def run() -> None:
        stream = api.stream(await service.chat(read(), ""), "tiny")
        assert b"message_start" in await stream.__anext__()
        assert b"Hel" in await stream.__anext__()
        await stream.aclose()

    asyncio.run(run())
    assert service.n_closed == 1


def test_a_whole_message_that_fails_closes_the_events(service: ScriptedService) -> None:
    service.script = (TextDelta("a"), ApiError(500, "broken"))

    async def run() -> None:
        await api.message(await service.chat(read(), ""), "tiny")

    with pytest.raises(ApiError, match="broken"):
        asyncio.run(run())
    assert service.n_closed == 1


def test_the_sdk_takes_pings_anywhere(client: Any, service: ScriptedService) -> None:
    service.pings = True
    raw = list(client.messages.create(**BODY, stream=True))
    assert "".join(e.delta.text for e in raw if e.type == "content_block_delta") == "Hello"
    with client.messages.stream(**BODY) as stream:
        assert stream.get_final_text() == "Hello"


@pytest.mark.parametrize(
    "said", ['"\n\\', "\u2028\x00\x7f", "漢字🙂", "\ud800", "data: x\n\ndata: y"]
)
def test_any_text_survives_a_stream(said: str) -> None:
    writer = api.MessageWriter("tiny")
    events = sse(writer.start() + writer.write(TextDelta(said)) + writer.write(END))
    assert [d["delta"]["text"] for n, d in events if n == "content_block_delta"] == [said]


# Requests


def test_sampling_starts_from_the_servers_defaults() -> None:
    options = read(top_p=0.5, top_k=7, stop_sequences=["a", "b"], seed=3).options
    params = options.params
    assert (params.top_p, params.top_k, params.seed) == (0.5, 7, 3)
    assert (params.temperature, params.min_p) == (0.7, 0.1), "the server's"
    assert (options.max_tokens, options.stop) == (50, ("a", "b"))
    assert read(temperature=0).options.params.temperature == 0


def test_unknown_and_null_fields_are_ignored() -> None:
    more = {"betas": ["x"], "service_tier": "auto", "container": None, "top_k": None, "odd": {}}
    assert read(**more) == read()


def test_content_may_be_a_text_or_blocks() -> None:
    one = messages_of({"role": "user", "content": "Hello"})
    assert one == messages_of(user(text("Hello"))) == [{"role": "user", "content": "Hello"}]
    cached = {**text("Hello"), "cache_control": {"type": "ephemeral"}}
    assert messages_of(user(cached)) == one


def test_turns_of_the_same_role_become_one() -> None:
    turns = (
        user(text("a"), text("b")),
        user(text("c")),
        assistant(text("d")),
        assistant(text("e")),
    )
    assert messages_of(*turns, user(text("f"))) == [
        {"role": "user", "content": "a\nb\n\nc"},
        {"role": "assistant", "content": "d\n\ne"},
        {"role": "user", "content": "f"},
    ]


def test_results_of_tools_come_before_what_the_user_says() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("rain"), text("wind")]}
    said = messages_of(user(text("a")), assistant(use), user(text("and?"), result))
    assert [m["role"] for m in said] == ["user", "assistant", "tool", "user"]
    assert said[1]["content"] == ""
    assert said[2]["content"] == "rain\nwind"
    assert said[3]["content"] == "and?"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("no such file", "Error: no such file"),
        ("<tool_use_error>no such file", "<tool_use_error>no such file"),
        (None, "Error: "),
    ],
)
def test_a_result_that_is_an_error_says_so(content: str | None, told: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": True}
    assert messages_of(user(result)) == [{"role": "tool", "tool_call_id": "c1", "content": told}]


@pytest.mark.parametrize("kind", ["image", "document"])
def test_the_model_is_told_of_a_result_that_it_cannot_read(kind: str) -> None:
    """An agent that read a picture would get an error for ever, as it sends all of its results."""
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    content = [{"type": kind, "source": source}, text("hello.png")]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    assert messages_of(user(result))[0]["content"] == f"{UNREAD}\nhello.png"


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "a\nb"},
        {"type": "content", "content": [text("a"), text("b")]},
        {"type": "content", "content": "a\nb"},
    ],
)
def test_a_document_of_plain_text_is_text(source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source, "title": "T", "citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [document]}
    returned, said = messages_of(user(result, document, text("?")))
    assert returned["content"] == "T\na\nb"
    assert said["content"] == "T\na\nb\n?"


SEARCH: dict[str, Any] = {
    "type": "search_result",
    "source": "https://example.org/a",
    "title": "T",
    "content": [text("a"), text("b")],
    "citations": {"enabled": True},
}


def test_a_result_of_a_search_is_text(client: Any, service: ScriptedService) -> None:
    """In a question and in what a tool returned, beside other blocks."""
    returned = [text("Found:"), SEARCH, {**SEARCH, "title": "U", "content": [text("c")]}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": returned, "is_error": False}
    client.messages.create(**{**BODY, "messages": [user(result, SEARCH, text("?"))]})
    tool, said = service.requests[0].messages
    found = "T\nhttps://example.org/a\na\nb"
    assert tool["content"] == f"Found:\n{found}\nU\nhttps://example.org/a\nc"
    assert said["content"] == f"{found}\n?"


def test_thinking_is_kept_and_what_is_redacted_is_not() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    said = messages_of(user(text("a")), assistant(thinking, redacted, text("b")), user(text("c")))
    assert said[1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}


def test_system_may_be_a_text_or_blocks() -> None:
    blocks = [text("You are X."), {**text("Rules."), "cache_control": {"type": "ephemeral"}}]
    assert messages_of(*ASK, system=blocks)[0] == {
        "role": "system",
        "content": "You are X.\nRules.",
    }
    assert messages_of(*ASK, system="You")[0] == {"role": "system", "content": "You"}
    assert messages_of(*ASK, system=[]) == messages_of(*ASK)
    later = messages_of(*ASK, {"role": "system", "content": "be brief"}, system="You")
    assert [m["role"] for m in later] == ["system", "user", "system"]


def test_a_line_that_changes_with_every_request_is_left_out_of_the_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"
    for system in (line + "You are X.", [text(line), text("You are X.")], line + "\nYou are X."):
        assert messages_of(*ASK, system=system)[0]["content"] == "You are X."
    assert messages_of(*ASK, system=line) == ASK
    assert messages_of(*ASK, system="About " + line)[0]["content"] == "About " + line


def test_tools_in_the_form_of_openai() -> None:
    strict = {"name": "time", "input_schema": {"type": "object"}, "strict": True}
    tools = read(tools=[WEATHER, {**strict, "type": "custom"}]).tools
    assert [t["type"] for t in tools] == ["function", "function"]
    assert tools[0]["function"] == {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": WEATHER["input_schema"],
    }
    assert tools[1]["function"]["strict"] is True


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any"}, ("required", True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "weather"}, ("name:weather", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, None),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, bool] | None) -> None:
    request = read(tools=[WEATHER], tool_choice=choice)
    found = (request.tool_choice, request.parallel_tool_calls)
    assert found == (expected or ("name:weather", False))


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": True},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_variables_of_the_template(more: Any, variables: dict[str, Any]) -> None:
    assert read(**more).template_variables == variables


def test_a_schema_of_the_answer() -> None:
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "schema": schema}}
    expected = Constraint("json_schema", json.dumps(schema))
    assert read(output_config=form).options.constraint == expected
    assert read(output_format=form["format"]).options.constraint == expected


def test_what_a_coding_agent_sends(client: Any, service: ScriptedService) -> None:
    """Blocks with cache_control, many tools, results of tools, fields of betas."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [{**WEATHER, "name": f"tool_{i}", "eager_input_streaming": True} for i in range(40)]
    use = {"type": "tool_use", "id": "toolu_1", "name": "tool_3", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain", **mark}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
    stream = client.messages.create(
        model="any-name",
        max_tokens=32000,
        system=[{**text("You are a coding agent."), **mark}, {**text("Rules"), **mark}],
        messages=[
            user(text("<system-reminder>today</system-reminder>"), text("Fix it")),
            assistant(thinking, text("I look."), use),
            user(result, text("go on")),
        ],
        tools=[*tools[:-1], {**tools[-1], **mark}],
        thinking={"type": "enabled", "budget_tokens": 31999},
        metadata={"user_id": "user_1_account__session_2"},
        stream=True,
        extra_body={
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            "output_config": {"effort": "high"},
            "temperature": 1,
        },
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )
    assert [event.type for event in stream][-1] == "message_stop"
    request = service.requests[0]
    roles = [m["role"] for m in request.messages]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert len(request.tools) == 40
    assert request.template_variables["reasoning_effort"] == "high"


# Bad bodies

USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
SCHEMA = {"format": {"type": "json_schema", "schema": {}}}
WRONG: list[tuple[str, Any]] = [
    ("model", 3),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_tokens", None),
    ("messages", "Hello"),
    ("messages", None),
    ("messages", []),
    ("messages[0]", "Hello"),
    ("messages[0].role", "robot"),
    ("messages[0].role", 1),
    ("messages[0].role", None),
    ("messages[0].content", 3),
    ("messages[0].content", None),
    ("messages[0].content[0]", "Hello"),
    ("messages[0].content[0].type", "video"),
    ("messages[0].content[0].type", "tool_use"),
    ("messages[0].content[0].type", "image"),
    ("messages[0].content[0].type", "document"),
    ("messages[0].content[0].type", 1),
    ("messages[0].content[0].text", 1),
    ("messages[0].content[0].text", None),
    ("messages[1].content[0].id", 1),
    ("messages[1].content[0].name", ["x"]),
    ("messages[1].content[0].input", "{}"),
    ("messages[1].content[0].input", None),
    ("messages[1].content[1].thinking", 1),
    ("messages[1].content[1].signature", 1),
    ("messages[2].content[0].tool_use_id", None),
    ("messages[2].content[0].content", 1),
    ("messages[2].content[0].is_error", "yes"),
    ("messages[2].content[1].title", None),
    ("messages[2].content[1].source", 1),
    ("messages[2].content[1].citations", 1),
    ("messages[2].content[1].content", None),
    ("messages[2].content[1].content", "a"),
    ("messages[2].content[1].content[0]", "a"),
    ("messages[2].content[1].content[0].type", "image"),
    ("messages[2].content[1].content[1].text", 1),
    ("system", 1),
    ("system[0]", "x"),
    ("system[0].type", "image"),
    ("system[0].text", 1),
    ("stop_sequences", 1),
    ("stop_sequences", [1]),
    ("stop_sequences", ["x"] * 65),
    ("temperature", "hot"),
    ("temperature", 1.1),
    ("temperature", float("nan")),
    ("top_p", 2),
    ("top_k", -1),
    ("top_k", 1.5),
    ("seed", "x"),
    ("stream", "yes"),
    ("metadata", "me"),
    ("tools", {}),
    ("tools[0]", "weather"),
    ("tools[0].name", None),
    ("tools[0].name", 1),
    ("tools[0].description", 1),
    ("tools[0].input_schema", "{}"),
    ("tools[0].input_schema", None),
    ("tools[0].strict", 1),
    ("tools[0].type", "web_search_20250305"),
    ("tools[1].name", "weather"),
    ("tool_choice", "auto"),
    ("tool_choice.type", "some"),
    ("tool_choice.type", None),
    ("tool_choice.name", "absent"),
    ("tool_choice.name", None),
    ("tool_choice.disable_parallel_tool_use", 1),
    ("thinking", True),
    ("thinking.type", "deep"),
    ("thinking.type", None),
    ("thinking.budget_tokens", "many"),
    ("output_config", 1),
    ("output_config.effort", 1),
    ("output_config.format", "json"),
    ("output_config.format.type", "xml"),
    ("output_config.format.schema", None),
    ("output_config.format.schema", "x"),
    ("chat_template_kwargs", 1),
]


def full_body() -> dict[str, Any]:
    """A body with every field that is read."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    turns = [user(text("a")), assistant(dict(USE), thinking), user(dict(RESULT), SEARCH)]
    return json.loads(
        json.dumps(
            {
                **BODY,
                "messages": turns,
                "system": [text("x")],
                "stop_sequences": ["x"],
                "temperature": 1,
                "top_p": 1,
                "top_k": 5,
                "stream": True,
                "metadata": {"user_id": "me"},
                "tools": [WEATHER, {**WEATHER, "name": "time"}],
                "tool_choice": {"type": "tool", "name": "weather"},
                "thinking": {"type": "enabled", "budget_tokens": 2000},
                "output_config": {"effort": "low", **SCHEMA},
                "chat_template_kwargs": {},
            }
        )
    )


def test_the_full_body_is_right() -> None:
    call = api.read(Fields(full_body()), ScriptedService())
    assert call.stream and call.request.tool_choice == "name:weather"


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_wrong_value_is_told_with_its_field(path: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        api.read(Fields(replaced(full_body(), path, value)), ScriptedService())
    assert (caught.value.status, caught.value.param) == (400, path)
    told = api.error_body(caught.value)
    assert told["error"]["type"] == "invalid_request_error"
    assert path in told["error"]["message"]


def test_odd_values_are_read_or_refused() -> None:
    """Nothing but ApiError comes out, and it names the field."""
    refused = 0
    for path, body in odd_bodies(full_body):
        try:
            api.read(Fields(body), ScriptedService())
        except ApiError as error:
            refused += 1
            named = field_of(error.param or "")
            changed = field_of(path)
            assert error.status == 400
            assert named == changed or (named, changed) == ("tool_choice", "tools")
    assert refused > 300


def test_errors_say_what_to_do() -> None:
    for path, value, told in (
        ("messages[0].content[0].type", "image", "reads text only"),
        ("tools[0].type", "web_search_20250305", "web_search_20250305.*input_schema"),
        ("tool_choice.name", "absent", "weather, time"),
    ):
        with pytest.raises(ApiError, match=told):
            api.read(Fields(replaced(full_body(), path, value)), ScriptedService())


@pytest.mark.parametrize("content", [[], [{"type": "redacted_thinking", "data": "x"}]])
def test_there_must_be_something_to_answer(content: list[Any]) -> None:
    for system in (None, "x"):
        with pytest.raises(ApiError, match="at least one message") as caught:
            messages_of({"role": "assistant", "content": content}, system=system)
        assert caught.value.param == "messages"


def test_any_tool_needs_tools() -> None:
    with pytest.raises(ApiError, match="there are no tools"):
        read(tool_choice={"type": "any"})


def test_a_wrong_body_raises_in_the_sdk(client: Any, service: ScriptedService) -> None:
    with pytest.raises(sdk.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        client.messages.create(model="tiny", max_tokens=5, messages=[user(image)])
    with pytest.raises(sdk.NotFoundError, match="unknown"):
        client.messages.create(**{**BODY, "model": "unknown"})
    assert service.requests == []
