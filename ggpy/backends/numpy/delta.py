"""The gated delta net in numpy: the specification of a `GatedDeltaNet` layer. It is computed token
by token (`recur`), or by chunks of tokens (`scan_chunk`), which differs only in rounding and is
faster for prompts.

Nothing here knows which state belongs to which sequence: a step says for each of its sequences
which state is read and which is written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.base import F32
from .. import host
from ..interface import CacheGroup, GatedDeltaNet, Recurrent, Step
from ..states import NO_STATE
from .attention import sequences
from .functions import added, normalised, sigmoid, silu, softplus

CHUNK, LEAST = 64, 8  # tokens of a chunk, at most and at least
UNIT_EPS = np.float32(1e-6)  # added to the square of the length of q and k


class GroupStates:
    """Zeroed states of a group, by slots of layers; they take memory when they are written."""

    def __init__(self, group: CacheGroup) -> None:
        spec = group.spec
        assert isinstance(spec, Recurrent)
        size = group.n_layer, group.n_pages
        self.conv = host.lazy_zeros((*size, *spec.conv_shape))
        self.matrix = host.lazy_zeros((*size, *spec.matrix_shape))

    def read(self, slot: int, page: int) -> tuple[F32, F32]:
        """(conv[taps - 1, C], M[Hv, S, S]), copies; zeros for NO_STATE."""
        if page == NO_STATE:
            return np.zeros_like(self.conv[slot, 0]), np.zeros_like(self.matrix[slot, 0])
        return self.conv[slot, page].copy(), self.matrix[slot, page].copy()

    def write(self, slot: int, page: int, conv: F32, matrix: F32) -> None:
        """Store a state."""
        self.conv[slot, page], self.matrix[slot, page] = conv, matrix


def mix(
    x: F32, d: GatedDeltaNet, step: Step, states: GroupStates, probe: Callable[[str, F32], None]
) -> F32:
    """x[T, D] + (norm(o) * silu(n w_gate^T)) wo^T."""
    n = normalised(x, d.norm)
    projected, gate = d.w_qkv.multiply(n), d.w_gate.multiply(n)
    beta = sigmoid(d.w_beta.multiply(n))
    decay = d.a * softplus(d.w_alpha.multiply(n) + d.dt)
    u, o = np.empty_like(projected), np.empty_like(gate)
    for tokens in sequences(step):
        old, new = step.page_tables[d.group][step.sequences[tokens.start]]
        conv, matrix = states.read(d.slot, old)
        seen = np.concatenate([conv, projected[tokens]])
        u[tokens] = unit_heads(silu(convolved(seen, d.conv.reshape(-1, d.spec.taps))), d)
        o[tokens], matrix = scan(u[tokens], beta[tokens], decay[tokens], matrix, d)
        states.write(d.slot, new, seen[len(seen) - d.spec.taps + 1 :], matrix)
    probe("qkv", u)
    heads = normalised(o.reshape(len(x), -1, d.spec.size), d.out_norm)
    o = heads.reshape(len(x), -1) * silu(gate)
    probe("attention", o)
    x = added(x, d.wo.multiply(o), d.post_norm, d.residual_scale)
    probe("attn_out", x)
    return x


def convolved(seen: F32, taps: F32) -> F32:
    """y[T, C], the convolution of seen[taps - 1 + T, C] with taps[C, taps]."""
    n = taps.shape[1]
    stop = len(seen) - n + 1
    y = seen[:stop] * taps[:, 0]
    for i in range(1, n):
        y = y + seen[i : stop + i] * taps[:, i]
    return y


def scan(u: F32, beta: F32, decay: F32, matrix: F32, d: GatedDeltaNet) -> tuple[F32, F32]:
    """(o[T, Hv*S], the last M), for u[T, C], beta[T, Hv] and decay[T, Hv], starting from
    M[Hv, S, S]; each token multiplies M by exp(decay).
    """
    q, k, v = (x.swapaxes(0, 1) for x in heads_of(u, d))
    o = np.empty_like(v)
    for start in range(0, len(u), CHUNK):
        part = slice(start, start + CHUNK)
        scanned = scan_chunk if len(u[part]) >= LEAST else recur
        inputs = q[:, part], k[:, part], v[:, part], beta[part].T, decay[part].T
        o[:, part], matrix = scanned(*inputs, matrix)
    return o.swapaxes(0, 1).reshape(len(u), -1), matrix


def recur(q: F32, k: F32, v: F32, beta: F32, decay: F32, m: F32) -> tuple[F32, F32]:
    """(o[Hv, T, S], the last M), for q, k, v[Hv, T, S] and beta, decay[Hv, T], by definition."""
    o = np.empty_like(v)
    for t in range(v.shape[1]):
        m = m * np.exp(decay[:, t, None, None])
        read = (k[:, t, None] @ m)[:, 0]
        m = m + k[:, t, :, None] * (beta[:, t, None] * (v[:, t] - read))[:, None]
        o[:, t] = (q[:, t, None] @ m)[:, 0]
    return o, m


def scan_chunk(q: F32, k: F32, v: F32, beta: F32, decay: F32, m: F32) -> tuple[F32, F32]:
    """The same for all tokens at once. Let e(t, j) be the decay from token j to t. Token t changes
    M by k_t d_t^T, where d solves

        d_t + beta_t sum_(j < t) e(t, j) (k_t k_j) d_j = beta_t (v_t - e(t, 0) M^T k_t).

    Source: Yang et al. 2024, section 3.
    """
    total = np.cumsum(decay.astype(np.float64), axis=1)
    ahead = np.triu(np.ones((k.shape[1], k.shape[1]), bool), 1)
    since = np.where(ahead, -np.inf, total[:, :, None] - total[:, None])
    between, before = np.exp(since).astype(np.float32), np.exp(total).astype(np.float32)[..., None]
    keys, weight = k.swapaxes(1, 2), beta[..., None]
    system = np.tril(weight * between * (k @ keys), -1) + np.eye(k.shape[1], dtype=np.float32)
    change = np.linalg.solve(system, weight * (v - before * (k @ m)))
    o = before * (q @ m) + (between * (q @ keys)) @ change
    kept = between[:, -1][..., None]
    return o, before[:, -1:] * m + keys @ (kept * change)


def unit_heads(u: F32, d: GatedDeltaNet) -> F32:
    """u[T, C] with heads of q and k scaled to length 1, and q divided by sqrt(S)."""
    n, size = 2 * d.spec.n_k_head, d.spec.size
    heads = u[:, : n * size].reshape(len(u), n, size)
    heads = heads / np.sqrt(np.square(heads).sum(axis=-1, keepdims=True) + UNIT_EPS)
    heads[:, : n // 2] *= np.float32(size**-0.5)
    return np.concatenate([heads.reshape(len(u), -1), u[:, n * size :]], axis=1)


def heads_of(u: F32, d: GatedDeltaNet) -> tuple[F32, F32, F32]:
    """q, k and v, each [T, Hv, S]; q and k are those of the key head of each value head."""
    n_k, n_v = d.spec.n_k_head, d.spec.n_v_head
    heads = u.reshape(len(u), 2 * n_k + n_v, d.spec.size)
    of = np.arange(n_v)
    of = of % n_k if d.tiled else of // (n_v // n_k)
    return heads[:, of], heads[:, n_k + of], heads[:, 2 * n_k :]
