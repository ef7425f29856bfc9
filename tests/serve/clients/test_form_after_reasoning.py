"""Answers of a form after reasoning, through the SDKs: a tiny random model, whose template always
opens reasoning, so that only a limit ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from clients_of_servers import HELLO, TOOLS, Weather, check
from running_server import RunningServer, running

from ggpy.chat_formats import by_name
from ggpy.serve.answers.constraints import ChatConstraints
from ggpy.serve.events import AnswerOptions, ChatRequest, Constraint

pytest.importorskip("llguidance", reason="needs the extra 'grammar'")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MESSAGE = " Enough."
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"],
          "additionalProperties": False}  # fmt: skip
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 160, "seed": 5}
CHAT = "/v1/chat/completions"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    chat = {"tool_format": "hermes", "chat_template": TEMPLATE}
    with running(**chat, n_ctx=1024, reasoning_message=MESSAGE) as found:
        yield found


@pytest.fixture(scope="module")
def client(thinker: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def is_of_form(text: str | None) -> bool:
    found = json.loads(text or "")
    return bool(found.keys() == {"kind"} and found["kind"] in ("a", "bc"))


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("form", [FORM, {"type": "json_object"}], ids=["schema", "object"])
def test_whole_and_streamed(client: openai.OpenAI, budget: int, form: Any) -> None:
    """The budget ends reasoning, and 0 turns it off; what follows has the form."""
    options = {**OPTIONS, "extra_body": {"reasoning_budget_tokens": budget}}
    whole = client.chat.completions.create(**options, response_format=form).choices[0]
    thought, content = getattr(whole.message, "reasoning_content", ""), whole.message.content
    assert thought.endswith(MESSAGE.strip()) is (budget > 0) is bool(thought)
    if form is FORM:
        assert is_of_form(content) and whole.finish_reason == "stop"
    else:
        assert content is not None and content.startswith("{")
    parts = ["", ""]
    for chunk in client.chat.completions.create(**options, response_format=form, stream=True):
        for choice in chunk.choices:
            parts[0] += getattr(choice.delta, "reasoning_content", None) or ""
            parts[1] += choice.delta.content or ""
    assert parts == [thought, content]


def test_reasoning_that_never_ends_leaves_half_of_the_tokens(
    client: openai.OpenAI, thinker: RunningServer
) -> None:
    """Of max_tokens, for the form, whether the budget is larger or there is none."""
    answer = client.chat.completions.create(**OPTIONS, response_format=FORM)
    (choice,) = answer.choices
    assert is_of_form(choice.message.content) and choice.finish_reason == "stop"
    assert choice.message.reasoning_content.endswith("Enough.")  # type: ignore[attr-defined]
    n_ending = len(thinker.engine.tokenizer.encode(MESSAGE + "</think>", add_special=False))
    assert 80 + n_ending < answer.usage.completion_tokens <= 160
    budget: Any = {"reasoning_budget_tokens": 150}
    larger = client.chat.completions.create(**OPTIONS, response_format=FORM, extra_body=budget)
    assert is_of_form(larger.choices[0].message.content)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"response_format": FORM, **OFF}, "json"),
        ({"response_format": FORM, "reasoning_effort": "none"}, "json"),
        ({"json_schema": SCHEMA, "reasoning_budget_tokens": 0}, "json"),
        ({"grammar": 'root ::= "yes"'}, "yes"),
        ({"grammar": 'root ::= "yes"', "chat_template_kwargs": {"enable_thinking": True}}, "yes"),
    ],
)
def test_a_form_without_reasoning(thinker: RunningServer, body: Any, kind: str) -> None:
    """Where the request turns it off, and for grammars, which say all of the answer."""
    prompt = thinker.post("/apply-template", messages=HELLO, **body).json()["prompt"]
    assert prompt.endswith("</think>\n\n")
    choice = thinker.post(CHAT, **OPTIONS, **body).json()["choices"][0]
    assert choice["message"].keys() == {"role", "content"}
    content = choice["message"]["content"]
    assert content == "yes" if kind == "yes" else is_of_form(content)


@pytest.mark.parametrize("seed", range(4))
def test_a_call_or_the_form_after_reasoning(client: openai.OpenAI, seed: int) -> None:
    options: Any = {**OPTIONS, "seed": seed, "max_tokens": 400}
    budget = {"reasoning_budget_tokens": 3}
    answer = client.chat.completions.create(
        **options, tools=TOOLS, response_format=FORM, extra_body=budget
    )
    message = answer.choices[0].message
    assert message.reasoning_content.endswith("Enough.")  # type: ignore[attr-defined]
    for call in message.tool_calls or ():
        check(call.function.name, call.function.arguments)
    assert message.tool_calls or is_of_form(message.content)


def test_the_other_apis(client: openai.OpenAI, thinker: RunningServer) -> None:
    response = client.responses.parse(
        model="tiny", input="hello", max_output_tokens=300, text_format=Weather
    )
    assert isinstance(response.output_parsed, Weather)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as other:
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        message = other.messages.create(
            model="tiny", max_tokens=160, messages=HELLO, extra_body={"output_config": form}
        )
    thought, text = message.content
    assert thought.type == "thinking" and text.type == "text" and is_of_form(text.text)


def test_wrong_schemas_are_told_in_their_own_terms(thinker: RunningServer) -> None:
    for schema, told in (({"format": "nope", "type": "string"}, "JSON schema: Unknown format"),
                         (False, "the JSON schema is false")):  # fmt: skip
        refused = thinker.post(CHAT, **OPTIONS, json_schema=schema)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "json_schema"
        assert refused.json()["error"]["message"].startswith(told)
    answer = thinker.post(CHAT, **{**OPTIONS, "max_tokens": 40}, json_schema=True).json()
    assert answer["choices"][0]["message"]["reasoning_content"]


JSON, GBNF = Constraint("json_object"), Constraint("gbnf", 'root ::= "a"')
USER, BEGUN = {"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}


@pytest.mark.parametrize(
    ("constraint", "more", "template", "allowed"),
    [
        (JSON, {}, "... </think> ...", True),
        (None, {"reasoning_budget": 0}, "", True),
        (GBNF, {}, "... </think> ...", False),
        (JSON, {}, "no reasoning", False),
        (JSON, {"reasoning": False}, "... </think> ...", False),
        (JSON, {"reasoning_budget": 0}, "... </think> ...", False),
        (JSON, {"template_variables": {"enable_thinking": False}}, "... </think> ...", False),
        (JSON, {"messages": [USER, BEGUN]}, "... </think> ...", False),
        (JSON, {"messages": [USER, BEGUN], "continues": False}, "... </think> ...", True),
    ],
)
def test_which_answers_may_begin_with_reasoning(
    constraint: Constraint | None, more: Any, template: str, allowed: bool
) -> None:
    request = ChatRequest(
        **{"messages": [USER], **more}, options=AnswerOptions(constraint=constraint)
    )
    constraints = ChatConstraints(by_name("hermes"), {}, template)
    assert constraints.allow_reasoning(request) is allowed
