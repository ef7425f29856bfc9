"""Mixtures of experts in numpy, against code that takes one token at a time in float64."""

from __future__ import annotations

import numpy as np
import plain_layers
import pytest
from random_moe import FORMS, Form, random_moe, random_x

from ggpy.backends.experts import LEAST_SUM
from ggpy.backends.numpy import moe
from ggpy.backends.numpy.backend import Reference
from ggpy.formats import Format


def silent(name: str, array: np.ndarray) -> None:
    """A probe that nobody listens to."""


@pytest.mark.parametrize("memory", [1 << 30, 0], ids=["float32", "blocks"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, memory: int) -> None:
    ffn, x = random_moe(Reference(1, weight_memory=memory), FORMS[name]), random_x(FORMS[name], 9)
    expected = plain_layers.fed_forward(x.astype(np.float64), ffn)
    assert np.std(expected - x) > 0.05, "the experts do nothing"
    np.testing.assert_allclose(moe.feed_forward(x, ffn, silent), expected, rtol=1e-4, atol=1e-5)


def test_halves_in_parallel() -> None:
    """The experts see x, and what they make of it is added to something else."""
    form = FORMS["gated shared"]
    ffn, x, y = random_moe(Reference(1), form), random_x(form, 9), random_x(form, 9, seed=3)
    expected = y + plain_layers.fed_forward(x.astype(np.float64), ffn) - x
    got = moe.feed_forward(y, ffn, silent, of=x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["softmax", "choice bias", "groups", "softmax of chosen", "llama4"]
)
def test_routes(name: str) -> None:
    ffn, n = random_moe(Reference(1), FORMS[name]), random_x(FORMS[name], 20)
    ids, weights = moe.route(n, ffn.router)
    assert ids.dtype == np.int32 and ids.shape == weights.shape == (20, FORMS[name].J)
    for token, chosen, strengths in zip(n, ids, weights, strict=True):
        expected = plain_layers.routed(token.astype(np.float64), ffn.router)
        assert chosen.tolist() == [expert for expert, _ in expected]
        np.testing.assert_allclose(strengths, [w for _, w in expected], rtol=1e-4)


def test_of_equal_experts_the_first_are_chosen() -> None:
    router = random_moe(Reference(1), Form(J=3)).router
    ids, weights = moe.route(np.zeros((2, 64), np.float32), router)
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 8)


def test_weights_are_divided_by_a_sum_that_is_not_too_small() -> None:
    form = Form(score="sigmoid", bias=True, normalise=True)
    router = random_moe(Reference(1), form).router
    router.bias[:] = -40
    _, weights = moe.route(np.zeros((1, 64), np.float32), router)
    assert weights.max() <= 1e-6 / LEAST_SUM


def test_only_chosen_experts_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights stay in blocks, a token reads J of X experts."""
    form = Form(X=32, J=2)
    ffn = random_moe(Reference(1, weight_memory=0), form)
    seen: list[int] = []
    dequantize = Format.dequantize

    def counted(self: Format, data: np.ndarray) -> np.ndarray:
        seen.append(len(data))
        return dequantize(self, data)

    monkeypatch.setattr(Format, "dequantize", counted)
    moe.feed_forward(random_x(form, 1), ffn, silent)
    # the router's rows, and those of two experts
    assert sum(seen) == 32 + 2 * (32 + 32 + 64)


def test_a_probe_is_told_what_is_inside() -> None:
    form = FORMS["gated shared"]
    told: dict[str, tuple[int, ...]] = {}
    ffn = random_moe(Reference(1), form)
    moe.feed_forward(random_x(form, 5), ffn, lambda name, a: told.update({name: a.shape}))
    shapes = {"experts": (5, 2), "shared_act": (5, 32), "ffn_act": (5, 2, 32), "ffn_out": (5, 64)}
    assert told == shapes and list(told) == list(shapes)


def test_no_tokens() -> None:
    ffn = random_moe(Reference(1), FORMS["gated shared"])
    assert moe.feed_forward(np.zeros((0, 64), np.float32), ffn, silent).shape == (0, 64)
