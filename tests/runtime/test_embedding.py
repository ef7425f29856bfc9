"""Embeddings: hidden states, pooling, steps and pages, beside sequences that answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
from random_decoder import EVERYTHING, decode_step, random_decoder
from steps import for_groups

import ggpy
from ggpy.backends.interface import PAGE_SIZE
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.numpy.functions import normalised
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.runtime.embedding import embed, pooled, pooling_of, scaled, token_states
from ggpy.runtime.embedding.prompts import evaluate
from ggpy.sampling import SamplingParams
from ggpy.tokenizer import Tokenizer

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
POOLINGS = ["mean", "last", "cls"]
GREEDY = SamplingParams(temperature=0)
LENGTHS = (3, 1, 70, 64, 9, 130, 2)  # of PROMPTS


@pytest.fixture
def load(tiny_path) -> Callable[..., Model]:
    def make(architecture: str = "llama", n_ctx: int = 256, **options: Any) -> Model:
        path = tiny_path(architecture)
        return ggpy.load(path, device="numpy", n_threads=1, n_ctx=n_ctx, **options)

    return make


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 350, n).tolist()


PROMPTS = [ids_of(n, n) for n in LENGTHS]


def all_free(model: Model) -> bool:
    return model.engine.cache.n_free == model.engine.cache.n_pages


def hidden_of(model: Model, ids: list[int]) -> np.ndarray:
    """Normalised hidden states [T, D] of all tokens, in one step."""
    parts: list[np.ndarray] = []
    run = lambda step: model.ops.read(model.decoder.hidden(step))[step.rows]  # noqa: E731
    evaluate(model.engine, [ids], range, run, lambda i, x: parts.append(x))
    return normalised(np.concatenate(parts), model.decoder.final_norm)


# Hidden states


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_head_makes_logits_of_hidden_states(load, tiny_path, architecture):
    model, ids = load(architecture), ids_of(90)
    with File(tiny_path(architecture)) as file:
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        head = file.tensors[name].dequantize()
    x = hidden_of(model, ids)
    assert x.shape == (90, model.decoder.sizes.n_embd) and x.dtype == np.float32
    logits, cap = x @ head.T, model.decoder.head.soft_cap
    if cap:
        logits = cap * np.tanh(logits / cap)
    np.testing.assert_allclose(logits, model.logits(ids), atol=1e-4, rtol=1e-4)


def test_a_norm_with_a_mean_and_a_bias():
    """Of a random decoder that has every part."""
    ops = Reference(1)
    decoder = random_decoder(ops, variation=EVERYTHING)
    shape = decoder.cache_shape(3, PAGE_SIZE, 3)
    ops.allocate_cache(shape)
    step = for_groups(decode_step(3), shape)
    x = decoder.hidden(step)
    assert decoder.final_norm.centred and decoder.final_norm.bias is not None
    n = normalised(x, decoder.final_norm)
    logits = decoder.head.weight.multiply(n) * np.float32(decoder.head.scale)
    cap = decoder.head.soft_cap
    np.testing.assert_allclose(cap * np.tanh(logits / cap), decoder.run(step), atol=1e-5)


# Pooling


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling(load, pooling):
    model, ids = load(), ids_of(80)
    x = hidden_of(model, ids).astype(np.float64)
    pooled = {"mean": x.mean(axis=0), "last": x[-1], "cls": x[0]}[pooling]
    (found,) = embed(model.engine, [ids], pooling)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pooled / np.linalg.norm(pooled), atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_llama_cpp_gives_the_same(tiny_path, tmp_path, architecture, pooling):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from oracle import Oracle, in_float32

    path, prompts = in_float32(tiny_path(architecture), tmp_path / "f32.gguf"), PROMPTS[:4]
    theirs = Oracle(path, pooling=pooling).embeddings(prompts)
    with ggpy.load(path, device="cpu", n_threads=1) as model:
        # llama.cpp computes GELU from a table of halves
        atol = 3e-4 if architecture == "gemma3" else 2e-6
        np.testing.assert_allclose(embed(model.engine, prompts, pooling), theirs, atol=atol)


def test_the_file_says_which_pooling():
    def of(value: Any) -> str:
        key = gguf.Keys.LLM.POOLING_TYPE.format(arch="qwen3")
        return pooling_of({"general.architecture": "qwen3", key: value})

    kinds = gguf.PoolingType
    found = [of(int(k)) for k in (kinds.MEAN, kinds.CLS, kinds.LAST, kinds.RANK, kinds.NONE)]
    assert found == ["mean", "cls", "last", "last", "last"]
    assert pooling_of({"general.architecture": "qwen3"}) == "last"
    for value in (5, -1, "mean", np.array([1])):
        with pytest.raises(ValueError, match=r"qwen3.pooling_type = .*: 0 to 4 .* give a pooling"):
            of(value)


# Steps


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_steps_change_nothing(load, architecture, pooling):
    """Alone, in chunks, and together: the same but for rounding."""
    alone = load(architecture)
    expected = np.concatenate([embed(alone.engine, [p], pooling) for p in PROMPTS])
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    for options in ({"n_batch": 16}, {"n_batch": 100, "n_seq": 2}, {"n_batch": 512, "n_seq": 7}):
        model = load(architecture, **options)
        for _ in range(2):  # in other pages
            found = embed(model.engine, PROMPTS, pooling)
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert all_free(model)


def steps_of(model: Model) -> list[list[int]]:
    """A list to which each hidden step adds the lengths of its prompts."""
    steps: list[list[int]] = []
    hidden = model.decoder.hidden

    def run(step: Any) -> Any:
        steps.append(np.bincount(step.sequences).tolist())
        return hidden(step)

    model.decoder.hidden = run
    return steps


def test_prompts_share_steps_as_far_as_they_and_their_pages_fit(load):
    model = load(n_batch=80, n_seq=4)
    steps = steps_of(model)
    embed(model.engine, PROMPTS, "last")
    assert steps == [[3, 1, 70], [64, 9], [80], [50], [2]]
    model = load(n_ctx=64, n_batch=80, n_seq=3)  # of a page each
    steps = steps_of(model)
    embed(model.engine, [ids_of(2)] * 4, "last")
    assert steps == [[2, 2, 2], [2]]


@pytest.mark.parametrize("n_ctx", [256, 64])  # with pages for a prompt beside the answers, without
def test_answers_beside_are_the_same(load, n_ctx):
    texts, prompts = [ids_of(20, 5), ids_of(30, 6)], [ids_of(60, 7), ids_of(64, 8)]
    expected = [[p.id for p in load().generate(t, max_tokens=25, temperature=0)] for t in texts]
    alone = embed(load().engine, prompts, "mean")
    engine = load(n_ctx=n_ctx, n_seq=2).engine
    answers = [engine.add(t, GREEDY, max_tokens=25) for t in texts]
    for _ in range(9):
        engine.step()
        np.testing.assert_allclose(embed(engine, prompts, "mean"), alone, atol=1e-5)
    while engine.busy:
        engine.step()
    assert [[p.id for p in s.pieces] for s in answers] == expected


def test_any_thread_may_ask_while_another_steps(load):
    model = load(n_seq=2, n_batch=64)
    expected = embed(model.engine, PROMPTS, "last")
    found: list[np.ndarray] = []
    ask = lambda: found.append(embed(model.engine, PROMPTS, "last"))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    pieces = []
    for piece in model.generate(ids_of(8), max_tokens=60, temperature=0):
        pieces.append(piece.id)
        if len(pieces) == 5:
            for thread in threads:
                thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 3
    for x in found:
        np.testing.assert_allclose(x, expected, atol=1e-5)
    assert pieces == [p.id for p in load().generate(ids_of(8), max_tokens=60, temperature=0)]


# Texts


def test_texts_of_every_kind(load):
    model = load()
    ids = model.tokenizer.encode("hello world")
    expected = embed(model.engine, [ids], "last")
    for texts in ("hello world", ["hello world"], ids, [ids], np.array(ids), (tuple(ids),)):
        np.testing.assert_array_equal(model.embed(texts), expected)
    mean = model.embed(["hello world", "hello"], pooling="mean")
    assert mean.shape == (2, 64) and not np.allclose(mean[0], expected[0], atol=0.1)


def test_the_token_behind_a_text_is_there_where_the_file_wants_it(tiny_path):
    with File(tiny_path("qwen3")) as file:
        metadata = dict(file.metadata) | {"tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer(metadata)
    with ggpy.load(tiny_path("qwen3"), device="cpu", n_threads=1, tokenizer=tokenizer) as model:
        ids = tokenizer.encode("hello")
        assert ids[-1] == tokenizer.eos_id
        np.testing.assert_array_equal(model.embed("hello"), model.embed(ids))
        assert abs(float(model.embed("hello")[0] @ model.embed(ids[:-1])[0])) < 0.9


def test_the_models_own_pooling_is_used(tiny_path):
    file = File(tiny_path("qwen3"))
    file.metadata["qwen3.pooling_type"] = 1
    with ggpy.load(file, device="cpu", n_threads=1) as model:
        np.testing.assert_array_equal(model.embed("abc"), model.embed("abc", pooling="mean"))
        assert not np.allclose(model.embed("abc"), model.embed("abc", pooling="last"))


# Errors


@pytest.mark.parametrize(
    ("prompts", "kind", "words"),
    [
        ([[5], [5] * 65], ggpy.ContextOverflow, "prompt 1 of the list: context is 64 tokens.* 65"),
        ([[]], ValueError, "prompt 0 of the list: the prompt has no tokens"),
        ([[5], [453]], ValueError, "prompt 1 of the list: token id 453 is not in the vocabulary"),
        (["text"], ValueError, "prompt 0 of the list: the prompt is 'text': give ids"),
    ],
)
def test_what_cannot_be_evaluated_is_named(load, prompts, kind, words):
    model = load(n_ctx=64)
    with pytest.raises(kind, match=words):
        embed(model.engine, prompts, "last")
    assert all_free(model)


def test_another_pooling(load):
    with pytest.raises(ValueError, match="pooling is 'max': it must be one of mean, last, cls"):
        load().embed("a", pooling="max")


def test_no_prompts(load):
    assert embed(load().engine, [], "last").shape == (0, 64)


def test_a_closed_model(load):
    model = load()
    model.close()
    with pytest.raises(RuntimeError, match="the model is closed"):
        model.embed("a")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_numbers_that_are_none(load, pooling):
    """They are told, and nobody reads them from the pages that they were left in."""
    model, cleared = load(n_seq=2), []
    expected = [p.id for p in model.generate(PROMPTS[2], max_tokens=5, temperature=0)]
    clear = model.ops.clear_pages
    model.ops.clear_pages = lambda *args: (cleared.append(args), clear(*args))
    values, hidden = model.decoder.layers[0].mixer.wv.array, model.decoder.hidden
    kept = values.copy()
    values[:] = np.nan
    with pytest.raises(ValueError, match="prompt 0 of the list: its hidden state is NaN"):
        embed(model.engine, [ids_of(30), ids_of(30, 1)], pooling)
    values[:] = kept
    assert all_free(model) and not cleared
    assert [p.id for p in model.generate(PROMPTS[2], max_tokens=5, temperature=0)] == expected
    assert cleared, "the second page has room after the text"
    model.decoder.hidden = lambda step: np.zeros_like(hidden(step))
    with pytest.raises(ValueError, match="prompt 0 of the list: its hidden state is 0"):
        embed(model.engine, [ids_of(3)], pooling)


def test_pages_are_given_back_when_the_device_fails(load):
    model = load(n_batch=16)

    def fails(step: Any) -> Any:
        if step.positions[0]:
            raise ArithmeticError
        return hidden(step)

    hidden, model.decoder.hidden = model.decoder.hidden, fails
    with pytest.raises(ArithmeticError):
        embed(model.engine, [ids_of(3), ids_of(40)], "last")
    assert all_free(model)
    model.decoder.hidden = hidden
    np.testing.assert_allclose(
        np.linalg.norm(embed(model.engine, PROMPTS, "last"), axis=1), 1, 1e-6
    )


def test_finite_pages_are_not_cleared(load):
    model, cleared = load(n_batch=16), []
    model.ops.clear_pages = lambda *args: cleared.append(args)
    for pooling in ("mean", "last"):
        embed(model.engine, PROMPTS, pooling)
    assert not cleared and not any(pool.suspects for pool in model.engine.cache.pools)


# Models in which a token sees later ones


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_llama_cpp_gives_the_same_on_both_sides(tiny_path, tmp_path, pooling):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from oracle import Oracle, in_float32

    path, prompts = in_float32(tiny_path("gemma-embedding"), tmp_path / "f32.gguf"), PROMPTS[:4]
    theirs = Oracle(path, pooling=pooling).embeddings(prompts)
    with ggpy.load(path, device="cpu", n_threads=1) as model:
        # llama.cpp computes GELU from a table of halves
        np.testing.assert_allclose(embed(model.engine, prompts, pooling), theirs, atol=3e-4)


def test_texts_that_share_a_step_see_nothing_of_each_other(load):
    model = load("gemma-embedding", n_seq=3)
    expected = np.concatenate([embed(model.engine, [p], "mean") for p in PROMPTS])
    steps = steps_of(model)
    np.testing.assert_allclose(embed(model.engine, PROMPTS, "mean"), expected, atol=1e-5)
    assert len(steps) < len(PROMPTS) and all_free(model)


def test_the_dense_matrices_come_after_pooling(load, tiny_path):
    model, ids = load("gemma-embedding"), ids_of(20)
    with File(tiny_path("gemma-embedding")) as file:
        second, third = (file.tensors[f"dense_{i}.weight"].dequantize() for i in (2, 3))
    x = hidden_of(model, ids).mean(axis=0) @ second.T @ third.T
    assert pooling_of(model.metadata) == "mean"
    np.testing.assert_allclose(pooled(model.engine, [ids], "mean")[0], x, atol=1e-5)


def test_a_text_on_both_sides_is_one_step(load):
    assert load("gemma-embedding", n_ctx=200).engine.n_batch == 200
    model = load("gemma-embedding", n_batch=64)
    for call in (lambda: model.embed([ids_of(65)]), lambda: model.logits(ids_of(65))):
        with pytest.raises(ValueError, match=r"a step is 64 tokens, the text has 65: .* n_batch"):
            call()
    assert all_free(model) and model.embed([ids_of(64)]).shape == (1, 64)
    with pytest.raises(ValueError, match="makes embeddings, and continues no text"):
        model.generate("hello")


# What is not pooled, or not of length 1


def test_states_of_all_tokens(load):
    model = load(n_batch=16)
    found = token_states(model.engine, PROMPTS[:3])
    assert [len(x) for x in found] == list(LENGTHS[:3])
    np.testing.assert_allclose(found[2], hidden_of(model, PROMPTS[2]), atol=1e-5)


def test_scales_of_llama_cpp():
    x = np.array([[3.0, -4.0], [0.0, 0.0]])
    wanted = {-1: (3, -4), 0: (3 / 4 * 32760, -32760), 1: (3 / 7, -4 / 7), 2: (0.6, -0.8)}
    wanted[3] = (3 / 91 ** (1 / 3), -4 / 91 ** (1 / 3))
    for norm, row in wanted.items():
        np.testing.assert_allclose(scaled(x, norm), [row, (0, 0)], rtol=1e-6)
