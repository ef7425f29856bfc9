"""Weights and order of candidates, against the exponential and a full sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_cases import random_logits

from ggpy.sampling import ranking


def test_weights_are_the_exponential_rounded_down() -> None:
    below = -np.concatenate([np.linspace(0, 30, 5000), [1e3, 3e38, math.inf]]).astype(np.float32)
    exact = [math.floor(math.exp(x) * 2**40) for x in below.tolist()]
    found = ranking.weights(below + np.float32(0))
    assert found[0] == 2**40 and (np.diff(found) <= 0).all() and not found[-3:].any()
    assert np.abs(found - exact).max() <= 1


def test_weights_do_not_depend_on_a_library() -> None:
    """The same bits from single operations of Python, whose doubles are IEEE's everywhere."""
    logits = random_logits(200, 4)
    for x, weight in zip(logits, ranking.weights(logits), strict=True):
        turns = float(x - logits.max()) * ranking.LOG2_E
        part, power = turns - round(turns), ranking.EXP2[-1]
        for coefficient in ranking.EXP2[-2::-1]:
            power = power * part + coefficient
        assert weight == math.floor(math.ldexp(power, round(turns) + 40))


@pytest.mark.parametrize("n", [1, 5, 64, 700, 5000])
@pytest.mark.parametrize("k", [1, 3, 40, 999])
@pytest.mark.parametrize("levels", [3, 10**6])  # 3: nearly all are ties
def test_largest_equals_a_full_sort(n: int, k: int, levels: int) -> None:
    scores = np.random.default_rng(n + k).integers(0, levels, n).astype(np.float32)
    expected = sorted(range(n), key=lambda i: (-scores[i], i))[:k]
    assert ranking.largest(scores, min(k, n)).tolist() == expected


def in_order(scores: np.ndarray, weights: np.ndarray, mass: float, side: str) -> list[int]:
    """The prefix by a whole sort and a loop."""
    taken, total = [], 0
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        taken.append(i)
        total += int(weights[i])
        if total > mass if side == "right" else total >= mass:
            break
    return taken


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 0.9999, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["flat", "peaked", "one", "levels", "equal", "-inf", "short"])
def test_prefix_is_the_shortest_that_reaches_the_mass(kind: str, share: float, side: str) -> None:
    """Exactly, however the mass is spread; the crossing is its last entry."""
    logits = random_logits(300 if kind == "short" else 9000, 3)
    logits = {
        "peaked": logits * np.float32(4),
        "one": np.where(np.arange(len(logits)) == 4321, np.float32(30), logits),
        "levels": np.rint(logits),
        "equal": np.zeros_like(logits),
        "-inf": np.where(logits < 1, np.float32(-math.inf), logits),
    }.get(kind, logits)
    weights = ranking.weights(logits)
    mass = share * float(weights.sum())
    expected = in_order(logits, weights, mass, side)
    assert ranking.prefix(logits, weights, mass, side).tolist() == sorted(expected)  # type: ignore[arg-type]
    assert ranking.crossing(logits, weights, mass, side) == expected[-1]  # type: ignore[arg-type]


def test_softmax_of_extreme_logits() -> None:
    p = ranking.softmax(np.array([1e30, -np.inf, 1e30, -1e30], dtype=np.float32))
    assert p.tolist() == [0.5, 0.0, 0.5, 0.0]
