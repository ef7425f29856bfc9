"""The ops of a GPU against the reference: steps of every kind, graphs, batches, whole answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import kl_divergence, nmse, random_rows
from random_decoder import (
    DIFFERING,
    Shape,
    Variation,
    decode_step,
    random_decoder,
)
from steps import StatesOf, for_groups

from ggpy import arch
from ggpy.arch.layers.attention import QK_NORM, WHOLE_QK_NORM
from ggpy.backends.cuda import backend as cuda
from ggpy.backends.cuda import weights
from ggpy.backends.cuda.plan import Recurrence
from ggpy.backends.cuda.steps import upload
from ggpy.backends.cuda.steps.graphs import EAGER_STEPS
from ggpy.backends.cuda.steps.upload import PLACES
from ggpy.backends.interface import (
    PAGE_SIZE,
    Attention,
    CacheGroup,
    CacheShape,
    Dense,
    Head,
    Layer,
    Norm,
    PagedKV,
    Role,
    Rope,
    Step,
)
from ggpy.backends.numpy.backend import Reference
from ggpy.cache_types import CacheTypes
from ggpy.device.base import capability
from ggpy.formats import by_name
from ggpy.formats.rows import by_row, encode_rows, row_scales
from ggpy.gguf import File, GGUFError, Tensor
from ggpy.kernels.attention.prefill_attention import PrefillAttention
from ggpy.kernels.delta import delta_chunks
from ggpy.runtime.engine import Engine
from ggpy.sampling import Sampler, SamplingParams
from tools.make_tiny import MODELS

from .heads.real_heads import write_real_heads

# Normalised mean square error of logits. The reference, with its activations rounded to halves at
# the same places, is 3e-6 off over many rows; a single row is up to 2e-5.
TOLERANCE, OF_A_ROW = 1e-5, 4e-5
KL = 1e-4  # of the softmax of logits, the mean of a step's rows
WITHOUT_VALUES = "values without a matrix of their own"
REFUSED = {  # what no kernel computes
    "no kernel for heads that differ": DIFFERING,
    f"{WITHOUT_VALUES} beside such norms of keys": Variation(
        layers=(Shape(v_norm=True),),
        tensors=tuple(WHOLE_QK_NORM.items()),
        without=("attn_v.weight",),
        norm_whole=True,
    ),
    f"{WITHOUT_VALUES} beside": Variation(
        layers=(Shape(v_norm=True, norm_after_rope=True),), tensors=tuple(QK_NORM.items())
    ),
}
# Heads of a gated delta net begin near 0, and have a norm: of random weights and as few numbers as
# those of tiny models have, it makes what was rounded before it much larger. test_real_heads.py has
# heads as large as real ones, and no slack.
SLACK = {"qwen35": 10}
GREEDY = SamplingParams(temperature=0)
DENSE = [name for name, model in MODELS.items() if not model.experts]  # the others: test_moe.py


def ids_of(n: int, seed: int = 0, n_vocab: int = 350) -> list[int]:
    return np.random.default_rng(seed).integers(5, n_vocab, n).tolist()


def step_of(chunks: list[tuple[list[int], int, list[int]]], rows=None) -> Step:
    """Of (ids, position of the first, pages) for each sequence; rows: each sequence's last."""
    lengths = [len(ids) for ids, _, _ in chunks]
    width = max(len(pages) for _, _, pages in chunks)
    positions = [np.arange(p, p + len(ids)) for ids, p, _ in chunks]
    ids, positions, sequences, table, wanted = (
        np.asarray(array).astype(np.int32)
        for array in (
            np.concatenate([ids for ids, _, _ in chunks]),
            np.concatenate(positions),
            np.repeat(np.arange(len(chunks)), lengths),
            np.array([pages + [0] * (width - len(pages)) for _, _, pages in chunks]),
            np.cumsum(lengths) - 1 if rows is None else np.array(rows),
        )
    )
    return Step(ids, positions, sequences, (table,), wanted)


class Model:
    """A tiny model on one backend, and the sequences whose tokens it has seen."""

    def __init__(self, ops, path, n_pages: int = 24, **sizes: Any) -> None:
        """sizes: those of arch.load."""
        self.ops = ops
        with File(path) as file:
            self.decoder = arch.load(file, ops, 256, **sizes)
        self.shape = self.decoder.cache_shape(n_pages, PAGE_SIZE, 1)
        ops.allocate_cache(self.shape)
        self.states = StatesOf()
        self.n_vocab = self.decoder.sizes.n_vocab

    def logits(self, step: Step) -> np.ndarray:
        return self.ops.read(self.decoder.run(for_groups(step, self.shape, self.states)))

    def hidden(self, step: Step) -> np.ndarray:
        return self.ops.read(self.decoder.hidden(for_groups(step, self.shape, self.states)))

    def op_by_op(self, step: Step) -> np.ndarray:
        """The same, of which every op's output could be read."""
        given = for_groups(step, self.shape, self.states), self.decoder.forward
        return self.ops.read(self.ops.run(*given, lambda *_: None))


class Pair:
    """A model on a GPU and on the reference; each step runs on both and must agree."""

    def __init__(self, device, path, n_seq: int = 1) -> None:
        self.gpu = Model(cuda.Cuda(device), path, n_seq=n_seq)
        self.reference = Model(Reference(1), path)
        self.n_vocab, self.slack = self.gpu.n_vocab, SLACK.get(path.stem, 1)

    def step(self, chunks, rows=None, known: dict[int, int] | None = None) -> np.ndarray:
        """The GPU's logits; known: what the negative ids of this step stand for."""
        step = step_of(chunks, rows)
        result = self.gpu.logits(step)
        ids = np.array([(known or {}).get(i, i) for i in step.ids.tolist()], np.int32)
        expected = self.reference.logits(replace(step, ids=ids))
        assert result.shape == expected.shape
        if len(result):
            tolerance = TOLERANCE if len(result) > 20 else OF_A_ROW
            assert nmse(result, expected) <= self.slack * tolerance
            assert kl_divergence(result, expected) <= self.slack * KL
        return result


@pytest.fixture
def pair(machine, tiny_path, request):
    """A pair of the architecture that the test is parametrised with."""
    return Pair(machine, tiny_path(request.param))


@pytest.fixture
def frequent(monkeypatch):
    """Shapes of steps count as frequent from the first step on."""
    monkeypatch.setattr(upload, "OFTEN", 1)


@pytest.fixture
def captures(machine, monkeypatch, frequent):
    """Counts the graphs that are recorded."""
    counted, capture = [], machine.capture
    monkeypatch.setattr(machine, "capture", lambda: (counted.append(1), capture())[1])
    return counted


PAGES = [[3], [7, 1], [0], [5, 2]]  # of four sequences, no neighbours


# Steps


@pytest.mark.parametrize("pair", DENSE, indirect=True)
def test_steps_of_every_kind(pair, captures):
    prompts = [ids_of(n, n) for n in (5, 66, 1)]
    everything = list(range(72))
    pair.step([(p, 0, t) for p, t in zip(prompts, PAGES, strict=False)], everything)
    lengths = [5, 66, 1]
    for _ in range(5):  # decode: directly, recorded for each place, replayed
        chunks = [([40 + n], n, t) for n, t in zip(lengths, PAGES, strict=False)]
        pair.step(chunks)
        lengths = [n + 1 for n in lengths]
    assert len(captures) == PLACES
    mixed = [([9], lengths[0], PAGES[0]), (ids_of(3), 0, PAGES[3]), ([8], lengths[2], PAGES[2])]
    pair.step(mixed)
    pair.step([(ids_of(2, 8), 3, PAGES[3])], [])


@pytest.fixture
def wide_heads(machine, tmp_path, monkeypatch):
    """A pair of qwen35 with heads as large as most models have, which needs no slack."""
    return Pair(machine, write_real_heads(tmp_path / "real-heads.gguf", "qwen35", monkeypatch))


def test_chunks_of_prompts_and_what_follows_them(wide_heads):
    pages = [[3, 4, 9, 8], [7, 1], [0]]
    prompts = [ids_of(n, n) for n in (140, 64, 3)]
    chunks = [(p, 0, t) for p, t in zip(prompts, pages, strict=True)]
    wide_heads.step(chunks, list(range(207)))
    wide_heads.step(chunks)  # padded
    parts = [(ids_of(70), 140, pages[0]), ([5], 64, pages[1]), (ids_of(2), 3, pages[2])]
    wide_heads.step(parts, list(range(73)))
    wide_heads.step([([8], n, t) for n, t in zip((210, 65, 5), pages, strict=True)])
    wide_heads.step([([9], 211, pages[0])])
    ops = wide_heads.gpu.ops
    has_chunks = capability(ops.device.arch) >= delta_chunks.FIRST_ARCH
    of_prompts = Recurrence.CHUNKS if has_chunks else Recurrence.SCAN
    used = {recurrence for _, recurrence in ops.delta._kernels}
    assert used == {of_prompts, Recurrence.DECODE}


@pytest.mark.parametrize("what, variation", REFUSED.items())
def test_what_has_no_kernel_is_refused_by_name(machine, what, variation):
    with pytest.raises(GGUFError, match=f"{what}.*: use --device cpu|{what}; use --device cpu"):
        ops = cuda.Cuda(machine)
        ops.run(decode_step(1), random_decoder(ops, variation=variation).forward)


@pytest.mark.parametrize("pair", ["llama", "gemma3", "qwen35"], indirect=True)
def test_sampled_ids_are_used_before_anyone_reads_them(pair, captures):
    """Two sequences swap their places from step to step, as far as the ids are concerned."""
    samplers = [Sampler(GREEDY, pair.n_vocab), Sampler(GREEDY, pair.n_vocab)]
    logits = pair.step([(ids_of(4), 0, PAGES[0]), (ids_of(3, 1), 0, PAGES[1])])
    ops, lengths = pair.gpu.ops, [4, 3]
    for i in range(4):
        step_logits = cuda.Array(
            ops.context.scratch("logits", 0), np.float32, logits.shape, pair.n_vocab
        )
        sampled = ops.read(ops.sample(step_logits, samplers))
        assert np.array_equal(sampled, np.argmax(logits, axis=1))
        known = {~row: int(id) for row, id in enumerate(sampled)}
        order = [~1, ~0] if i % 2 else [~0, ~1]
        chunks = [([id], n, t) for id, n, t in zip(order, lengths, PAGES, strict=False)]
        logits = pair.step(chunks, known=known)
        lengths = [n + 1 for n in lengths]
    assert len(captures) == PLACES and [s.n_drawn for s in samplers] == [4, 4]


@pytest.mark.parametrize("pair", ["llama", "qwen35"], indirect=True)
def test_graphs_of_rare_steps_and_of_frequent_ones(pair, captures, monkeypatch):
    """Rare ones have a graph in one place, recorded later. No bit depends on which it is."""
    monkeypatch.setattr(upload, "OFTEN", 8)
    pair.step([(ids_of(4), 0, PAGES[0])])
    step, numbers, found = step_of([([7], 4, PAGES[0])]), [], []
    for _ in range(10):
        found.append(pair.gpu.logits(step))
        numbers.append(len(captures))
    assert numbers == [0] * EAGER_STEPS + [1] * (7 - EAGER_STEPS) + [PLACES] * 3
    assert all(np.array_equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_steps_find_the_highest_logits_themselves_where_they_were_wanted(
    pair, monkeypatch, frequent
):
    """What another sampler wants next is drawn as ever; and what nobody has read yet stays."""
    ops, n = pair.gpu.ops, 3
    launched, launch = [], ops._sampling._argmax.launch
    monkeypatch.setattr(
        ops._sampling._argmax, "launch", lambda *args: (launched.append(1), launch(*args))
    )
    pair.step([(ids_of(n), 0, PAGES[0])])

    def sample(params: SamplingParams) -> tuple[Any, int, int]:
        """(what is sampled, numpy's id, how often the kernel was launched by then)."""
        values = pair.step([([5 + n], n, PAGES[0])])
        by_step = len(launched)
        logits = cuda.Array(
            ops.context.scratch("logits", 0), np.float32, values.shape, pair.n_vocab
        )
        sampled = ops.sample(logits, [Sampler(params, pair.n_vocab)])
        return sampled, Sampler(params, pair.n_vocab).sample(values[0]), by_step

    given = []
    for params in (GREEDY,) * 6 + (SamplingParams(seed=1),) * 2 + (GREEDY,) * 2:
        given.append(sample(params))
        n += 1
        assert (ops._sampling._sample is None) == (len(given) <= 6), "another chain was run"
    assert [by_step for *_, by_step in given] == [0, 2, 3, 4, 4, 4, 4, 4, 4, 5]
    assert [sampled.read().tolist() for sampled, *_ in given] == [[id] for _, id, _ in given]


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_graphs_are_recorded_again_when_memory_moves(pair, captures):
    for start, size in ((0, 1), (3, 40), (43, 3)):
        for i in range(3):
            pair.step([([11 + i], start + i, PAGES[1])])
        pair.step([(ids_of(size), start + 3, PAGES[1])])
        if size == 1:
            assert len(captures) == PLACES
    assert len(captures) == 2 * PLACES, "the large step moved memory, the last one did not"


@pytest.mark.parametrize("pair", ["llama", "gemma2", "qwen35"], indirect=True)
def test_parts_of_a_long_prompt_are_recorded(pair, captures):
    """Parts of one shape, at other positions; between them sequences of other lengths, with as many
    tokens in all, whose logits are wanted each second time. Each shape is recorded once.
    """
    pair.step([(ids_of(40), 0, [5, 6])], list(range(40)))  # memory stays where it is from here on
    for i in range(6):
        pair.step([(ids_of(16, i), 16 * i, [7, 1])])
        pair.step([(ids_of(9, i), 0, [3, 4]), (ids_of(7, i), 0, [0, 2])], [8, 15] if i % 2 else [])
    assert len(captures) == 3


@pytest.mark.parametrize("pair", ["llama", "gemma3", "qwen35"], indirect=True)
def test_prompts_of_other_lengths_beside_other_numbers_of_answers_share_a_graph(pair, captures):
    """Their steps are padded to one shape, and their logits are those of the steps as they are."""
    pair.step([(ids_of(40), 0, [5, 6])], list(range(40)))  # memory stays where it is from here on
    for i in range(3):
        pair.step([(ids_of(3 + i, i), 0, PAGES[i])])
    captures.clear()
    lengths = [3, 4, 5]
    for i, n_prompt in enumerate((17, 20, 21, 19)):
        n = 2 + i % 2
        answers = [([7 + i + s], lengths[s], PAGES[s]) for s in range(n)]
        pair.step([*answers, (ids_of(n_prompt, i), 0, [8, 9])])
        lengths[:n] = [length + 1 for length in lengths[:n]]
    assert len(captures) == 1


def test_many_answers_of_other_numbers_share_a_graph(machine, tiny_path, captures):
    """Their steps are padded to one shape, and find the best logits themselves."""
    pair = Pair(machine, tiny_path("llama"), n_seq=23)
    samplers = [Sampler(GREEDY, pair.n_vocab) for _ in range(23)]
    for i, n in enumerate((23, 18, 21, 17, 22, 20)):
        values = pair.step([([5 + i + s], i, [s]) for s in range(n)])
        logits = cuda.Array(
            pair.gpu.ops.context.scratch("logits", 0), np.float32, values.shape, pair.n_vocab
        )
        ids = pair.gpu.ops.sample(logits, samplers[:n]).read()
        assert ids.tolist() == values.argmax(1).tolist()
    assert len(captures) == PLACES


def test_many_answers_with_keys_and_values_in_blocks_are_padded(machine, tiny_path, captures):
    """Their logits are those of steps that are not padded, for which the memory has no room."""
    path, types = tiny_path("qwen3"), CacheTypes("q8_0", "q8_0")
    models = [Model(cuda.Cuda(machine), path, n_seq=n, cache_types=types) for n in (23, 1)]
    for i, n in enumerate((18, 21, 17, 19)):
        step = step_of([([5 + i + s], i, [s]) for s in range(n)])
        padded, plain = (model.logits(step) for model in models)
        assert padded.shape == plain.shape and nmse(padded, plain) <= TOLERANCE
    assert len(captures) == PLACES


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_only_some_rows(pair):
    """Rows in the middle, and one decoded sequence of which nothing is wanted."""
    pair.step([(ids_of(9), 0, PAGES[0]), (ids_of(2), 0, PAGES[1])], [3, 10])
    for i in range(3):
        chunks = [([7], 9 + i, PAGES[0]), ([8], 2 + i, PAGES[1])]
        pair.step(chunks, [1])


def test_more_sequences_than_have_room_to_be_split(emulator, tiny_path, monkeypatch):
    """Alone in their step, and beside a prompt."""
    monkeypatch.setattr(cuda, "SPLIT_TOKENS", 1)
    pair = Pair(emulator, tiny_path("llama"))
    pages = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(3)]
    for i in range(3):
        pair.step([(ids_of(130, i), 0, pages[i])])
    tokens = [([7 + i], 130, pages[i]) for i in range(3)]
    pair.step(tokens)
    pair.step([*(([9], 131, p) for p in pages), (ids_of(4), 0, [9])])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen35"])
def test_a_sequence_does_not_depend_on_the_batch(machine, tiny_path, architecture):
    """The same bits alone, beside one and beside seven others, and beside a prompt: when asked for
    in prompts, always in steps of single tokens.
    """
    found = []
    for n in (1, 2, 8):
        model = Model(cuda.Cuda(machine, batch_invariant=True), tiny_path(architecture))
        prompts, mine = [ids_of(3 + i, i) for i in range(n)], n // 2
        prompts[mine] = ids_of(3, 99)
        steps = [model.logits(step_of([(p, 0, [i]) for i, p in enumerate(prompts)]))[mine]]
        for j in range(3):
            chunks = [([20 + j], len(p) + j, [i]) for i, p in enumerate(prompts)]
            steps.append(model.logits(step_of(chunks))[mine])
        here = len(prompts[mine]) + 3
        chunks = [([9], here, [mine]), (ids_of(5, 7), 0, [20])]
        steps.append(model.logits(step_of(chunks[: min(n, 2)]))[0])
        found.append(steps)
    for steps in found[1:]:
        for i, (a, b) in enumerate(zip(steps, found[0], strict=True)):
            assert np.array_equal(a, b), f"step {i}"


def test_a_prompt_takes_the_product_for_many(machine, tiny_path):
    """40 tokens at once: other products than in parts, and the same logits but for rounding."""
    found = []
    for invariant in (False, True):
        model = Model(cuda.Cuda(machine, batch_invariant=invariant), tiny_path("llama"))
        step = step_of([(ids_of(40, 1), 0, [0, 1])])
        found.append(model.logits(step)[-1])
    rounded, exact = found
    assert not np.array_equal(rounded, exact)
    assert np.square(rounded - exact).sum() <= 2e-5 * np.square(exact).sum()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_large_batch_equals_the_exact_products_but_for_rounding(machine, tiny_path, architecture):
    """Twelve sequences: recorded, replayed, and op by op; on Hopper with packed activations."""
    chunks = [([20 + i], 0, [i]) for i in range(12)]
    exact = Model(cuda.Cuda(machine, batch_invariant=True), tiny_path(architecture))
    expected = exact.logits(step_of(chunks))
    model = Model(cuda.Cuda(machine), tiny_path(architecture))
    found = [model.logits(step_of(chunks)) for _ in range(3)]
    found.append(model.op_by_op(step_of(chunks)))
    for logits in found:
        assert np.square(logits - expected).sum() <= 2e-5 * np.square(expected).sum()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[1], found[2])


@pytest.mark.parametrize("pair", ["llama", "qwen35"], indirect=True)
def test_op_by_op_equals_fused_across_ops(pair):
    """Where single outputs are going to be read nothing is fused across ops: the same bits."""
    model = pair.gpu
    step = step_of([(ids_of(1), 0, PAGES[0]), (ids_of(1, 1), 0, PAGES[1])])
    fused = model.logits(step)
    apart = model.op_by_op(step)
    assert np.array_equal(fused, apart)


@pytest.mark.parametrize("pair", ["llama", "gemma2"], indirect=True)
def test_hidden_states(pair, captures):
    """Of prompts and of single tokens, between steps of the same shape that end with logits: each
    is recorded apart, and each tells what numpy does.
    """
    lengths, n_captures = (5, 12, 1), []
    prompts = [(ids_of(n, n), 0, t) for n, t in zip(lengths, PAGES, strict=False)]
    single = [([40 + i], n, t) for i, (n, t) in enumerate(zip(lengths, PAGES, strict=False))]
    many = [([20 + i], 0, [i]) for i in range(12)]
    for chunks, n_steps in ((prompts, 3), (single, 3), (many, 2)):
        step = step_of(chunks, list(range(sum(len(ids) for ids, _, _ in chunks))))
        expected = pair.reference.hidden(step)
        for _ in range(n_steps):
            pair.step(chunks, step.rows)
            for _ in range(2):  # in each of the places in turn
                found = pair.gpu.hidden(step)
                assert found.dtype == np.float32 and found.shape == expected.shape
                assert nmse(found, expected) <= TOLERANCE
        n_captures.append(len(captures))
    assert n_captures == [2, 2 + 2 * PLACES, 2 + 2 * PLACES + 1 + PLACES]


@pytest.mark.parametrize("pair", ["llama", "gemma2"], indirect=True)
def test_the_norm_behind_hidden_states_is_read(pair):
    mine, same = (model.decoder.final_norm for model in (pair.gpu, pair.reference))
    assert np.array_equal(mine.weight, same.weight) and mine.eps == same.eps


# A layer of weights in mixed formats


D, H, G, E, F, V = 96, 3, 1, 32, 128, 100
SPEC = PagedKV(H, G, E, E)


def one_group(n_layer: int, n_pages: int, spec: PagedKV = SPEC) -> CacheShape:
    return CacheShape((CacheGroup(spec, tuple(range(n_layer)), n_pages),))


def weight(name: str, rows: int, columns: int, seed: int) -> Tensor:
    format = by_name(name)
    rng = np.random.default_rng([seed, rows, columns])
    blocks = random_rows(format, rows, columns, rng, rms=0.1)
    return Tensor(f"{name} {rows}x{columns}", (rows, columns), format, blocks)


def hand_over(ops, name: str, rows: int, columns: int, seed: int, lookup: bool = False):
    """A matrix; "I8 * rows" is one whose rows have scales, "NVFP4 * one" has one for all rows."""
    kind, _, scaled = name.partition(" * ")
    if scaled != "rows":
        scale = Tensor("w.scale", (rows,), by_name("F32"), np.full(rows, 0.7, "f4").view(np.uint8))
        matrix = weight(kind, rows, columns, seed)
        return ops.weight(matrix, Role("F D", lookup), scale if scaled else None)
    format = by_row(kind)
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / 10
    scales = row_scales(values, format)
    matrix = Tensor("w", (rows, columns), format, encode_rows(values, scales, format))
    scale = Tensor("w.scale", (rows,), by_name("F32"), scales.view(np.uint8))
    return ops.weight(matrix, Role("F D", lookup), scale)


def vector(n: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).uniform(0.5, 1.5, n).astype(np.float32)
    return Tensor("norm", (n,), by_name("F32"), values.view(np.uint8))


def layer_on(ops, formats: dict[str, str], table: str, tied: bool):
    """forward(step) of embedding, one layer and output, in the formats given by tensor."""
    kind = lambda name: formats.get(name, formats["other"])  # noqa: E731
    shapes = {"wq": (H * E, D), "wk": (G * E, D), "wv": (G * E, D), "wo": (D, H * E)}
    shapes |= {"gate": (F, D), "up": (F, D), "down": (D, F), "output": (V, D)}
    w = {
        name: hand_over(ops, kind(name), *shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = [Norm(ops.weight(vector(D, i), Role("D")), 1e-5) for i in range(4)]
    embedding = hand_over(ops, table, V, D, 9, lookup=not tied)
    ops.weights_ready()
    ops.allocate_cache(one_group(1, 4))
    rope = Rope("norm", 100.0 ** (-np.arange(8) / 8), 1.2)
    qkvo = {name: w[name] for name in ("wq", "wk", "wv", "wo")}
    attention = Attention(SPEC, 0, 0, norms[0], **qkvo, rope=rope, scale=0.2)
    matrices = w["gate"], w["up"], w["down"]
    layer = Layer(0, attention, Dense(norms[1], *matrices, "gelu_tanh", post_norm=norms[3]))
    head = Head(norms[2], embedding if tied else w["output"], soft_cap=5.0)

    def forward(step):
        x = ops.embed(step, embedding, 3.0)
        x = ops.feed_forward(ops.mix(x, layer, step), layer, step)
        return ops.logits(x, head, step)

    return forward


FORMATS = {
    "one": {"other": "Q8_0"},
    "mixed": {"other": "Q8_0", "wv": "Q4_0", "up": "Q4_0", "wo": "F16"},
    "tables": {"other": "IQ4_NL", "wo": "MXFP4", "down": "NVFP4 * one"},
    "blocks": {"other": "F32"},
    "some in blocks": {"other": "Q8_0", "wk": "F32", "gate": "F32", "output": "F32"},
    "scales of rows": {"other": "I8 * rows", "wk": "Q4_0 * rows", "down": "F8_E4M3 * rows"},
}


@pytest.mark.parametrize(
    "formats, tied",
    [
        *[(name, False) for name in FORMATS],
        *[(n, True) for n in ("one", "blocks", "scales of rows")],
    ],
)
def test_weights_in_any_formats(machine, formats, tied):
    table = FORMATS[formats]["other"] if tied else "Q4_0"
    backends = [cuda.Cuda(machine), Reference(1)]
    forwards = [layer_on(ops, FORMATS[formats], table, tied) for ops in backends]
    prompt, tail = ids_of(3, n_vocab=V), [([7], 3, [2])]
    for step in map(step_of, ([(prompt, 0, [2])], tail, tail, tail)):
        result, expected = (
            ops.read(ops.run(step, forward))
            for ops, forward in zip(backends, forwards, strict=True)
        )
        assert nmse(result, expected) <= OF_A_ROW


@pytest.mark.parametrize("invariant", [False, True])
def test_a_prompt_beside_others(machine, monkeypatch, invariant):
    """Its attention has a kernel of its own from some tokens on, unless bits must not change."""
    monkeypatch.setattr(PrefillAttention, "min_tokens", 8)
    ops, reference = cuda.Cuda(machine, batch_invariant=invariant), Reference(1)
    forwards = [layer_on(backend, FORMATS["one"], "Q4_0", False) for backend in (ops, reference)]
    parts = [(ids_of(20, n_vocab=V), 0, [2]), ([7], 0, [0]), (ids_of(3, n_vocab=V), 0, [1])]
    alone = [(ids_of(9, n_vocab=V), 20, [2])]
    for step, tiles in ((step_of(parts), 2), (step_of(alone), 0)):
        result = ops.read(ops.run(step, forwards[0]))
        assert nmse(result, reference.run(step, forwards[1])) <= OF_A_ROW
        (tiling,) = ops.context.batch.tilings
        assert (tiling.n_prefill_tiles > 0, tiling.n_tiles >= tiles) == (not invariant, True)


@pytest.mark.parametrize("part", [1 << 10, 9000, 32 << 20])
def test_weights_arrive_whole_whatever_the_part(machine, monkeypatch, part):
    """Also where 16 rows are more than a part."""
    monkeypatch.setattr(weights, "PART", part)
    ops, reference = cuda.Cuda(machine), Reference(1)
    step = step_of([(list(range(70)), 0, [0, 1])])
    for kind, lookup in (("Q8_0", False), ("Q8_0", True), ("F16", False)):
        tensor = weight(kind, 70, 128, 3)
        table = ops.weight(tensor, Role("V D", lookup))
        if ops.attention is None:
            ops.allocate_cache(one_group(1, 2))
        embed = partial(ops.embed, table=table, scale=2.0)
        rows = ops.run(step, embed, lambda *_: None)
        x = ops.read(rows)
        expected = reference.weight(tensor, Role("V D"))
        assert np.array_equal(x, reference.embed(step, expected, 2.0))


# Whole answers


class Letters:
    """A tokenizer that makes a letter of each id."""

    end_ids = suppressed_ids = frozenset()

    def stream(self):
        return SimpleNamespace(add=lambda id: chr(97 + id % 26), finish=lambda: "")


def answers(ops, path, prompts, params, **options) -> list[tuple[list[int], str]]:
    """Ids and text of each prompt's continuation, all in one engine."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64)
    engine = Engine(decoder, ops, Letters(), 64, n_batch=16, n_seq=3, **options)
    sequences = [engine.add(p, params, max_tokens=10) for p in prompts]
    while engine.busy:
        engine.step()
    assert engine.cache.n_free == engine.cache.n_pages
    return [([p.id for p in s.pieces], "".join(p.text for p in s.pieces)) for s in sequences]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma4"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=5, temperature=1.0, top_k=20)])
def test_answers_equal_the_references(machine, tiny_path, architecture, params):
    """With and without running ahead; prompts in several steps; more sequences than room."""
    path, prompts = tiny_path(architecture), [ids_of(n, n) for n in (4, 30, 1, 9)]
    expected = answers(Reference(1), path, prompts, params)
    exact = params is not GREEDY  # weights rounded to halves would tip some of the draws
    for run_ahead in (True, False):
        ops = cuda.Cuda(machine, batch_invariant=exact)
        got = answers(ops, path, prompts, params, run_ahead=run_ahead)
        assert got == expected


def test_a_sampler_with_a_history_reads_the_logits(machine, tiny_path):
    params = SamplingParams(temperature=0, repeat_penalty=1.8)
    path, prompts = tiny_path("llama"), [ids_of(4), ids_of(6)]
    expected = answers(Reference(1), path, prompts, params)
    assert answers(cuda.Cuda(machine), path, prompts, params) == expected
    assert expected != answers(Reference(1), path, prompts, GREEDY), "the penalty does something"


def test_logits_of_a_text(machine, tiny_path):
    path, logits = tiny_path("gemma2"), []
    for ops in (cuda.Cuda(machine), Reference(1)):
        with File(path) as file:
            engine = Engine(arch.load(file, ops, 64), ops, Letters(), 64, n_batch=7)
        logits.append(engine.logits(ids_of(20)))
    assert nmse(*logits) <= TOLERANCE


# What is refused


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_another_sequence_left_does_not_matter(machine, tiny_path, architecture):
    """Not even NaN, of a prompt that was cancelled before its logits were seen."""
    path, prompt = tiny_path(architecture), ids_of(9, 9)
    expected = answers(Reference(1), path, [prompt], GREEDY)[0][0]
    ops = cuda.Cuda(machine)
    with File(path) as file:
        engine = Engine(arch.load(file, ops, 64), ops, Letters(), 64, n_batch=16)
    cancelled = engine.add(ids_of(30, 30), GREEDY)
    engine.step()
    for group in ops.attention.pages._groups:
        for memory in (group.keys, group.values):
            machine.fill(memory, 0xFF)
    engine.cancel(cancelled)
    healthy = engine.add(prompt, GREEDY, max_tokens=10)
    while engine.busy:
        engine.step()
    assert (healthy.finish, [p.id for p in healthy.pieces]) == ("length", expected)


def test_order_of_calls(emulator):
    ops, step = cuda.Cuda(emulator), step_of([([1], 0, [0])])
    with pytest.raises(RuntimeError, match="allocate_cache comes before the first step"):
        ops.run(step, lambda step: None)
    ops.allocate_cache(one_group(1, 1))
    with pytest.raises(RuntimeError, match="allocated before"):
        ops.allocate_cache(one_group(1, 1))
    with pytest.raises(RuntimeError, match="inside run"):
        ops.embed(step, None)
    ops.weights_ready()
    with pytest.raises(RuntimeError, match="after weights_ready"):
        ops.weight(weight("Q8_0", 16, 32, 0), Role("F D"))


def test_a_cache_that_does_not_fit(emulator):
    words = r"needs \d+\.\d GB, .* a context of \d+ tokens would fit"
    with pytest.raises(MemoryError, match=words):
        spec = PagedKV(32, 8, 128, 128)
        cuda.Cuda(emulator).allocate_cache(one_group(64, 1 << 22, spec))
