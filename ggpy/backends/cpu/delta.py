"""The gated delta net as jobs of the pool, as numpy/delta.py defines it; x[T, D] is in buffer "x".

There are kernels for head sizes S that are a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..interface import GatedDeltaNet, Layer
from ..numpy.delta import GroupStates
from .jobs import JobList
from .layers import added, address_of_vector, affine, gated_rows, is_read, normalised, numbers_of
from .matrix import MappedMatrix
from .pool import address_of
from .sizes import LANES
from .step import StepArrays

COLUMNS = 32  # columns of a head's state matrix in an item of a job


def has_delta(layer: Layer) -> bool:
    """Whether a layer's mixer is a gated delta net and all of it has kernels."""
    d = layer.mixer
    if not isinstance(d, GatedDeltaNet) or layer.parallel or not is_read(layer):
        return False
    matrices = [d.wo, *d.projections]
    return (
        all(is_read(part) for part in (d, d.spec, d.norm, d.out_norm, d.post_norm))
        and all(isinstance(m, MappedMatrix) for m in matrices)
        and d.spec.size % LANES == 0
    )


def delta_net(p: JobList, d: GatedDeltaNet, step: StepArrays, states: GroupStates) -> None:
    """x += (norm(o) * silu(n w_gate^T)) wo^T, with o of the gated delta rule."""
    s, rows, width = d.spec, step.n_tokens, d.w_qkv.blocks.k
    n = normalised(p, p.buffers.floats("x", rows, width), rows, width, d.norm, "n")
    u = affine(p, d.w_qkv, n, rows, None, "qkv")
    gate = affine(p, d.w_gate, n, rows, None, "gate")
    beta = affine(p, d.w_beta, n, rows, None, "beta")
    alpha = affine(p, d.w_alpha, n, rows, None, "alpha")
    convolved(p, d, u, step, states)
    o = recurred(p, d, u, beta, alpha, step, states)
    given = o, s.size, *numbers_of(p, d.out_norm)
    p.add("normalise_heads", rows * s.n_v_head, 0, 0, *given)
    h = gated_rows(p, "silu", gate, o, rows * s.n_v_head * s.size)
    y = affine(p, d.wo, h, rows, None, "y")
    added(p, y, rows, width, d.post_norm, d.residual_scale)


def convolved(p: JobList, d: GatedDeltaNet, u: int, step: StepArrays, states: GroupStates) -> None:
    """The causal convolution and silu of the projections u[T, C], in place: q, k and v."""
    s = d.spec
    taps = p.buffers.made(d.conv, lambda w: w.reshape(-1, s.taps).T)  # [taps, C]
    given = [u, s.channels, s.size, s.n_k_head, s.taps, taps, step.runs, step.states(d.group)]
    given += place(p, states.conv, d.slot)
    items = step.n_runs * (s.channels // s.size)
    p.add("convolve", items, 0, 0, *given, private=4 * s.taps * s.size)


def recurred(
    p: JobList,
    d: GatedDeltaNet,
    u: int,
    beta: int,
    alpha: int,
    step: StepArrays,
    states: GroupStates,
) -> int:
    """The address of o[T, Hv, S], the output of the gated delta rule."""
    s = d.spec
    o = p.buffers.floats("o", step.n_tokens, s.n_v_head * s.size)
    given = [u, s.channels, s.size, s.n_k_head, s.n_v_head, int(d.tiled), beta, alpha]
    given += [address_of_vector(p, d.a), address_of_vector(p, d.dt)]
    given += [step.runs, step.states(d.group), *place(p, states.matrix, d.slot), o]
    columns = COLUMNS if s.size % COLUMNS == 0 else LANES
    items = step.n_runs * s.n_v_head * (s.size // columns)
    p.add("recur", items, 0, 0, *given, private=4 * COLUMNS * s.size + 1024)
    return o


def place(p: JobList, states: Any, slot: int) -> tuple[int, int]:
    """The address of the layer's first state, and the bytes of a state."""
    p.keep.append(states)
    layer = states[slot]
    assert layer.dtype == np.float32
    return address_of(layer), layer.strides[0]
