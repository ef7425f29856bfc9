"""Attention layers on a GPU: RoPE, the KV cache, decode attention and prefill attention.

This module executes plans (plan/layers.py). Layers with the same head shape share kernels; each
group of the KV cache has its own pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...device.base import Buffer
from ...kernels.attention.paged_attention import AttentionParams, PagedAttention
from ...kernels.attention.pages_to_f16 import PagesToF16
from ...kernels.attention.prefill_attention import PrefillAttention
from ...kernels.attention.rope_kv import (
    Heads,
    RopeEpilogue,
    RopeEpilogueRows,
    RopeKv,
    Rotation,
    angles,
    angles_bytes,
)
from ..interface import Attention, CacheShape, Layer, Rope
from .arrays import Array, Projected
from .context import StepContext
from .kv_pages import PageMemory, heads_of
from .plan import AttentionPlan, RopeIn, unusual_heads


class HeadKernels:
    """The attention kernels for one head shape.

    max_split_tokens: the most sequences whose contexts may be split over CTAs.
    """

    def __init__(
        self, device: Any, heads: Heads, max_split_tokens: int, batch_invariant: bool
    ) -> None:
        self.heads, self.rope = heads, RopeKv(device, heads)
        shared = device.shared_bytes
        self.decode = PagedAttention(device, heads, max_split_tokens, shared, batch_invariant)
        self.prefill: PrefillAttention | None = None
        if has_prefill_attention(device, heads, batch_invariant):
            self.prefill = PrefillAttention(self.decode)
        self.to_f16 = PagesToF16(device, heads)
        self.packs = self.decode.packs
        # Prefill attention takes sequences with at least so many tokens in a step.
        self.prefill_tokens = self.prefill.min_tokens if self.prefill else None


def has_prefill_attention(device: Any, heads: Heads, batch_invariant: bool) -> bool:
    """Whether the GPU has a prefill attention kernel for these heads."""
    return not batch_invariant and PrefillAttention.fits(device, heads)


def converts_pages(device: Any, heads: Heads, batch_invariant: bool) -> bool:
    """Whether pages of these heads are converted to f16 for prefill attention."""
    return has_prefill_attention(device, heads, batch_invariant) and not heads.is_f16


class AttentionOps:
    """Executes the plans of attention layers."""

    def __init__(self, context: StepContext, shape: CacheShape, max_split_tokens: int) -> None:
        """Allocates the KV cache; raises MemoryError if it does not fit."""
        self._context, device = context, context.device
        batch_invariant = context.planner.batch_invariant
        shapes = [heads_of(group.spec) for group in shape.groups]
        self.kernels: list[HeadKernels] = []  # one per head shape
        for heads in shapes:
            if heads not in [k.heads for k in self.kernels]:
                self.kernels.append(HeadKernels(device, heads, max_split_tokens, batch_invariant))
        known = [k.heads for k in self.kernels]
        self.kernel_of_group = [known.index(heads) for heads in shapes]
        converts = [converts_pages(device, heads, batch_invariant) for heads in shapes]
        self.pages = PageMemory(device, shape, converts)
        self._angles: dict[bytes, Buffer] = {}  # by RoPE frequencies
        self._rotations: dict[Layer, Rotation] = {}
        self.begin()

    def kernels_of(self, group: int) -> HeadKernels:
        """The kernels of a group of the KV cache."""
        return self.kernels[self.kernel_of_group[group]]

    def begin(self) -> None:
        """Begin a step."""
        self._step_angles: dict[tuple[int, int], tuple[Buffer, Buffer]] = {}

    def heads(self, x: Array, layer: Layer) -> tuple[Array, AttentionPlan]:
        """The input of wo, f16 [T, H*Ev], and the layer's plan."""
        c, a = self._context, layer.mixer
        assert isinstance(a, Attention)
        kernels = self.kernels_of(a.group)
        plan = c.planner.attention(layer, c.s, c.stream, kernels)
        c.stream = plan.after
        q = self.qkv(x, layer, plan, kernels)
        if c.probe:
            c.probe(layer.index, "qkv", q)
        o = self.attention(q, layer, plan, kernels)
        if c.probe:
            c.probe(layer.index, "attention", o)
        return o, plan

    def attn_out(self, o: Array, x: Array, layer: Layer, plan: AttentionPlan) -> Array:
        """x + post_norm(o wo^T + bo); o and plan: from `heads`."""
        c, a = self._context, layer.mixer
        assert isinstance(a, Attention)
        x = c.output_product(plan.out, o, a.wo, x, a, a.bo)
        if c.probe:
            c.probe(layer.index, "attn_out", x)
        return x

    def qkv(
        self, x: Array, layer: Layer, plan: AttentionPlan, kernels: HeadKernels
    ) -> Array | Projected:
        """q f16 [T, H, E] after RoPE, with k and v in their pages; or q, k and v that attention
        rotates.
        """
        c, a, n = self._context, layer.mixer, x.shape[0]
        assert isinstance(a, Attention)
        rotation, row = self._rotation(layer), kernels.heads.row
        weights, pages = a.projections, self.pages.of(a.group, a.slot)
        n_head = a.spec.n_head
        memory = c.scratch("q", 2 * n * n_head * row)
        q = Array(memory, np.float16, (n, n_head, a.spec.key_size), row)
        batch = c.batch.groups[a.group].memory
        if plan.rope is RopeIn.EPILOGUE:
            epilogue: RopeEpilogue | RopeEpilogueRows
            if c.s.decode and c.s.fused:
                epilogue = RopeEpilogueRows(memory, pages, batch, rotation, kernels.heads)
            else:
                epilogue = self._rope_epilogue(layer, kernels, rotation)
            outs = [Array(to, np.float16, (n, row), row) for to in (memory, *pages)]
            c.input_product(plan.qkv, x, a.norm, weights, outs, rope=epilogue)
            return q
        named = {"q": a.wq, "gate": a.w_gate, "k": a.wk, "v": a.wv}
        parts = {
            name: c.f32(f"projected {name}", n, w.n_rows)
            for name, w in named.items()
            if w is not None
        }
        c.input_product(plan.qkv, x, a.norm, weights, list(parts.values()))
        if a.norm_whole:
            self._add_bias(parts["q"], a.bq)
            self._add_bias(parts["k"], a.bk)
            parts["q"], parts["k"] = self._normed(parts["q"], parts["k"], a)
        key = parts["k"].data if "k" in parts else None
        projected = [parts["q"].data, key, parts["v"].data if "v" in parts else key]
        if plan.rope is RopeIn.ATTENTION:
            return Projected(projected, rotation)
        kernels.rope.launch(projected, rotation, batch, n, pages, memory)
        return q

    def _add_bias(self, part: Array, bias: Buffer | None) -> None:
        if bias is not None:
            self._context.elementwise.add_bias(part.data, bias, *part.shape)

    def _normed(self, q: Array, k: Array, a: Attention) -> tuple[Array, Array]:
        """q and k, each normalised over all heads. The new q goes to the scratch memory "y", which
        is free now, and the new k to that of the old q.
        """
        c = self._context
        assert a.q_norm is not None and a.k_norm is not None
        n, k_columns = k.shape
        spare = c.scratch("y", 4 * n * q.shape[1])
        normed = c.norms.to_f32(q, a.q_norm, spare)
        return normed, c.norms.to_f32(k, a.k_norm, c.scratch("projected q", 4 * n * k_columns))

    def attention(
        self, q: Array | Projected, layer: Layer, plan: AttentionPlan, kernels: HeadKernels
    ) -> Array:
        """o f16 [T, H*Ev]."""
        c, a = self._context, layer.mixer
        assert isinstance(a, Attention)
        batch, spec = c.batch, a.spec
        group, kind = batch.groups[a.group], batch.tilings[self.kernel_of_group[a.group]]
        n, columns = batch.n_tokens, spec.n_head * spec.value_size
        o = c.f16("o", n, columns, plan.o_layout, slow_producer=True)
        rotated = not isinstance(q, Projected)
        params = AttentionParams(
            q.data if isinstance(q, Array) else None,
            group.memory,
            self.pages.of(a.group, a.slot),
            o.data,
            a.scale,
            spec.window,
            a.soft_cap,
            a.sinks,
            c.f32("projected gate", n, columns).data if a.w_gate is not None else None,
            projected=() if isinstance(q, Array) else q.parts,
            rotation=None if isinstance(q, Array) else q.rotation,
            rotated=c.s.decode and c.s.fused and rotated,
            order=plan.o_layout,
            n_tokens=n,
            chunked=a.chunked,
            both_sides=not a.causal,
        )
        if kernels.prefill and kind.n_prefill_tiles:
            self._prefill(params, layer, kernels)
        if kind.n_tiles:
            kernels.decode.launch(params, kind.tiles, kind.n_tiles, kind.n_split)
        return o

    def _prefill(self, params: AttentionParams, layer: Layer, kernels: HeadKernels) -> None:
        """Prefill attention for the sequences with many tokens; pages of other types are converted
        to f16 first.
        """
        batch, a = self._context.batch, layer.mixer
        assert isinstance(a, Attention)
        group, kind = batch.groups[a.group], batch.tilings[self.kernel_of_group[a.group]]
        assert kernels.prefill is not None
        scratch = self.pages.f16_scratch
        listed, n = group.f16_pages, group.n_f16_pages
        if listed is not None and scratch is not None:
            kernels.to_f16.launch(params.pages, scratch, listed, n, params.window)
            params = replace(params, batch=group.prefill_memory, pages=scratch)
        kernels.prefill.launch(params, kind.prefill_tiles, kind.n_prefill_tiles)

    # RoPE

    def _rotation(self, layer: Layer) -> Rotation:
        """The layer's RoPE, with the biases and norms that precede it."""
        if layer not in self._rotations:
            a = layer.mixer
            assert isinstance(a, Attention)
            rope = a.rope or Rope("norm", np.zeros(a.spec.key_size // 2))  # an angle of 0
            weight_of = self._context.norms.weight_of_heads
            of_values = a.bk if a.wv is None else a.bv
            norms, bias = (a.q_norm, a.k_norm), (a.bq, a.bk, of_values)
            if a.norm_whole:  # kernels before RoPE apply these
                norms, bias = (None, None), (None, None, of_values)
            self._rotations[layer] = Rotation(
                angles=self._angles_of(rope),
                n_pairs=len(rope.inv_freq),
                neox=rope.style == "neox",
                magnitude=rope.magnitude,
                bias=bias,
                norm=[weight_of(n, a.spec.key_size) for n in norms],
                eps=[n.eps if n else 0.0 for n in norms],
                value_eps=a.v_norm.eps if a.v_norm and a.wk is not None else None,
                shared=a.wk is None,
                unusual=unusual_heads(a),
            )
        return self._rotations[layer]

    def _rope_epilogue(
        self, layer: Layer, kernels: HeadKernels, rotation: Rotation
    ) -> RopeEpilogue:
        """The RoPE epilogue of a prefill GEMM. A step computes the angles of each RoPE once."""
        c, a = self._context, layer.mixer
        assert isinstance(a, Attention)
        key, n = (id(rotation.angles), a.group), c.batch.n_tokens
        if key not in self._step_angles:
            i = len(self._step_angles)
            angles = c.scratch(f"angles {i}", angles_bytes(n, rotation.n_pairs))
            rows = c.scratch(f"rows of keys {a.group}", 4 * n)
            kernels.rope.compute_angles(rotation, c.batch.groups[a.group].memory, n, angles, rows)
            self._step_angles[key] = angles, rows
        return RopeEpilogue(*self._step_angles[key], rotation, kernels.heads)

    def _angles_of(self, rope: Rope) -> Buffer:
        key = rope.inv_freq.tobytes()
        if key not in self._angles:
            values, device = angles(rope.inv_freq), self._context.device
            self._angles[key] = device.alloc(values.nbytes, "rope")
            device.upload(self._angles[key], values)
        return self._angles[key]
