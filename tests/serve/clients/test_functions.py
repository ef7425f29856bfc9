"""OpenAI's older form of tools, functions, through the SDK: calls, streams, results, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from clients_of_servers import HELLO, TOOLS, check
from running_server import RunningServer, running

from ggpy.serve.api.messages import read_messages, read_tools
from ggpy.serve.api.reading import UNREAD
from ggpy.serve.errors import ApiError
from ggpy.serve.fields import Fields

FUNCTIONS = [tool["function"] for tool in TOOLS]
OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def client(roomy: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="sesame", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **more: Any) -> Any:
    options = {"messages": HELLO, "functions": FUNCTIONS, **OPTIONS, **more}
    return client.chat.completions.create(**options)


def test_a_function_that_is_demanded(client: openai.OpenAI) -> None:
    (choice,) = ask(client, function_call={"name": "Weather"}).choices
    assert (choice.finish_reason, choice.message.content) == ("function_call", None)
    assert choice.message.function_call.name == "Weather"
    assert not choice.message.tool_calls
    check("Weather", choice.message.function_call.arguments)


@pytest.mark.parametrize("more", [{}, {"extra_body": {"timings_per_token": True}}])
def test_a_streamed_function_call(client: openai.OpenAI, more: dict[str, Any]) -> None:
    chunks = list(ask(client, function_call={"name": "Weather"}, stream=True, **more))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert [call.name for call in calls if call.name] == ["Weather"]
    check("Weather", "".join(call.arguments for call in calls))
    assert choices[-1].finish_reason == "function_call"
    assert not any(choice.delta.tool_calls for choice in choices)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_of_text(client: openai.OpenAI, choice: str) -> None:
    (found,) = ask(client, function_call=choice, max_tokens=3).choices
    assert found.finish_reason == "length" and found.message.content
    assert found.message.function_call is None


def test_of_two_calls_there_is_one() -> None:
    """The older form has no place for a second."""
    call = '<tool_call>\\n{\\"name\\": \\"Clock\\", \\"arguments\\": {}}\\n</tool_call>'
    grammar = f'root ::= "{call}\\n{call}"'
    body = {"messages": HELLO, "functions": FUNCTIONS, "grammar": grammar, "max_tokens": 200}
    with running(tool_format="hermes", n_ctx=2048) as server:
        (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "Clock", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]


def test_calls_and_results_become_those_of_tools(client: openai.OpenAI) -> None:
    def called(name: str, arguments: str) -> dict[str, Any]:
        call = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": None, "function_call": call}

    messages = [
        *HELLO,
        called("Weather", '{"city": "Oslo"}'),
        {"role": "function", "name": "Weather", "content": "rain"},
        called("Clock", "{}"),
        {"role": "function", "name": "Clock", "content": None},
    ]
    found = read_messages(Fields({"messages": messages}))
    assert found[1]["tool_calls"] == [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "Weather", "arguments": '{"city": "Oslo"}'},
        }
    ]
    assert found[2] == {
        "role": "tool", "name": "Weather", "tool_call_id": "call00001", "content": "rain"
    }  # fmt: skip
    assert (found[4]["tool_call_id"], found[4]["content"]) == ("call00003", "")
    unasked = {"messages": [{"role": "function", "name": "Clock", "content": "12:00"}]}
    assert read_messages(Fields(unasked)) == [{"role": "tool", "name": "Clock", "content": "12:00"}]
    assert ask(client, messages=messages, max_tokens=3).choices[0].message.content
    assert read_tools(Fields({"functions": FUNCTIONS})) == read_tools(Fields({"tools": TOOLS}))


def test_results_of_tools_may_have_parts() -> None:
    """A picture becomes a sentence, because agents send the whole conversation each time."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    parts.append({"type": "text", "text": "b"})
    message = {"role": "tool", "tool_call_id": "c", "content": parts}
    (found,) = read_messages(Fields({"messages": [message]}))
    assert found["content"] == f"a\n{UNREAD}\nb"
    with pytest.raises(ApiError, match="reads text only"):
        read_messages(Fields({"messages": [{"role": "user", "content": parts}]}))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS}, "functions"),
        ({"function_call": {"name": "Other"}}, "function_call.name"),
        ({"function_call": "required"}, "function_call"),
        ({"function_call": "auto", "tool_choice": "auto"}, "function_call"),
        ({"functions": None, "function_call": "auto"}, "function_call"),
        ({"functions": [{"description": "x"}]}, "functions[0].name"),
        ({"function_call": {"name": "Clock"}, "grammar": "root ::= [a]"}, "function_call"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": "x", "function_call": {"name": "a"}}]},
            "messages[0].function_call",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [], "function_call": {"name": "a"}}]},
            "messages[0].function_call",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]},
            "messages[0].function_call.name",
        ),
    ],
)
def test_what_is_wrong_is_named(roomy: RunningServer, body: dict[str, Any], param: str) -> None:
    whole = {"messages": HELLO, "functions": FUNCTIONS, "max_tokens": 2, **body}
    answer = roomy.client.post("/v1/chat/completions", content=json.dumps(whole))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
