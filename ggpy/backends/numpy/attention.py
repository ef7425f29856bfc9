"""Attention over pages in numpy: what an `Attention` layer computes.

A sequence's keys and values are read in place where its pages are neighbours, and long prompts are
attended in blocks of queries, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ..interface import PAGE_SIZE, Attention, Step
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
    """x[T, D] + post_norm(softmax(mask(cap(q k^T * scale))) v wo^T) * residual_scale, perhaps with
    a gate before wo.
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
    """q[T, H, E] of n[T, D]; k and v go to their pages."""
    q, k, v = a.wq.affine(n, a.bq), a.wk.affine(n, a.bk), a.wv.affine(n, a.bv)
    if a.norm_whole:
        q, k = _normed(q, k, a)
    q, k, v = (
        _heads(y, n_head)
        for y, n_head in ((q, a.spec.n_head), (k, a.spec.n_head_kv), (v, a.spec.n_head_kv))
    )
    if not a.norm_whole and not a.norm_after_rope:
        q, k = _normed(q, k, a)
    if a.rope is not None:
        cos, sin = angles(a.rope, step.positions)
        q, k = (rotated(y, a.rope, cos, sin) for y in (q, k))
    if a.norm_after_rope:
        q, k = _normed(q, k, a)
    if a.temperature is not None:
        q = q * sharpness(a.temperature, step.positions)
    if pages.keys.spreads:
        q, k = spread(q), spread(k)
    page, offset = step.pages(a.group), step.positions % PAGE_SIZE
    pages.keys.write(a.slot, page, offset, k)
    pages.values.write(a.slot, page, offset, v)
    return q


def _normed(q: F32, k: F32, a: Attention) -> tuple[F32, F32]:
    """q and k, each with its norm, if it has one."""
    q = q if a.q_norm is None else normalised(q, a.q_norm)
    return q, k if a.k_norm is None else normalised(k, a.k_norm)


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
    """The positions first:last that any of these sees, of a sequence that has `end`."""
    window, last = a.spec.window, int(positions[-1])
    before = window - 1 if a.causal else window // 2
    first = max(0, int(positions[0]) - before) if window else 0
    if a.causal:
        return first, last + 1
    return first, min(end, last + window // 2 + 1) if window else end


def _visible(positions: NDArray, others: NDArray, a: Attention) -> NDArray[np.bool_]:
    """mask[t, n]: position p sees itself and earlier ones, only the last `window` if not 0; on
    both sides half of it, where attention is not causal; or what is in its chunk.
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
