"""Attention over pages in numpy: the specification of an `Attention` layer.

The keys and values of a sequence are read in place if its pages are neighbours. Long prompts are
computed in blocks of queries, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ..interface import PAGE_SIZE, Attention, Norm, Step
from .functions import (
    added,
    angles,
    normalised,
    rotated,
    sharpness,
    sigmoid,
    soft_capped,
    softmax,
)
from .kv_pages import GroupPages, spread

CHUNK_SCORES = 1 << 22  # attention scores held at a time


def mix(
    x: F32, a: Attention, step: Step, pages: GroupPages, probe: Callable[[str, F32], None]
) -> F32:
    """x[T, D] + post_norm(softmax(mask(cap(q k^T * scale))) v wo^T) * residual_scale; some layers
    have a gate before wo.
    """
    n = x if a.norm is None else normalised(x, a.norm)
    q = project(n, a, step, pages)
    probe("qkv", q)
    o = attend(q, a, step, pages)
    if a.w_gate is not None:
        o = o * sigmoid(a.w_gate.multiply(n))
    probe("attention", o)
    x = added(x, a.wo.affine(o, a.bo), a.post_norm, a.residual_scale)
    probe("attn_out", x)
    return x


def project(n: F32, a: Attention, step: Step, pages: GroupPages) -> F32:
    """q[T, H, E] of n[T, D]; k and v, if the layer has them, go to their pages."""
    q = _placed(a.wq.affine(n, a.bq), a.spec.n_head, a.q_norm, a, step)
    if a.temperature is not None:
        q = q * sharpness(a.temperature, step.positions)
    if a.wk is not None:
        key = a.wk.affine(n, a.bk)
        v = _heads(key if a.wv is None else a.wv.affine(n, a.bv), a.spec.n_head_kv)
        v = v if a.v_norm is None else normalised(v, a.v_norm)
        k = _placed(key, a.spec.n_head_kv, a.k_norm, a, step)
        page, offset = step.pages(a.group), step.positions % PAGE_SIZE
        pages.keys.write(a.slot, page, offset, spread(k) if pages.keys.spreads else k)
        pages.values.write(a.slot, page, offset, v)
    return spread(q) if pages.keys.spreads else q


def _placed(y: F32, n_head: int, norm: Norm | None, a: Attention, step: Step) -> F32:
    """y[T, n_head*E] as heads [T, n_head, E], with norm and rotation."""
    if norm is not None and a.norm_whole:
        y = normalised(y, norm)
    y = _heads(y, n_head)
    if norm is not None and a.norm_by_head:
        norm = replace(norm, weight=norm.weight.reshape(n_head, -1))
    if norm is not None and not a.norm_whole and not a.norm_after_rope:
        y = normalised(y, norm)
    if a.rope is not None:
        y = rotated(y, a.rope, *angles(a.rope, step.positions))
    return normalised(y, norm) if norm is not None and a.norm_after_rope else y


def attend(q: F32, a: Attention, step: Step, pages: GroupPages) -> F32:
    """o[T, H*Ev], one sequence and one block of queries at a time."""
    out = np.empty((len(q), a.spec.n_head * a.spec.value_size), np.float32)
    for tokens in sequences(step):
        table = step.page_tables[a.group][step.sequences[tokens.start]]
        longest = int(step.positions[tokens.stop - 1]) + 1
        size = max(1, CHUNK_SCORES // (a.spec.n_head * longest))
        for start in range(tokens.start, tokens.stop, size):
            block = slice(start, min(start + size, tokens.stop))
            out[block] = _attend(q[block], a, step.positions[block], longest, table, pages)
    return out


def _attend(
    q: F32, a: Attention, positions: NDArray, end: int, table: NDArray, pages: GroupPages
) -> F32:
    """q[t, H, E] at rising positions -> o[t, H*Ev]; end: positions of the sequence."""
    s, t, share = a.spec, len(q), a.spec.n_head // a.spec.n_head_kv
    first, last = _seen(positions, a, end)
    k = pages.keys.read(a.slot, table, first, last)  # [n, G, E]
    v = pages.values.read(a.slot, table, first, last)  # [n, G, Ev]
    grouped = q.reshape(t, s.n_head_kv, share, s.key_size).transpose(1, 2, 0, 3)  # [G, H/G, t, E]
    scores = grouped.reshape(s.n_head_kv, share * t, s.key_size) @ k.transpose(1, 2, 0)
    scores = soft_capped(scores * np.float32(a.scale), a.soft_cap)
    scores = scores.reshape(s.n_head_kv, share, t, last - first)
    scores[..., ~_visible(positions, np.arange(first, last), a)] = -np.inf
    sinks = None if a.sinks is None else a.sinks.reshape(s.n_head_kv, share, 1, 1)
    weights = softmax(scores, sinks).reshape(s.n_head_kv, share * t, last - first)
    o = (weights @ v.transpose(1, 0, 2)).reshape(s.n_head_kv, share, t, s.value_size)
    return o.transpose(2, 0, 1, 3).reshape(t, s.n_head * s.value_size)


def _seen(positions: NDArray, a: Attention, end: int) -> tuple[int, int]:
    """The positions first:last that any of these positions sees, in a sequence of `end`."""
    window, last = a.spec.window, int(positions[-1])
    before = window - 1 if a.causal else window // 2
    first = max(0, int(positions[0]) - before) if window else 0
    if a.causal:
        return first, last + 1
    return first, min(end, last + window // 2 + 1) if window else end


def _visible(positions: NDArray, others: NDArray, a: Attention) -> NDArray[np.bool_]:
    """mask[t, n] of what each position sees: itself and earlier positions, or the last `window`; if
    attention is not causal, half of the window on either side; if chunked, its own chunk.
    """
    distance, window = positions[:, None] - others, a.spec.window
    if a.chunked:
        return (distance >= 0) & (positions[:, None] // window == others // window)
    if not a.causal:
        return np.abs(distance) <= window // 2 if window else np.ones(distance.shape, np.bool_)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _heads(x: F32, n_head: int) -> F32:
    """x[T, n_head*E] -> [T, n_head, E]."""
    return x.reshape(len(x), n_head, -1)


def sequences(step: Step) -> Iterator[slice]:
    """The tokens of each sequence in turn."""
    borders = np.flatnonzero(np.diff(step.sequences)) + 1
    for start, stop in zip([0, *borders], [*borders, len(step.sequences)], strict=True):
        yield slice(int(start), int(stop))
