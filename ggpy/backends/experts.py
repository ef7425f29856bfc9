"""The parts of a mixture of experts (layers.MoE): router, experts, shared expert.

This module has weights and settings; numpy/moe.py is the specification of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Weight = Any  # as in layers.py

# The function of gate and up: Activation(gate) * up, or that of gpt-oss; see Experts.
GatedActivation = Literal["silu", "gelu_tanh", "swiglu_oai"]
Score = Literal[
    "softmax", "sigmoid", "softmax_chosen", "sigmoid_chosen"
]  # of a router's logits: see Router
LEAST_SUM = 2.0**-14  # the smallest normal f16, as in llama.cpp's build_moe_ffn
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Router:
    """Chooses n_used experts for a token, and the weights of their outputs.

    The logits are l = n weight^T + bias.

    | score | chosen experts | their weights |
    |---|---|---|
    | softmax | the largest p + choice_bias | p = softmax(l) over all X |
    | sigmoid | the largest p + choice_bias | p = sigmoid(l) |
    | softmax_chosen | the largest l + choice_bias | softmax over the l of the chosen ones |
    | sigmoid_chosen | the largest l + choice_bias | sigmoid(l) |

    Chosen experts are in falling order, the first of equal ones first. normalise: weights are
    divided by their sum, or by LEAST_SUM if that is larger. Then they are multiplied by `scale` and
    by the `expert_scale` of their expert. groups (m, n): experts are m groups of neighbours, and
    only those n groups take part whose two best experts have the largest sums. With a `norm`, the
    router takes norm(x) * norm_scale instead of n.
    """

    weight: Weight  # [X, D]
    n_used: int  # J
    score: Score = "softmax"
    bias: Weight | None = None  # [X], of the logits
    choice_bias: Weight | None = None  # [X], of the choice alone
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    weighs_input: bool = False  # weights multiply the input of experts, not their output
    expert_scale: Weight | None = None  # [X]
    norm: Any = None  # layers.Norm, of x
    norm_scale: float = 1.0


@dataclass(frozen=True)
class Experts:
    """X feed-forwards, each act(n w_gate^T + b_gate, n w_up^T + b_up) w_down^T + b_down.

    act(gate, up) is activation(gate) * up. "swiglu_oai" is g sigmoid(OAI_ALPHA g) (u + 1) with
    g = min(gate, OAI_LIMIT) and u = up limited to -OAI_LIMIT ... OAI_LIMIT.
    """

    w_gate: Weight  # [X, F, D]
    w_up: Weight  # [X, F, D]
    w_down: Weight  # [X, D, F]
    activation: GatedActivation
    b_gate: Weight | None = None  # [X, F]
    b_up: Weight | None = None  # [X, F]
    b_down: Weight | None = None  # [X, D]


@dataclass(frozen=True)
class SharedExpert:
    """A feed-forward that every token takes: sigmoid(n gate) * (silu(n w_gate^T) * (n w_up^T))
    w_down^T; without a gate, there is no sigmoid factor.
    """

    w_gate: Weight  # [F, D]
    w_up: Weight  # [F, D]
    w_down: Weight  # [D, F]
    gate: Weight | None = None  # [D]
