"""A second implementation of layers: in float64, token by token, head by head, without a cache.

Written from the formulas in ggpy/backends/interface.py: it reads the fields of a `Layer`, and
has no code in common with a backend. `weight(w)` returns the array of a backend's weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Weights = Callable[[Any], np.ndarray]


def arrays(w: Any) -> np.ndarray:
    """The array of a weight of the numpy backend: vectors are arrays, matrices hold a tensor."""
    return np.asarray(w.tensor.dequantize() if hasattr(w, "tensor") else w, np.float64)


def logits(decoder: Any, ids: list[int], weight: Weights = arrays) -> np.ndarray:
    """l[T, V] of a whole text."""
    x = weight(decoder.table)[ids] * decoder.settings.embedding_scale
    for layer in decoder.layers:
        y = mixed(x, layer.mixer, weight)
        if layer.ffn is not None:
            of = x if layer.parallel else y
            y = y + fed_forward(of, layer.ffn, weight) - of
        x = y
    head = decoder.head
    y = norm(x, head.norm, weight) @ weight(head.weight).T * head.scale
    return capped(y, head.soft_cap)


def mixed(x: np.ndarray, a: Any, weight: Weights = arrays) -> np.ndarray:
    """x[T, D] with attention added."""
    s, n = a.spec, len(x)
    normed = norm(x, a.norm, weight)
    q, k, v = (
        normed @ weight(w).T + (0 if b is None else weight(b))
        for w, b in ((a.wq, a.bq), (a.wk, a.bk), (a.wv, a.bv))
    )
    if a.norm_whole:
        q, k = norm(q, a.q_norm, weight), norm(k, a.k_norm, weight)
    q, k = q.reshape(n, s.n_head, s.key_size), k.reshape(n, s.n_head_kv, s.key_size)
    v = v.reshape(n, s.n_head_kv, s.value_size)
    per_head = not a.norm_whole and not a.norm_after_rope
    q, k = (norm(q, a.q_norm, weight), norm(k, a.k_norm, weight)) if per_head else (q, k)
    if a.rope is not None:
        q, k = (np.array([rotated(y[p], a.rope, p) for p in range(n)]) for y in (q, k))
    if a.norm_after_rope:
        q, k = norm(q, a.q_norm, weight), norm(k, a.k_norm, weight)
    if a.temperature is not None:
        t = a.temperature
        factors = [1 + t.scale * math.log(1 + (p + t.offset) // t.length) for p in range(n)]
        q = q * np.array(factors)[:, None, None]
    o = np.zeros((n, s.n_head, s.value_size))
    for h in range(s.n_head):
        g = h // (s.n_head // s.n_head_kv)
        for p in range(n):
            first = max(0, p - s.window + 1) if s.window else 0
            first = p - p % s.window if a.chunked else first
            scores = capped(k[first : p + 1, g] @ q[p, h] * a.scale, a.soft_cap)
            e = np.exp(scores)
            total = e.sum() + (0 if a.sinks is None else math.exp(weight(a.sinks)[h]))
            o[p, h] = e / total @ v[first : p + 1, g]
    y = o.reshape(n, -1) @ weight(a.wo).T + (0 if a.bo is None else weight(a.bo))
    return x + post(y, a, weight)


def fed_forward(x: np.ndarray, ffn: Any, weight: Weights = arrays) -> np.ndarray:
    """x[T, D] with the feed-forward added."""
    n = norm(x, ffn.norm, weight)
    if hasattr(ffn, "experts"):
        return x + np.array([mixture(token, ffn, weight) for token in n])
    z = n @ weight(ffn.w_gate).T
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    act = {"silu": z / (1 + np.exp(-z)), "gelu_tanh": z / 2 * (1 + np.tanh(inner))}
    y = (act[ffn.activation] * (n @ weight(ffn.w_up).T)) @ weight(ffn.w_down).T
    return x + post(y, ffn, weight)


def mixture(n: np.ndarray, moe: Any, weight: Weights = arrays) -> np.ndarray:
    """What experts make of one normalised token n[D]."""
    y = np.zeros(len(n))
    for expert, strength in routed(n, moe.router, weight):
        taken, given = (strength, 1) if moe.router.weighs_input else (1, strength)
        y += given * one_expert(taken * n, moe.experts, expert, weight)
    if (shared := moe.shared) is not None:
        gate, up = weight(shared.w_gate) @ n, weight(shared.w_up) @ n
        out = weight(shared.w_down) @ (gate / (1 + np.exp(-gate)) * up)
        y += out if shared.gate is None else out / (1 + math.exp(-(weight(shared.gate) @ n)))
    return y


def routed(n: np.ndarray, r: Any, weight: Weights = arrays) -> list[tuple[int, float]]:
    """The chosen experts of a token and their weights, in order."""
    logits = weight(r.weight) @ n + (0 if r.bias is None else weight(r.bias))
    p = {
        "softmax": lambda: np.exp(logits) / np.exp(logits).sum(),
        "sigmoid": lambda: 1 / (1 + np.exp(-logits)),
        "softmax_chosen": lambda: logits,
        "sigmoid_chosen": lambda: logits,
    }[r.score]()
    liking = p + (0 if r.choice_bias is None else weight(r.choice_bias))
    groups = np.array_split(np.arange(len(p)), r.groups[0])
    groups = sorted(groups, key=lambda g: -sum(sorted(liking[g])[-2:]))[: r.groups[1]]
    chosen = sorted((int(e) for g in groups for e in g), key=lambda e: (-liking[e], e))[: r.n_used]
    found = np.array([math.exp(p[e]) if r.score == "softmax_chosen" else p[e] for e in chosen])
    if r.score == "sigmoid_chosen":
        found = 1 / (1 + np.exp(-found))
    if r.normalise or r.score == "softmax_chosen":
        found /= found.sum()
    return list(zip(chosen, found * r.scale, strict=True))


def one_expert(n: np.ndarray, e: Any, i: int, weight: Weights = arrays) -> np.ndarray:
    """Expert i of n[D]."""
    biases = (0 if b is None else weight(b)[i] for b in (e.b_gate, e.b_up, e.b_down))
    b_gate, b_up, b_down = biases
    gate, up = weight(e.w_gate)[i] @ n + b_gate, weight(e.w_up)[i] @ n + b_up
    if e.activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        act = {"silu": gate / (1 + np.exp(-gate)), "gelu_tanh": gate / 2 * (1 + np.tanh(inner))}
        h = act[e.activation] * up
    return weight(e.w_down)[i] @ h + b_down


def post(y: np.ndarray, part: Any, weight: Weights) -> np.ndarray:
    return norm(y, part.post_norm, weight) * part.residual_scale


def norm(x: np.ndarray, n: Any, weight: Weights = arrays) -> np.ndarray:
    """The norm over the last axis; without one, x."""
    if n is None:
        return x
    y = x - x.mean(-1, keepdims=True) if n.centred else x
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + n.eps) * weight(n.weight)
    return y if n.bias is None else y + weight(n.bias)


def rotated(x: np.ndarray, rope: Any, position: int) -> np.ndarray:
    """x[heads, E], rotated for a position."""
    out, pairs = x.copy(), len(rope.inv_freq)
    for i, frequency in enumerate(rope.inv_freq):
        a, b = (i, i + pairs) if rope.style == "neox" else (2 * i, 2 * i + 1)
        c, s = (rope.magnitude * f(position * frequency) for f in (math.cos, math.sin))
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return out


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x
