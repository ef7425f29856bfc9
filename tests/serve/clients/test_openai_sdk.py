"""OpenAI's SDK against a server of a tiny model: tools, parse(), responses, embeddings, errors.

The model is random, so calls are demanded by tool_choice, and grammars make them right.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from clients_of_servers import HELLO, TOOLS, Clock, Weather, check
from running_server import RunningServer, eventually, idle, running

OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def client(roomy: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="sesame", max_retries=0) as found:
        yield found


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model


# Tools


@pytest.mark.parametrize("seed", [0, 3, 4])  # of two calls, four and one
def test_a_call_that_is_demanded(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        **{**OPTIONS, "temperature": 1, "max_tokens": 400},
        seed=seed,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check(call.function.name, call.function.arguments)
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids)


def test_a_streamed_call(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "Weather"}}
    chunks = client.chat.completions.create(
        messages=HELLO, tools=TOOLS, tool_choice=named, stream=True, **OPTIONS
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert all(delta.content is None for delta in deltas), "an empty text is shown by AI SDKs"
    parts = [call for delta in deltas for call in delta.tool_calls or []]
    assert [part.function.name for part in parts if part.function.name] == ["Weather"]
    assert {part.index for part in parts} == {0}
    assert len([part.id for part in parts if part.id]) == 1
    check("Weather", "".join(part.function.arguments or "" for part in parts))


def test_the_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Clock, name="Clock")]
    with client.chat.completions.stream(
        messages=HELLO,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        **OPTIONS,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call, *_) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Clock)


def test_the_round_trip_of_a_call(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        **OPTIONS,
    )
    message = asked.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    more = client.chat.completions.create(
        messages=[*HELLO, message.model_dump(exclude_none=True), result],
        tools=TOOLS,
        **{**OPTIONS, "max_tokens": 8},
    )
    assert more.usage.prompt_tokens > asked.usage.prompt_tokens + len("sunny")
    assert more.choices[0].message.content
    assert more.usage.prompt_tokens_details.cached_tokens >= 64, "the tools are read once"


def test_no_call_where_none_is_wanted(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=HELLO, **{**OPTIONS, "max_tokens": 8})
    none = client.chat.completions.create(
        messages=HELLO, tools=TOOLS, tool_choice="none", **{**OPTIONS, "max_tokens": 8}
    )
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_tool_whose_schema_cannot_be_met(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "wrong"}}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=HELLO, tools=[tool], tool_choice="required", **OPTIONS
        )
    assert caught.value.param == "tools"


# Answers that match a schema


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=HELLO, response_format=Weather, **OPTIONS)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"


def test_parse_a_call(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client.chat.completions.parse(
        messages=HELLO,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        **OPTIONS,
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_an_answer_that_is_cut_off_is_told_by_parse(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            messages=HELLO, response_format=Weather, **{**OPTIONS, "max_tokens": 3}
        )


def test_json_object(client: openai.OpenAI, roomy: RunningServer) -> None:
    tokenizer = roomy.process.server.service.tokenizer  # type: ignore[union-attr]
    quotes = [id for id in range(tokenizer.n_vocab) if '"' in tokenizer.decode([id])]
    chunks = client.chat.completions.create(
        messages=HELLO,
        response_format={"type": "json_object"},
        stream=True,
        logit_bias={str(id): -100 for id in quotes},  # no text that never ends
        **OPTIONS,
    )
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks)) == {}


# Responses


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="hello", temperature=0, max_output_tokens=8, store=False
    )
    plain = client.chat.completions.create(messages=HELLO, **{**OPTIONS, "max_tokens": 8})
    assert answer.output_text == plain.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.usage.output_tokens == 8


def test_a_streamed_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="hello", temperature=0, max_output_tokens=8
    ) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert text == events[-1].response.output_text != ""


def test_the_round_trip_of_a_response_s_call(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "Weather",
        "parameters": Weather.model_json_schema(),
        "strict": True,
    }
    options: dict[str, Any] = {"model": "tiny", "tools": [tool], "temperature": 0}
    options["parallel_tool_calls"] = False
    first = client.responses.create(
        input=HELLO, tool_choice="required", max_output_tokens=200, **options
    )
    calls = [item for item in first.output if item.type == "function_call"]
    for call in calls:
        check(call.name, call.arguments)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    second = client.responses.create(
        input=[*HELLO, *items, *results], max_output_tokens=8, **options
    )
    assert calls and second.usage.input_tokens > first.usage.input_tokens


def test_parse_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="tiny", input="hello", text_format=Clock, temperature=0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Clock)


# Embeddings and text completions


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["hello", "world", "hello"]
    answer = client.embeddings.create(model="tiny", input=texts)  # base64, the SDK's default
    floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = [item.embedding for item in answer.data]
    # a BLAS may add up the rows of a batch in different orders
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-6)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)
    assert vectors[1] == pytest.approx(floats.data[1].embedding, abs=1e-6)
    assert math.hypot(*vectors[0]) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == floats.usage.prompt_tokens > 0


def test_text_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**OPTIONS, "max_tokens": 8}
    whole = client.completions.create(prompt="hello", **options).choices[0].text
    stream = client.completions.create(prompt="hello", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole != ""


# Errors


def test_errors_are_the_sdk_s_exceptions(client: openai.OpenAI, roomy: RunningServer) -> None:
    for error, options in {
        openai.BadRequestError: {"top_p": 2},
        openai.AuthenticationError: {"extra_headers": {"Authorization": "Bearer wrong"}},
    }.items():
        with pytest.raises(error):
            client.chat.completions.create(messages=HELLO, **{**OPTIONS, **options})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=[{"role": "user", "content": "x" * 9000}], **OPTIONS
        )
    assert caught.value.code == "context_length_exceeded"


def test_a_full_server_is_overloaded() -> None:
    with running(n_seq=1, n_waiting=0, n_ctx=4096) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        endless: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        with client.chat.completions.create(
            messages=HELLO, stream=True, **{**OPTIONS, **endless}
        ) as stream:
            next(iter(stream))
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(messages=HELLO, **OPTIONS)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert eventually(lambda: idle(server))


def test_a_time_limit_of_the_client_ends_the_answer(
    client: openai.OpenAI, roomy: RunningServer
) -> None:
    endless: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            messages=HELLO, **{**OPTIONS, **endless}
        )
    assert eventually(lambda: idle(roomy))


def test_a_stream_that_is_closed_ends_the_answer(
    client: openai.OpenAI, roomy: RunningServer
) -> None:
    before = roomy.engine.stats().generated_tokens_total
    endless: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(
        messages=HELLO, stream=True, **{**OPTIONS, **endless}
    ) as stream:
        next(iter(stream))
    assert eventually(lambda: idle(roomy))
    assert roomy.engine.stats().generated_tokens_total - before < 3000


def test_the_asynchronous_client(roomy: RunningServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{roomy.url}/v1", api_key="sesame") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    messages=HELLO, stream=True, **{**OPTIONS, "max_tokens": 8}
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*[one() for _ in range(6)])

    assert len(set(asyncio.run(ask()))) == 1
