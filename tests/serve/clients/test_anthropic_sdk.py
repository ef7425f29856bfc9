"""Anthropic's SDK against a server of a tiny model: messages, streams, tools, tokens, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from clients_of_servers import HELLO, Clock, Weather, check
from running_server import RunningServer, eventually, idle

OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}}
SHORT = {**OPTIONS, "max_tokens": 8}
TOOLS: list[Any] = [
    {"name": tool.__name__, "description": tool.__doc__, "input_schema": tool.model_json_schema()}
    for tool in (Weather, Clock)
]
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(roomy: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=roomy.url, api_key="sesame", max_retries=0) as found:
        yield found


def test_a_message_is_what_openai_s_api_answers(
    client: anthropic.Anthropic, roomy: RunningServer
) -> None:
    message = client.messages.create(messages=HELLO, **SHORT)
    plain = roomy.post("/v1/chat/completions", messages=HELLO, max_tokens=8, temperature=0).json()
    assert [block.text for block in message.content] == [plain["choices"][0]["message"]["content"]]
    assert message.stop_reason == "max_tokens"
    usage = message.usage
    n_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (n_prompt, usage.output_tokens) == (plain["usage"]["prompt_tokens"], 8)


def test_a_stream_has_the_same_text(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HELLO, system="Be brief.", **SHORT)
    with client.messages.stream(messages=HELLO, system="Be brief.", **SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8


def test_tokens_are_those_of_the_answer(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, tools=TOOLS)
    message = client.messages.create(messages=HELLO, tools=TOOLS, **SHORT)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_round_trip_of_a_tool(client: anthropic.Anthropic) -> None:
    first = client.messages.create(messages=HELLO, tools=TOOLS, tool_choice=ONE_CALL, **OPTIONS)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    check(call.name, call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    second = client.messages.create(
        messages=[
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=TOOLS,
        **SHORT,
    )
    assert second.content
    assert (second.usage.cache_read_input_tokens or 0) >= 64, "the tools are read once"


def test_a_streamed_call_of_a_named_tool(client: anthropic.Anthropic) -> None:
    named: Any = {"type": "tool", "name": "Weather"}
    with client.messages.stream(
        messages=HELLO, tools=TOOLS, tool_choice=named, **OPTIONS
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert call.name == "Weather"
    assert check("Weather", "".join(parts)) == check("Weather", call.input)


def test_errors_are_the_sdk_s_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(messages=HELLO, **{**OPTIONS, "max_tokens": -1})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(messages=[{"role": "user", "content": "x" * 9000}], **OPTIONS)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=HELLO, **SHORT)


def test_a_stream_that_is_closed_ends_the_answer(
    client: anthropic.Anthropic, roomy: RunningServer
) -> None:
    before = roomy.engine.stats().generated_tokens_total
    endless = {**OPTIONS, "max_tokens": 3900}
    with client.messages.stream(messages=HELLO, **endless) as stream:
        next(iter(stream.text_stream))
    assert eventually(lambda: idle(roomy))
    assert roomy.engine.stats().generated_tokens_total - before < 3000
