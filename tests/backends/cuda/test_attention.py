"""Prompts whose keys and values are of every type: the attention made for them against the one of
single tokens over the same pages, and against the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import nmse

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import (
    Attention,
    CacheGroup,
    CacheShape,
    Layer,
    Norm,
    PagedKV,
    Role,
    Rope,
    Step,
)
from ggpy.backends.numpy.backend import Reference
from ggpy.cache_types import USUAL, CacheTypes
from ggpy.formats import by_name
from ggpy.gguf import Tensor
from ggpy.kernels.attention.prefill_attention import PrefillAttention

D, H, G, E = 64, 4, 2, 64
N_IDS, N_PAGES = 300, 12
NEVER = 1 << 20  # tokens
SAME_PAGES = 1e-6  # normalised mean square error of two kernels that read the same numbers
# Beyond that, numbers that are a little off go to the next code, as coarse as the type is
# (tests/test_cache_type.py).
OF_THE_REFERENCE = 4e-5

# Of each step: sequence, first position, tokens. Sequence 1 shares the first page of sequence 0.
STEPS = {
    "first": [(0, 0, 70)],
    "shared": [(0, 70, 33), (1, 64, 40)],
    "among others": [(2, 0, 1), (0, 103, 3), (1, 104, 90), (3, 0, 130)],
    "short": [(2, 1, 3), (3, 130, 1)],
    "again": [(3, 131, 61)],
}
TABLES = [[7, 2, 0, 0], [7, 5, 9, 4], [1, 0, 0, 0], [3, 11, 6, 10]]


def step_of(parts: list[tuple[int, int, int]]) -> Step:
    spans = [np.arange(first, first + n) for _, first, n in parts]
    seen = zip(parts, spans, strict=True)
    ids, positions, sequences, table, rows = (
        np.asarray(array, np.int32)
        for array in (
            np.concatenate([(17 * s + span) % N_IDS for (s, *_), span in seen]),
            np.concatenate(spans),
            np.repeat(np.arange(len(parts)), [n for *_, n in parts]),
            [TABLES[s] for s, *_ in parts],
            [],
        )
    )
    return Step(ids, positions, sequences, (table, table), rows)


def tensor(seed: int, *shape: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Tensor("w", shape, by_name("F32"), values.view(np.uint8).reshape(*shape[:-1], -1))


class Layers:
    """Attention of two layers on a backend, the second of which has a window."""

    def __init__(self, ops: Any, types: CacheTypes, n_pages: int = N_PAGES) -> None:
        self.ops = ops
        self.table = ops.weight(tensor(0, N_IDS, D), Role("V D", lookup=True))
        shapes = {"wq": (H * E, D), "wk": (G * E, D), "wv": (G * E, D), "wo": (D, H * E)}
        rope = Rope("neox", 100.0 ** (-np.arange(E // 2) / (E // 2)))
        norm = Norm(ops.weight(tensor(9, D), Role("D")), 1e-5)
        self.layers, groups = [], []
        for i, window in enumerate((0, 40)):
            role = Role("F D")
            w = {n: ops.weight(tensor(i, *shape), role) for n, shape in shapes.items()}
            spec = PagedKV(H, G, E, E, window, types)
            groups.append(CacheGroup(spec, (i,), n_pages))
            attention = Attention(spec, i, 0, norm, **w, rope=rope, scale=0.02)
            self.layers.append(Layer(i, attention, None))
        ops.weights_ready()
        ops.allocate_cache(CacheShape(tuple(groups)))

    def run(self, step: Step) -> list[np.ndarray]:
        """o[T, H * E] of each layer."""
        found = []

        def forward(step: Step) -> Any:
            for layer in self.layers:
                x = self.ops.mix(self.ops.embed(step, self.table), layer, step)
            return x

        def keep(layer: int, name: str, array: Any) -> None:
            if name == "attention":
                found.append(np.array(self.ops.read(array)).reshape(len(step.ids), H * E))

        self.ops.run(step, forward, keep)
        return found


def on_gpu(machine: Any, types: CacheTypes, monkeypatch: pytest.MonkeyPatch, least: int) -> Layers:
    """With that attention for so many tokens and more."""
    monkeypatch.setattr(PrefillAttention, "min_tokens", least)
    return Layers(Cuda(machine), types)


@pytest.mark.parametrize(
    "k, v",
    [("q8_0", "q4_1"), ("q4_0", "q5_1"), ("q5_0", "f16"), ("bf16", "f32")],
)
def test_every_step(machine, monkeypatch, k, v):
    """Shared pages, prompts beside others and alone, tokens before and after."""
    types = CacheTypes(k, v)
    prompts = on_gpu(machine, types, monkeypatch, 9)
    tokens = on_gpu(machine, types, monkeypatch, NEVER)
    references = [Layers(Reference(1), t) for t in (types, USUAL)]
    for name, parts in STEPS.items():
        step = step_of(parts)
        results = [layers.run(step) for layers in (prompts, tokens, *references)]
        batch = prompts.ops.context.batch
        long = [(s, first, n) for s, first, n in parts if n >= 9]
        pages = {page for s, first, n in long for page in TABLES[s][: -(-(first + n) // 64)]}
        (tiling,) = batch.tilings
        assert [g.n_f16_pages for g in batch.groups] == [len(pages)] * 2, name
        assert (tiling.n_prefill_tiles > 0) == bool(long), name
        others = tokens.ops.context.batch
        assert others.tilings[0].n_prefill_tiles == others.groups[0].n_f16_pages == 0
        for layer, (mine, same, wanted, exact) in enumerate(zip(*results, strict=True)):
            assert nmse(mine, same) <= SAME_PAGES, f"{name}, layer {layer}"
            bound = OF_THE_REFERENCE + nmse(wanted, exact) / 5
            assert nmse(mine, wanted) <= bound, f"{name}, layer {layer}"


def test_halves_need_nothing_made(machine, monkeypatch):
    """f16 is read where it is, and takes no memory twice."""
    layers = on_gpu(machine, CacheTypes("f16", "f16"), monkeypatch, 9)
    layers.run(step_of(STEPS["first"]))
    batch = layers.ops.context.batch
    assert batch.tilings[0].n_prefill_tiles > 0 and batch.groups[0].n_f16_pages == 0
    assert layers.ops.attention.pages.f16_scratch is None


def test_bits_that_must_not_change_need_no_room_either(emulator):
    layers = Layers(Cuda(emulator, batch_invariant=True), CacheTypes("q8_0", "q8_0"))
    assert layers.ops.attention.pages.f16_scratch is None


def test_all_pages_may_be_of_prompts_at_once(machine, monkeypatch):
    """There is room for each of them."""
    types = CacheTypes("q8_0", "q4_1")
    prompts, tokens = (on_gpu(machine, types, monkeypatch, n) for n in (9, NEVER))
    parts = [(0, 0, 256), (1, 0, 256), (3, 0, 256)]
    step, tables = step_of(parts), np.random.default_rng(0).permutation(12).reshape(3, 4)
    for table in step.page_tables:
        table[:] = tables
    for mine, same in zip(prompts.run(step), tokens.run(step), strict=True):
        assert nmse(mine, same) <= SAME_PAGES
    assert prompts.ops.context.batch.groups[0].n_f16_pages == N_PAGES
