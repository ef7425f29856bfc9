"""The library as its users see it."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest

import ggpy
from ggpy import hub
from ggpy.backends.numpy.backend import Reference
from ggpy.chat_formats import ReasoningLimit, by_name
from ggpy.gguf import File
from ggpy.model import DEFAULT_MAX_TOKENS, GenerateKeywords, Model
from ggpy.runtime.sequence import Sequence
from ggpy.sampling import NO_TOKEN, SamplingParams
from ggpy.sampling.keywords import SamplingKeywords
from ggpy.tokenizer import ChatTemplateError, Tokenizer
from ggpy.tokenizer.templates import BUILT_IN

ARCHITECTURES = ["gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def model(tiny_path):
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=64, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def three(tiny_path):
    """A model that evaluates three sequences together."""
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=64, n_seq=3, n_threads=1) as model:
        yield model


def all_free(model: Model) -> bool:
    return not model.engine.busy and model.engine.cache.n_free == model.engine.cache.n_pages


def text_of(pieces: Iterable[ggpy.Piece]) -> str:
    return "".join(map(str, pieces))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tiny_model_talks(tiny_path, architecture):
    path = tiny_path(architecture)
    assert path.stat().st_size < 150_000
    with ggpy.load(path, device="cpu", n_threads=1) as model:
        text = "hello world, the model is one \u00e9"
        ids = model.tokenizer.encode(text, add_special=False)
        assert model.tokenizer.decode(ids) == text
        assert model.logits(ids).shape == (len(ids), model.tokenizer.n_vocab)
        assert len(list(model.generate(text, max_tokens=5, seed=1))) <= 5
        assert model.n_ctx == model.n_ctx_train == model.metadata[f"{architecture}.context_length"]


def test_generate_is_repeatable_and_takes_text_or_ids(model):
    ids = model.tokenizer.encode("hello world")
    texts = [
        "".join(p.text for p in model.generate(prompt, max_tokens=20, seed=5))
        for prompt in ("hello world", ids, np.array(ids))
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != "".join(p.text for p in model.generate(ids, max_tokens=20, seed=6))


def test_infill_ends_where_texts_are_improbable(model):
    (piece,) = model.generate("hello", max_tokens=5, seed=1, samplers=("infill",))
    assert piece.id in model.tokenizer.end_ids and piece.finish_reason == "stop"


def test_greedy_takes_the_best_logit(model):
    ids = model.tokenizer.encode("one two")
    for piece in model.generate(ids, max_tokens=6, temperature=0, logprobs=True):
        row = model.logits(ids)[-1]
        assert piece.id == row.argmax() and piece.logprob == pytest.approx(logprob(row), abs=1e-4)
        ids = [*ids, piece.id]


def logprob(row: np.ndarray) -> float:
    x = row.astype(np.float64)
    return float(x.max() - np.log(np.exp(x).sum()))


def test_special_tokens_of_a_text_are_parsed(model):
    ids = model.tokenizer.encode("<|im_start|>user\nhello<|im_end|>", parse_special=True)
    assert 3 in ids and 4 in ids
    ways = ("<|im_start|>user\nhello<|im_end|>", ids)
    texts = [[p.id for p in model.generate(w, max_tokens=5, temperature=0)] for w in ways]
    assert texts[0] == texts[1]


def test_parameters_by_name_or_together(model):
    by_name = [p.id for p in model.generate("one", max_tokens=9, seed=3, top_k=7, temperature=1.1)]
    params = SamplingParams(seed=3, top_k=7)
    together = [p.id for p in model.generate("one", max_tokens=9, params=params, temperature=1.1)]
    assert by_name == together


def test_stop_and_max_tokens(model):
    text = "".join(p.text for p in model.generate("one", max_tokens=12, temperature=0))
    stopped = "".join(p.text for p in model.generate("one", temperature=0, stop=text[3:6]))
    assert stopped == text[: text.index(text[3:6])]
    assert not list(model.generate("one", max_tokens=0))


def test_without_max_tokens_a_text_ends_all_the_same(model):
    endless = dict.fromkeys(model.tokenizer.end_ids, -float("inf"))
    *_, last = pieces = list(model.generate("one", context_shift=True, logit_bias=endless))
    assert len(pieces) == DEFAULT_MAX_TOKENS == 512 and last.finish_reason == "length"


def test_the_last_piece_says_why_the_text_ended(model):
    def reasons(**options) -> list[str | None]:
        return [p.finish_reason for p in model.generate([5] * 60, temperature=0, **options)]

    assert reasons(max_tokens=3) == [None, None, "length"]
    assert reasons(max_tokens=None) == [*[None] * 4, "context"]
    assert reasons(logit_bias={next(iter(model.tokenizer.end_ids)): 1e9}) == ["stop"]
    (piece,) = model.generate([5], max_tokens=9, temperature=0, stop="#", logit_bias={40: 1e9})
    assert (piece.text, piece.finish_reason) == ("", "stop")


def test_a_piece_is_shown_as_its_text(model):
    piece = next(model.generate("hello", temperature=0, logprobs=True))
    assert f"{piece}" == str(piece) == piece.text == "h"
    assert repr(piece) == f"Piece(text='h', id=109, logprob={piece.logprob!r})"
    assert repr(ggpy.Piece("a", 5, index=2)) == "Piece(text='a', id=5, index=2)"


def test_two_generators_at_once_and_one_left_alone(model):
    expected = [
        [p.id for p in model.generate(t, max_tokens=6, temperature=0)] for t in ("one", "two")
    ]
    first = model.generate("one", max_tokens=6, temperature=0)
    ids = [next(first).id]
    second = [p.id for p in model.generate("two", max_tokens=6, temperature=0)]
    ids += [p.id for p in first]
    assert [ids, second] == expected
    abandoned = model.generate("one", temperature=0)
    next(abandoned)
    abandoned.close()
    assert all_free(model)


# Several prompts

PROMPTS = ["one", "hello world", "two three", "the model is one"]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_each_prompt_of_a_list_gets_its_text(model, three, temperature):
    options = {"max_tokens": 7, "temperature": temperature, "seed": 5}
    alone = [[p.id for p in model.generate(prompt, **options)] for prompt in PROMPTS]
    for several in (model, three):
        ids = [several.tokenizer.encode(p) for p in PROMPTS]
        for prompts in (PROMPTS, tuple(ids), [np.array(i) for i in ids], [PROMPTS[0], *ids[1:]]):
            found: list[list[int]] = [[] for _ in prompts]
            reasons = []
            for piece in several.generate(prompts, **options):
                found[piece.index].append(piece.id)
                reasons += [piece.finish_reason] if piece.finish_reason else []
            assert found == alone and len(reasons) == 4
        assert all_free(several)


def test_prompts_of_a_list_are_evaluated_together(three, monkeypatch):
    run, sizes = three.decoder.run, []
    monkeypatch.setattr(
        three.decoder, "run", lambda step: (sizes.append(len({*step.sequences})), run(step))[1]
    )
    pieces = three.generate(PROMPTS[:3], max_tokens=4, temperature=0)
    assert not sizes, "nothing is evaluated before a piece is asked for"
    assert {next(pieces).index for _ in range(3)} == {0, 1, 2}
    list(pieces)
    assert sizes == [3] * 4


def test_one_stop_iterator_serves_all_prompts(three):
    text = text_of(three.generate("one", temperature=0, max_tokens=9))
    texts = ["", ""]
    for piece in three.generate(["one", "one"], temperature=0, stop=iter([text[3:6]])):
        texts[piece.index] += piece.text
    assert texts == [text[: text.index(text[3:6])]] * 2


def test_the_error_of_one_prompt_comes_after_the_texts_of_the_others(three, monkeypatch):
    sample = three.ops.sample

    def broken(logits, samplers):
        ids = sample(logits, samplers)
        return np.where([s.history[:2] == [1, 287] for s in samplers], NO_TOKEN, ids)

    expected = [p.id for p in three.generate("one", max_tokens=5, temperature=0)]
    monkeypatch.setattr(three.ops, "sample", broken)
    ids, pieces = [], three.generate([[1, 287], "one"], max_tokens=5, temperature=0)
    with pytest.raises(ValueError, match="no token can be chosen"):
        for piece in pieces:
            assert piece.index == 1
            ids.append(piece.id)
    assert ids == expected and all_free(three)


def test_a_list_that_is_left_ends_all_its_sequences(three):
    pieces = three.generate([*PROMPTS, "five"], temperature=0)
    next(pieces)
    pieces.close()
    assert all_free(three)


# Log probabilities


def test_top_logprobs_are_the_models_own_best(tiny_path):
    """With numpy, whose prompts and texts have the same activations."""
    model = ggpy.load(tiny_path("llama"), device="numpy", n_ctx=64, n_threads=1)
    ids = model.tokenizer.encode("one two")
    odd = {"seed": 3, "temperature": 1.7, "top_k": 5, "logit_bias": {7: 3.0}, "repeat_penalty": 1.5}
    for n in (1, 4, 1000):
        so_far = list(ids)
        for piece in model.generate(ids, max_tokens=4, top_logprobs=n, **odd):
            row = model.logits(so_far)[-1].astype(np.float64)
            expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
            best = np.argsort(-expected, kind="stable")[:n]
            assert [x.id for x in piece.top_logprobs] == best.tolist()
            found = [x.logprob for x in piece.top_logprobs]
            np.testing.assert_allclose(found, expected[best], atol=1e-4)
            assert piece.logprob == pytest.approx(expected[piece.id], abs=1e-4)
            so_far.append(piece.id)


def test_top_logprobs_have_the_text_of_whole_tokens(model):
    (piece,) = model.generate("hello", max_tokens=1, temperature=0, top_logprobs=453)
    texts = {x.id: x.text for x in piece.top_logprobs}
    end = model.tokenizer.eos_id
    assert texts[287] == " hello" and texts[end] == model.tokenizer.text(end)
    assert texts[0x80 + 5] == "\ufffd", "a byte alone is no character"


def test_who_asks_for_no_logprobs_pays_for_none(model, monkeypatch):
    read, kinds = model.ops.read, []
    monkeypatch.setattr(model.ops, "read", lambda x: (kinds.append(x.dtype.kind), read(x))[1])
    monkeypatch.setattr(Sequence, "scores", lambda *_: pytest.fail("nobody asked"))
    *_, last = model.generate("one", max_tokens=5, temperature=0)
    assert (last.logprob, last.top_logprobs) == (None, ())
    assert "f" not in kinds, "logits stay where they are"


# Conversations

TALK = [
    {"role": "system", "content": "the model"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "two"},
]


def test_a_chat_answers_what_the_template_makes_of_the_messages(model):
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    options = {"max_tokens": 6, "temperature": 0.9, "seed": 4}
    expected = text_of(model.generate(rendered + "<|im_start|>assistant\n", **options))
    assert text_of(model.chat(TALK, **options)) == expected
    assert text_of(model.chat(tuple(TALK), chat_template="chatml", **options)) == expected
    assert text_of(model.chat(TALK, chat_template=BUILT_IN["chatml"], **options)) == expected
    assert text_of(model.chat(TALK, chat_template="vicuna", **options)) != expected
    assert len(TALK) == 4, "the caller's messages are left alone"


def test_a_model_without_a_template_says_what_to_do(tiny_path, tmp_path):
    path = tmp_path / "base.gguf"
    path.write_bytes(tiny_path("llama").read_bytes().replace(b"tokenizer.chat_template", b"t" * 23))
    with ggpy.load(path, device="cpu", n_ctx=64, n_threads=1) as model:
        with pytest.raises(ChatTemplateError, match=r"has none: give chat_template.* generate"):
            model.chat(TALK)
        assert list(model.chat(TALK, chat_template="chatml", max_tokens=2))
        assert "without a chat template" in repr(model.tokenizer)


# What is wrong is told at the call


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages is 'hello': give a list of dicts like"),
        (TALK[1], "messages is {'role': 'user'"),
        ([], "messages is empty: give at least one"),
        (["hello"], r"messages\[0\] is 'hello': give a dict"),
        ([*TALK, {"role": "model", "content": "a"}], r"messages\[4\] has the role 'model'"),
        ([{"role": "user"}], r"messages\[0\] has the content None: it must be a text"),
        ([{"role": "user", "content": [1]}], r"messages\[0\] has the content \[1\]"),
    ],
)
def test_messages_of_another_form_are_refused(model, messages, words):
    with pytest.raises(ValueError, match=words):
        model.chat(messages)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (TALK, {}, "is a message: give messages to chat"),
        (TALK[0], {}, "is a message: give messages to chat"),
        (None, {}, "the prompt is None: give ids of tokens"),
        (5, {}, "the prompt is 5: give ids of tokens"),
        (b"hello", {}, "the prompt is b'hello': give ids of tokens"),
        ([1.5], {}, r"the prompt is \[1.5\]: give ids"),
        ([], {}, "the prompt has no tokens"),
        (["a", 5], {}, "prompt 1 of the list: the prompt is 5: give ids"),
        ([[5], [5] * 90], {}, "prompt 1 of the list: context is 64 tokens, the prompt has 90"),
        ([5] * 90, {}, r"context is 64 tokens, the prompt has 90: raise n_ctx \(-c\) or shorten"),
        ([500], {}, "token id 500 is not in the vocabulary"),
        ("a", {"max_tokens": "5"}, "max_tokens is '5': it must be a whole number"),
        ("a", {"max_tokens": -1}, "max_tokens is -1: it must be 0 or more"),
        ("a", {"top_logprobs": -1}, "top_logprobs is -1: it must be 0 or more"),
        ("a", {"top_logprobs": "all"}, "top_logprobs is 'all': it must be a whole number"),
        ("a", {"n_keep": 64}, "n_keep is 64: it must be 0 to 63"),
        ("a", {"stop": 5}, "stop is 5: give a text, or several"),
        ("a", {"top_p": 3}, "top_p is 3: it must be from 0 to 1"),
        ("a", {"params": {"top_p": 1}}, "params is {'top_p': 1}: give a SamplingParams"),
    ],
)
def test_wrong_arguments_are_told_at_the_call(model, prompt, options, words):
    with pytest.raises(ValueError, match=words):
        model.generate(prompt, **options)
    assert not model.engine.busy


def test_other_calls_speak_the_library_s_words_too(model, tiny_path):
    with pytest.raises(TypeError, match="no parameter temprature: did you mean temperature"):
        model.generate("one", temprature=1)
    with pytest.raises(TypeError, match="no parameter max_token: did you mean max_tokens"):
        model.chat(TALK, max_token=1)
    with pytest.raises(ValueError, match="the prompt is 'hi': give ids of tokens; "):
        model.logits("hi")
    for name, value in (("n_ctx", 0), ("n_ctx", "64"), ("n_batch", 0), ("n_seq", 0)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}: it must be"):
            ggpy.load("model.gguf", **{name: value})
    for device in ("tpu", 0):
        with pytest.raises(ValueError, match=f"unknown device '{device}': use auto, cpu"):
            ggpy.load(tiny_path("llama"), device)


def test_a_closed_model_says_so_at_the_call(tiny_path):
    model = ggpy.load(tiny_path("llama"), device="cpu", n_ctx=64, n_threads=1)
    begun, waiting = model.generate("one", seed=5), model.generate("two", seed=5)
    next(begun)
    model.close()
    model.close()
    calls = (
        lambda: model.generate("one"),
        lambda: model.generate(["one", "two"]),
        lambda: model.chat(TALK),
        lambda: model.logits([5]),
        lambda: next(waiting),
        lambda: next(begun),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"the model (is|was) closed"):
            call()
    assert "llama.gguf" in repr(model)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_missing_file_is_a_file_not_found_error(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=r"there is no .*file"):
        ggpy.load(kind(tmp_path / "missing.gguf"), device="cpu")
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a known model \(smollm2"):
        ggpy.load("no-model-of-this-name", device="cpu")


def test_progress_counts_to_the_end(tiny_path):
    calls = []
    progress = lambda done, total: calls.append((done, total))  # noqa: E731
    with ggpy.load(tiny_path("qwen3"), device="cpu", n_threads=1, progress=progress):
        pass
    assert calls[-1][0] == calls[-1][1] and calls == sorted(calls) and len(calls) > 10


def test_weights_that_do_not_fit_stay_in_blocks_and_give_the_same(tiny_path):
    notes: list[str] = []
    with File(tiny_path("gemma2")) as file:
        tokenizer = Tokenizer.from_gguf(file)
        ops = [Reference(1), Reference(1, weight_memory=100_000, note=notes.append)]
        logits = [Model(file, tokenizer, x).logits(list(range(5, 25))) for x in ops]
    assert len(notes) == 1 and "in blocks" in notes[0]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_bad_files_leave_nothing_open(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ggpy.GGUFError):
        ggpy.load(path)
    path.unlink()


def test_formats_by_name_in_any_case():
    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    blocks = ggpy.quantize(weights, "Q8_0")
    assert blocks.dtype == np.uint8 and blocks.shape == (2, 34)
    np.testing.assert_allclose(ggpy.dequantize(blocks, "q8_0"), weights, atol=0.01)


def test_import_is_cheap_and_complete():
    code = (
        "import sys, ggpy; assert 'numpy' not in sys.modules; dir(ggpy);"
        "ggpy.gguf.File; ggpy.tokenizer.Tokenizer; ggpy.GGUFError; assert 'cuda' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ggpy.nothing  # noqa: B018


def test_a_known_name_is_loaded_as_its_file(tiny_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(hub, "fetch", lambda m: (fetched.append(m.name), tiny_path("qwen3"))[1])
    with ggpy.load("SmolLM2", device="cpu", n_ctx=32, n_threads=1) as model:
        assert model.metadata["general.architecture"] == "qwen3"
    assert fetched == ["smollm2"]


def test_a_file_that_is_called_like_a_known_model_is_that_file(tiny_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(tiny_path("phi3").read_bytes())
    monkeypatch.setattr(hub, "fetch", lambda model: pytest.fail("it is there"))
    with ggpy.load("smollm2", device="cpu", n_ctx=32, n_threads=1) as model:
        assert model.metadata["general.architecture"] == "phi3"


def test_a_file_that_is_open_and_its_tokenizer_are_used(tiny_path, monkeypatch):
    file = File(tiny_path("llama"))
    tokenizer = Tokenizer.from_gguf(file)
    monkeypatch.setattr(Tokenizer, "from_gguf", lambda source: pytest.fail("it is there"))
    ops = Reference(1)
    with ggpy.load(file, ops, n_ctx=32, tokenizer=tokenizer) as model:
        assert (model.file, model.ops, model.tokenizer) == (file, ops, tokenizer)
    assert not file.tensors, "it is closed with the model"


def test_what_a_shell_shows(model):
    assert repr(model) == "<Model llama.gguf: llama, 64 tokens of context, cpu>"
    assert repr(model.file) == "<File llama.gguf: llama, 21 tensors, 0.1 MB>"
    tokenizer = "<Tokenizer SentencePiece, 453 tokens, with a chat template>"
    assert repr(model.tokenizer) == tokenizer
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(top_k=5, logit_bias={3: -1.0})
    assert repr(params) == "SamplingParams(top_k=5, logit_bias={3: -1.0})"
    assert eval(repr(params)) == params
    shown = [name for name in dir(ggpy) if not name.startswith("__")]
    assert sorted(shown) == sorted(set(ggpy.__all__) - {"__version__"})
    assert re.fullmatch(r"\d+\.\d+\.\d+", ggpy.__version__)


# What editors know of keyword arguments


def test_sampling_keywords_are_the_parameters_of_sampling():
    declared = {name: t.__forward_arg__ for name, t in SamplingKeywords.__annotations__.items()}
    assert declared == {f.name: f.type for f in fields(SamplingParams)}


def test_generate_keywords_are_those_of_generate():
    parameters = inspect.signature(Model.generate).parameters.values()
    own = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    added = GenerateKeywords.__annotations__.keys() - SamplingKeywords.__annotations__.keys()
    assert {n: GenerateKeywords.__annotations__[n].__forward_arg__ for n in added} == own


def test_a_chat_with_a_budget_of_reasoning(tiny_path):
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=256, n_threads=1) as model:
        messages = [{"role": "user", "content": "hello"}]
        options = {"max_tokens": 40, "seed": 3}
        options["logit_bias"] = dict.fromkeys(model.tokenizer.end_ids, -inf)
        options["chat_template"] = "{{ messages[-1].content }}<think>\n"
        free = "".join(map(str, model.chat(messages, **options)))
        limits = {"reasoning_budget": 9, "reasoning_budget_message": " Enough."}
        text = "".join(map(str, model.chat(messages, **limits, **options)))
        thought, closer, answer = text.partition(" Enough.</think>")
        assert closer and answer and free.startswith(thought)
        with pytest.raises(ValueError, match="reasoning_budget is -2: it must be -1 or more"):
            model.chat(messages, reasoning_budget=-2)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
KIND = {"type": "object", "properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"],
        "additionalProperties": False}  # fmt: skip


def of_chat(pieces):
    """The text of an answer, its reasoning, and the number of its tokens."""
    found = list(pieces)
    return "".join(map(str, found)), "".join(p.reasoning for p in found), len(found)


def is_of_kind(text):
    return json.loads(text)["kind"] in ("a", "bc")


def test_json_of_a_chat_follows_reasoning(tiny_path):
    """As in the server: with half of the tokens at most, and not where reasoning is off."""
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=512, n_seq=2, n_threads=1) as model:
        ask = partial(model.chat, [{"role": "user", "content": "hello"}], chat_template=THINKS)
        ask = partial(ask, max_tokens=160, seed=5, json_schema=KIND)
        said = {"reasoning_budget_message": " Enough."}
        found = of_chat(ask(**said))
        text, thought, n_tokens = found
        assert is_of_kind(text) and thought.endswith("Enough.") and 80 < n_tokens < 160
        assert of_chat(ask(**said)) == found, "the seed says all of it"
        text, short, _ = of_chat(ask(reasoning_budget=9, **said))
        assert is_of_kind(text) and thought.startswith(short.removesuffix("Enough.").strip())
        text, none, n_tokens = of_chat(ask(reasoning_budget=0))
        assert is_of_kind(text) and not none and n_tokens < 40
        assert is_of_kind(of_chat(ask(max_tokens=None, reasoning_budget=3))[0])
        assert of_chat(ask(json_schema=None, grammar='root ::= "yes"'))[:2] == ("yes", "")
        for wrong, told in ((False, "the JSON schema is false"), ("{", "schema is not JSON")):
            with pytest.raises(ValueError, match=told):
                ask(json_schema=wrong)
        with pytest.raises(ValueError, match="max_tokens is -1"):
            ask(max_tokens=-1)


def test_json_of_a_raw_prompt_begins_at_once(tiny_path):
    """Unless `generate` is told that the ids are those of a chat, each of which has its own end."""
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=512, n_seq=2, n_threads=1) as model:
        options = {"max_tokens": 120, "seed": 5, "json_schema": KIND}
        text, thought, _ = of_chat(model.generate("hello<think>", **options))
        assert is_of_kind(text) and not thought
        limit = ReasoningLimit.of(model.tokenizer, THINKS, 4, " Enough.")
        prompts = [model.tokenizer.encode(text) for text in ("hello<think>", "world<think>\n")]
        pieces = list(model.generate(prompts, reasoning=limit, **options))
        for i in range(2):
            text, thought, _ = of_chat(piece for piece in pieces if piece.index == i)
            assert is_of_kind(text) and thought.endswith("Enough.")
        harmony = ReasoningLimit(by_name("harmony"), model.tokenizer, 4, " Enough.")
        text, _, n_tokens = of_chat(model.generate("hello", reasoning=harmony, **options))
        assert is_of_kind(text) and n_tokens > 20, "the header of the message is no text"
