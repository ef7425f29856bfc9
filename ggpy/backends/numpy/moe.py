"""Mixtures of experts in numpy: the specification of a `MoE` layer.

The matrices of an expert are used only if a token chose it, so blocks of other experts are not read
or dequantised. Each expert multiplies all of its tokens at once; outputs are added token by token,
in the order of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ..experts import LEAST_SUM, OAI_ALPHA, OAI_LIMIT, Experts, Router, SharedExpert
from ..interface import Dense, MoE
from . import dense
from .functions import ACTIVATIONS, added, normalised, sigmoid, softmax
from .matrix import HostMatrix

Ids = NDArray[np.int32]


def feed_forward(
    x: F32, ffn: MoE, probe: Callable[[str, NDArray], None], of: F32 | None = None
) -> F32:
    """x[T, D] + the sum over the chosen experts, in the order of the choice, and the shared one,
    with n = norm(of), or norm(x).
    """
    of = x if of is None else of
    n = normalised(of, ffn.norm)
    ids, weights = route(n if ffn.router.norm is None else routed(of, ffn.router), ffn.router)
    probe("experts", ids)
    y, h = shared_output(n, ffn.shared) if ffn.dense is None else dense_output(of, ffn.dense)
    if h is not None:
        probe("shared_act", h)
    before = weights if ffn.router.weighs_input else None
    h = hidden(n, ids, ffn.experts, before)
    probe("ffn_act", h)
    outputs = down(h, ids, ffn.experts)
    total = np.zeros_like(x)
    for place in range(ids.shape[1]):
        of_output = weights[:, place, None] if before is None else np.float32(1)
        total += of_output * outputs[:, place]
    total = total if ffn.expert_norm is None else normalised(total, ffn.expert_norm)
    x = added(x, total if y is None else total + y, ffn.post_norm, 1.0)
    probe("ffn_out", x)
    return x


def routed(x: F32, router: Router) -> F32:
    """The input of a router that has its own norm."""
    return normalised(x, router.norm) * np.float32(router.norm_scale)


def dense_output(x: F32, f: Dense) -> tuple[F32, F32]:
    """(y[T, D] that a dense feed-forward adds to x, h[T, F])."""
    found = []
    y = dense.feed_forward(np.zeros_like(x), f, lambda name, array: found.append(array), of=x)
    return y, found[0]


def route(n: F32, router: Router) -> tuple[Ids, F32]:
    """ids[T, J] of the chosen experts and their weights[T, J], in falling order of the choice."""
    logits = router.weight.affine(n, router.bias)
    by_logits = router.score in OF_CHOSEN
    score = logits if by_logits else SCORES[router.score](logits)
    choice = score if router.choice_bias is None else score + router.choice_bias
    choice = in_groups(choice, *router.groups)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : router.n_used]
    weights = np.take_along_axis(score, ids, axis=-1)
    if by_logits:
        weights = OF_CHOSEN[router.score](weights)
    if router.normalise:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), np.float32(LEAST_SUM))
    weights = weights * np.float32(router.scale)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[ids]
    return ids.astype(np.int32), weights


def in_groups(choice: F32, n_group: int, n_used: int) -> F32:
    """choice[T, X], with -inf outside of the n_used groups whose two best have the largest sum."""
    if n_group == 1:
        return choice
    groups = choice.reshape(len(choice), n_group, -1)
    best = np.sort(groups, axis=-1)[..., -2:].sum(-1)
    order = np.argsort(-best, axis=-1, kind="stable")
    left = np.full_like(groups, -np.inf)
    rows = np.arange(len(choice))[:, None]
    left[rows, order[:, :n_used]] = groups[rows, order[:, :n_used]]
    return left.reshape(choice.shape)


def hidden(n: F32, ids: Ids, e: Experts, weights: F32 | None = None) -> F32:
    """h[T, J, F], the input of w_down of each token's experts; their own input is n, or n times
    weights[T, J].
    """
    h = np.empty((*ids.shape, e.w_gate.tensor.shape[1]), np.float32)
    for expert, at in _chosen(ids):
        inputs = n[at[0]] if weights is None else n[at[0]] * weights[at][:, None]
        gate = _affine(e.w_gate, e.b_gate, expert, inputs)
        h[at] = gated(e.activation, gate, _affine(e.w_up, e.b_up, expert, inputs))
    return h


def down(h: F32, ids: Ids, e: Experts) -> F32:
    """The outputs y[T, J, D] of each token's experts, before the router's weights."""
    y = np.empty((*ids.shape, e.w_down.tensor.shape[1]), np.float32)
    for expert, at in _chosen(ids):
        y[at] = _affine(e.w_down, e.b_down, expert, h[at])
    return y


def shared_output(n: F32, shared: SharedExpert | None) -> tuple[F32, F32] | tuple[None, None]:
    """(y[T, D], h[T, F]) of the shared expert, if there is one."""
    if shared is None:
        return None, None
    h = gated("silu", shared.w_gate.multiply(n), shared.w_up.multiply(n))
    y = shared.w_down.multiply(h)
    return (y if shared.gate is None else y * sigmoid(n @ shared.gate)[:, None]), h


def gated(activation: str, gate: F32, up: F32) -> F32:
    """The function of gate and up; see Experts."""
    if activation != "swiglu_oai":
        return ACTIVATIONS[activation](gate) * up
    limit = np.float32(OAI_LIMIT)
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return g * sigmoid(np.float32(OAI_ALPHA) * g) * (u + 1)


def _affine(w: HostMatrix, bias: HostMatrix | None, expert: int, x: F32) -> F32:
    """x w[expert]^T + bias[expert]."""
    y = w.expert(expert).multiply(x)
    return y if bias is None else y + bias.rows(np.array([expert]))


def _chosen(ids: Ids) -> Iterator[tuple[int, tuple[NDArray, NDArray]]]:
    """Yields each chosen expert, with (tokens, places in their choice)."""
    for expert in np.unique(ids):
        tokens, places = np.nonzero(ids == expert)
        yield int(expert), (tokens, places)


def _softmax(x: F32) -> F32:
    return softmax(x, None)


# Scores of the chosen experts alone, which are those with the largest logits
OF_CHOSEN: dict[str, Callable[[F32], F32]] = {
    "softmax_chosen": _softmax,
    "sigmoid_chosen": sigmoid,
}
SCORES: dict[str, Callable[[F32], F32]] = {"softmax": _softmax, "sigmoid": sigmoid}
