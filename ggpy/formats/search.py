"""Searches for the scale, or scale and minimum, that lets rounded weights come nearest to the true ones.

They are ggml's (make_qx_quants, make_qkx2_quants, make_qkx3_quants, make_qp_quants, make_q3_quants in
ggml-quants.c), for many groups of weights side by side. The bytes of a file depend on every rounding, so each float32
operation and the order of every sum is ggml's; integers are kept as float32, which holds them exactly. Knows no block.

Letters: b weights per group, g groups. Weights are [b, g]: one operation treats all groups, and a sum along b adds in
ggml's order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .base import F32

ALL_ZERO = np.float32(1e-15)  # groups whose largest magnitude is below get the scale 0 (ggml GROUP_MAX_EPS)


def aligned(values: F32) -> F32:
    """values[b, g], contiguous from a multiple of 64 bytes: numpy's products of two such arrays take half the time."""
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
    """terms[b, g] -> sums[g], one term after the other; numpy sums a single column in another order."""
    if terms.shape[1] == 1:
        running: F32 = np.add.accumulate(terms, axis=0)[-1]
        return running
    return np.add.reduce(terms, axis=0)


def first_extreme(x: F32) -> F32:
    """x[b, g] -> the first element of the largest magnitude of each group, [g], and +0 for zeros."""
    extreme: F32 = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    return extreme + np.float32(0)


def finite_inverse(numerator: float, x: F32) -> F32:
    """numerator / x; 0 where that overflows, for C rounds an infinite product to 0."""
    inverse = np.float32(numerator) / x
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def round_to_levels(x: F32, inverse: F32, lowest: int, highest: int, out: F32) -> F32:
    """The integers nearest to x * inverse, ties to even, from `lowest` to `highest`."""
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(lowest), np.float32(highest), out=out)


def search_scale(x: F32, weights: F32, n_max: int) -> tuple[F32, F32]:
    """x[b, g], weights[b, g] -> scales[g] and q[b, g] in -n_max..n_max - 1 for x near scale * q.

    Tries 19 scales about the one that makes the extreme weight -n_max (ggml make_qx_quants). A group of zeros gets
    scale 0 and q = -n_max.
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
    x: F32, weights: F32, n_max: int, steps: tuple[float, float, int], absolute: bool = False
) -> tuple[F32, F32, F32]:
    """x[b, g], weights[b, g] -> scales[g], minimums[g] <= 0 and q[b, g] in 0..n_max for x near scale * q + minimum.

    Rounds with n_max + first + i * delta steps over the range, for steps (first, delta, last i); fits scale and
    minimum to each rounding by least squares, and keeps the fit with the least square (or absolute) error. As in
    ggml make_qkx2_quants and make_qkx3_quants, a better fit's minimum is where the following roundings start.
    """
    lowest = np.take_along_axis(x, x.argmin(axis=0)[None], axis=0)[0]
    lowest, highest = np.where(lowest > 0, np.float32(0), lowest), x.max(axis=0)
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)
    q, terms, offset = (aligned_empty(x.shape) for _ in range(3))
    error_of = _error_function(x, weights, absolute)
    minimum, best_origin = lowest, lowest
    best_inverse = finite_inverse(n_max, highest - minimum)
    scale = np.float32(1) / (np.float32(n_max) / (highest - minimum))
    np.subtract(x, lowest, out=offset)
    round_to_levels(offset, best_inverse, 0, n_max, out=q)
    best_error = error_of(q, scale, minimum, terms)
    first, delta, last = steps
    for i in range(last + 1):
        levels = np.float32(first) + np.float32(delta) * np.float32(i) + np.float32(n_max)
        inverse = finite_inverse(levels, highest - minimum)
        np.subtract(x, minimum, out=offset)
        round_to_levels(offset, inverse, 0, n_max, out=q)
        np.multiply(weights, q, out=terms)
        sum_l = ordered_sum(terms)
        sum_xl = ordered_sum(np.multiply(terms, x, out=offset))
        sum_l2 = ordered_sum(np.multiply(terms, q, out=terms))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        fit_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        fit_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = fit_minimum > 0
        fit_scale = np.where(positive, sum_xl / sum_l2, fit_scale)
        fit_minimum = np.where(positive, np.float32(0), fit_minimum)
        error = error_of(q, fit_scale, fit_minimum, terms)
        better = (determinant > 0) & (error < best_error)
        best_error = np.where(better, error, best_error)
        best_inverse = np.where(better, inverse, best_inverse)
        best_origin = np.where(better, minimum, best_origin)
        scale = np.where(better, fit_scale, scale)
        minimum = np.where(better, fit_minimum, minimum)
    round_to_levels(np.subtract(x, best_origin, out=offset), best_inverse, 0, n_max, out=q)
    empty = highest == lowest
    q[:, empty] = 0
    return np.where(empty, np.float32(0), scale), minimum, q


def _error_function(
    x: F32, weights: F32, absolute: bool
) -> Callable[[F32, F32, F32, F32], F32]:
    """(q, scale, minimum, scratch) -> the weighted sum of (scale * q + minimum - x), squared or absolute, [g]."""

    def error(q: F32, scale: F32, minimum: F32, out: F32) -> F32:
        np.multiply(q, scale, out=out)
        np.add(out, minimum, out=out)
        np.subtract(out, x, out=out)
        if absolute:
            np.abs(out, out=out)
        else:
            np.multiply(out, out, out=out)
        return ordered_sum(np.multiply(out, weights, out=out))

    return error
