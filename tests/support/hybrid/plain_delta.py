"""A second implementation of gated delta nets: in float64, token by token, head by head.

Written from the formulas, of tensors by their names in a file; it has no code in common with ggpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np


def delta_net(
    w: Mapping[str, np.ndarray],
    n: np.ndarray,
    n_k_head: int,
    eps: float,
    key_head: Callable[[int], int],
) -> np.ndarray:
    """What a layer adds to x, of n[T, D]; w: its tensors without "blk.N."."""
    size, n_head = len(w["ssm_norm.weight"]), len(w["ssm_a"])
    mixed, taps = n @ w["attn_qkv.weight"].T, w["ssm_conv1d.weight"].shape[1]
    states = [np.zeros((size, size)) for _ in range(n_head)]
    out = []
    for t in range(len(n)):
        u = np.zeros(mixed.shape[1])
        for i in range(taps):
            at = t - taps + 1 + i
            u += w["ssm_conv1d.weight"][:, i] * (mixed[at] if at >= 0 else 0)
        u = u / (1 + np.exp(-u))
        beta = 1 / (1 + np.exp(-(w["ssm_beta.weight"] @ n[t])))
        step = np.log1p(np.exp(w["ssm_alpha.weight"] @ n[t] + w["ssm_dt.bias"]))
        z = w["attn_gate.weight"] @ n[t]
        heads = []
        for h in range(n_head):
            g = key_head(h) * size
            q, k = unit(u[g : g + size]), unit(u[n_k_head * size + g :][:size])
            v = u[2 * n_k_head * size + h * size :][:size]
            states[h] *= math.exp(w["ssm_a"][h] * step[h])
            states[h] += np.outer(k, beta[h] * (v - states[h].T @ k))
            o = states[h].T @ q / math.sqrt(size)
            o = o / math.sqrt((o * o).mean() + eps) * w["ssm_norm.weight"]
            gate = z[h * size : (h + 1) * size]
            heads.append(o * gate / (1 + np.exp(-gate)))
        out.append(w["ssm_out.weight"] @ np.concatenate(heads))
    return np.array(out)


def unit(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(x @ x + 1e-6)


def taken_apart(w: Mapping[str, np.ndarray], n_k_head: int) -> dict[str, np.ndarray]:
    """The tensors with alpha and beta apart, which stand together for each key head."""
    both = w["ssm_ba.weight"].reshape(n_k_head, 2, -1, w["ssm_ba.weight"].shape[1])
    beta, alpha = (both[:, i].reshape(-1, both.shape[-1]) for i in range(2))
    return {**w, "ssm_beta.weight": beta, "ssm_alpha.weight": alpha}
