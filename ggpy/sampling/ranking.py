"""Weights of candidates, and their order by logit.

A vocabulary is never sorted whole: `largest` and `prefix` order only as many entries as are needed.
cuda/sampling/sample.cu repeats `weights`, operation by operation, and gets the same bits.

Letters: V vocabulary, k candidates, n scores.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Weights = NDArray[np.int64]
Side = Literal["left", "right"]

CHUNK = 8192  # entries at a time: 64 KB of float64 stay in a cache, and in malloc's pools
FIRST = 64  # entries among which most sums reach their mass
SAMPLE = 1024  # scores that are sorted to guess where
MARGIN = 64  # scores of a sample by which the guess may be off: four standard deviations
WEIGHT_BITS = 40  # the most probable candidate weighs 2^40
LOG2_E = 1.4426950408889634
EXP2 = (  # Taylor coefficients of 2^x, ln(2)^i / i!: the error is below 1e-14 for |x| <= 1/2
    *(1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477),
    *(0.0013333558146428443, 0.0001540353039338161, 1.5252733804059841e-05),
    *(1.321548679014431e-06, 1.01780860092397e-07, 7.054911620801123e-09, 4.4455382718708116e-10),
)


def softmax(logits: Logits) -> Probabilities:
    """Returns probabilities[k] of logits[k]."""
    e = np.exp(logits.astype(np.float64) - float(logits.max()))
    return e / e.sum()


def weights(logits: Logits) -> Weights:
    """Returns floor(2^40 e^(l - max l)) of logits[k]: at least one is finite, and none is NaN.

    Sums of integers are the same in any order and on any machine. The exponential is a polynomial
    in double precision without fused multiply-add, so that it depends on no library.
    """
    found, best = np.empty(len(logits), np.int64), logits.max()
    with np.errstate(over="ignore"):
        for start in range(0, len(logits), CHUNK):
            part = slice(start, start + CHUNK)
            found[part] = _exponential((logits[part] - best).astype(np.float64))
    return found


def _exponential(exponent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns 2^40 e^x of exponent[n] <= 0, which is overwritten."""
    exponent *= LOG2_E
    np.maximum(exponent, -64.0, out=exponent)  # a weight is 0 from -41 on
    integer = np.rint(exponent)
    exponent -= integer
    integer += WEIGHT_BITS
    power = np.full_like(exponent, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power *= exponent
        power += coefficient
    return np.ldexp(power, integer.astype(np.int32), out=power)


def largest(scores: NDArray, k: int) -> Ids:
    """Returns indices of the k largest of scores[n], largest first, ties by index. No NaN.

    Only scores that reach a lower bound of the k-th largest are sorted.
    """
    n = len(scores)
    indices = np.flatnonzero(scores >= _bound(scores, k)) if 4 * k < n else np.arange(n)
    order = np.argsort(-scores[indices], kind="stable")[:k]
    return indices[order]


def _bound(scores: NDArray, k: int) -> float:
    """Returns a number that at least k of scores[n] reach: the k-th largest of 64-row columns'
    maxima where there are enough columns, else the k-th largest score.
    """
    columns = len(scores) // 64
    if 4 * k < columns:
        scores = scores[: columns * 64].reshape(64, columns).max(axis=0)
    index = len(scores) - k
    return np.partition(scores, index)[index]


def prefix(scores: NDArray, weights: Weights, mass: float, side: Side = "left") -> Ids:
    """Returns rising indices of scores[n]: the fewest, largest first, whose sum reaches `mass`; see
    `crossing`.
    """
    last = crossing(scores, weights, mass, side)
    keep = scores > scores[last]
    keep[: last + 1] |= scores[: last + 1] == scores[last]
    return np.flatnonzero(keep)


def crossing(scores: NDArray, weights: Weights, mass: float, side: Side = "left") -> int:
    """Returns the index of scores[n], largest first, ties by index, at which the sum of weights[n]
    reaches `mass`: side "left" is at least `mass`, "right" more. The last one if no sum does.

    No more than a few thousand scores are sorted. Where the first ones do not reach it, a sample
    says between which scores the sum probably does, and sums of all others say whether that is so.
    """
    reached = np.greater_equal if side == "left" else np.greater
    order, before = largest(scores, min(FIRST, len(scores))), 0
    first = int(weights[order].sum())
    if len(order) < len(scores) and not reached(float(first), mass):
        bounds = _bounds(scores, weights, mass, float(scores[order[-1]]), first)
        order, before = _narrowed(scores, weights, bounds, mass, reached)
    sums = (before + np.cumsum(weights[order])).astype(np.float64)
    return int(order[min(int(np.searchsorted(sums, mass, side=side)), len(order) - 1)])


def _narrowed(
    scores: NDArray,
    weights: Weights,
    bounds: tuple[float, float],
    mass: float,
    reached: Callable[..., Any],
) -> tuple[Ids, int]:
    """Returns a few indices of scores[n], largest first, among which the sum reaches `mass`, and
    the sum before them. bounds: scores between which that probably is.
    """
    order: Ids | None = None
    before = 0
    while len(scores) > SAMPLE:
        inside, before = _between(scores, weights, *bounds, before, mass, reached)
        if len(inside) == len(scores):
            break
        order = inside if order is None else order[inside]
        scores, weights = scores[inside], weights[inside]
        bounds = _bounds(scores, weights, mass - before)
    sorted_ = np.argsort(-scores, kind="stable")
    return sorted_ if order is None else order[sorted_], before


def _between(
    scores: NDArray,
    weights: Weights,
    low: float,
    high: float,
    before: int,
    mass: float,
    reached: Callable[..., Any],
) -> tuple[Ids, int]:
    """Returns rising indices of scores[n] among which a sum that begins with `before` reaches
    `mass`, or the last ones, and the sum before them: those from `low` to `high`, if it is there.
    """
    above = scores > high
    sum_above = before + _sum_where(weights, above)
    if reached(float(sum_above), mass):
        return np.flatnonzero(above), before
    inside = np.flatnonzero((scores >= low) ^ above)
    sum_inside = sum_above + int(weights[inside].sum())
    if not reached(float(sum_inside), mass) and len(below := np.flatnonzero(scores < low)):
        return below, sum_inside
    return inside, sum_above


def _bounds(
    scores: NDArray, weights: Weights, mass: float, first: float = inf, sum_first: int = 0
) -> tuple[float, float]:
    """Returns two scores between which a sum of weights[n] probably reaches `mass`. Those of the
    scores from `first` on sum to `sum_first`; a sample does not show it, where few weigh much.
    """
    step = len(scores) // SAMPLE or 1
    sample = scores[::step]
    order = np.argsort(-sample)
    sample = sample[order]
    sums = np.cumsum(np.where(sample < first, weights[::step][order], 0))
    share = (mass - sum_first) / max(1, int(weights.sum()) - sum_first)
    place = int(np.searchsorted(sums, share * float(sums[-1])))
    low = sample[place + MARGIN] if place + MARGIN < len(sample) else -inf
    high = sample[place - MARGIN] if place >= MARGIN else first
    return float(low), float(high)


def _sum_where(weights: Weights, chosen: NDArray[np.bool_]) -> int:
    """Returns the sum of the chosen weights[n]."""
    parts = (slice(start, start + CHUNK) for start in range(0, len(weights), CHUNK))
    return sum(int((weights[part] * chosen[part]).sum()) for part in parts)
