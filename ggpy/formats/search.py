"""Searches for the scale, or scale and minimum, that lets rounded weights come nearest to the true
ones.

They are ggml's (make_qx_quants, make_qkx2_quants, make_qkx3_quants, make_qp_quants, make_q3_quants
in ggml-quants.c), for many groups of weights side by side. The bytes of a file depend on every
rounding, so each float32 operation and the order of every sum is ggml's; integers are kept as
float32, which holds them exactly. Knows no block.

Letters: b weights per group, g groups. Weights are [b, g]: one operation treats all groups, and a
sum along b adds in ggml's order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .base import F32

# Groups whose largest magnitude is below this get the scale 0 (ggml's GROUP_MAX_EPS).
ALL_ZERO = np.float32(1e-15)

# Which of ggml's two searches for a scale and a minimum: make_qkx2_quants by squared or absolute
# error, or make_qkx3_quants, for an importance matrix. They differ if a rounding leaves the range.
Kind = Literal["squared", "absolute", "weighted"]


def aligned(values: F32) -> F32:
    """values[b, g], contiguous from a multiple of 64 bytes: numpy's products of two such arrays
    take half the time.
    """
    out = aligned_empty(values.shape)
    out[:] = values
    return out


def aligned_empty(shape: tuple[int, ...]) -> F32:
    """Like np.empty, from a multiple of 64 bytes."""
    size = int(np.prod(shape))
    buffer = np.empty(size + 15, np.float32)
    start = -buffer.ctypes.data // 4 % 16
    return buffer[start : start + size].reshape(shape)


def ordered_sum(terms: F32) -> F32:
    """terms[b, g], contiguous -> 0 + the terms one after the other, [g]."""
    if terms.shape[1] == 1:  # which numpy would sum in another order
        return running_sum(terms) + np.float32(0)
    sums: F32 = np.add.reduce(terms, axis=0, initial=np.float32(0))
    return sums


def running_sum(terms: F32) -> F32:
    """Like ordered_sum, but starting from the first term: a sum of negative zeros is -0."""
    sums: F32 = np.add.accumulate(terms, axis=0)[-1]
    return sums


def first_extreme(x: F32) -> F32:
    """x[b, g] -> the first of the largest magnitude in each group, [g]; of zeros +0."""
    low, high = x.min(axis=0), x.max(axis=0)
    extreme: F32 = np.where(high >= -low, high, low) + np.float32(0)
    ties = np.flatnonzero((high == -low) & (high > 0))
    extreme[ties] = x[np.abs(x[:, ties]).argmax(axis=0), ties]
    return extreme


def first_range(x: F32) -> tuple[F32, F32]:
    """x[b, g] -> minimum and maximum of each group, [g] each; a zero has the sign of the group's
    first zero.
    """
    ends = x.min(axis=0), x.max(axis=0)
    for end in ends:
        zero = np.flatnonzero(end == 0)
        end[zero] = x[(x[:, zero] == 0).argmax(axis=0), zero]
    return ends


def finite_inverse(numerator: float | np.float32, x: F32) -> F32:
    """numerator / x; 0 where that overflows, for C rounds an infinite product to 0."""
    inverse = np.float32(numerator) / x
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def round_to_levels(x: F32, inverse: F32, lowest: int, highest: int, out: F32) -> F32:
    """The integers nearest to x * inverse, ties to even, from `lowest` to `highest`."""
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(lowest), np.float32(highest), out=out)


def nearest_int(x: F32) -> F32:
    """ggml's nearest_int: ties to even, and beyond 2^22, where nobody should be, what its bit trick
    makes of it.
    """
    rounded = np.rint(x)
    wild = ~(np.abs(x) <= np.float32(4194303))
    if wild.any():
        bits = (x[wild] + np.float32(12582912)).view(np.int32)
        rounded[wild] = (bits & 0x007FFFFF) - 0x00400000
    return rounded


def mean_square(x: F32) -> F32:
    """x[n, m] -> the mean of the squares of each row, [n], added in order."""
    totals: F32 = np.add.accumulate(x * x, axis=1)[:, -1]
    return totals / np.float32(x.shape[1])


def error_weights(x: F32, importance: F32, variance: F32) -> F32:
    """x[n, m], importance[..., m], variance[n] -> importance * sqrt(variance + x^2), [n, m]."""
    return importance * np.sqrt(variance[:, None] + x * x)


def row_error_weights(weights: F32, importance: F32) -> F32:
    """weights[n, b], importance[m, b] of a row of m blocks -> [n, b], by the row's variance."""
    rows = weights.reshape(-1, importance.size)
    return error_weights(rows, importance.reshape(-1), mean_square(rows)).reshape(weights.shape)


def block_error_weights(weights: F32, importance: F32) -> F32:
    """Like row_error_weights, but by twice the variance of each block."""
    variance = np.float32(2) * mean_square(weights)
    return error_weights(weights, tiled(importance, weights), variance)


def tiled(importance: F32, weights: F32) -> F32:
    """importance[m, b] of the columns of a row, repeated for the rows of weights[n, b]: [n, b]."""
    return np.broadcast_to(
        importance, (len(weights) // len(importance), *importance.shape)
    ).reshape(weights.shape)


def requantize(
    weights: F32, scales: F32, minimums: F32 | float, found: F32, lowest: int, highest: int
) -> NDArray[np.int8]:
    """weights[n, b * k] -> q for the scales[n, k] (and minimums) that a block stores,
    lowest..highest.

    A group whose scale became 0 keeps the found[b, n * k].
    """
    groups = weights.reshape(*scales.shape, -1)
    offset = minimums if isinstance(minimums, float) else minimums[:, :, None]
    q = nearest_int((groups - offset) / scales[:, :, None])
    q = np.clip(q, np.float32(lowest), np.float32(highest))
    q = np.where(scales[:, :, None] == 0, found.T.reshape(groups.shape), q)
    return q.astype(np.int8).reshape(weights.shape)


def search_scale(x: F32, weights: F32, n_max: int) -> tuple[F32, F32]:
    """x[b, g], weights[b, g] -> scales[g] and q[b, g] in -n_max..n_max - 1 for x near scale * q.

    Tries 19 scales about the one that makes the extreme weight -n_max (ggml make_qx_quants). A
    group of zeros gets scale 0 and q = -n_max.
    """
    extreme = first_extreme(x)
    q, terms, weighted = (aligned_empty(x.shape) for _ in range(3))
    np.multiply(weights, x, out=weighted)
    scale = best = best_inverse = np.zeros_like(extreme)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse = finite_inverse(-(np.float32(n_max) + np.float32(0.1) * np.float32(step)), extreme)
        round_to_levels(x, inverse, -n_max, n_max - 1, out=q)
        sum_lx = ordered_sum(np.multiply(weighted, q, out=terms))
        np.multiply(weights, q, out=terms)
        sum_l2 = ordered_sum(np.multiply(terms, q, out=terms))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2) if step else sum_l2 != 0
        scale = np.where(better, sum_lx / sum_l2, scale)
        best = np.where(better, scale * sum_lx, best)
        best_inverse = np.where(better, inverse, best_inverse) if step else inverse
    round_to_levels(x, best_inverse, -n_max, n_max - 1, out=q)
    empty = np.abs(extreme) < ALL_ZERO
    q[:, empty] = -n_max
    return np.where(empty, np.float32(0), scale), q


def search_scale_and_minimum(
    x: F32, weights: F32, n_max: int, steps: tuple[float, float, int], kind: Kind
) -> tuple[F32, F32, F32]:
    """x[b, g], weights[b, g] -> scales[g], minimums[g] <= 0 and q[b, g] in 0..n_max.

    For x near scale * q + minimum: rounds with n_max + first + i * delta steps over the range, for
    steps (first, delta, last i), fits scale and minimum to each rounding by least squares, and
    keeps the fit with the least error. A better fit's minimum is where the following roundings
    start.
    """
    lowest, highest = first_range(x)
    lowest[lowest > 0] = 0
    least_span = _least_span(highest - lowest)
    sums = ordered_sum(weights), running_sum(weights * x)
    q, terms, offset = (aligned_empty(x.shape) for _ in range(3))
    inverse = finite_inverse(n_max, highest - lowest)
    round_to_levels(np.subtract(x, lowest, out=offset), inverse, 0, n_max, out=q)
    scale: F32 = np.float32(1) / (np.float32(n_max) / (highest - lowest))
    error = _error(x, weights, q, scale, lowest, kind, out=terms)
    # The best fit so far, and the rounding that it is a fit to.
    best: list[F32] = [error, scale, lowest, inverse, lowest]
    first, delta, last = steps
    for i in range(last + 1):
        minimum = best[2]
        levels = np.float32(first) + np.float32(delta) * np.float32(i) + np.float32(n_max)
        inverse = levels / (highest - minimum)
        np.subtract(x, minimum, out=offset)
        wild = (highest - minimum < least_span).any()
        _round(offset, inverse, n_max, q, kind if wild else None)
        determinant, *fit = _fit_line(x, weights, q, sums, scratch=(terms, offset))
        error = _error(x, weights, q, fit[0], fit[1], kind, out=terms)
        better = (determinant > 0) & (error < best[0])
        found = (error, *fit, inverse, minimum)
        best = [np.where(better, new, old) for new, old in zip(found, best, strict=True)]
    _, scale, minimum, inverse, origin = best
    np.subtract(x, origin, out=offset)
    wild = (highest - origin < least_span).any()
    _round(offset, inverse, n_max, q, kind if wild else None)
    empty = highest == lowest
    q[:, empty] = 0
    return np.where(empty, np.float32(0), scale), minimum, q


def _fit_line(
    x: F32, weights: F32, q: F32, sums: tuple[F32, F32], scratch: tuple[F32, F32]
) -> tuple[F32, F32, F32]:
    """Least squares of scale * q + minimum - x: (determinant, scale, minimum <= 0), [g] each.

    `sums` are those of w and w * x.
    """
    sum_w, sum_x = sums
    wq, terms = scratch
    sum_l = ordered_sum(np.multiply(weights, q, out=wq))
    sum_xl = ordered_sum(np.multiply(wq, x, out=terms))
    sum_l2 = ordered_sum(np.multiply(wq, q, out=terms))
    determinant = sum_w * sum_l2 - sum_l * sum_l
    scale: F32 = np.divide(sum_w * sum_xl - sum_x * sum_l, determinant)
    minimum: F32 = np.divide(sum_l2 * sum_x - sum_l * sum_xl, determinant)
    positive = minimum > 0
    np.divide(sum_xl, sum_l2, out=scale, where=positive)
    minimum[positive] = 0
    return determinant, scale, minimum


def _least_span(span: F32) -> F32:
    """The least span from origin to maximum for which all roundings are in the range in which
    `nearest_int` rounds.
    """
    return np.where(
        span == 0, np.float32(0), np.maximum(span / np.float32(32768), np.float32(1e-36))
    )


def _round(x: F32, inverse: F32, n_max: int, out: F32, wild: Kind | None) -> None:
    """The integers nearest to x * inverse, 0..n_max; `wild` products may be huge or NaN."""
    if wild is None:
        round_to_levels(x, inverse, 0, n_max, out=out)
        return
    products = x * inverse
    if wild == "weighted":  # here ggml clamps, then rounds
        products = np.where(products > 0, np.minimum(products, np.float32(n_max)), np.float32(0))
    np.clip(nearest_int(products), np.float32(0), np.float32(n_max), out=out)


def _error(x: F32, weights: F32, q: F32, scale: F32, minimum: F32, kind: Kind, out: F32) -> F32:
    """The weighted sum of (scale * q + minimum - x), squared or, if of that kind, absolute: [g]."""
    np.multiply(q, scale, out=out)
    np.add(out, minimum, out=out)
    np.subtract(out, x, out=out)
    if kind == "absolute":
        np.abs(out, out=out)
    else:
        np.multiply(out, out, out=out)
    return ordered_sum(np.multiply(out, weights, out=out))


def search_scale_by_descent(x: F32, n_max: int) -> tuple[F32, F32]:
    """x[b, g] -> scales[g] and q[b, g] in -n_max..n_max - 1 for x near scale * q, errors weighed by
    x^2.

    Starts from the scale that makes the extreme weight -n_max and changes one q at a time while
    that lets a better scale exist, at most five rounds (ggml make_q3_quants). A group of zeros gets
    scale 0 and q = -n_max.
    """
    extreme = first_extreme(x)
    weights = x * x
    q = round_to_levels(x, finite_inverse(-n_max, extreme), -n_max, n_max - 1, np.empty_like(x))
    sum_lx, sum_l2 = _descend(x, weights, q, -n_max, n_max - 1)
    empty = np.abs(extreme) < ALL_ZERO
    q[:, empty] = -n_max
    return np.where(empty | ~(sum_l2 > 0), np.float32(0), sum_lx / sum_l2), q


def search_positive_scale(x: F32, weights: F32, n_max: int) -> tuple[F32, F32]:
    """x[b, g] >= 0, weights[b, g] -> scales[g] and q[b, g] in 0..n_max for x near scale * q.

    Tries nine scales about the one that makes the largest x n_max, then changes one q at a time
    (ggml make_qp_quants). A group of zeros gets scale 0 and q = 0.
    """
    largest = np.maximum(x.max(axis=0), np.float32(0))
    inverse = finite_inverse(n_max, largest)
    q = nearest_int(inverse * x) % np.float32(256)  # ggml keeps q in a byte
    best = _square_error(x, weights, q, np.float32(1) / inverse)
    for step in (-4, -3, -2, -1, 1, 2, 3, 4):
        levels = np.float32(0.1) * np.float32(step) + np.float32(n_max)
        attempt = finite_inverse(levels, largest)
        q = np.minimum(nearest_int(attempt * x), np.float32(n_max))
        error = _square_error(x, weights, q, np.float32(1) / attempt)
        inverse = np.where(error < best, attempt, inverse)
        best = np.where(error < best, error, best)
    q = np.minimum(nearest_int(inverse * x), np.float32(n_max))
    sum_lx, sum_l2 = _descend(x, weights, q, None, n_max)
    empty = largest < ALL_ZERO
    q[:, empty] = 0
    return np.where(empty | ~(sum_l2 > 0), np.float32(0), sum_lx / sum_l2), q


def _square_error(x: F32, weights: F32, q: F32, scale: F32) -> F32:
    difference = x - scale * q
    return ordered_sum(weights * difference * difference)


def _descend(x: F32, weights: F32, q: F32, lowest: int | None, highest: int) -> tuple[F32, F32]:
    """Changes single q[b, g], in place, while sum(w x q)^2 / sum(w q^2) grows; returns both sums,
    [g].

    Without a `lowest`, as ggml has it for positive x, q counts as a byte and both partial sums must
    be positive.
    """
    weighted = weights * x
    sum_lx, sum_l2 = ordered_sum(weighted * q), ordered_sum(weights * q * q)
    if lowest is None:
        q %= np.float32(256)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest_lx = sum_lx - weighted[i] * q[i]
            rest_l2 = sum_l2 - weights[i] * q[i] * q[i]
            level = np.minimum(nearest_int(x[i] * rest_l2 / rest_lx), np.float32(highest))
            if lowest is not None:
                level = np.maximum(level, np.float32(lowest))
            new_lx, new_l2 = rest_lx + weighted[i] * level, rest_l2 + weights[i] * level * level
            better = (rest_lx > 0) & (level != q[i])
            better &= (new_l2 > 0) if lowest is not None else (rest_l2 > 0)
            better &= new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            if better.any():
                changed = True
                q[i] = np.where(
                    better, level if lowest is not None else level % np.float32(256), q[i]
                )
                sum_lx, sum_l2 = np.where(better, new_lx, sum_lx), np.where(better, new_l2, sum_l2)
        if not changed:
            break
    return sum_lx, sum_l2
