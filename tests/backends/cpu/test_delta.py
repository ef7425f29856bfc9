"""Gated delta nets by kernels against numpy's: sizes of heads, states of several texts, threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from random_moe import Maker

from ggpy.backends.cpu import delta
from ggpy.backends.cpu.backend import Cpu
from ggpy.backends.cpu.compiled import progress
from ggpy.backends.cpu.pool import ThreadPool
from ggpy.backends.interface import CacheGroup, CacheShape, GatedDeltaNet, Layer, Norm, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.states import NO_STATE, Recurrent

D, PAGES = 64, 5


@dataclass(frozen=True)
class Form:
    """Sizes of a layer; letters as in ggpy/backends/interface.py. dt: how far it reaches."""

    Hk: int = 2
    Hv: int = 4
    S: int = 32
    taps: int = 4
    tiled: bool = True
    dt: float = 1.0

    @property
    def spec(self) -> Recurrent:
        return Recurrent(self.Hk, self.Hv, self.S, self.taps)


FORMS = {
    "columns of 32": Form(S=96),
    "columns of 16": Form(S=48),
    "key heads in a row": Form(Hv=6, tiled=False),
    "a head for each": Form(Hk=3, Hv=3, S=16),
    "two taps": Form(taps=2),
    "seven taps": Form(taps=7),
    "never and at once": Form(Hv=16, dt=60.0),
}


def layer_of(ops: Any, f: Form) -> Layer:
    """A layer with random weights, which ops have taken over, and its memory."""
    m, c = Maker(ops), f.spec.channels
    mixer = GatedDeltaNet(
        f.spec,
        0,
        0,
        Norm(m.f32("norm", D, size=0.2, mean=1.0), 1e-5),
        *(m.matrix("w", "Q8_0", n, D) for n in (c, f.Hv * f.S, f.Hv, f.Hv)),
        conv=m.f32("conv", c * f.taps, size=0.5),
        a=-np.abs(m.f32("a", f.Hv)),
        dt=m.f32("dt", f.Hv, size=f.dt),
        out_norm=Norm(m.f32("out", f.S, size=0.2, mean=1.0), 1e-5),
        wo=m.matrix("wo", "F16", D, f.Hv * f.S),
        tiled=f.tiled,
    )
    ops.allocate_cache(CacheShape((CacheGroup(f.spec, (0,), PAGES),)))
    return Layer(0, mixer, None)


def step(*runs: tuple[int, int, int]) -> Step:
    """Of runs: tokens, the state that one begins with, and the one it leaves."""
    counts, tables = [n for n, _, _ in runs], np.array([r[1:] for r in runs], np.int32)
    sequences = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
    every = np.arange(len(sequences), dtype=np.int32)
    return Step(every, every, sequences, (tables,), every)


# Prompts, and then as many tokens in runs of other numbers and lengths, by programs that are kept
STEPS = [
    step((37, NO_STATE, 0), (20, NO_STATE, 1)),
    step((1, 0, 2), (2, 1, 3)),
    step((3, 2, 0)),
    step((2, 3, 1), (1, NO_STATE, 4)),
    step((1, 1, 2), (1, 4, 4), (1, 0, 3)),
    step((3, 3, 1)),
]


def mixed(ops: Any, f: Form) -> list[np.ndarray]:
    """What x becomes in each step, and the states at the end."""
    layer, rng, found = layer_of(ops, f), np.random.default_rng(5), []
    for s in STEPS:
        x = rng.standard_normal((len(s.ids), D)).astype(np.float32)
        found.append(ops.run(s, lambda s, x=x: ops.mix(x.copy(), layer, s)).copy() - x)
    if isinstance(ops, Cpu):
        assert delta.has_delta(layer) and len(ops._programs) == 3
    return [*found, ops._cache[0].conv.copy(), ops._cache[0].matrix.copy()]


def cpu(n_threads: int) -> Cpu:
    """A backend with as many threads, which may be more than this machine has."""
    ops = Cpu(1, activations="f32")
    ops.use(ThreadPool(n_threads))
    return ops


@pytest.fixture(scope="module")
def ops() -> Iterator[Cpu]:
    yield cpu(2)
    progress.close()


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, ops: Cpu) -> None:
    pairs = zip(mixed(Reference(1), FORMS[name]), mixed(ops, FORMS[name]), strict=True)
    for expected, found in pairs:
        np.testing.assert_allclose(found, expected, atol=5e-6 * np.abs(expected).max())


def test_bits_are_the_same_for_any_number_of_threads() -> None:
    form = Form(Hk=2, Hv=6, S=48)
    alone = mixed(cpu(1), form)
    for n_threads in (2, 3, 4):
        for one, other in zip(alone, mixed(cpu(n_threads), form), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_token_without_a_number_stays_in_its_text(ops: Cpu) -> None:
    layer, s = layer_of(ops, Form()), step((2, NO_STATE, 0), (2, NO_STATE, 1))
    x = np.random.default_rng(0).standard_normal((4, D)).astype(np.float32)
    x[0] = np.nan
    found = ops.run(s, lambda s: ops.mix(x.copy(), layer, s))
    assert np.isnan(found[:2]).all() and not np.isnan(found[2:]).any()
    matrix = ops._cache[0].matrix[0]
    assert np.isnan(matrix[0]).all() and matrix[1].any() and not np.isnan(matrix[1]).any()


def test_heads_that_fill_no_vectors_are_numpys() -> None:
    notes: list[str] = []
    ops = Cpu(1, activations="f32", note=notes.append)
    form = Form(S=24)
    layer, expected = layer_of(ops, form), layer_of(reference := Reference(1), form)
    x = np.random.default_rng(0).standard_normal((4, D)).astype(np.float32)
    s = step((4, NO_STATE, 0))
    found = ops.run(s, lambda s: ops.mix(x.copy(), layer, s))
    np.testing.assert_allclose(found, reference.mix(x.copy(), expected, s), atol=1e-4)
    assert notes == ["numpy computes gated delta nets of this model: only their products are fast"]
