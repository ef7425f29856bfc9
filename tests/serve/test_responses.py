"""OpenAI's Responses API over scripted answers: through its SDK, and body by body."""

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
    ScriptedService,
    field_of,
    odd_bodies,
    replaced,
    sse,
)

from ggpy.serve.api import responses as api
from ggpy.serve.api.reading import UNREAD
from ggpy.serve.api.responses.request import sealed, unsealed
from ggpy.serve.errors import ApiError
from ggpy.serve.events import (
    AnswerToken,
    CallDelta,
    CallStart,
    Constraint,
    ReasoningDelta,
    TextDelta,
)
from ggpy.serve.fields import Fields

sdk = pytest.importorskip("openai")

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": True}
HOSTED = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
BODY: dict[str, Any] = {"model": "tiny", "input": "Hello"}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def client(scripted: tuple[ScriptedService, str]) -> Iterator[Any]:
    with sdk.OpenAI(base_url=scripted[1] + "/v1", api_key="none", max_retries=0) as client:
        yield client


def read(**more: Any) -> Any:
    """What a body becomes."""
    return api.read(Fields({**BODY, **more}), ScriptedService()).request


def messages_of(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return list(read(input=list(items), **more).messages)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# Answers, through the SDK


def test_a_response(client: Any, service: ScriptedService) -> None:
    response = client.responses.create(**BODY)
    assert response.output_text == "Hello"
    assert (response.status, response.model, response.object) == ("completed", "tiny", "response")
    item = response.output[0]
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.content[0].annotations == [] and item.content[0].logprobs == []
    assert response.id.startswith("resp_") and item.id.startswith("msg_")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 5, 25)
    assert usage.input_tokens_details.cached_tokens == 8
    assert usage.output_tokens_details.reasoning_tokens == 2
    assert response.error is None and response.incomplete_details is None


def test_what_a_response_repeats(client: Any, service: ScriptedService) -> None:
    response = client.responses.create(
        **BODY,
        instructions="Be brief.",
        metadata={"run": "7"},
        max_output_tokens=50,
        temperature=0.25,
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        tools=[WEATHER, *HOSTED],
        tool_choice="auto",
        truncation="auto",
        store=True,
        user="me",
    )
    assert (response.instructions, response.metadata) == ("Be brief.", {"run": "7"})
    assert (response.max_output_tokens, response.temperature) == (50, 0.25)
    assert response.top_p == 0.95, "the server's own"
    assert response.parallel_tool_calls is False and response.tool_choice == "auto"
    assert [tool.name for tool in response.tools] == ["weather"], "what the model was given"
    assert response.reasoning.effort == "low" and response.text.format.type == "text"
    assert (response.truncation, response.store, response.user) == ("disabled", False, "me")
    assert "sealed" not in response.to_dict()


def test_an_answer_that_is_cut_off(client: Any, service: ScriptedService) -> None:
    service.script = (ReasoningDelta("a"), TextDelta("b"), CUT)
    response = client.responses.create(**BODY)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    events = list(client.responses.create(**BODY, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[1].status == "incomplete"
    done = [e.item.status for e in events if e.type == "response.output_item.done"]
    assert done == ["completed", "incomplete"]


def test_a_stream_has_all_that_a_whole_response_has(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    whole = client.responses.create(**BODY, tools=[WEATHER])
    with client.responses.stream(**BODY, tools=[WEATHER]) as stream:
        streamed = stream.get_final_response()
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    for one, other in zip(whole.output, streamed.output, strict=True):
        left, right = one.to_dict(), other.to_dict()
        assert (left.pop("id"), right.pop("id")) != (None, None)
        right.pop("parsed_arguments", None)
        for part in right.get("content", []):
            part.pop("parsed", None)
        assert left == right
    assert whole.output[0].content[0].text == "Two cities."
    assert whole.output[0].summary == []
    call = whole.output[2]
    assert (call.call_id, call.name, call.status) == ("call_a", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Üsküp"}
    assert whole.usage.to_dict() == streamed.usage.to_dict()


def test_the_sdk_puts_a_stream_together(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    with client.responses.stream(**BODY, tools=[WEATHER]) as stream:
        events = list(stream)
    snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots == ["I look."]
    arguments = [e.snapshot for e in events if e.type == "response.function_call_arguments.delta"]
    assert arguments == ['{"city": ', '{"city": "Üsküp"}', "{}"]
    thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert thought == ["Two ", "cities."]


def test_the_order_of_events(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    events = list(client.responses.create(**BODY, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = [t.replace("output", "reasoning") for t in text]
    thought.insert(1, thought[1])
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [thought, text, [call[0], *call], call]
    expected = ["created", "in_progress"]
    for item in items:
        expected += ["output_item.added", *item, "output_item.done"]
    assert [e.type.removeprefix("response.") for e in events] == [*expected, "completed"]
    ids: dict[int, set[str]] = {}
    for e in events:
        if hasattr(e, "output_index"):
            item_id = e.item_id if hasattr(e, "item_id") else e.item.id
            ids.setdefault(e.output_index, set()).add(item_id)
    assert all(len(found) == 1 for found in ids.values())
    final = events[-1].response
    assert [{item.id} for item in final.output] == [ids[i] for i in range(4)]
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1


def test_what_begins_is_empty(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    events = list(client.responses.create(**BODY, stream=True))
    begun = [e.item for e in events if e.type == "response.output_item.added"]
    assert all(item.status == "in_progress" for item in begun)
    assert [item.content for item in begun[:2]] == [[], []]
    assert [item.arguments for item in begun[2:]] == ["", ""]
    created = events[0].response
    assert (created.status, created.output, created.usage) == ("in_progress", [], None)


def test_parse_with_a_model(client: Any, service: ScriptedService) -> None:
    class City(BaseModel):
        name: str
        people: int

    service.script = (TextDelta('{"name": "Bonn", '), TextDelta('"people": 330000}'), END)
    response = client.responses.parse(**BODY, text_format=City)
    assert response.output_parsed == City(name="Bonn", people=330000)
    constraint = service.requests[0].options.constraint
    assert constraint is not None and constraint.kind == "json_schema"
    assert json.loads(constraint.text)["required"] == ["name", "people"]
    with client.responses.stream(**BODY, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    assert response.text.format.name == "City"


def test_the_round_trip_of_a_tool(client: Any, service: ScriptedService) -> None:
    service.script = CALLS
    first = client.responses.create(**BODY, tools=[WEATHER])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {i}"}
        for i, item in enumerate(i for i in first.output if i.type == "function_call")
    ]
    service.script = TEXT
    turns = [said("user", "Hello"), *first.output, *results]
    second = client.responses.create(model="tiny", input=turns, tools=[WEATHER])
    assert second.output_text == "Hello"
    messages = service.requests[-1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    calling = messages[1]
    assert (calling["content"], calling["reasoning_content"]) == ("I look.", "Two cities.")
    functions = [call["function"] for call in calling["tool_calls"]]
    assert [f["name"] for f in functions] == ["weather", "time"]
    assert json.loads(functions[0]["arguments"]) == {"city": "Üsküp"}
    assert messages[3] == {"role": "tool", "tool_call_id": "call_b", "content": "result 1"}


def test_reasoning_comes_back_sealed(client: Any, service: ScriptedService) -> None:
    """Agents that keep no text of reasoning send back encrypted_content alone."""
    service.script = CALLS
    include = ["reasoning.encrypted_content"]
    with client.responses.stream(**BODY, include=include) as stream:
        item = stream.get_final_response().output[0]
    assert unsealed(item.encrypted_content) == "Two cities."
    sent = {"type": "reasoning", "summary": [], "encrypted_content": item.encrypted_content}
    assert messages_of(said("user", "a"), sent)[1]["reasoning_content"] == "Two cities."
    plain = client.responses.create(**BODY).output[0]
    assert plain.encrypted_content is None


@pytest.mark.parametrize("content", [None, "", "gAAAA", "ggpy:!", "ggpy:/w=="])
def test_what_was_sealed_elsewhere_is_ignored(content: str | None) -> None:
    assert unsealed(content) == ""
    sent = {"type": "reasoning", "summary": [], "encrypted_content": content}
    assert messages_of(said("user", "a"), sent) == [said("user", "a")]


@pytest.mark.parametrize("text", ["", "a\nb", "漢字🙂"])
def test_sealing_keeps_the_text(text: str) -> None:
    assert unsealed(sealed(text)) == text


def test_logprobs(client: Any, service: ScriptedService) -> None:
    best = (AnswerToken(5, b"He", -0.1), AnswerToken(6, b"Ho", float("-inf")))
    service.script = (
        TextDelta("", (AnswerToken(5, b"He", -0.1, 0, best),)),
        TextDelta("He!", (AnswerToken(7, b"He!", -2.0),)),
        END,
    )
    whole = client.responses.create(**BODY, include=LOGPROBS, top_logprobs=2)
    found = whole.output[0].content[0].logprobs
    assert [(p.token, p.logprob, p.bytes) for p in found] == [
        ("He", -0.1, [72, 101]),
        ("He!", -2.0, [72, 101, 33]),
    ]
    assert [(top.token, top.logprob) for top in found[0].top_logprobs] == [
        ("He", -0.1),
        ("Ho", -9999.0),
    ]
    assert service.requests[0].options.top_logprobs == 2 and whole.top_logprobs == 2
    with client.responses.stream(**BODY, include=LOGPROBS) as stream:
        deltas = [e for e in stream if e.type == "response.output_text.delta"]
    assert [[p.token for p in e.logprobs] for e in deltas] == [["He"], ["He!"]]


@pytest.mark.parametrize(
    ("more", "top_logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": LOGPROBS}, 0),
        ({"include": LOGPROBS, "top_logprobs": 20}, 20),
    ],
)
def test_when_logprobs_are_wanted(more: dict[str, Any], top_logprobs: int | None) -> None:
    assert read(**more).options.top_logprobs == top_logprobs


def test_tokens_are_counted(client: Any, service: ScriptedService) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="Hello", instructions="x")
    assert (counted.input_tokens, counted.object) == (17, "response.input_tokens")
    assert [m["role"] for m in service.requests[0].messages] == ["system", "user"]


def test_an_answer_of_nothing(client: Any, service: ScriptedService) -> None:
    service.script = (TextDelta(""), END)
    assert client.responses.create(**BODY).output == []
    with client.responses.stream(**BODY) as stream:
        assert stream.get_final_response().output_text == ""


# Errors


@pytest.mark.parametrize(
    ("refusal", "raised", "kind"),
    [
        (ApiError(400, "bad", param="input"), "BadRequestError", "invalid_request_error"),
        (ApiError(401, "no key"), "AuthenticationError", "authentication_error"),
        (ApiError(404, "no model"), "NotFoundError", "not_found_error"),
        (ApiError(429, "full", retry_after=3), "RateLimitError", "rate_limit_error"),
        (ApiError(503, "loading"), "InternalServerError", "unavailable_error"),
    ],
)
def test_the_sdk_knows_the_errors(
    client: Any, service: ScriptedService, refusal: ApiError, raised: str, kind: str
) -> None:
    service.refusal = refusal
    for streamed in (False, True):
        with pytest.raises(getattr(sdk, raised), match=refusal.message) as caught:
            client.responses.create(**BODY, stream=streamed)
        assert (caught.value.type, caught.value.param) == (kind, refusal.param)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(500, "the GPU is lost"), "server_error"),
        (ApiError(503, "the GPU is lost"), "rate_limit_exceeded"),
        (ApiError(400, "the GPU is lost", code="context_length_exceeded"), None),
    ],
)
def test_an_error_midway_ends_the_stream(
    client: Any, service: ScriptedService, error: ApiError, code: str | None
) -> None:
    service.script = (TextDelta("a"), error)
    events = list(client.responses.create(**BODY, stream=True))
    assert [e.type for e in events[-2:]] == ["error", "response.failed"]
    assert (events[-2].message, events[-2].code) == ("the GPU is lost", code or error.code)
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", code or error.code)
    assert failed.output[0].content[0].text == "a" and failed.output[0].status == "incomplete"
    assert service.n_closed == 1


def test_what_nobody_foresaw_ends_the_stream_and_is_raised(service: ScriptedService) -> None:
    service.script = (TextDelta("a"), ZeroDivisionError("secret"))

    async def run() -> bytes:
        body = b""
        with pytest.raises(ZeroDivisionError):
            async for told in api.stream(await service.chat(read(), ""), "tiny", {}):
                body += told
        return body

    body = asyncio.run(run())
    assert sse(body)[-1][0] == "response.failed" and b"secret" not in body


def test_the_sdk_takes_comments_anywhere(client: Any, service: ScriptedService) -> None:
    service.pings = True
    with client.responses.stream(**BODY) as stream:
        assert stream.get_final_response().output_text == "Hello"


@pytest.mark.parametrize(
    "said", ['"\n\\', "\u2028\x00\x7f", "漢字🙂", "\ud800", "data: x\n\ndata: y"]
)
def test_any_text_survives_a_stream(said: str) -> None:
    writer = api.ResponseWriter("tiny", {})
    events = sse(writer.start() + writer.write(TextDelta(said)) + writer.write(END))
    assert [d["delta"] for n, d in events if n == "response.output_text.delta"] == [said]


# Requests


def test_sampling_starts_from_the_servers_defaults() -> None:
    options = read(top_p=0.5, seed=3, max_output_tokens=9).options
    params = options.params
    assert (params.top_p, params.seed, params.temperature, params.min_p) == (0.5, 3, 0.7, 0.1)
    assert options.max_tokens == 9 and options.constraint is None
    assert read().options.max_tokens is None
    limited = api.read(Fields(BODY), ScriptedService(), max_tokens=7)
    assert limited.request.options.max_tokens == 7


def test_unknown_and_null_fields_are_ignored() -> None:
    more = {"prompt_cache_key": "x", "service_tier": "auto", "odd": {}, "temperature": None}
    assert read(**more, previous_response_id=None, conversation=None, background=False) == read()


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}]
    refusal = [{"type": "refusal", "refusal": "no"}]
    assert messages_of(
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": answer},
        said("user", "d"),
        said("assistant", refusal),
        said("system", "e"),
    ) == [
        said("user", "a\nb"),
        said("assistant", "c"),
        said("user", "d"),
        said("assistant", "no"),
        said("system", "e"),
    ]


def test_instructions_and_a_developers_message_are_one_system_message() -> None:
    messages = messages_of(said("developer", "b"), said("user", "c"), instructions="a")
    assert messages == [said("system", "a\n\nb"), said("user", "c")]


def test_an_output_may_be_parts() -> None:
    output = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    sent = {"type": "function_call_output", "call_id": "c", "output": output}
    told = {"role": "tool", "tool_call_id": "c", "content": "a\nb"}
    assert messages_of(sent) == [told]


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
        {"content": None, "summary": [], "encrypted_content": sealed("hm")},
        {"content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": "x"},
    ],
)
def test_reasoning_is_kept_with_what_follows(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    messages = messages_of(said("user", "a"), {"type": "reasoning", **item}, call)
    assert len(messages) == 2
    assert messages[1]["reasoning_content"] == "hm" and messages[1]["content"] == ""
    assert messages[1]["tool_calls"][0]["id"] == "c"


def test_tools_that_cannot_run_here_are_left_out() -> None:
    request = read(tools=[*HOSTED, WEATHER, {"type": "local_shell"}, TIME])
    assert [t["function"]["name"] for t in request.tools] == ["weather", "time"]
    weather, clock = (t["function"] for t in request.tools)
    assert weather["parameters"] == WEATHER["parameters"] and "strict" not in weather
    assert clock == {"name": "time", "description": "", "parameters": {}, "strict": True}


# Codex lists the tools of an MCP server so.
SPACE = {"type": "namespace", "name": "mcp__w", "tools": [WEATHER, HOSTED[1], TIME]}
CALL_THERE = (CallStart(0, "call_a", "mcp__w__weather"), CallDelta(0, "{}"), CALLED)


def test_the_model_is_given_the_functions_of_a_namespace() -> None:
    request = read(tools=[WEATHER, SPACE])
    names = ["weather", "mcp__w__weather", "mcp__w__time"]
    assert [t["function"]["name"] for t in request.tools] == names
    assert request.tools[1]["function"]["parameters"] == WEATHER["parameters"]
    older = read(tools=[{**SPACE, "name": "mcp__w__"}])
    assert [t["function"]["name"] for t in older.tools] == names[1:]


def test_a_call_names_its_namespace(client: Any, service: ScriptedService) -> None:
    service.script = CALL_THERE
    whole = client.responses.create(**BODY, tools=[SPACE]).to_dict()
    with client.responses.stream(**BODY, tools=[SPACE]) as stream:
        events = list(stream)
        streamed = stream.get_final_response().to_dict()
    for response in (whole, streamed):
        (call,) = response["output"]
        assert (call["namespace"], call["name"]) == ("mcp__w", "weather")
        assert "namespaces" not in response and response["tools"][0]["name"] == "mcp__w"
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert done.name == "weather"
    service.script = CALLS
    (*_, plain, _) = client.responses.create(**BODY, tools=[WEATHER, SPACE]).to_dict()["output"]
    assert plain["name"] == "weather" and "namespace" not in plain


def test_a_call_in_a_namespace_comes_back() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    messages = messages_of(said("user", "a"), {**call, "namespace": "mcp__w"}, tools=[SPACE])
    assert messages[1]["tool_calls"][0]["function"]["name"] == "mcp__w__weather"


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ([{**SPACE, "name": ""}], "tools[0].name"),
        ([{**SPACE, "tools": {}}], "tools[0].tools"),
        ([WEATHER, {**SPACE, "tools": [{"type": 1}]}], "tools[1].tools[0].type"),
        ([{**SPACE, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([SPACE, {**SPACE, "name": "mcp__w__"}], "tools[1].tools[0].name"),
    ],
)
def test_a_namespace_that_is_wrong(tools: list[Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(tools=tools)
    assert caught.value.param == path


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_the_model_is_told_of_a_result_that_it_cannot_read(kind: str) -> None:
    output = [{"type": kind, "image_url": "data:"}, {"type": "input_text", "text": "b"}]
    told = messages_of({"type": "function_call_output", "call_id": "c", "output": output})
    assert told[0]["content"] == f"{UNREAD}\nb"


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [TIME, *HOSTED]}
THERE = {"type": "function", "name": "time", "namespace": "mcp__w"}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["weather", "time"]),
        ("none", "none", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        ({"type": "function", "name": "time"}, "name:time", ["weather", "time"]),
        (ALLOWED, "required", ["time"]),
        ({**ALLOWED, "mode": "auto"}, "auto", ["time"]),
    ],
)
def test_tool_choice(choice: Any, expected: str, names: list[str]) -> None:
    request = read(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert request.tool_choice == expected and request.parallel_tool_calls is False
    assert [t["function"]["name"] for t in request.tools] == names


def test_tool_choice_in_a_namespace() -> None:
    request = read(tools=[TIME, SPACE], tool_choice=THERE)
    assert request.tool_choice == "name:mcp__w__time"
    request = read(tools=[TIME, SPACE], tool_choice={**ALLOWED, "tools": [THERE]})
    assert [t["function"]["name"] for t in request.tools] == ["mcp__w__time"]


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint("json_object")),
        (
            {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}},
            Constraint("json_schema", '{"type": "object"}'),
        ),
    ],
)
def test_the_format_of_the_text(form: dict[str, Any], constraint: Constraint | None) -> None:
    text = {"format": form, "verbosity": "low"}
    assert read(text=text).options.constraint == constraint
    assert api.read(Fields({**BODY, "text": text}), ScriptedService()).echo["text"] == {
        "format": form
    }


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": None}}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_variables_of_the_template(more: Any, variables: dict[str, Any]) -> None:
    assert read(**more).template_variables == variables


def test_what_a_coding_agent_sends(client: Any, service: ScriptedService) -> None:
    """Instructions, a developer's message, tools of all kinds, results of calls."""
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    developer = [{"type": "input_text", "text": "permissions"}]
    user = [{"type": "input_text", "text": "Fix it"}]
    stream = client.responses.create(
        model="any-name",
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": developer},
            {"type": "message", "role": "user", "content": user},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {**call, "id": "fc_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        tools=[WEATHER, *HOSTED, {"type": "namespace", "name": "mcp", "tools": [WEATHER]}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        store=False,
        stream=True,
        prompt_cache_key="x",
        text={"verbosity": "medium"},
        extra_body={"client_metadata": {"session": "x"}},
    )
    assert [event.type for event in stream][-1] == "response.completed"
    roles = [m["role"] for m in service.requests[0].messages]
    assert roles == ["system", "user", "assistant", "tool"]
    names = [tool["function"]["name"] for tool in service.requests[0].tools]
    assert names == ["weather", "mcp__weather"]


# Bad bodies

CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
WRONG: list[tuple[str, Any]] = [
    ("model", 3),
    ("input", 3),
    ("input", None),
    ("input", {}),
    ("input[0]", "Hello"),
    ("input[0].type", "item_reference"),
    ("input[0].type", "web_search_call"),
    ("input[0].type", 1),
    ("input[0].role", "robot"),
    ("input[0].role", None),
    ("input[0].role", 1),
    ("input[0].content", 1),
    ("input[0].content", None),
    ("input[0].content[0]", "x"),
    ("input[0].content[0].type", "input_image"),
    ("input[0].content[0].type", "input_file"),
    ("input[0].content[0].type", "thought"),
    ("input[0].content[0].type", None),
    ("input[0].content[0].text", 1),
    ("input[0].content[0].text", None),
    ("input[1].call_id", 1),
    ("input[1].name", None),
    ("input[1].arguments", {}),
    ("input[2].call_id", None),
    ("input[2].output", None),
    ("input[2].output", 1),
    ("input[2].output[0].text", 1),
    ("input[3].content", "hm"),
    ("input[3].content[0].type", "output_text"),
    ("input[3].content[0].text", 1),
    ("input[3].summary", "hm"),
    ("input[3].summary[0].text", 1),
    ("instructions", 1),
    ("instructions", ["x"]),
    ("previous_response_id", "resp_1"),
    ("conversation", "conv_1"),
    ("prompt", {"id": "x"}),
    ("background", True),
    ("background", "no"),
    ("store", "no"),
    ("stream", 1),
    ("include", 1),
    ("include", [1]),
    ("max_output_tokens", 0),
    ("max_output_tokens", "5"),
    ("temperature", "hot"),
    ("temperature", 2.1),
    ("top_p", -0.1),
    ("top_logprobs", 21),
    ("top_logprobs", "x"),
    ("seed", "x"),
    ("metadata", "x"),
    ("metadata.run", 7),
    ("parallel_tool_calls", "yes"),
    ("truncation", "some"),
    ("user", 1),
    ("reasoning", "low"),
    ("reasoning.effort", 1),
    ("text", "json"),
    ("text.format", "json"),
    ("text.format.type", "xml"),
    ("text.format.type", None),
    ("text.format.name", 1),
    ("text.format.strict", "yes"),
    ("text.format.schema", None),
    ("text.format.schema", "{}"),
    ("tools", {}),
    ("tools[0]", "weather"),
    ("tools[0].type", None),
    ("tools[0].type", 1),
    ("tools[0].name", None),
    ("tools[0].name", 1),
    ("tools[0].description", 1),
    ("tools[0].parameters", "{}"),
    ("tools[0].strict", 1),
    ("tools[1].name", "weather"),
    ("tool_choice", 1),
    ("tool_choice", "some"),
    ("tool_choice.type", "web_search"),
    ("tool_choice.type", None),
    ("tool_choice.name", "absent"),
    ("tool_choice.name", None),
    ("chat_template_kwargs", 1),
]


def full_body() -> dict[str, Any]:
    """A body with every field that is read."""
    text = {"type": "input_text", "text": "x"}
    thought = {"content": [{"type": "reasoning_text", "text": "hm"}]}
    summary = {"summary": [{"type": "summary_text", "text": "hm"}]}
    body = {
        "model": "tiny",
        "input": [
            {"type": "message", "role": "user", "content": [text]},
            CALL,
            {"type": "function_call_output", "call_id": "c", "output": [text]},
            {"type": "reasoning", **thought, **summary},
        ],
        "instructions": "x",
        "stream": True,
        "include": LOGPROBS,
        "max_output_tokens": 5,
        "temperature": 1,
        "top_p": 1,
        "metadata": {"run": "7"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    return json.loads(json.dumps(body))


def test_the_full_body_is_right() -> None:
    call = api.read(Fields(full_body()), ScriptedService())
    assert call.stream and call.request.tool_choice == "name:weather"


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_wrong_value_is_told_with_its_field(path: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        api.read(Fields(replaced(full_body(), path, value)), ScriptedService())
    assert (caught.value.status, caught.value.param) == (400, path)
    assert path in caught.value.message


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


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"previous_response_id": "resp_1"}, "not stored: send the whole conversation"),
        ({"conversation": {"id": "conv_1"}}, "not stored: send the whole conversation"),
        ({"background": True}, "not stored"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"send the item itself .store: false"),
        ({"input": []}, "at least one message"),
        ({"tool_choice": "required"}, "no functions"),
        ({"tools": HOSTED, "tool_choice": "required"}, "no functions"),
        ({"tools": [TIME], "tool_choice": {**ALLOWED, "tools": HOSTED}}, "names no function"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "one of time"),
        ({"input": [said("user", [{"type": "input_image"}])]}, "reads text only"),
        ({"metadata": {str(i): "" for i in range(17)}}, "17 entries: give at most 16"),
    ],
)
def test_errors_say_what_to_do(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        read(**more)


def test_a_wrong_body_raises_in_the_sdk(client: Any, service: ScriptedService) -> None:
    with pytest.raises(sdk.BadRequestError, match="not stored") as caught:
        client.responses.create(**BODY, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(sdk.NotFoundError, match="unknown"):
        client.responses.create(model="unknown", input="x")
    assert service.requests == []


def test_a_call_that_is_cut_off_keeps_its_text(client: Any, service: ScriptedService) -> None:
    service.script = (CallStart(0, "call_a", "weather"), CallDelta(0, '{"city": "B'), CUT)
    item = client.responses.create(**BODY).output[0]
    assert (item.arguments, item.status) == ('{"city": "B', "incomplete")
