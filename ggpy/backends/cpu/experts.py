"""A mixture of experts as jobs of the pool.

A pair is a token and one of its experts. With few pairs, the rows of all chosen experts are items
of one job. With many, Python reads which experts were chosen, and the tokens of an expert are
multiplied in one GEMM. numpy/moe.py defines what is computed; x[T, D] is in buffer "x".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..interface import MoE
from . import kernels
from .jobs import FEW_BYTES, FEW_FLOATS, BlockRows, JobList, Pairs, rounded_up
from .layers import address_of_vector, affine, gated_rows, is_read, normalised
from .matrix import MappedMatrix
from .pool import address_of
from .sizes import ACTIVATIONS, GROUP_BYTES, PITCH, SCORES, WHOLE_PITCH, f32_bits

MAX_VECTORS = 4  # vectors of 16 columns (pairs) in a block
WAVE_BYTES = 8 << 20  # of columns that are packed at a time
Ids = NDArray[np.int32]


def has_experts(ffn: Any) -> bool:
    """Whether a feed-forward is a mixture of experts and all of it has kernels."""
    if not isinstance(ffn, MoE):
        return False
    r, e, s = ffn.router, ffn.experts, ffn.shared
    matrices = [r.weight, e.w_gate, e.w_up, e.w_down]
    matrices += [s.w_gate, s.w_up, s.w_down] if s else []
    biases = [b for b in (e.b_gate, e.b_up, e.b_down) if b is not None]
    return (
        all(is_read(part) for part in (ffn, r, e, s, ffn.norm))
        and all(isinstance(m, MappedMatrix) for m in matrices)
        and all(
            m.blocks.data.flags.c_contiguous and m.scale is None
            for m in (e.w_gate, e.w_up, e.w_down)
        )
        and r.score in SCORES
        and e.activation in ACTIVATIONS
        and (e.b_gate is None) == (e.b_up is None)
        and all(b.tensor.format.name == "F32" and b.scale is None for b in biases)
    )


def are_few(p: JobList, ffn: MoE, rows: int) -> bool:
    """Whether experts have so few tokens each that these are multiplied one by one."""
    e = ffn.experts
    pairs = rows * ffn.router.n_used
    blocks = [m.blocks for m in (e.w_gate, e.w_up, e.w_down)]
    few = FEW_BYTES if all(p.in_bytes(b) for b in blocks) else FEW_FLOATS
    return pairs <= few * min(pairs, e.w_gate.tensor.shape[0])


@dataclass(frozen=True)
class Routed:
    """Addresses of the buffers of a route of `rows` tokens."""

    rows: int
    pairs: Pairs
    weights: int  # f32 [P] for the outputs of pairs; 0 if the inputs were multiplied by them
    n: int  # norm(x)[T, D]
    inputs: int  # of experts [columns, D]: n, or a weighted row for each pair
    columns: int


def places(p: JobList, ffn: MoE, rows: int) -> Routed:
    """Buffers for the route of `rows` tokens."""
    r, width = ffn.router, ffn.experts.w_gate.blocks.k
    count = rows * r.n_used
    pairs = Pairs(count, p.buffers.bytes("ids", 4 * count))
    weights = p.buffers.floats("weights", count)
    n = p.buffers.floats("n of experts", rows, width)
    if not r.weighs_input:
        return Routed(rows, pairs, weights, n, n, rows)
    return Routed(rows, pairs, 0, n, p.buffers.floats("inputs", count, width), count)


def routed(p: JobList, ffn: MoE, rows: int) -> Routed:
    """Adds jobs that choose the experts of each token, their weights and their inputs."""
    r, at, width = ffn.router, places(p, ffn, rows), ffn.experts.w_gate.blocks.k
    x = p.buffers.floats("x", rows, width)
    normalised(p, x, rows, width, ffn.norm, "n of experts")
    logits = affine(p, r.weight, at.n, rows, r.bias, "router")
    n_expert, weights = r.weight.blocks.n, p.buffers.floats("weights", at.pairs.count)
    given = [logits, n_expert, r.n_used, SCORES[r.score], address_of_vector(p, r.choice_bias)]
    given += [int(r.normalise), f32_bits(r.scale), *r.groups, at.pairs.ids, weights]
    private = 4 * (2 * rounded_up(n_expert, 16) + rounded_up(max(r.n_used, r.groups[0]), 16))
    p.add("route", rows, 0, 0, *given, private=private)
    if r.weighs_input:
        given = [at.n, width, r.n_used, weights]
        p.add("weigh_rows", at.columns, at.inputs, 4 * width, *given)
    return at


def experts(p: JobList, ffn: MoE, rows: int) -> None:
    """x += outputs of experts, for few pairs."""
    e, at = ffn.experts, routed(p, ffn, rows)
    count, size = at.pairs.count, e.w_gate.blocks.n
    gate = chosen(p, e.w_gate, e.b_gate, at.inputs, at.columns, at.pairs, "gate")
    up = chosen(p, e.w_up, e.b_up, at.inputs, at.columns, at.pairs, "up")
    h = gated_rows(p, e.activation, gate, up, count * size)
    y = chosen(p, e.w_down, e.b_down, h, count, at.pairs, "y of pairs")
    combined(p, ffn, at, y)


def chosen(
    p: JobList, w: MappedMatrix, bias: Any, x: int, columns: int, pairs: Pairs, name: str
) -> int:
    """out[P, N] of each pair's expert, in the buffer `name`."""
    n = w.blocks.n
    out = p.buffers.floats(name, pairs.count, n)
    p.chosen(w.blocks, x, columns, pairs, out)
    biased(p, bias, out, n, pairs)
    return out


def biased(p: JobList, bias: Any, y: int, n: int, pairs: Pairs) -> None:
    """y[P, N] += bias[X, N] of each pair's expert."""
    if bias is not None:
        given = y, n, rows_of(p, bias), pairs.ids
        p.add("add_chosen", pairs.count, y, 4 * n, *given)


def rows_of(p: JobList, bias: Any) -> int:
    """The address of bias[X, N] in float32; 0 for None."""
    if bias is None:
        return 0
    p.keep.append(np.ascontiguousarray(bias.tensor.data))
    return address_of(p.keep[-1])


def combined(p: JobList, ffn: MoE, at: Routed, y: int) -> None:
    """x += the sum of y[P, D] times weights, and the shared expert's output."""
    width, rows = ffn.experts.w_gate.blocks.k, at.rows
    shared = of_shared(p, ffn, at)
    x = p.buffers.floats("x", rows, width)
    given = x, width, y, ffn.router.n_used, at.weights, shared
    p.add("combine", rows, x, 4 * width, *given, private=4 * width)


def of_shared(p: JobList, ffn: MoE, at: Routed) -> int:
    """The address of the shared expert's output [T, D]; 0 without one."""
    shared, width, rows = ffn.shared, ffn.experts.w_gate.blocks.k, at.rows
    if shared is None:
        return 0
    gate = affine(p, shared.w_gate, at.n, rows, None, "gate")
    up = affine(p, shared.w_up, at.n, rows, None, "up")
    h = gated_rows(p, "silu", gate, up, rows * shared.w_gate.blocks.n)
    y = affine(p, shared.w_down, h, rows, None, "y")
    if shared.gate is not None:
        given = y, width, at.n, width, address_of_vector(p, shared.gate)
        p.add("gate_rows", rows, y, 4 * width, *given)
    return y


# Many pairs


@dataclass(frozen=True)
class Grouped:
    """Pairs in blocks of one expert each."""

    blocks: Ids  # [B, 2]: the expert, and how many pairs it has in this block
    lanes: Ids  # [B, V, 16]: the pair of each lane, or -1
    vectors: int  # V


def grouped(ids: Ids, n_expert: int) -> Grouped:
    """Pairs with the experts ids[P] in blocks of one expert; all but its last block are full."""
    counts = np.bincount(ids, minlength=n_expert)
    mean = len(ids) / np.count_nonzero(counts)
    vectors = int(np.clip(-(-mean // 16), 1, MAX_VECTORS))
    size = 16 * vectors
    n_blocks = -(-counts // size)
    first_block = np.cumsum(n_blocks) - n_blocks
    order = np.argsort(ids, kind="stable")
    expert = ids[order]
    place = np.arange(len(ids)) - (np.cumsum(counts) - counts)[expert]
    lanes = np.full((n_blocks.sum(), size), -1, np.int32)
    block = first_block[expert] + place // size
    lanes[block, place % size] = order
    experts = np.repeat(np.arange(n_expert), n_blocks)
    blocks = np.stack([experts, (lanes >= 0).sum(1)], axis=1).astype(np.int32)
    return Grouped(blocks, lanes.reshape(-1, vectors, 16), vectors)


def experts_of_many(p: JobList, ffn: MoE, rows: int, ids: Ids) -> None:
    """Like `experts` for many pairs, after `routed` ran; ids[P]: the expert of each pair."""
    e, at = ffn.experts, places(p, ffn, rows)
    groups = grouped(ids, e.w_gate.tensor.shape[0])
    widest = max(e.w_gate.blocks.k, e.w_gate.blocks.n)
    step = max(1, WAVE_BYTES // (64 * groups.vectors * widest))
    y = p.buffers.floats("y of pairs", at.pairs.count, e.w_down.blocks.n)
    for first in range(0, len(groups.blocks), step):
        part = slice(first, first + step)
        wave(p, ffn, at, Grouped(groups.blocks[part], groups.lanes[part], groups.vectors), y)
    biased(p, e.b_down, y, e.w_down.blocks.n, at.pairs)
    combined(p, ffn, at, y)


def wave(p: JobList, ffn: MoE, at: Routed, groups: Grouped, y: int) -> None:
    """y[P, D] for the pairs of some blocks."""
    e, v, n_blocks = ffn.experts, groups.vectors, len(groups.blocks)
    k, size, width = e.w_gate.blocks.k, e.w_gate.blocks.n, e.w_down.blocks.n
    blocks, lanes = address_of(groups.blocks), address_of(groups.lanes)
    p.keep.append(groups)
    packed = p.buffers.bytes("packed pairs", 64 * v * n_blocks * k)
    given = [at.inputs, 4 * k, k, lanes, at.pairs.count // at.columns]
    p.add("pack_pairs", v * n_blocks, packed, 64 * k, *given, grain=1)
    x = columns_of(p, [e.w_gate, e.w_up], packed, v * n_blocks)
    gate, rows = by_blocks(p, e.w_gate.blocks, x, groups, "gate of pairs")
    up, _ = by_blocks(p, e.w_up.blocks, x, groups, "up of pairs")
    h = p.buffers.bytes("h of pairs", 64 * v * n_blocks * size)
    given = [gate, up, rows, v, size, ACTIVATIONS[e.activation]]
    given += [rows_of(p, e.b_gate), rows_of(p, e.b_up), blocks]
    p.add("gated_blocks", v * n_blocks, h, 64 * size, *given, grain=1)
    x = columns_of(p, [e.w_down], h, v * n_blocks)
    out, rows = by_blocks(p, e.w_down.blocks, x, groups, "down of pairs")
    p.add("unpack_pairs", v * n_blocks, 0, 0, out, rows, v, width, lanes, y, grain=1)


@dataclass(frozen=True)
class Columns:
    """Addresses of packed columns in float32 and as whole numbers; 0 if no matrix takes these."""

    floats: int
    whole: int


def columns_of(p: JobList, matrices: list[MappedMatrix], packed: int, vectors: int) -> Columns:
    """Packed columns for matrices of one K, rounded, too, if one of them takes whole numbers."""
    if not any(p.in_whole(m.blocks) for m in matrices):
        return Columns(packed, 0)
    k = matrices[0].blocks.k
    whole = p.buffers.bytes("whole pairs", GROUP_BYTES * vectors * (k // 32))
    p.rounded(packed, vectors, k, whole)
    return Columns(packed, whole)


def by_blocks(p: JobList, w: BlockRows, x: Columns, groups: Grouped, name: str) -> tuple[int, int]:
    """(address of out[B, rows, V, 16], rows) of packed columns; rows is N or somewhat more."""
    v, n_blocks = groups.vectors, len(groups.blocks)
    wanted = 4 * p.pool.n_threads
    item_rows = next((r for r in (96, 48) if n_blocks * (w.n // r) >= wanted), 24)
    panels = -(-w.n // item_rows)
    nbytes = item_rows * 64 * v
    out = p.buffers.bytes(name, n_blocks * panels * nbytes + 64)
    of_rows, of_items = (w.address, w.row_bytes, w.n, w.k), (v, item_rows, panels)
    blocks = address_of(groups.blocks)
    if p.in_whole(w):
        kernel, pitch, of_x = kernels.whole("blocks", w.format), WHOLE_PITCH, [x.whole]
    else:
        kernel, pitch = kernels.common("multiply_blocks"), PITCH
        of_x = [kernels.expand(w.format), x.floats]
    given = *of_rows, *of_x, *of_items, blocks
    p.add_kernel(kernel, n_blocks * panels, out, nbytes, given, 1, item_rows * pitch + 512)
    return out, panels * item_rows
