"""Chat completions through OpenAI's SDK, and what it cannot say through plain requests."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from running_server import RunningServer, eventually, idle, running

import ggpy
from ggpy.grammar import Grammars
from ggpy.runtime.sequence import Sequence
from ggpy.sampling import SAMPLERS, SamplingParams, in_effect
from ggpy.serve.answers.worker import Ticket
from ggpy.serve.api.messages import read_messages, read_tool_choice
from ggpy.serve.api.options import sampling_params
from ggpy.serve.errors import ApiError
from ggpy.serve.fields import Fields

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 8, "messages": HELLO, "model": "tiny", **options}
    return client.chat.completions.create(**options)


def library_text(n: int = 8, **options: Any) -> str:
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=256) as model:
        return "".join(map(str, model.chat(HELLO, max_tokens=n, temperature=0, **options)))


def test_the_answer_is_the_library_s(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == library_text()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == library_text()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8
    assert len({c.id for c in chunks}) == 1


def test_without_include_usage_no_chunk_has_usage(client: openai.OpenAI) -> None:
    assert all(c.usage is None and c.choices for c in ask(client, stream=True))


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
def test_timings_with_every_token(client: openai.OpenAI, more: dict[str, Any]) -> None:
    """As llama.cpp's page and ggpy's want them."""
    asked = {"timings_per_token": True}
    chunks = list(ask(client, stream=True, extra_body=asked, **more))[1:]
    counts = [c.timings["predicted_n"] for c in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 8
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == library_text()
    assert all(bool(c.choices[0].logprobs) == bool(more) for c in chunks[:-1])
    plain = list(ask(client, stream=True))
    assert [hasattr(c, "timings") for c in plain] == [False] * (len(plain) - 1) + [True]


def test_several_answers(client: openai.OpenAI) -> None:
    answer = ask(client, n=3, temperature=1.5, seed=5, max_tokens=12)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    again = ask(client, n=3, temperature=1.5, seed=5, max_tokens=12)
    assert [choice.message.content for choice in again.choices] == texts
    assert answer.usage.completion_tokens == 36
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_several_streamed_answers(client: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in ask(client, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [library_text()] * 2


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    streamed = [
        token
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=4, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in content])


def test_log_probabilities_name_whole_tokens(server: RunningServer) -> None:
    """Also those that are a part of a character, or held back for a stop string."""
    body = {"messages": HELLO, "max_tokens": 40, "seed": 3, "temperature": 2, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 20, "stop": ["never this text"], "top_k": 0}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    ids = [token["id"] for token in tokens]
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=64) as model:
        expected = [model.tokenizer.piece(id, special=True) for id in ids]
    assert [bytes(token["bytes"]) for token in tokens] == expected
    assert [token["token"] for token in tokens] == [e.decode("utf-8", "replace") for e in expected]
    assert "\ufffd" in "".join(token["token"] for token in tokens), "a part of a character"
    for token in tokens:
        same = [t for t in token["top_logprobs"] if t["id"] == token["id"]]
        assert all((t["token"], t["bytes"]) == (token["token"], token["bytes"]) for t in same)


@pytest.mark.parametrize("stop", [None, "b>"])
def test_log_probabilities_are_those_of_the_text(server: RunningServer, stop: str | None) -> None:
    """Not of reasoning, of markers, of what a stop string cuts off, or of the end."""
    grammar = 'root ::= "<think>\\nwhy é\\n</think>\\n\\nHé < <b> 😀."'
    body = {"messages": HELLO, "grammar": grammar, "max_tokens": 99, "logprobs": True, "stop": stop}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "why é"
    assert choice["message"]["content"] == ("Hé < <" if stop else "Hé < <b> 😀.")
    data = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert data.decode() == choice["message"]["content"]


@pytest.mark.parametrize(("parallel", "n"), [(None, 2), (True, 2), (False, 1)])
def test_parallel_tool_calls(parallel: bool | None, n: int) -> None:
    call = '<tool_call>\\n{\\"name\\": \\"w\\", \\"arguments\\": {}}\\n</tool_call>'
    body = {
        "messages": HELLO,
        "grammar": f'root ::= "So.\\n{call}\\n{call}" [a-z]{{2000}}',  # an answer that goes on
        "tools": [{"type": "function", "function": {"name": "w"}}],
        "parallel_tool_calls": parallel,
        "max_tokens": 300,
    }
    with running(tool_format="hermes", n_ctx=1024) as server:
        for logprobs in (False, True):
            answer = server.post("/v1/chat/completions", **body, logprobs=logprobs).json()
            (choice,) = answer["choices"]
            calls = choice["message"]["tool_calls"]
            assert [c["function"] for c in calls] == [{"name": "w", "arguments": "{}"}] * n
            assert choice["finish_reason"] == ("length" if n == 2 else "tool_calls")
            assert (answer["usage"]["completion_tokens"] < 300) == (n == 1)
        assert eventually(lambda: idle(server))


ALWAYS_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_reasoning_that_a_template_always_opens() -> None:
    """It is closed where there is to be none: the answer must not be taken for reasoning."""
    off = {"enable_thinking": False}
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "a"}}}
    plain: list[dict[str, Any]] = [
        {"response_format": form, "chat_template_kwargs": off},
        {"grammar": 'root ::= "\\"a\\""', "chat_template_kwargs": {"enable_thinking": True}},
    ]
    with running(tool_format="hermes", chat_template=ALWAYS_THINKS) as server:

        def prompt(**more: Any) -> str:
            return str(
                server.post("/apply-template", **{"messages": HELLO, **more}).json()["prompt"]
            )

        for more in plain:
            answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=20, **more)
            message = answer.json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": '"a"'}
            assert prompt(**more).endswith("<think>\n\n</think>\n\n")
        assert prompt().endswith("assistant\n<think>\n")
        assert prompt(chat_template_kwargs=off).endswith("<think>\n\n</think>\n\n")
        begun = [*HELLO, {"role": "assistant", "content": "It"}]
        assert prompt(messages=begun).endswith("<think>\n\n</think>\n\nIt")
        begun[-1] = {"role": "assistant", "content": "hm</think>It"}
        assert prompt(messages=begun).endswith("<think>\nhm</think>It")


def test_an_agent_s_tools_and_the_form_of_its_answer() -> None:
    """The answer calls a tool, or is of the form; a seed of random text decides here."""
    tool = {"name": "w", "parameters": {"enum": [{}]}}
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a"]}}}
    body: dict[str, Any] = {"messages": HELLO, "response_format": form, "max_tokens": 99}
    body |= {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "parallel_tool_calls": False}
    with running(tool_format="hermes", n_ctx=1024) as server:

        def ask(seed: int, tool: dict[str, Any], **more: Any) -> dict[str, Any]:
            tools = [{"type": "function", "function": tool}]
            asked = {**body, "tools": tools, "seed": seed, **more}
            (choice,) = server.post("/v1/chat/completions", **asked).json()["choices"]
            message: dict[str, Any] = choice["message"]
            assert (message["content"] is None) == (choice["finish_reason"] == "tool_calls")
            return message

        found = [ask(seed, tool) for seed in range(12)]
        assert {m["content"] for m in found} == {None, '"a"'}
        calls = [c["function"] for m in found for c in m.get("tool_calls", ())]
        assert calls and all(c["name"] == "w" and not json.loads(c["arguments"]) for c in calls)
        odd = {"name": "w", "parameters": {"not": {}}}  # it is not supported
        assert all(ask(seed, odd)["content"] == '"a"' for seed in range(12))
        assert all(ask(seed, tool, tool_choice="none")["content"] == '"a"' for seed in range(12))


def test_allowed_tools_are_those_to_choose_from() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]

    def read(mode: str, *names: str) -> Any:
        listed = [{"type": "function", "function": {"name": name}} for name in names]
        allowed = {"mode": mode, "tools": listed}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        return read_tool_choice(Fields({"tool_choice": choice}), tools)

    assert read("auto", "b") == ("auto", tools[1:])
    assert read("required", "b", "a") == ("required", tools)
    with pytest.raises(ApiError, match=r"allowed_tools.tools\[0\].function.name.*give one of a, b"):
        read("auto", "c")


def test_a_tool_may_return_nothing() -> None:
    body = {"messages": [{"role": "tool", "tool_call_id": "x", "content": None}]}
    (message,) = read_messages(Fields(body))
    assert message == {"role": "tool", "tool_call_id": "x", "content": ""}


@pytest.mark.parametrize(
    ("samplers", "order", "kept"),
    [
        (None, SAMPLERS, {"top_k": 5, "temperature": 0.5, "min_p": 0.2, "repeat_penalty": 1.5}),
        (["temp", "top-k", "fill"], ("temperature", "top_k"), {"top_k": 5, "temperature": 0.5}),
        (["Top_K", "penalties"], ("top_k", "penalties"), {"top_k": 5, "repeat_penalty": 1.5}),
        ("tim?", ("temperature", "infill", "min_p"), {"min_p": 0.2, "temperature": 0.5}),
        ([], (), {}),
    ],
)
def test_samplers_that_are_not_named_are_off(
    samplers: Any, order: tuple[str, ...], kept: dict[str, float]
) -> None:
    asked = {"top_k": 5, "temperature": 0.5, "min_p": 0.2, "repeat_penalty": 1.5}
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=64) as model:
        body = Fields({**asked, "samplers": samplers})
        params = sampling_params(body, model.tokenizer, SamplingParams(top_p=1))
    assert params.samplers == order
    off = {"top_k": 0, "temperature": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    effective = in_effect(params)
    assert {name: getattr(effective, name) for name in asked} == {**off, **kept}


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    whole = library_text()
    stop = whole[3:5]
    answer = ask(client, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logit_bias_and_seed(client: openai.OpenAI, server: RunningServer) -> None:
    token = server.post("/tokenize", content="d").json()["tokens"][-1]
    answer = ask(client, logit_bias={str(token): 100}, max_tokens=3)
    assert answer.choices[0].message.content == "ddd"
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 3}
    for biases, text in (  # a digit is an id as a key, and a text in a pair
        ([[token, 100]], "ddd"),
        ([["d", 100]], "ddd"),
        ([["7", 100]], "777"),
        ({"d": 100}, "ddd"),
    ):
        told = server.post("/v1/chat/completions", **body, logit_bias=biases).json()
        assert told["choices"][0]["message"]["content"] == text
    texts = {ask(client, temperature=2, seed=9).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


def test_llama_cpp_s_fields(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repeat_penalty": 1.1, "dry_multiplier": 0.8, "seed": 3}
    answer = ask(client, temperature=1, extra_body=extra)
    assert answer.choices[0].message.content
    assert answer.timings["predicted_n"] == 8
    texts = []
    for extra in (
        {},
        {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.5},
        {"mirostat": 1, "mirostat_tau": 1.0, "mirostat_eta": 0.5},
        {"adaptive_target": 0.1, "adaptive_decay": 0.5},
        {"samplers": ["top_p", "top_k"], "min_keep": 30, "top_p": 0.01},
    ):
        two = [ask(client, temperature=1, seed=3, extra_body=extra) for _ in range(2)]
        found = [answer.choices[0].message.content for answer in two]
        assert found[0] == found[1]
        texts.append(found[0])
    assert len(set(texts)) == len(texts), "each acts"


def test_json_answers(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for _ in range(2):
        answer = ask(client, response_format=form, max_tokens=100, temperature=0.5)
        assert answer.choices[0].finish_reason == "stop"
        assert json.loads(answer.choices[0].message.content).keys() == {"ok", "n"}
        # the next one need not be compiled, nor wait for a thread
        monkeypatch.setattr(Grammars, "compile", lambda *_: pytest.fail("compiled once more"))


def test_a_bad_schema_is_refused_by_name(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"


def test_nothing_of_an_answer_waits_for_the_collector(server: RunningServer) -> None:
    def left() -> list[Any]:
        found = [x for x in gc.get_objects() if isinstance(x, (Sequence, Ticket))]
        return [x for x in found if x not in before]

    before: list[Any] = []
    gc.collect()
    before = left()
    gc.disable()
    try:
        for stream in (True, False):
            body = {"messages": HELLO, "max_tokens": 4, "stream": stream}
            assert server.post("/v1/chat/completions", **body).status_code == 200
        assert eventually(lambda: idle(server) and not left())
    finally:
        gc.enable()


def test_many_at_once_have_the_text_of_one(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(client), range(32)))
    assert {a.choices[0].message.content for a in answers} == {library_text()}


def test_a_prompt_of_parts_and_a_prefilled_answer(server: RunningServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    options = {"temperature": 0, "max_tokens": 8}
    plain = server.post("/v1/chat/completions", messages=HELLO, **options).json()
    same = server.post("/v1/chat/completions", messages=parts, **options).json()
    assert plain["choices"][0]["message"] == same["choices"][0]["message"]
    begun = [*HELLO, {"role": "assistant", "content": plain["choices"][0]["message"]["content"]}]
    more = server.post("/v1/chat/completions", messages=begun, **options).json()
    sixteen = server.post("/v1/chat/completions", messages=HELLO, temperature=0, max_tokens=16)
    whole = sixteen.json()["choices"][0]["message"]["content"]
    assert whole.startswith(plain["choices"][0]["message"]["content"])
    assert more["choices"][0]["message"]["content"]


def test_tokens_are_counted_without_an_answer(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    answer = server.post("/v1/chat/completions", **body).json()
    counted = server.post("/v1/chat/completions/input_tokens", **body).json()
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]


WRONG: dict[str, Any] = {
    "messages": [None, "hello", {}, [], [1], [{"role": "user"}], [{"role": "x", "content": "a"}]],
    "model": [],
    "temperature": ["hot", [], True, 1e300],
    "top_p": [2, -1, "x"],
    "top_k": ["x", {}],
    "min_p": [7],
    "seed": ["x", -5],
    "n": [0, "x", 1000, 1.5],
    "stop": [1, [1], ["x"] * 100],
    "max_tokens": ["x", -7, 1.5],
    "stream": ["yes", 1],
    "stream_options": [1, []],
    "logprobs": ["x", 3],
    "logit_bias": ["x", {"x1": 1, "-3": 1}, {"5": "x"}, [[1]], [[1.5, 1]]],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}],
    "json_schema": [3, "x"],
    "grammar": [1, "root ::= ["],
    "tools": [1, [1], [{"type": "function"}], [{"type": "function", "function": {}}]],
    "tool_choice": ["maybe", {"type": "function"}, "required"],
    "chat_template_kwargs": [1],
    "repeat_penalty": [0, "x"],
    "repeat_last_n": [1.5],
    "min_keep": [-1, 1.5],
    "mirostat": [3, -1, 0.5, "x", True],
    "mirostat_tau": [-1, "x"],
    "mirostat_eta": [-0.1],
    "adaptive_target": [1.5, "x"],
    "adaptive_decay": [1, -0.1],
    "samplers": [7, [1], ["top_k"] * 65, "t" * 65],
    "cache_prompt": ["x"],
    "ignore_eos": [3],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_a_wrong_value_is_an_error_that_names_its_field(
    server: RunningServer, name: str, value: Any
) -> None:
    body = {"messages": HELLO, "max_tokens": 2, name: value}
    answer = server.client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(name) or name in error["message"]


def test_a_prompt_beyond_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "hello " * 400}])
    assert caught.value.code == "context_length_exceeded"
    assert "256" in str(caught.value)


def test_calls_of_a_template_that_writes_none_are_those_of_the_model() -> None:
    """It says how calls are written, as Granite's: earlier ones must not look otherwise."""
    template = (
        "{% if tools %}Answer with <tool_calls> and a list.\n{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"a": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "rain"})
    tools = [{"type": "function", "function": {"name": "w"}}]
    with running(chat_template=template) as server:
        body = {"messages": messages, "tools": tools}
        prompt = server.post("/apply-template", **body).json()["prompt"]
    written = '<tool_calls>[{"name": "w", "arguments": {"a": 1}}]</tool_calls>'
    assert f"assistant: {written}\ntool: rain\n" in prompt
