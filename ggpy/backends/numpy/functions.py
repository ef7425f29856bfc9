"""Norms, RoPE, softmax and activations in float32: formulas on arrays, which know no files, no
pages and no steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ..interface import AttentionTemperature, Norm, Rope


def normalised(x: F32, norm: Norm) -> F32:
    """The norm over the last axis; its weight and bias are arrays."""
    if norm.centred:
        x = x - np.mean(x, axis=-1, keepdims=True)
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    y = x / np.sqrt(mean + np.float32(norm.eps))
    y = y if norm.weight is None else y * norm.weight
    return y if norm.bias is None else y + norm.bias


def added(x: F32, y: F32, post_norm: Norm | None, scale: float) -> F32:
    """x[T, D] + post_norm(y) * scale: the end of each mixer and of each feed-forward."""
    if post_norm is not None:
        y = normalised(y, post_norm)
    return x + (y if scale == 1 else y * np.float32(scale))


def angles(rope: Rope, positions: NDArray) -> tuple[F32, F32]:
    """cos and sin [T, 1, pairs] of position * inv_freq, times the magnitude; angles in float64."""
    angle = positions[:, None, None] * rope.inv_freq
    cos, sin = np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


def rotated(x: F32, rope: Rope, cos: F32, sin: F32) -> F32:
    """x[T, heads, E] with its pairs rotated."""
    n = len(rope.inv_freq)
    if rope.style == "neox":
        first, second = slice(0, n), slice(n, 2 * n)
    else:
        first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def sharpness(t: AttentionTemperature, positions: NDArray) -> F32:
    """[T, 1, 1], the factors of q: 1 + scale * ln(1 + (position + offset) // length)."""
    factors = 1 + t.scale * np.log(1 + (positions + t.offset) // t.length)
    return factors.astype(np.float32)[:, None, None]


def softmax(scores: F32, sinks: F32 | None) -> F32:
    """The softmax over the last axis; a sink is one more score, whose weight is dropped."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / (total if sinks is None else total + np.exp(sinks - top))


def soft_capped(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap); 0 is none."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x)), by way of tanh: exp would overflow."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


def silu(x: F32) -> F32:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def softplus(x: F32) -> F32:
    """ln(1 + exp(x))."""
    return np.logaddexp(np.float32(0), x)


def gelu_tanh(x: F32) -> F32:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {"silu": silu, "gelu_tanh": gelu_tanh}
