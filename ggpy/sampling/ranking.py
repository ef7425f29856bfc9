"""Weights of candidates, and their order by logit.

A vocabulary is never sorted whole: `largest` and `prefix` order only as many entries as are needed.
cuda/sampling/sample.cu repeats `weights`, operation by operation, and gets the same bits.

Letters: V vocabulary, k candidates, n scores.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Weights = NDArray[np.int64]

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
    with np.errstate(over="ignore"):
        below = (logits - logits.max()).astype(np.float64)
    exponent = np.maximum(below * LOG2_E, -64.0)  # a weight is 0 from -41 on
    integer = np.rint(exponent)
    exponent -= integer
    power = np.full_like(exponent, EXP2[-1])
    for coefficient in EXP2[-2::-1]:
        power *= exponent
        power += coefficient
    return np.ldexp(power, integer.astype(np.int32) + WEIGHT_BITS).astype(np.int64)


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


def prefix(
    scores: NDArray,
    weights: Weights | Probabilities,
    mass: float,
    side: Literal["left", "right"] = "left",
) -> Ids:
    """Returns indices of scores[n], largest first: the fewest whose weights[n] sum to `mass`.

    side "left" stops where the sum is at least `mass`, "right" where the sum is more. All indices
    are returned if no sum reaches that.
    """
    n = len(scores)
    k = 64
    while True:
        k = min(k, n)
        indices = largest(scores, k)
        sums = np.cumsum(weights[indices]).astype(np.float64)
        last = int(np.searchsorted(sums, mass, side=side))
        if last < k or k == n:
            return indices[: last + 1]
        k *= 16
