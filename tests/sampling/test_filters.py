"""Each filter of candidates against its formula written out the slow way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_cases import candidates, plain_softmax, random_logits

from ggpy.sampling import filters
from ggpy.sampling.ranking import softmax


def test_top_n_sigma_cuts_below_the_best_by_standard_deviations() -> None:
    ids, logits = np.arange(5), np.array([4, 3, 0, -np.inf, 1], dtype=np.float32)
    finite = [4.0, 3.0, 0.0, 1.0]
    mean = sum(finite) / 4
    sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / 4)
    for n in (0.5, 1.0, 2.0):
        kept, _ = filters.top_n_sigma(ids, logits, n)
        assert kept.tolist() == [i for i in range(5) if logits[i] >= 4 - n * sigma]
    assert len(filters.top_n_sigma(ids, logits, -1.0)[0]) == 5


@pytest.mark.parametrize(("k", "left"), [(1, [13]), (2, [12, 13]), (0, [10, 11, 12, 13]), (9, 4)])
def test_top_k(k: int, left: list[int] | int) -> None:
    kept, logits = filters.top_k(*candidates(0.1, 0.2, 0.3, 0.4), k)
    assert kept.tolist() == (left if isinstance(left, list) else [10, 11, 12, 13])
    assert len(logits) == len(kept)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    assert filters.top_k(np.arange(6), np.zeros(6, np.float32), 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("p", "left"), [(0.0, [13]), (0.39, [13]), (0.65, [12, 13]), (0.85, [11, 12, 13]), (1.0, 4)]
)
def test_top_p(p: float, left: list[int] | int) -> None:
    kept, _ = filters.top_p(*candidates(0.1, 0.2, 0.3, 0.4), p)
    assert kept.tolist() == (left if isinstance(left, list) else [10, 11, 12, 13])


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("least", [0.0, 1e-4, 0.02, 0.3, 1.0])
def test_top_p_and_min_p_in_one(p: float, least: float) -> None:
    for seed in range(3):
        ids, logits = np.arange(2000), np.rint(2 * random_logits(2000, seed))  # with ties
        one, other = filters.top_p(ids, logits, p, least), filters.top_p(ids, logits, p)
        other = filters.min_p(*other, least)
        assert one[0].tolist() == other[0].tolist() and (one[1] == other[1]).all()


@pytest.mark.parametrize(("p", "left"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.74, 2), (1.0, 1)])
def test_min_p(p: float, left: int) -> None:
    kept, _ = filters.min_p(*candidates(0.1, 0.2, 0.3, 0.4), p)
    assert kept.tolist() == [10, 11, 12, 13][4 - left :]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.97])
def test_typical_p_against_its_definition(p: float) -> None:
    ids, logits = np.arange(30), random_logits(30, seed=3)
    probabilities = plain_softmax(logits)
    entropy = -sum(x * math.log(x) for x in probabilities)
    order = sorted(ids, key=lambda i: abs(-math.log(probabilities[i]) - entropy))
    expected, total = [], 0.0
    for i in order:
        expected.append(int(i))
        total += probabilities[i]
        if total > p:
            break
    assert filters.typical_p(ids, logits, p)[0].tolist() == sorted(expected)


def test_typical_p_may_drop_the_most_probable_one() -> None:
    kept, _ = filters.typical_p(*candidates(0.5, 0.07, 0.07, 0.07, 0.07, 0.07, 0.15), 0.1)
    assert kept.tolist() == [16]


@pytest.mark.parametrize(
    ("threshold", "left"), [(0.15, [10, 11]), (0.25, [10, 11, 12]), (0.35, [10, 11, 12, 13])]
)
def test_xtc_leaves_the_least_probable_of_the_top_choices(threshold: float, left: list) -> None:
    kept, _ = filters.xtc(*candidates(0.1, 0.2, 0.3, 0.4), threshold)
    assert kept.tolist() == left


def test_scale_divides_and_goes_greedy_at_zero() -> None:
    ids, logits = candidates(0.1, 0.2, 0.3, 0.4)
    kept, scaled = filters.scale(ids, logits, 0.5)
    squares = np.array([0.1, 0.2, 0.3, 0.4]) ** 2
    assert softmax(scaled) == pytest.approx(squares / squares.sum(), rel=1e-5)
    assert len(kept) == 4
    assert filters.scale(ids, logits, 0.0)[0].tolist() == [13]
    assert softmax(filters.scale(ids, logits, 1e-38)[1])[3] == 1.0


def test_dynamic_temperature_follows_the_entropy() -> None:
    flat = np.zeros(8, dtype=np.float32)
    sure = np.array([100.0] + [0.0] * 7, dtype=np.float32)
    assert filters.dynamic_temperature(flat, 0.8, 0.3, 1.0) == pytest.approx(1.1)
    assert filters.dynamic_temperature(sure, 0.8, 0.3, 1.0) == pytest.approx(0.5)
    assert filters.dynamic_temperature(sure, 0.8, 0.0, 1.0) == 0.8
    half = np.array([0.0, 0.0] + [-1e9] * 2, dtype=np.float32)  # one bit of two
    assert filters.dynamic_temperature(half, 0.8, 0.4, 2.0) == pytest.approx(0.4 + 0.8 * 0.25)
