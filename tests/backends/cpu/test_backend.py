"""The numba backend against the numpy one: logits and greedy text of whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_decoder import DIFFERING, EVERYTHING, USUAL, V, Variation, random_decoder

from ggpy.arch.layers.attention import OUTPUT_BIAS, QK_NORM, QKV_BIAS, SINKS
from ggpy.backends.cpu.backend import Cpu
from ggpy.backends.interface import INNER, PAGE_SIZE, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.model import load as load_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
IDS = [1, *range(20, 110)]
BIASES = Variation(
    layers=DIFFERING.layers, tensors=tuple({**QKV_BIAS, **OUTPUT_BIAS, **SINKS}.items())
)


def opened(path: Path, ops, **options) -> Model:
    return load_model(File(path), ops, n_ctx=256, **options)


def text_of(model: Model, n: int = 40) -> list[int]:
    return [p.id for p in model.generate([5, 30, 77], max_tokens=n, temperature=0)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_text_are_the_references(
    tiny_path: Callable[[str], Path], architecture: str
) -> None:
    """Prompts of one to many tokens; text of decode steps, in float32 and in 15 bits."""
    path = tiny_path(architecture)
    reference = opened(path, Reference(1))
    expected, text = reference.logits(IDS), text_of(reference)
    for activations, tolerance in (("f32", 1e-5), ("q16", 5e-4)):
        model = opened(path, Cpu(2, activations=activations))
        for n in (1, 4, 7, len(IDS)):
            found = model.logits(IDS[:n])
            np.testing.assert_allclose(found, expected[:n], atol=tolerance * np.abs(expected).max())
        if activations == "f32":
            assert text_of(model) == text


def test_few_tokens_in_8_bits_are_near(tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path("llama")
    expected = opened(path, Reference(1)).logits(IDS[:5])
    found = opened(path, Cpu(1, activations="q8")).logits(IDS[:5])
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("k, v", [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f32"), ("q4_0", "q5_1")])
def test_types_of_the_cache(tiny_path: Callable[[str], Path], k: str, v: str) -> None:
    """What has kernels, and what numpy computes, keeps the same bytes or nearly."""
    path, options = tiny_path("qwen3"), {"cache_type_k": k, "cache_type_v": v, "n_batch": 30}
    from ggpy.cache_types import CacheTypes

    del options["cache_type_k"], options["cache_type_v"]
    models = [
        load_model(File(path), ops, n_ctx=256, cache_type_k=k, cache_type_v=v, **options)
        for ops in (Reference(1), Cpu(2, activations="f32"))
    ]
    assert CacheTypes(k, v) == CacheTypes(k, v)
    expected, found = (model.logits(IDS) for model in models)
    pages = [model.engine.evaluator if False else model.ops._cache[0] for model in models]
    mine, same = (p.keys.array.view(np.uint8) for p in pages)
    assert (mine != same).mean() < 0.02
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def steps() -> list[Step]:
    """A prompt of 90 tokens in two steps beside another, then tokens of both."""
    tables = np.array([[3, 1], [0, 2]], np.int32)

    def step(parts: list[tuple[int, int, int]]) -> tuple:
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in parts])
        sequences = np.repeat([s for s, _, _ in parts], [n for _, _, n in parts])
        ids = (positions * 7 + 3) % V
        every = np.arange(len(ids))
        return tuple(a.astype(np.int32) for a in (ids, positions, sequences)), tables, every

    parts = [[(0, 0, 70)], [(0, 70, 20), (1, 0, 9)], [(0, 90, 1), (1, 9, 3)], [(0, 91, 1), (1, 12, 1)]]
    found = []
    for numbers, table, every in map(step, parts):
        found.append(Step(*numbers, (table,), every.astype(np.int32)))
    return found


@pytest.mark.parametrize(
    "variation", [USUAL, DIFFERING, EVERYTHING, BIASES], ids=["usual", "differing", "all", "biases"]
)
@pytest.mark.parametrize("norms", [False, True])
def test_layers_of_every_kind(variation: Variation, norms: bool) -> None:
    """Windows, soft caps, sinks, biases, norms of heads, values of another size than keys."""
    types = {"attn_q": "Q4_K", "ffn_gate": "Q6_K", "attn_output": "Q8_0", "ffn_down": "F16"}
    if variation is not USUAL:
        types = {"attn_q": "Q4_K", "ffn_down": "Q5_1"}
    options = {"norms": norms and variation is not EVERYTHING, "post_norms": norms}
    decoders = [
        random_decoder(ops, types, "neox", variation=variation, **options)
        for ops in (Reference(1), Cpu(2, activations="f32"))
    ]
    for step in steps():
        groups = len(decoders[0].cache_shape(32, PAGE_SIZE, PAGE_SIZE).groups)
        step = replace(step, page_tables=step.page_tables * groups)
        expected, found = (np.array(d.ops.read(d.run(step))) for d in decoders)
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


def test_a_probe_sees_every_part(tiny_path: Callable[[str], Path]) -> None:
    from ggpy.backends.observe import ObservedOps

    seen: dict[str, int] = {}
    ops = ObservedOps(Cpu(1), lambda name, x: seen.update({name: len(x)}))
    opened(tiny_path("llama"), ops).logits([1, 2, 3])
    assert seen and len(INNER) == 5


def test_too_many_threads_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpy.backends.host.usable_cores", lambda: 2)
    notes: list[str] = []
    assert Cpu(16, note=notes.append).n_threads == 2
    assert Reference(16, note=notes.append).n_threads == 2
    text = "16 threads are too many: this process has 2 cores, and uses 2"
    assert notes == [text, text]
    assert Cpu(note=notes.append).n_threads == 2 and len(notes) == 2


def test_weights_stay_in_the_file(tiny_path: Callable[[str], Path]) -> None:
    """Matrices are views of the mapped file."""
    model = opened(tiny_path("llama"), Cpu(1))
    file = model.file
    w = model.engine
    assert w is not None
    layer = QK_NORM and file.tensors["blk.0.ffn_down.weight"]
    ops = model.ops
    from ggpy.backends.interface import Role

    matrix = ops.weight(layer, Role("D F"))
    assert np.shares_memory(matrix.blocks.data, layer.data)
