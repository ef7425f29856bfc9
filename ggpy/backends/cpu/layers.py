"""Parts of a model as jobs of the pool: attention, the dense feed-forward, and the head.

Each function adds jobs to a program p that compute what numpy/attention.py or numpy/dense.py
defines, on buffers at fixed addresses; x[T, D] is in buffer "x". `has_...` says whether there are
kernels for all of it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from ...formats import by_name
from ..experts import Experts, Router, SharedExpert
from ..inputs import LayerInput
from ..interface import (
    PAGE_SIZE,
    Attention,
    AttentionTemperature,
    Dense,
    GatedDeltaNet,
    Head,
    Layer,
    MoE,
    Norm,
    PagedKV,
    Recurrent,
    Rope,
)
from ..numpy.kv_pages import GroupPages, Pages
from . import kernels
from .jobs import Array, JobList, rounded_up
from .matrix import MappedMatrix
from .pool import address_of
from .sizes import ACTIVATIONS, HEAD_PITCH, KINDS, LANES, MAX_HEAD, PANEL_ROWS, ROWS, f32_bits
from .step import Sight, StepArrays

HUGE = 2.0**50  # beside an eps of HUGE^2, the mean square of a norm's input is negligible

# The fields that these functions read; numpy computes a layer that has others set.
READ = {
    Attention: {
        *("spec", "group", "slot", "norm", "wq", "wk", "wv", "wo", "scale", "rope", "bq", "bk"),
        *("bv", "bo", "q_norm", "k_norm", "v_norm", "norm_whole", "norm_after_rope", "temperature"),
        "norm_by_head",
        *("soft_cap", "sinks", "post_norm", "residual_scale", "w_gate", "causal", "chunked"),
    },
    AttentionTemperature: {"scale", "length", "offset"},
    Norm: {"weight", "eps", "bias", "centred"},
    GatedDeltaNet: {
        *("spec", "group", "slot", "norm", "w_qkv", "w_gate", "w_beta", "w_alpha", "conv", "a"),
        *("dt", "out_norm", "wo", "tiled", "post_norm", "residual_scale"),
    },
    Recurrent: {"n_k_head", "n_v_head", "size", "taps"},
    PagedKV: {"n_head", "n_head_kv", "key_size", "value_size", "window", "types"},
    Rope: {"style", "inv_freq", "magnitude"},
    Dense: {*("norm", "w_gate", "w_up", "w_down", "activation", "post_norm", "residual_scale")},
    MoE: {"norm", "router", "experts", "shared"},
    Router: {
        *("weight", "n_used", "score", "bias", "choice_bias", "normalise", "scale", "groups"),
        "weighs_input",
    },
    Experts: {"w_gate", "w_up", "w_down", "activation", "b_gate", "b_up", "b_down"},
    SharedExpert: {"w_gate", "w_up", "w_down", "gate"},
    LayerInput: {"gate", "w", "post_norm", "activation"},
    Head: {"norm", "weight", "soft_cap", "scale"},
    Layer: {
        "index",
        "mixer",
        "ffn",
        "parallel",
        "next",
        "input",
        "scale",
    },  # the last two: layer_inputs.py
}


def is_read(part: Any) -> bool:
    """Whether all fields of a part of a layer are in READ or have their defaults; None is read."""
    known = READ.get(type(part), set())
    return part is None or (
        bool(known)
        and all(f.name in known or getattr(part, f.name) == f.default for f in fields(part))
    )


def has_attention(a: Attention, pages: GroupPages) -> bool:
    """Whether all of an attention layer has kernels."""
    matrices = [a.wo, *a.projections]
    parts = [a, a.spec, a.rope, a.temperature, a.norm, a.q_norm, a.k_norm, a.v_norm, a.post_norm]
    return (
        all(is_read(part) for part in parts)
        and all(isinstance(m, MappedMatrix) for m in matrices)
        and max(a.spec.key_size, a.spec.value_size) <= MAX_HEAD
        and pages.keys.type in KINDS
        and pages.values.type in KINDS
    )


def has_dense(ffn: Any) -> bool:
    """Whether a feed-forward is dense and all of it has kernels."""
    if not isinstance(ffn, Dense) or not is_read(ffn):
        return False
    if ffn.activation not in ACTIVATIONS:
        return False
    matrices = (ffn.w_gate, ffn.w_up, ffn.w_down)
    return all(isinstance(m, MappedMatrix) for m in matrices) and all(
        is_read(n) for n in (ffn.norm, ffn.post_norm)
    )


def has_mix(layer: Layer, memory: Any) -> bool:
    """Whether all that `mix` computes has kernels, with the feed-forward if it is parallel.

    memory: of the mixer's group, GroupPages if it is attention.
    """
    if not isinstance(layer.mixer, Attention) or not is_read(layer):
        return False
    if not has_attention(layer.mixer, memory):
        return False
    ffn = layer.ffn if layer.parallel else None
    return ffn is None or (has_dense(ffn) and ffn.norm is not None)


def kind_of(layer: Layer, half: str) -> str:
    """Words for a part ("mix", "ffn" or "end") of a layer, for a message."""
    if half == "end":
        return "inputs of layers"
    if half == "ffn":
        return "mixtures of experts" if isinstance(layer.ffn, MoE) else "feed-forwards"
    return "attention" if isinstance(layer.mixer, Attention) else "gated delta nets"


def has_head(head: Head) -> bool:
    """Whether the head has kernels."""
    return is_read(head) and isinstance(head.weight, MappedMatrix) and is_read(head.norm)


def numbers_of(p: JobList, norm: Norm) -> tuple[int, int, int, int]:
    """The four arguments of a norm: address of its weight, bits of eps, centred, its bias."""
    weight, bias = (address_of_vector(p, w) for w in (norm.weight, norm.bias))
    return weight, f32_bits(norm.eps), int(norm.centred), bias


def address_of_vector(p: JobList, vector: Array | None) -> int:
    """The address of a vector in float32, which is kept as long as the jobs; 0 for None."""
    if vector is None:
        return 0
    p.keep.append(np.ascontiguousarray(vector, np.float32))
    return address_of(p.keep[-1])


def normalised(p: JobList, x: int, rows: int, width: int, norm: Norm | None, name: str) -> int:
    """norm(x[rows, width]) in the buffer `name`; x itself without a norm."""
    if norm is None:
        return x
    out = p.buffers.floats(name, rows, width)
    p.add("normalise_rows", rows, out, 4 * width, x, width, *numbers_of(p, norm))
    return out


def added(p: JobList, y: int, rows: int, width: int, norm: Norm | None, scale: float) -> None:
    """x += norm(y) * scale."""
    x = p.buffers.floats("x", rows, width)
    numbers = (0,) if norm is None else (1, *numbers_of(p, norm))
    p.add("add_rows", rows, x, 4 * width, x, y, width, f32_bits(scale), *numbers, private=4 * width)


def affine(p: JobList, m: MappedMatrix, x: int, rows: int, bias: Array | None, name: str) -> int:
    """x w^T + bias in the buffer `name`."""
    n = m.blocks.n
    out = p.buffers.floats(name, rows, n)
    p.product(m.blocks, x, rows, out)
    if bias is not None:
        p.keep.append(bias)
        p.add("add_bias", rows, out, 4 * n, out, n, address_of(bias))
    return out


def mix(p: JobList, layer: Layer, step: StepArrays, pages: GroupPages) -> None:
    """Attention, and a feed-forward of the same x where they are parallel."""
    a, ffn, rows = layer.mixer, layer.ffn, step.n_tokens
    assert isinstance(a, Attention)
    if not layer.parallel or not isinstance(ffn, Dense):
        attention(p, a, step, pages)
        return
    width = a.wq.blocks.k
    n = normalised(p, p.buffers.floats("x", rows, width), rows, width, ffn.norm, "n of ffn")
    attention(p, a, step, pages)
    gated_product(p, ffn, n, rows)


def attention(p: JobList, a: Attention, step: StepArrays, pages: GroupPages) -> None:
    """x += post_norm(o wo^T) * residual_scale with o = softmax(mask(cap(q k^T * scale))) v, or this
    times sigmoid(n w_gate^T) if there is a gate.
    """
    s, rows, width = a.spec, step.n_tokens, a.wq.blocks.k
    n = normalised(p, p.buffers.floats("x", rows, width), rows, width, a.norm, "n")
    q = affine(p, a.wq, n, rows, a.bq, "q")
    heads(p, a, q, s.n_head, a.q_norm, step)
    if a.temperature is not None:
        factors = step.sharpness(a.temperature)
        p.add("scale_rows", rows, 0, 0, q, s.n_head * s.key_size, factors)
    spread_heads(p, q, rows * s.n_head, pages)
    if a.wk is not None:
        keys_and_values(p, a, n, step, pages)
    o = attended(p, a, q, pages, step)
    if a.w_gate is not None:
        gate = affine(p, a.w_gate, n, rows, None, "gate")
        o = gated_rows(p, "sigmoid", gate, o, rows * s.n_head * s.value_size)
    y = affine(p, a.wo, o, rows, a.bo, "y")
    added(p, y, rows, width, a.post_norm, a.residual_scale)


def keys_and_values(p: JobList, a: Attention, n: int, step: StepArrays, pages: GroupPages) -> None:
    """Writes k and v of n[T, D] to their pages. v is first: without wv, it is k before its norm."""
    s, rows = a.spec, step.n_tokens
    k = affine(p, a.wk, n, rows, a.bk, "k")
    v = k if a.wv is None else affine(p, a.wv, n, rows, a.bv, "v")
    v = normalised(p, v, rows * s.n_head_kv, s.value_size, a.v_norm, "normalised v")
    written(p, a, v, s.value_size, pages.values, step)
    heads(p, a, k, s.n_head_kv, a.k_norm, step)
    spread_heads(p, k, rows * s.n_head_kv, pages)
    written(p, a, k, s.key_size, pages.keys, step)


def spread_heads(p: JobList, x: int, n: int, pages: GroupPages) -> None:
    """The Hadamard transform of n heads of q or k, in place, if the type of the keys wants it."""
    if pages.keys.spreads:
        p.add("spread", n * pages.keys.head_size // 32, 0, 0, x)


def heads(
    p: JobList, a: Attention, x: int, n_head: int, norm: Norm | None, step: StepArrays
) -> None:
    """Normalises and rotates (RoPE) x[T, n_head, E] in place."""
    rope = a.rope
    if not a.norm_after_rope:
        head_norm(p, a, x, n_head, norm, step)
    if rope is not None:
        given = n_head, a.spec.key_size, len(rope.inv_freq), int(rope.style == "norm")
        p.add("turn_heads", step.n_tokens, 0, 0, x, *given, *step.angles(rope))
    if a.norm_after_rope:
        head_norm(p, a, x, n_head, norm, step)


def head_norm(
    p: JobList, a: Attention, x: int, n_head: int, norm: Norm | None, step: StepArrays
) -> None:
    """Normalises each head of x[T, n_head, E], or all heads of a token together, in place."""
    if norm is None:
        return
    if a.norm_by_head:  # each head is normalised; the weights are of all heads of a token
        width = n_head * a.spec.key_size
        weights = Norm(np.float32(HUGE) * norm.weight, HUGE**2)
        head_norm(p, replace(a, norm_by_head=False), x, n_head, replace(norm, weight=None), step)
        p.add("normalise_heads", step.n_tokens, 0, 0, x, width, *numbers_of(p, weights))
        return
    together = n_head if a.norm_whole else 1
    rows, width = step.n_tokens * n_head // together, together * a.spec.key_size
    grain = max(n_head // together, p.pool.chunk(rows))  # the heads of a token at least
    p.add("normalise_heads", rows, 0, 0, x, width, *numbers_of(p, norm), grain=grain)


def written(p: JobList, a: Attention, x: int, size: int, pages: Pages, step: StepArrays) -> None:
    """Writes x[T, G, size] to the pages of the tokens."""
    first, page_bytes, position_bytes, head_bytes = places(pages, a.slot)
    numbers, _ = step.pages(a.group)
    given = x, a.spec.n_head_kv, size, KINDS[pages.type], first, page_bytes, position_bytes
    p.add("write_pages", step.n_tokens, 0, 0, *given, head_bytes, numbers, step.offsets)


def places(pages: Pages, slot: int) -> tuple[int, int, int, int]:
    """The address of the layer's first page, and bytes of a page, a position and a head."""
    layer = pages.array[slot]
    return address_of(layer), *layer.strides[:3]


def attended(p: JobList, a: Attention, q: int, pages: GroupPages, step: StepArrays) -> int:
    """The address of o[T, H*Ev], the output of attention before wo."""
    s, rows = a.spec, step.n_tokens
    share = s.n_head // s.n_head_kv
    out = p.buffers.floats("o", rows, s.n_head * s.value_size)
    sinks = 0 if a.sinks is None else address_of(a.sinks)
    p.keep += [a.sinks, pages]
    seen = step.seen(Sight(s.window, a.causal, a.chunked))
    given = [q, *seen, step.pages(a.group)[1], s.n_head, s.n_head_kv, s.key_size, s.value_size]
    given += [f32_bits(a.scale), f32_bits(a.soft_cap), sinks]
    for x in (pages.keys, pages.values):
        given += [*places(x, a.slot), kernels.expand(by_name(x.type))]
    panels = 2 * PANEL_ROWS * HEAD_PITCH
    if step.n_blocks == 0:
        private = panels + share * (4 * PAGE_SIZE + 8 + HEAD_PITCH) + 128
        width = 4 * share * s.value_size
        p.add("attend_token", rows * s.n_head_kv, out, width, *given, private=private)
    else:
        acc = rounded_up(s.value_size, ROWS) * 64
        private = panels + PANEL_ROWS * 64 + share * (s.key_size * 64 + 128 + acc) + 256
        given += [step.block_address, out]
        p.add("attend_block", step.n_blocks * s.n_head_kv, 0, 0, *given, grain=1, private=private)
    return out


def dense(p: JobList, ffn: Dense, rows: int) -> None:
    """x += post_norm((act(n w_gate^T) * (n w_up^T)) w_down^T) * residual_scale, n = norm(x)."""
    width = ffn.w_gate.blocks.k
    x = p.buffers.floats("x", rows, width)
    gated_product(p, ffn, normalised(p, x, rows, width, ffn.norm, "n"), rows)


def gated_product(p: JobList, ffn: Dense, n: int, rows: int) -> None:
    """`dense` with n[rows, D], which is normalised already."""
    gate = affine(p, ffn.w_gate, n, rows, None, "gate")
    up = affine(p, ffn.w_up, n, rows, None, "up")
    h = gated_rows(p, ffn.activation, gate, up, rows * ffn.w_gate.blocks.n)
    y = affine(p, ffn.w_down, h, rows, None, "y")
    added(p, y, rows, ffn.w_gate.blocks.k, ffn.post_norm, ffn.residual_scale)


def gated_rows(p: JobList, activation: str, gate: int, up: int, numbers: int) -> int:
    """act(gate) * up for so many numbers, in the place of `gate`, whose address is returned."""
    items = -(-numbers // LANES)
    grain = max(512, p.pool.chunk(items))
    p.add("gated", items, gate, 64, gate, up, ACTIVATIONS[activation], grain=grain)
    return gate


def head(p: JobList, h: Head, shape: tuple[int, ...], x: int, out: int) -> None:
    """out[R, V] = norm(x) w^T, without the scale and the cap; shape: of x[R, D]."""
    rows, width = shape
    n = normalised(p, x, rows, width, h.norm, "n")
    p.product(h.weight.blocks, n, rows, out)
