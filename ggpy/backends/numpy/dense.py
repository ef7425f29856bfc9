"""The dense feed-forward in numpy: what a `Dense` layer computes."""

from __future__ import annotations

from collections.abc import Callable

from ...formats.base import F32
from ..interface import Dense
from .functions import ACTIVATIONS, added, normalised


def feed_forward(
    x: F32, ffn: Dense, probe: Callable[[str, F32], None], of: F32 | None = None
) -> F32:
    """x[T, D] + post_norm((act(n w_gate^T) * (n w_up^T)) w_down^T) * residual_scale.

    of: what is normalised and multiplied, if it is not x.
    """
    of = x if of is None else of
    n = of if ffn.norm is None else normalised(of, ffn.norm)
    gate = ACTIVATIONS[ffn.activation](ffn.w_gate.multiply(n))
    h = gate * ffn.w_up.multiply(n)
    probe("ffn_act", h)
    x = added(x, ffn.w_down.multiply(h), ffn.post_norm, ffn.residual_scale)
    probe("ffn_out", x)
    return x
