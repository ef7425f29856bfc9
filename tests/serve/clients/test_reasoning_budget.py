"""Budgets of reasoning through the SDKs, against a server of a tiny model whose template always
opens reasoning: the model is random, so that only a budget ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from clients_of_servers import HELLO, TOOLS, check
from running_server import RunningServer, running

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LIMIT, MESSAGE = 12, " Enough."
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 5}
EXTRA = {"ignore_eos": True}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    limits = {"reasoning_budget": LIMIT, "reasoning_message": MESSAGE}
    with running(tool_format="hermes", chat_template=TEMPLATE, n_ctx=1024, **limits) as found:
        yield found


@pytest.fixture(scope="module")
def client(thinker: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def parts(answer: Any, i: int = 0) -> tuple[str, str]:
    """Reasoning and content of an answer of OpenAI's SDK."""
    message = answer.choices[i].message
    return message.reasoning_content, message.content


def test_reasoning_ends_at_the_limit(client: openai.OpenAI, thinker: RunningServer) -> None:
    """The request's or the server's; all before is what would have been said without one."""

    def ask(**more: Any) -> Any:
        stop = more.pop("stop", None)
        return client.chat.completions.create(**OPTIONS, stop=stop, extra_body={**EXTRA, **more})

    endless, nothing = parts(ask(reasoning_budget_tokens=1000))
    assert endless and not nothing
    n_ending = len(thinker.engine.tokenizer.encode(MESSAGE + "</think>", add_special=False))
    for body, limit in (
        *(({}, LIMIT), ({"reasoning_budget_tokens": -1}, LIMIT)),
        *(({"reasoning_budget_tokens": 20}, 20), ({"thinking_budget_tokens": 1}, 1)),
    ):
        answer = ask(**body)
        thought, content = parts(answer)
        assert thought.endswith(MESSAGE.strip()) and content
        assert endless.startswith(thought.removesuffix(MESSAGE.strip()).strip())

        assert answer.usage.completion_tokens == 60
        assert ask(**body, stop="</think>").usage.completion_tokens == limit + n_ending
        assert answer.choices[0].finish_reason == "length"
    thought, content = parts(ask(reasoning_budget_message=""))
    assert content and endless.startswith(thought)


def test_a_budget_of_zero_asks_for_no_reasoning(thinker: RunningServer) -> None:
    body = {"messages": HELLO, "reasoning_budget_tokens": 0}
    assert thinker.post("/apply-template", **body).json()["prompt"].endswith("</think>\n\n")
    message = thinker.post(CHAT, **body, max_tokens=9).json()["choices"][0]["message"]
    assert message.keys() == {"role", "content"}


@pytest.mark.parametrize("logprobs", [False, True])
def test_streams_and_several_answers(client: openai.OpenAI, logprobs: bool) -> None:
    options = {**OPTIONS, "n": 2, "logprobs": logprobs, "extra_body": EXTRA}
    whole = client.chat.completions.create(**options)
    found = [["", ""], ["", ""]]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            found[choice.index][0] += getattr(choice.delta, "reasoning_content", None) or ""
            found[choice.index][1] += choice.delta.content or ""
    told = [list(parts(whole, i)) for i in range(2)]
    assert found == told and found[0] != found[1]
    assert all(thought.endswith("Enough.") and content for thought, content in found)
    if logprobs:
        for (_, content), choice in zip(told, whole.choices, strict=True):
            data = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
            assert data.decode("utf-8", "replace").replace("<s>", "") == content


def test_a_stop_string_and_bans_after_the_limit(thinker: RunningServer) -> None:
    body = {**OPTIONS, "reasoning_budget_message": " So STOP", "stop": ["STOP"]}
    choice = thinker.post(CHAT, **body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] in ("", None)
    banned = {"logit_bias": [["</think>", False]], **EXTRA}
    choice = thinker.post(CHAT, **OPTIONS, **banned).json()["choices"][0]
    assert choice["message"]["reasoning_content"].endswith("Enough.")
    assert choice["message"]["content"]


def test_a_demanded_call_after_reasoning(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 300, "temperature": 0}
    answer = client.chat.completions.create(**options, tools=TOOLS, tool_choice="required")
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content.endswith("Enough.")
    for call in choice.message.tool_calls:
        check(call.function.name, call.function.arguments)


def test_the_other_apis(client: openai.OpenAI, thinker: RunningServer) -> None:
    """Both without a token that ends the text before its limit, which a random model may draw."""
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as other:
        thinking: Any = {"type": "enabled", "budget_tokens": 4}
        options: Any = {"messages": HELLO, "model": "tiny", "max_tokens": 60, "thinking": thinking}
        options["extra_body"] = EXTRA
        message = other.messages.create(**options)
        with other.messages.stream(**options) as stream:
            kinds = [block.type for block in stream.get_final_message().content]
    assert kinds[:2] == [block.type for block in message.content][:2] == ["thinking", "text"]
    assert message.content[0].thinking.endswith("Enough.")
    more = {**EXTRA, "thinking_budget_tokens": 3, "reasoning_budget_message": " Well."}
    answer = client.responses.create(
        model="tiny", input="hello", max_output_tokens=60, extra_body=more
    )
    assert answer.output[0].content[0].text.endswith("Well.") and answer.output_text


@pytest.mark.parametrize("armed", [True, False])
def test_a_second_request_ends_the_reasoning_of_the_first(armed: bool) -> None:
    """llama-server's control of a stream, by the id that the stream has."""
    options: dict[str, Any] = {**OPTIONS, "max_tokens": 1500, "stream": True, **EXTRA}
    options |= {"reasoning_control": armed, "reasoning_budget_message": MESSAGE}
    with running(tool_format="hermes", chat_template=TEMPLATE, n_ctx=2048, n_seq=1) as server:

        def end(**body: Any) -> Any:
            return server.post(f"{CHAT}/control", **body)

        thought, content, told = "", "", None
        with server.client.stream("POST", CHAT, json=options) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                delta = chunk["choices"][0]["delta"]
                thought += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
                if thought and told is None:
                    told = end(id=chunk["id"], action="reasoning_end").json()
        assert told is not None and told["success"] is armed
        assert (told.get("message") is None) is armed
        assert (thought.endswith("Enough."), bool(content)) == (armed, armed)
        told = end(id=chunk["id"], action="reasoning_end").json()
        assert told == {"success": False, "message": "no answer with this id is under way"}
        for body, name in (({"id": "x", "action": "stop"}, "action"), ({}, "id")):
            refused = end(**body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "reasoning_budget_tokens", -2),
        (CHAT, "thinking_budget_tokens", 1.5),
        (CHAT, "reasoning_budget_message", "x" * 5000),
        ("/v1/responses", "thinking_budget_tokens", -3),
        ("/v1/messages", "thinking.budget_tokens", -1),
        ("/v1/messages", "reasoning_budget_tokens", "many"),
    ],
)
def test_a_wrong_value_is_told_by_its_name(
    thinker: RunningServer, path: str, name: str, value: Any
) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "input": "hello", "messages": HELLO}
    outer, _, inner = name.partition(".")
    body[outer] = {"type": "enabled", inner: value} if inner else value
    answer = thinker.post(path, **body)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]
