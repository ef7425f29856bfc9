"""llama.cpp's own endpoints, text completions, and the state of the server."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest
from running_server import RunningServer, running

import ggpy
from ggpy.serve.fields import Fields


def library_text(prompt: str, n: int) -> str:
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=256) as model:
        return "".join(map(str, model.generate(prompt, max_tokens=n, temperature=0)))


def test_completion_is_the_library_s(server: RunningServer) -> None:
    answer = server.post("/completion", prompt="hello", n_predict=6, temperature=0).json()
    assert answer["content"] == library_text("hello", 6)
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"] == 6


def test_streamed_completion(server: RunningServer) -> None:
    body = {"prompt": "hello", "n_predict": 6, "temperature": 0, "stream": True}
    with server.client.stream("POST", "/completion", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert "".join(event["content"] for event in events) == library_text("hello", 6)
    assert [event["stop"] for event in events][-2:] == [False, True]


def test_response_fields_are_a_choice(server: RunningServer) -> None:
    """Editors ask for them with each infill, by paths."""
    body = {"prompt": "hello", "n_predict": 3, "temperature": 0}
    paths = ["content", "timings/predicted_n", "tokens_cached", "absent", "stop/x", "timings/x"]
    answer = server.post("/completion", **body, response_fields=paths).json()
    assert answer == {
        "content": library_text("hello", 3),
        "timings/predicted_n": 3,
        "tokens_cached": 0,
    }
    body |= {"stream": True, "response_fields": ["stop_type"]}
    with server.client.stream("POST", "/completion", json=body) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line]
    assert "".join(event.get("content", "") for event in events) == answer["content"]
    assert events[-1] == {"stop_type": "limit"}
    refused = server.post("/completion", prompt="a", response_fields=[1])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_fields")


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_answer_ends_with_its_line(server: RunningServer, stream: bool) -> None:
    """t_max_predict_ms, which editors send: it counts from the first token."""
    body = {"prompt": "a" * 100, "n_predict": 120, "stream": stream, "grammar": "root ::= [b\\n]+"}
    for bias, whole in (([["\n", False]], True), ([["\n", 3]], False)):
        more = {"t_max_predict_ms": 1, "logit_bias": bias, "seed": 1, "ignore_eos": True}
        told = server.post("/completion", **body, **more)
        end = json.loads(told.text.split("data: ")[-1]) if stream else told.json()
        assert end["stop_type"] == "limit"
        assert end["has_new_line"] is not whole
        assert (end["tokens_predicted"] == 120) == whole


def test_the_stop_string_is_named(server: RunningServer) -> None:
    whole = library_text("hello", 8)
    body = {"prompt": "hello", "n_predict": 8, "temperature": 0, "stop": [whole[4]]}
    answer = server.post("/completion", **body).json()
    assert answer["stop_type"] == "word"
    assert answer["stopping_word"] == whole[4]


def test_text_completions_of_the_sdk(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    prompts = ["hello", "world"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=4, temperature=0, echo=True
    )
    assert [c.text for c in answer.choices] == [p + library_text(p, 4) for p in prompts]
    assert answer.usage.completion_tokens == 8
    chunks = client.completions.create(
        model="tiny", prompt=[1, 30, 31], max_tokens=4, temperature=0, stream=True
    )
    assert len([c for c in chunks if c.choices]) >= 2


def test_log_probabilities_of_text_completions(server: RunningServer) -> None:
    """text_offset counts from the beginning of the choice, in each chunk of a stream, too."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "tiny", "prompt": ["hello", "world"], "logprobs": 2}
    body |= {"max_tokens": 6, "temperature": 0}
    whole = [c.logprobs for c in client.completions.create(**body).choices]
    parts = [c.choices[0] for c in client.completions.create(**body, stream=True) if c.choices]
    for i, expected in enumerate(whole):
        told = [part.logprobs for part in parts if part.index == i and part.logprobs]
        assert [t for part in told for t in part.tokens] == expected.tokens
        assert [n for part in told for n in part.text_offset] == expected.text_offset
        assert expected.text_offset[-1] > 0
        assert len(expected.token_logprobs) == len(expected.top_logprobs) == 6
    with pytest.raises(openai.BadRequestError, match="echo with logprobs"):
        client.completions.create(**body, echo=True)


def test_tokens_of_an_answer(server: RunningServer) -> None:
    """A stream has them; an answer in one piece has them if return_tokens asks for them."""
    body = {"prompt": "hello", "n_predict": 6, "temperature": 0}
    assert server.post("/completion", **body).json()["tokens"] == []
    answer = server.post("/completion", **body, return_tokens=True).json()
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=256) as model:
        ids = [piece.id for piece in model.generate("hello", max_tokens=6, temperature=0)]
    assert answer["tokens"] == ids
    assert answer["completion_probabilities"] == []
    with server.client.stream("POST", "/completion", json=body | {"stream": True}) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line]
    assert [id for event in events for id in event["tokens"]] == ids
    assert "completion_probabilities" not in events[0]


def test_tokens_there_and_back(server: RunningServer) -> None:
    ids = server.post("/tokenize", content="hello world").json()["tokens"]
    assert server.post("/detokenize", tokens=ids).json()["content"].strip() == "hello world"
    with_pieces = server.post("/tokenize", content="hello", with_pieces=True).json()["tokens"]
    assert "".join(token["piece"] for token in with_pieces).strip() == "hello"
    refused = server.post("/detokenize", tokens=[10**9])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tokens"


def test_apply_template(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = server.post("/apply-template", messages=messages).json()["prompt"]
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_infill_needs_tokens_for_it(server: RunningServer) -> None:
    answer = server.post("/infill", input_prefix="a", input_suffix="b")
    assert answer.status_code == 501
    assert "fill-in-the-middle" in answer.json()["error"]["message"]


def test_infill_prompts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's pattern for a repository; other files give way where the context is short."""
    infill = server.process.server.service.infill  # type: ignore[union-attr]
    roles = {"pre": 5, "suf": 6, "mid": 7, "rep": 8, "sep": 9}
    monkeypatch.setattr(infill, "_tokens", roles)
    encode = infill._tokenizer.encode

    def ids(text: str) -> list[int]:
        return list(encode(text, add_special=False))

    code = [5, *ids("def f("), 6, *ids("return x"), 7, *ids("a")]
    files = [8, *ids("myproject\n"), 9, *ids("b.py\n"), *ids("x = 1"), 9, *ids("filename\n")]
    body = {"input_prefix": "def f(", "input_suffix": "return x", "prompt": "a", "n_predict": 2}
    extra = {**body, "input_extra": [{"filename": "b.py", "text": "x = 1"}]}
    bos = infill._tokenizer.bos_id
    assert infill.prompt(Fields(extra), 999) == [bos, *files, *code]
    assert infill.prompt(Fields(extra), len(code) + 5) == [bos, *files[-4:], *code]
    assert infill.prompt(Fields(extra), 3) == [bos, *code]
    monkeypatch.setattr(infill, "_tokens", {role: roles[role] for role in ("pre", "suf", "mid")})
    assert infill.prompt(Fields(body), 999) == [bos, *code]
    long = {**extra, "input_extra": [{"text": "x" * 5000}]}
    assert server.post("/infill", **long).json()["tokens_predicted"] == 2


def test_state(server: RunningServer) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "llama"
    assert server.client.get("/v1/models/llama").json() == model
    assert server.client.get("/v1/models/other").status_code == 404
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["total_slots"] == 4
    assert len(server.client.get("/slots").json()) == 4


def test_metrics(server: RunningServer) -> None:
    def values() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {k: float(v) for k, _, v in (x.rpartition(" ") for x in lines if x[0] != "#")}

    before = values()
    server.post("/completion", prompt="hello", n_predict=6, temperature=0)
    after = values()
    name = "llamacpp:tokens_predicted_total"
    assert after[name] == before[name] + 6
    assert after["ggpy:kv_pages"] > 0
    assert after['ggpy:request_seconds_bucket{le="+Inf"}'] == after["ggpy:request_seconds_count"]


def test_the_same_prompt_again_is_cached(server: RunningServer) -> None:
    prompt = "the prefix of a prompt that is longer than a page " * 4
    usage = [
        server.post("/v1/completions", prompt=prompt, max_tokens=2, temperature=0).json()["usage"]
        for _ in range(2)
    ]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert cached[1] >= 64
    assert cached[1] % 64 == 0


def test_props_say_what_the_template_can() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}Q: "
    for name, template, can in (("hermes", None, True), ("content", refuses, False)):
        with running(tool_format=name, chat_template=template) as found:
            caps = found.client.get("/props").json()["chat_template_caps"]
            assert (caps["supports_tools"], caps["supports_system_role"]) == (can, can)


def test_reasoning_effort_has_a_second_name_in_templates() -> None:
    """Muse Glimmer's template calls it reasoning_strength."""
    template = "{{ reasoning_strength }} of {{ reasoning_effort }}: {{ messages[0].content }}"
    with running(chat_template=template) as found:
        asked = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
        assert found.post("/apply-template", **asked).json()["prompt"] == "low of low: a"
        asked["chat_template_kwargs"] = {"reasoning_strength": "xhigh"}
        assert found.post("/apply-template", **asked).json()["prompt"] == "xhigh of low: a"


def test_a_constraint_needs_the_library(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = server.post("/completion", prompt="a", grammar='root ::= "not compiled before"')
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert "pip install 'ggpy[grammar]'" in told["message"] and told["param"] == "grammar"
