"""Steps of models with recurrent states are padded, and no bit of what was asked for changes.

The state that padding tokens write is NaN here before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from steps import StatesOf, finish, for_groups

from ggpy import arch
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.steps import upload
from ggpy.backends.interface import PAGE_SIZE, Step
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.sampling import SamplingParams

N_CTX = 4 * PAGE_SIZE
NAN = 0xFF  # each byte
GREEDY = SamplingParams(temperature=0)

Chunk = tuple[list[int], int, int]  # ids, position of the first, page


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 350, n).tolist()


def poison(ops: Cuda) -> None:
    """Of each layer the spare state."""
    assert ops.delta is not None
    for conv, matrices, shape, n_states in ops.delta.states._groups:
        for memory, size in ((conv, shape.conv_bytes), (matrices, shape.matrix_bytes)):
            for state in range(n_states - 1, memory.nbytes // size, n_states):
                ops.device.fill(memory.part(state * size, size), NAN)


@pytest.fixture
def load(machine, tiny_path) -> Callable[..., tuple[Any, Cuda]]:
    """A decoder whose steps are padded, or are not, and its ops."""

    def make(pads: bool, n_seq: int) -> tuple[Any, Cuda]:
        ops = Cuda(machine, batch_invariant=True)
        with File(tiny_path("qwen35")) as file:
            decoder = arch.load(file, ops, N_CTX, n_batch=N_CTX, n_seq=n_seq)
        if not pads:
            ops._pad_to = None
        return decoder, ops

    return make


@pytest.fixture
def sizes(monkeypatch) -> list[tuple[int, int]]:
    """T and S of the padded steps."""
    found, padding = [], upload.padded

    def noted(step: Step, *given: Any) -> Step:
        out = padding(step, *given)
        found.append((len(out.ids), len(out.page_tables[0])))
        return out

    monkeypatch.setattr(upload, "padded", noted)
    return found


def step_of(chunks: list[Chunk]) -> Step:
    """Of sequences in a page each, whose last tokens are rows."""
    lengths = [len(ids) for ids, _, _ in chunks]
    return Step(
        ids=np.concatenate([np.array(ids, np.int32) for ids, _, _ in chunks]),
        positions=np.concatenate([np.arange(p, p + len(x), dtype=np.int32) for x, p, _ in chunks]),
        sequences=np.repeat(np.arange(len(chunks), dtype=np.int32), lengths),
        page_tables=(np.array([[page] for *_, page in chunks], np.int32),),
        rows=(np.cumsum(lengths) - 1).astype(np.int32),
    )


def test_logits_have_the_bits_of_steps_that_are_not_padded(load, sizes):
    """Of prompts, of tokens beside a prompt, and of tokens alone."""
    prompts = [(ids_of(1 + i % 3, i), 0, i) for i in range(18)]
    ones = [([20 + i], len(ids), i) for i, (ids, _, _) in enumerate(prompts)]
    mixed = [*ones, (ids_of(21, 99), 0, 20)]
    later = [([40 + i], position + 1, i) for _, position, i in ones]
    found = []
    for pads in (True, False):
        decoder, ops = load(pads, 22)
        shape, states = decoder.cache_shape(24, PAGE_SIZE, 1), StatesOf()
        ops.allocate_cache(shape)
        poison(ops)
        steps = [for_groups(step_of(c), shape, states) for c in (prompts, mixed, later, later)]
        found.append([ops.read(decoder.run(step)) for step in steps])
    assert sizes == [(40, 32), (40, 32), (22, 22), (22, 22)]
    for padded, plain in zip(*found, strict=True):
        assert np.isfinite(plain).all() and np.array_equal(padded, plain)


def answers(engine: Engine) -> list[list[tuple[int, float]]]:
    """Tokens and their probabilities: of prompts with so few pages that some are evaluated again,
    and of some that go on where another one ended, before that, and after its first page.
    """

    def add(ids: list[int], n: int, **options: Any) -> Any:
        return engine.add(ids, GREEDY, max_tokens=n, logprobs=True, **options)

    prompts = [ids_of(n, n) for n in (PAGE_SIZE - 2, PAGE_SIZE - 3, 5)]
    sequences = [add(prompt, 7) for prompt in prompts]
    finish(engine)
    first = add([*prompts[0], *ids_of(9, 1)], 2, keep=True)
    finish(engine)
    second = add([*first.ids, *ids_of(5, 2)], 2, keep=True, previous=first)
    finish(engine)
    third = add([*second.ids[:-4], *ids_of(5, 3)], 2, previous=second)
    finish(engine)
    fourth = add([*prompts[0], *ids_of(8, 1)], 2)
    finish(engine)
    sequences += [first, second, third, fourth]
    assert [s.n_reused for s in sequences[-3:]] == [len(first.ids) - 1, PAGE_SIZE, PAGE_SIZE]
    return [[(piece.id, piece.logprob) for piece in s.pieces] for s in sequences]


def test_answers_have_the_bits_of_steps_that_are_not_padded(load, sizes):
    found = []
    for pads in (True, False):
        decoder, ops = load(pads, 3)
        sizes_of = {"n_seq": 3, "n_positions": 4 * PAGE_SIZE}
        engine = Engine(decoder, ops, NoText(), N_CTX, 30, prefix_cache=True, **sizes_of)
        poison(ops)
        found.append(answers(engine))
        assert engine.stats().preemptions_total > 0
    assert found[0] == found[1]
