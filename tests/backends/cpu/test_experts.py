"""Mixtures of experts by kernels against numpy's: every form, few tokens and many, any threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from random_moe import FORMS, Form, random_moe, random_x

from ggpy.backends.cpu import experts
from ggpy.backends.cpu.backend import Cpu
from ggpy.backends.cpu.compiled import progress
from ggpy.backends.cpu.pool import ThreadPool
from ggpy.backends.interface import Layer, MoE, Role
from ggpy.backends.numpy import moe
from ggpy.backends.numpy.backend import Reference
from ggpy.formats import by_name
from ggpy.gguf import Tensor

# Of what outputs may differ by, their largest being 1: whole numbers are rounded twice
TOLERANCE = {"f32": 2e-6, "q16": 2e-4, "q8": 5e-2}


def cpu(n_threads: int, activations: Any) -> Cpu:
    """A backend with as many threads, which may be more than this machine has."""
    ops = Cpu(1, activations=activations)
    ops.use(ThreadPool(n_threads))
    return ops


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, Cpu]]:
    """A backend for each type of activations."""
    yield {name: cpu(2, name) for name in TOLERANCE}
    progress.close()


def silent(name: str, array: np.ndarray) -> None:
    """A probe that nobody listens to."""


def fed_forward(ops: Any, ffn: MoE, x: np.ndarray) -> np.ndarray:
    """x through a layer of this feed-forward, whose kernels must be there."""
    assert experts.has_experts(ffn)
    ops.pool.begin()
    found = ops.feed_forward(x.copy(), Layer(0, None, ffn), None).copy()
    ops.pool.end()
    ops._programs.forget()
    return found


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, backends: dict[str, Cpu]) -> None:
    """One token, and so many that some experts have one column, 16 or several vectors of them."""
    form = FORMS[name]
    reference = random_moe(Reference(1), form)
    for activations, ops in backends.items():
        ffn = random_moe(ops, form)
        for n_tokens in (1, 3, 17, 150):
            x = random_x(form, n_tokens)
            expected = moe.feed_forward(x, reference, silent) - x
            assert_near(fed_forward(ops, ffn, x) - x, expected, TOLERANCE[activations])


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("activations", ["f32", "q16", "q8"])
def test_bits_are_the_same_for_any_number_of_threads(activations: str) -> None:
    form = Form(X=5, J=3, D=160, F=224, bias=True, shared="gated", normalise=True)
    found: dict[int, list[np.ndarray]] = {}
    for n_threads in (1, 2, 3, 4):
        ops = cpu(n_threads, activations)
        ffn = random_moe(ops, form)
        found[n_threads] = [fed_forward(ops, ffn, random_x(form, t)) for t in (1, 4, 40)]
    for results in found.values():
        for one, other in zip(found[1], results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_columns_are_gathered_in_waves(
    backends: dict[str, Cpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are more than memory should be taken for, some experts come later."""
    form = Form(X=20, J=3, expert_bias=True, weighs_input=True)
    ffn, x = random_moe(backends["f32"], form), random_x(form, 200)
    whole = fed_forward(backends["f32"], ffn, x)
    monkeypatch.setattr(experts, "WAVE_BYTES", 1 << 14)
    np.testing.assert_array_equal(fed_forward(backends["f32"], ffn, x), whole)


def test_groups_hold_each_pair_once() -> None:
    ids = np.random.default_rng(0).integers(0, 7, 500).astype(np.int32)
    ids[ids == 3] = 4
    groups = experts.grouped(ids, 9)
    assert 1 < groups.vectors <= experts.MAX_VECTORS
    lanes = groups.lanes.reshape(len(groups.blocks), -1)
    assert sorted(lanes[lanes >= 0]) == list(range(500))
    for (expert, count), row in zip(groups.blocks, lanes, strict=True):
        assert (row[:count] >= 0).all() and (row[count:] == -1).all()
        assert (ids[row[:count]] == expert).all()


def test_a_probe_sees_what_numpys_layers_compute(backends: dict[str, Cpu]) -> None:
    """With each expert's products by kernels."""
    form, told = FORMS["gated shared"], {}
    ops = backends["f32"]
    ffn, x = random_moe(ops, form), random_x(form, 5)
    found = moe.feed_forward(x, ffn, lambda name, a: told.update({name: a.shape}))
    assert told["experts"] == (5, 2) and told["ffn_act"] == (5, 2, 32)
    assert_near(fed_forward(ops, ffn, x), found, 2e-6)


def test_experts_stay_in_the_file_unless_they_have_no_kernels() -> None:
    ops, blocks = Cpu(1), np.zeros((3, 64, 34), np.uint8)
    w = ops.weight(Tensor("w", (3, 64, 32), by_name("Q8_0"), blocks), Role("X F D"))
    assert np.shares_memory(w.blocks.data, blocks)
    assert np.shares_memory(w.expert(2).blocks.data, blocks[2])
    values = np.arange(192, dtype=np.int8).reshape(3, 2, 32)
    w = ops.weight(Tensor("w", (3, 2, 32), by_name("I8"), values.view(np.uint8)), Role("X F D"))
    one = w.expert(1).multiply(np.eye(32, dtype=np.float32))
    np.testing.assert_array_equal(one, values[1].T)


def test_tokens_without_a_number_choose_experts_that_exist(backends: dict[str, Cpu]) -> None:
    form = Form(X=8, J=3, score="sigmoid", normalise=True, groups=(4, 2))
    for n_tokens in (2, 40):
        x = random_x(form, n_tokens)
        x[0] = np.nan
        ffn = random_moe(backends["f32"], form)
        found = fed_forward(backends["f32"], ffn, x)
        assert np.isnan(found[0]).all() and not np.isnan(found[1:]).any()
