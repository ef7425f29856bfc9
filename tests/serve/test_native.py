"""llama.cpp's own endpoints, text completions, and the state of the server."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from running_server import RunningServer, running

import ggpy
from ggpy.sampling import SAMPLERS
from ggpy.serve.fields import Fields
from ggpy.util import paths


def library_text(prompt: str, n: int) -> str:
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=256) as model:
        return "".join(map(str, model.generate(prompt, max_tokens=n, temperature=0)))


def test_completion_is_the_library_s(server: RunningServer) -> None:
    answer = server.post("/completion", prompt="hello", n_predict=6, temperature=0).json()
    assert answer["content"] == library_text("hello", 6)
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"] == 6
    assert answer["prompt"] == "<s> hello"  # as it was read


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


def test_embeddings_in_llama_cpp_s_form() -> None:
    """A list, each vector in a list; embd_normalize says what its length is."""
    with running(pooling="mean") as server:
        plain = server.post("/v1/embeddings", input=["hello", "b"]).json()["data"]
        told = server.post("/embedding", content=["hello", "b"])
        assert [e["index"] for e in told.json()] == [0, 1]
        vectors = [np.array(e["embedding"][0]) for e in told.json()]
        for vector, expected in zip(vectors, plain, strict=True):
            assert vector.tolist() == expected["embedding"]
        for norm, length in ((0, 32760), (1, 1), (2, 1), (3, 1)):
            (found,) = server.post("/embedding", content="hello", embd_normalize=norm).json()
            got = np.array(found["embedding"][0])
            order = norm or np.inf
            assert np.linalg.norm(got, order) == pytest.approx(length, rel=1e-5)
            assert got / np.linalg.norm(got) == pytest.approx(vectors[0], abs=1e-6)
        refused = server.post("/embeddings", content="hello", embd_normalize=-2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "embd_normalize")


def test_state(server: RunningServer) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "llama"
    assert model["architecture"]["input_modalities"] == ["text"]
    assert (model["meta"]["n_ctx"], model["meta"]["vocab_type"]) == (256, 1)
    assert server.client.get("/v1/models/llama").json() == model
    (other,) = server.client.get("/models").json()["models"]  # as Ollama's clients read it
    assert (other["name"], other["details"]["format"]) == ("llama", "gguf")
    assert server.client.get("/v1/models/other").status_code == 404
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    defaults = props["default_generation_settings"]["params"]
    assert (defaults["n_predict"], defaults["mirostat"], defaults["adaptive_target"]) == (-1, 0, -1)
    assert defaults["samplers"] == list(SAMPLERS)
    assert props["total_slots"] == 4
    assert (props["endpoint_metrics"], props["endpoint_slots"], props["ui"]) == (True, True, True)
    assert len(server.client.get("/slots").json()) == 4
    erased = server.post("/slots/0?action=erase")
    assert (erased.status_code, erased.json()["error"]["type"]) == (501, "not_supported_error")


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
    assert after["llamacpp:n_tokens_max"] >= 6 and after["llamacpp:n_busy_slots_per_decode"] > 0
    assert int(server.client.get("/metrics").headers["Process-Start-Time-Unix"]) <= time.time()
    assert after['ggpy:request_seconds_bucket{le="+Inf"}'] == after["ggpy:request_seconds_count"]
    lines = server.client.get("/metrics").text.splitlines()
    names = {kind: [x.split()[2] for x in lines if x[:6] == kind] for kind in ("# HELP", "# TYPE")}
    assert names["# HELP"] == names["# TYPE"] and len({*names["# HELP"]}) == len(names["# HELP"])


def test_the_same_prompt_again_is_cached(server: RunningServer) -> None:
    prompt = "the prefix of a prompt that is longer than a page " * 4
    usage = [
        server.post("/v1/completions", prompt=prompt, max_tokens=2, temperature=0).json()["usage"]
        for _ in range(2)
    ]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert cached[1] >= 64
    assert cached[1] % 64 == 0


def test_a_model_may_have_several_names() -> None:
    with running(aliases=("one", "two"), tags=("a", "b")) as found:
        (model,) = found.client.get("/v1/models").json()["data"]
        assert (model["id"], model["aliases"], model["tags"]) == ("one", ["one", "two"], ["a", "b"])
        assert found.client.get("/v1/models/two").json() == model


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8 elsewhere")
def test_the_name_of_a_model_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff.gguf")
    path.write_bytes((paths.data_dir("models") / "tiny" / "llama.gguf").read_bytes())
    with running(path=path) as found:
        assert found.client.get("/v1/models").json()["data"][0]["id"] == "a\ufffd"
        assert found.client.get("/props").json()["model_path"] == "a\ufffd.gguf"


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


def test_the_settings_of_an_answer(server: RunningServer) -> None:
    """As llama-server: what is in effect, which clients ask for by paths."""
    more = {"top_k": 7, "stop": ["zz"], "samplers": ["top_k", "temperature"], "n_indent": 0}
    more |= {"mirostat": 1, "mirostat_tau": 4, "min_keep": 3}
    answer = server.post("/completion", prompt="a", n_predict=2, stream=False, **more).json()
    found = answer["generation_settings"]
    assert (found["top_k"], found["top_p"], found["n_predict"]) == (7, 0.95, 2)
    assert (found["stop"], found["samplers"]) == (["zz"], ["top_k", "temperature"])
    assert (found["mirostat"], found["mirostat_tau"], found["mirostat_eta"]) == (1, 4, 0.1)
    assert (found["min_keep"], found["adaptive_target"], found["adaptive_decay"]) == (3, -1, 0.9)
    paths = ["generation_settings/n_ctx"]
    answer = server.post("/completion", prompt="a", n_predict=2, response_fields=paths).json()
    assert answer == {"generation_settings/n_ctx": 256}
    for ignore in (False, True):
        answer = server.post("/completion", prompt="a", n_predict=1, ignore_eos=ignore).json()
        biases = answer["generation_settings"]["logit_bias"]
        assert bool(biases) == ignore and all(b["bias"] is None for b in biases)


def test_answers_that_say_more() -> None:
    """llama-server's __verbose, of chats and completions: what /completion would say of them."""
    messages = [{"role": "user", "content": "hello"}]
    common = {"max_tokens": 6, "temperature": 0}
    with running(verbose=True) as server:
        prompt = server.post("/apply-template", messages=messages).json()["prompt"]
        for path, more in (
            ("/v1/chat/completions", {"messages": messages, "verbose": True}),
            ("/v1/completions", {"prompt": "hello"}),  # the server's default
        ):
            body = {**common, **more}
            answer = server.post(path, **body).json()
            told = answer["__verbose"]
            ids = server.post("/tokenize", content=prompt, add_special=True).json()["tokens"]
            shown = server.post("/detokenize", tokens=ids).json()["content"]
            assert told["prompt"] == (shown if "messages" in more else "<s> hello")
            choice = answer["choices"][0]
            text = choice.get("text") or choice["message"]["content"]
            assert told["content"].strip() == text.strip()
            assert len(told["tokens"]) == told["tokens_predicted"] == 6
            assert told["generation_settings"]["temperature"] == 0
            with server.client.stream("POST", path, json={**body, "stream": True}) as streamed:
                lines = [line for line in streamed.iter_lines() if line.startswith("data: {")]
            found = [event for line in lines if (event := json.loads(line[6:])).get("__verbose")]
            assert [event["choices"][0]["finish_reason"] for event in found] == ["length"]
            assert found[0]["__verbose"]["content"] == told["content"]
            answer = server.post(path, **{**body, "verbose": False}).json()
            assert "__verbose" not in answer


def test_several_prompts_and_several_answers(server: RunningServer) -> None:
    body = {"n_predict": 4, "temperature": 0}
    ids = server.post("/tokenize", content="hello", add_special=True).json()["tokens"]
    prompts = ["world", {"prompt_string": "hello"}, ids, [ids[0], "hello"]]
    found = server.post("/completion", prompt=prompts, n_cmpl=2, **body).json()
    assert [answer["index"] for answer in found] == list(range(8))
    assert [answer["content"] for answer in found[:2]] == [library_text("world", 4)] * 2
    assert {answer["content"] for answer in found[2:]} == {library_text("hello", 4)}
    told = server.post("/completion", prompt=prompts[:2], stream=True, **body).text
    events = [json.loads(line[6:]) for line in told.splitlines() if line]
    texts = ["".join(e["content"] for e in events if e["index"] == i) for i in range(2)]
    assert texts == [library_text("world", 4), library_text("hello", 4)]
    picture = {"prompt_string": "a", "multimodal_data": ["AAAA"]}
    refused = server.post("/completion", prompt=picture)
    assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]


def test_an_answer_that_fills_the_context_is_truncated(server: RunningServer) -> None:
    body = {"prompt": "a" * 200, "ignore_eos": True}
    assert server.post("/completion", **body).json()["truncated"] is True
    assert server.post("/completion", **body, n_predict=2).json()["truncated"] is False


def said(event: dict[str, Any]) -> str:
    """The text of a chunk of any API."""
    (choice,) = event.get("choices") or [event]
    return str(
        choice.get("content") or choice.get("text") or choice.get("delta", {}).get("content") or ""
    )


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/completion", {"prompt": "a" * 150}),
        ("/v1/completions", {"prompt": "a" * 150}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 150}]}),
    ],
)
def test_progress_of_a_prompt(
    server: RunningServer, path: str, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First what the cache has, at last all of the prompt; then the timings of each token."""
    monkeypatch.setattr("ggpy.serve.answers.answer.PROGRESS_SECONDS", 1e-4)
    body = {**prompt, "max_tokens": 3, "stream": True, "seed": 1, "ignore_eos": True}
    assert "prompt_progress" not in server.post(path, **body).text
    for cached in (False, True):
        asked = {**body, "cache_prompt": cached, "timings_per_token": True}
        told = server.post(path, **asked, return_progress=True).text
        events = [json.loads(line[6:]) for line in told.splitlines() if line[6:7] == "{"]
        read = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        counts = [found["processed"] for found in read]
        assert counts == sorted(set(counts)) and len({found["total"] for found in read}) == 1
        assert counts[0] == read[0]["cache"] and counts[-1] == read[-1]["total"] > 150
        assert bool(read[0]["cache"]) == cached
        assert all(found["time_ms"] >= 0 for found in read)
        last = max(i for i, event in enumerate(events) if "prompt_progress" in event)
        assert last < min(i for i, event in enumerate(events) if said(event))
        if path != "/v1/completions":
            timings = [event["timings"] for event in events if "prompt_progress" in event]
            assert (timings[0]["prompt_n"], timings[0]["prompt_ms"]) == (0, 0)
            assert timings[-1]["prompt_n"] == counts[-1] - counts[0]
            assert timings[-1]["prompt_ms"] > 0


def test_progress_and_timings_of_a_response(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggpy.serve.answers.answer.PROGRESS_SECONDS", 1e-4)
    body = {"input": "a" * 150, "max_output_tokens": 4, "stream": True, "temperature": 0}
    asked = {"timings_per_token": True, "return_progress": True}
    for more in ({}, asked):
        told = server.post("/v1/responses", **body, **more).text
        events = [json.loads(line[6:]) for line in told.splitlines() if line[:5] == "data:"]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        read = [e["prompt_progress"] for e in events if "prompt_progress" in e]
        assert {e["type"] for e in events if "prompt_progress" in e} <= {"response.in_progress"}
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        if not more:
            assert not read and "timings" not in told
            continue
        assert read[-1]["processed"] == read[-1]["total"] > 150
        assert [event["timings"]["predicted_n"] for event in deltas][-1] == 4
        assert events[-1]["timings"]["predicted_n"] == 4


def test_infill_among_samplers(server: RunningServer) -> None:
    """By name and by letter; alone it finds an end probable among all tokens of a flat model."""
    for samplers in (["infill"], "i"):
        body = {"prompt": "hello", "n_predict": 4, "samplers": samplers, "seed": 1}
        answer = server.post("/completion", **body).json()
        assert answer["generation_settings"]["samplers"] == ["infill"]
        assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == (
            "",
            "eos",
            1,
        )


def test_probabilities_of_the_draw(server: RunningServer) -> None:
    """post_sampling_probs: only what the chain leaves has one, and they make up 1."""
    body: dict[str, Any] = {"prompt": "hello", "n_predict": 4, "seed": 1, "n_probs": 30}
    chain = {"top_k": 3, "temperature": 0.7, "top_p": 1, "min_p": 0, "post_sampling_probs": True}
    told = server.post("/completion", **body, **chain).json()["completion_probabilities"]
    for token in told:
        p = {t["id"]: t["prob"] for t in token["top_probs"]}
        assert len(p) == 3 and sum(p.values()) == pytest.approx(1)
        assert token["prob"] == p[token["id"]]
    model = {**body, "temperature": 1, "samplers": []}
    (draw,) = server.post(
        "/completion", **{**model, "n_predict": 1, "post_sampling_probs": True}
    ).json()["completion_probabilities"]
    (own,) = server.post("/completion", **{**model, "n_predict": 1}).json()[
        "completion_probabilities"
    ]
    logprobs = {t["id"]: t["logprob"] for t in own["top_logprobs"]}
    assert {t["id"]: math.log(t["prob"]) for t in draw["top_probs"]} == pytest.approx(
        logprobs, abs=1e-4
    )
    allowed = {"grammar": "root ::= [ab]", "post_sampling_probs": True, "top_k": 0, "min_p": 0}
    (draw,) = server.post("/completion", **body, **allowed).json()["completion_probabilities"][:1]
    assert {t["token"][:1] for t in draw["top_probs"]} <= {"a", "b"}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
    asked = {"logprobs": True, "top_logprobs": 5, "post_sampling_probs": True}
    (choice,) = server.post("/v1/chat/completions", **chat, **asked).json()["choices"]
    assert [len(t["top_probs"]) for t in choice["logprobs"]["content"]] == [1, 1]
    assert all(t["prob"] == 1 for t in choice["logprobs"]["content"])
    more = {"prompt": "hello", "max_tokens": 2, "n_probs": 2, "seed": 5}
    (choice,) = server.post("/v1/completions", **more).json()["choices"]
    assert [len(t["top_logprobs"]) for t in choice["logprobs"]["content"]] == [2, 2]
    (choice,) = server.post("/v1/completions", **more, post_sampling_probs=True).json()["choices"]
    assert all(0 < t["prob"] <= 1 for t in choice["logprobs"]["content"])


def test_a_line_with_fewer_blanks_ends_the_answer(server: RunningServer) -> None:
    grammar = 'root ::= "x\\n    y\\n  z" [a-z]{200}'
    body = {"prompt": "a", "grammar": grammar, "n_predict": 100}
    for n, text in ((4, "x\n    y\n  "), (5, "x\n    ")):
        for stream in (False, True):
            told = server.post("/completion", **body, n_indent=n, stream=stream)
            events = [
                json.loads(line.removeprefix("data: ")) for line in told.text.split("\n\n") if line
            ]
            assert "".join(event["content"] for event in events) == text
            assert events[-1]["stop_type"] == "limit"
    whole = server.post("/completion", **body, n_indent=2).json()["content"]
    assert whole.startswith("x\n    y\n  z") and len(whole) > 30


def test_slots_say_what_runs(server: RunningServer) -> None:
    body = {"prompt": "a", "n_predict": 2, "stream": True, "top_k": 7, "n_cmpl": 4}
    assert server.client.get("/slots?fail_on_no_slot=1").status_code == 200
    gate = threading.Event()
    server.process.server.service.worker._inbox.put(gate.wait)  # the engine waits for it
    with server.client.stream("POST", "/completion", json=body):
        found = server.client.get("/slots").json()
        full = server.client.get("/slots?fail_on_no_slot=1")
        gate.set()
    assert full.status_code == 503
    assert all(slot["is_processing"] for slot in found)
    assert {slot["params"]["top_k"] for slot in found} == {7}
    assert [slot["next_token"][0]["n_remain"] for slot in found] == [2] * 4


def test_the_last_message_and_the_prompt_of_an_answer(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It"}]

    def prompt(messages: list[Any], **more: Any) -> str:
        return str(server.post("/apply-template", messages=messages, **more).json()["prompt"])

    whole = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(messages) == prompt(messages, add_generation_prompt=False) == whole + "It"
    ended = f"{whole}It<|im_end|>\n"
    assert prompt(messages, continue_final_message=False) == ended + "<|im_start|>assistant\n"
    alone = {"continue_final_message": False, "add_generation_prompt": False}
    assert prompt(messages, **alone) == ended
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = server.post("/apply-template", messages=messages, **both)
    assert refused.json()["error"]["param"] == "continue_final_message"
