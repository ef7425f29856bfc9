"""The numba backend against the numpy one: logits and greedy text of whole models."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from random_decoder import (
    BEHIND,
    BOTH_SIDES,
    CHUNKS,
    DIFFERING,
    EVERYTHING,
    KEYS_AS_VALUES,
    PARALLEL,
    USUAL,
    WIDE_HEADS,
    V,
    Variation,
    random_decoder,
)

from ggpy.arch.layers.attention import OUTPUT_BIAS, QKV_BIAS, SINKS
from ggpy.backends import choose
from ggpy.backends.cpu.backend import Cpu
from ggpy.backends.interface import PAGE_SIZE, Role, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.observe import ObservedOps
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.model import load as load_model

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
EMBEDS = "gemma-embedding"  # and continues no text
ARCHITECTURES = sorted(path.stem for path in TINY.glob("*.gguf") if path.stem != EMBEDS)
IDS = [1, *range(20, 110)]
ONE_PAGE = (np.zeros((1, 1), np.int32),), np.zeros(1, np.int32)  # tables, and rows of one token
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
BIASES = Variation(
    layers=DIFFERING.layers, tensors=tuple({**QKV_BIAS, **OUTPUT_BIAS, **SINKS}.items())
)


def opened(path: Path, ops, **options) -> Model:
    return load_model(File(path), ops, n_ctx=256, **options)


def test_numba_is_taken_where_it_is_installed() -> None:
    assert type(choose("cpu", 1)) is Cpu
    assert type(choose("numpy", 1)) is Reference


def text_of(model: Model, n: int = 40) -> list[int]:
    return [p.id for p in model.generate([5, 30, 77], max_tokens=n, temperature=0)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_text_are_the_references(
    tiny_path: Callable[[str], Path], architecture: str
) -> None:
    """Prompts of one to many tokens; text of decode steps. Feed-forwards have kernels."""
    path = tiny_path(architecture)
    reference = opened(path, Reference(1))
    expected, text = reference.logits(IDS), text_of(reference)
    # Norms of small heads enlarge what is lost.
    exact, rounded = (3e-5, 5e-3) if architecture in DELTA_NETS else (1e-5, 5e-4)
    for activations, tolerance in (("f32", exact), ("q16", rounded)):
        model = opened(path, Cpu(2, activations=activations))
        for n in (1, 4, 7, len(IDS)):
            found = model.logits(IDS[:n])
            np.testing.assert_allclose(found, expected[:n], atol=tolerance * np.abs(expected).max())
        if activations == "f32":
            assert text_of(model) == text
        halves = model.ops._with_kernels.items()
        assert halves and all(has for _, has in halves)


def test_layers_that_numpy_computes_are_said_once(tiny_path: Callable[[str], Path]) -> None:
    """Here attention, because of the cache's type."""
    for type, kind in (("q4_0", "attention"), ("q8_0", None)):
        notes: list[str] = []
        text_of(opened(tiny_path("qwen3"), Cpu(1, note=notes.append), cache_type_k=type), 3)
        text = f"numpy computes {kind} of this model: only their products are fast"
        assert notes == ([text] if kind else [])


def test_embeddings_are_the_references(tiny_path: Callable[[str], Path]) -> None:
    """Tokens see later ones, too."""
    path, texts = tiny_path(EMBEDS), [IDS[:3], IDS[:7], IDS]
    expected = opened(path, Reference(1)).embed(texts)
    model = opened(path, Cpu(1, activations="f32"))
    np.testing.assert_allclose(model.embed(texts), expected, atol=1e-5)
    assert all(model.ops._with_kernels.values())


@pytest.mark.parametrize("architecture", ["llama", "granitemoe"])
def test_few_tokens_in_8_bits_are_near_and_many_nearer(
    tiny_path: Callable[[str], Path], architecture: str
) -> None:
    """Many are multiplied in float32, or in 16 bits."""
    path = tiny_path(architecture)
    model, expected = opened(path, Cpu(1, activations="q8")), opened(path, Reference(1)).logits(IDS)
    few, many = (np.abs(model.logits(IDS[:n]) - expected[:n]).max() for n in (5, len(IDS)))
    assert 1e-4 < few / np.abs(expected).max() < 0.1
    assert many / np.abs(expected).max() < 1e-3


@pytest.mark.parametrize(
    "k, v", [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f32"), ("q4_0", "q5_1")]
)
def test_types_of_the_cache(tiny_path: Callable[[str], Path], k: str, v: str) -> None:
    """Kernels for f16 and q8_0 write what numpy does, but for a rounding here and there."""
    types = {"cache_type_k": k, "cache_type_v": v, "n_batch": 30}
    path = tiny_path("qwen3")
    numpy, mine = (opened(path, ops, **types) for ops in (Reference(1), Cpu(2, activations="f32")))
    expected, found = numpy.logits(IDS), mine.logits(IDS)
    same, written = (model.ops._cache[0] for model in (numpy, mine))
    for a, b in ((same.keys, written.keys), (same.values, written.values)):
        x, y = (p.format.dequantize_blocks(p.array.reshape(-1)) for p in (a, b))
        assert x.any() and (np.abs(x - y) > 1e-4).mean() < 0.02
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def test_numpy_and_kernels_in_turn_generate_the_references_text(
    tiny_path: Callable[[str], Path],
) -> None:
    """numpy computes attention with this type of the cache, after jobs that wait."""
    types = {"cache_type_k": "q4_0", "cache_type_v": "q4_0"}
    models = [
        opened(tiny_path("qwen3"), o, **types) for o in (Reference(1), Cpu(2, activations="f32"))
    ]
    assert text_of(models[0]) == text_of(models[1])


def test_whoever_looks_at_x_sees_it_computed() -> None:
    """In the middle of a step whose jobs are kept, and after it."""
    decoder = random_decoder(Cpu(2))
    ops, layers = decoder.ops, decoder.layers
    step = Step(*np.array([[7], [0], [0]], np.int32), *ONE_PAGE)
    seen: list[list[np.ndarray]] = []

    def looking(step: Step, looks: bool) -> np.ndarray:
        x, found = ops.embed(step, decoder.table), []
        for layer in layers:
            for half in (ops.mix, ops.feed_forward):
                x = half(x, layer, step)
                if looks:
                    found.append(ops.read(x).copy())
        seen.append(found)
        return x

    ends = [ops.run(step, partial(looking, looks=bool(i % 2))).copy() for i in range(5)]
    np.testing.assert_array_equal(seen[1], seen[3])
    for end in ends:
        np.testing.assert_array_equal(end, seen[1][-1])


def test_logits_are_the_callers_and_are_not_kept() -> None:
    """Of one token and of several; what steps hold on to does not grow."""
    decoder = random_decoder(Cpu(2))
    for n in (1, 3):
        ids, every = np.full(n, 7, np.int32), np.arange(n, dtype=np.int32)
        given = [Step(ids + i, every, 0 * every, ONE_PAGE[0], every) for i in range(2)]
        first, second = (decoder.run(step) for step in given)
        assert not np.shares_memory(first, second) and (first != second).any()
        np.testing.assert_array_equal(first, decoder.run(given[0]))
        tracemalloc.start()
        for _ in range(50):
            decoder.run(given[0])
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 50 * first.nbytes / 2


def steps() -> list[Step]:
    """A prompt of 90 tokens in two steps beside another, then tokens of both."""
    tables = np.array([[3, 1], [0, 2]], np.int32)

    def step(parts: list[tuple[int, int, int]]) -> tuple:
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in parts])
        sequences = np.repeat([s for s, _, _ in parts], [n for _, _, n in parts])
        ids = (positions * 7 + 3) % V
        every = np.arange(len(ids))
        return tuple(a.astype(np.int32) for a in (ids, positions, sequences)), tables, every

    parts = [
        [(0, 0, 70)],
        [(0, 70, 20), (1, 0, 9)],
        [(0, 90, 1), (1, 9, 3)],
        [(0, 91, 1), (1, 12, 1)],
    ]
    found = []
    for numbers, table, every in map(step, parts):
        found.append(Step(*numbers, (table,), every.astype(np.int32)))
    return found


@pytest.mark.parametrize(
    "variation",
    [
        *(USUAL, DIFFERING, EVERYTHING, BIASES, BEHIND, CHUNKS, PARALLEL, BOTH_SIDES, WIDE_HEADS),
        KEYS_AS_VALUES,
    ],
    ids=[
        *("usual", "differing", "all", "biases", "behind", "chunks", "parallel", "both sides"),
        *("wide heads", "keys as values"),
    ],
)
@pytest.mark.parametrize("norms", [False, True])
def test_layers_of_every_kind(variation: Variation, norms: bool) -> None:
    """Windows, soft caps, sinks, biases, norms of heads, values of another size than keys."""
    types = {"attn_q": "Q4_K", "ffn_gate": "Q6_K", "attn_output": "Q8_0", "ffn_down": "F16"}
    if variation is not USUAL:
        types = {"attn_q": "Q4_K", "ffn_down": "Q5_1"}
    with_norms = (EVERYTHING, BEHIND, PARALLEL)
    options = {"norms": norms and variation not in with_norms, "post_norms": norms}
    decoders = [
        random_decoder(ops, types, "neox", variation=variation, **options)
        for ops in (Reference(1), Cpu(2, activations="f32"))
    ]
    for step in steps():
        groups = len(decoders[0].cache_shape(32, PAGE_SIZE, PAGE_SIZE).groups)
        step = replace(step, page_tables=step.page_tables * groups)
        expected, found = (np.array(d.ops.read(d.run(step))) for d in decoders)
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())
    assert all(decoders[1].ops._with_kernels.values())


def test_as_many_tokens_in_other_sequences() -> None:
    """Programs that are kept are those of a step's sequences."""
    decoders = [random_decoder(ops) for ops in (Reference(1), Cpu(1, activations="f32"))]
    for lengths in ((5,), (3, 2), (1, 4), (5,)):
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        every, tables = np.arange(5, dtype=np.int32), np.array([[0], [1]], np.int32)
        step = Step(every, positions, sequences, (tables,), every)
        expected, found = (np.array(d.ops.read(d.run(step))) for d in decoders)
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


def observed(ops, path: Path) -> dict[str, np.ndarray]:
    """What a probe of the model is told last, by name."""
    found: dict[str, np.ndarray] = {}
    opened(path, ObservedOps(ops, lambda name, x: found.update({name: x.copy()}))).logits([1, 2, 3])
    return found


def test_a_probe_sees_what_numpys_layers_compute(tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path("llama")
    expected, found = (observed(ops, path) for ops in (Reference(1), Cpu(1, activations="f32")))
    assert expected.keys() == found.keys() and len(expected) > 4
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5 * np.abs(x).max(), err_msg=name)


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
    with File(tiny_path("llama")) as file:
        tensor = file.tensors["blk.0.ffn_down.weight"]
        matrix = Cpu(1).weight(tensor, Role("D F"))
        assert np.shares_memory(matrix.blocks.data, tensor.data)
        del matrix, tensor


def test_two_models_at_once(tiny_path: Callable[[str], Path]) -> None:
    """Pools of two models, in two threads, do not get in each other's way."""
    models = [opened(tiny_path(name), Cpu(2, activations="f32")) for name in ("llama", "qwen3")]
    alone = [text_of(model) for model in models]
    with ThreadPoolExecutor(2) as threads:
        together = [list(threads.map(text_of, models)) for _ in range(3)]
    assert together == [alone] * 3
