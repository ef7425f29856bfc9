"""The parts of a mixture of experts (layers.MoE): router, experts, shared expert.

They are weights and settings only; numpy/moe.py is the specification of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Weight = Any  # as in layers.py

# What experts make of gate and up: Activation(gate) * up, or what gpt-oss has.
GatedActivation = Literal["silu", "gelu_tanh", "swiglu_oai"]
Score = Literal[
    "softmax", "sigmoid", "softmax_chosen", "sigmoid_chosen"
]  # of a router's logits: see Router
LEAST_SUM = 2.0**-14  # the smallest normal f16, as in llama.cpp's build_moe_ffn
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Router:
    """Which experts a token chooses, and the weights that their outputs get.

    l = n weight^T + bias; p = score(l): a softmax over all X, or a sigmoid. The n_used experts with
    the largest p + choice_bias are chosen, of equal ones the first, in falling order; their weights
    are their p. With "softmax_chosen" those with the largest l are, and the weights are a softmax
    over these alone; with "sigmoid_chosen", sigmoids of these. normalise: weights are divided by
    their sum, which is LEAST_SUM at least. All are multiplied by `scale`, and each by what
    `expert_scale` says of its expert. groups (m, n): experts are m groups of neighbours, and only
    the n groups are looked at whose two best experts have the largest sum. With a `norm` the router
    takes norm(x) * norm_scale instead of n.
    """

    weight: Weight  # [X, D]
    n_used: int  # J
    score: Score = "softmax"
    bias: Weight | None = None  # [X], of the logits
    choice_bias: Weight | None = None  # [X], of the choice alone
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    weighs_input: bool = False  # weights multiply what experts take, not what they return
    expert_scale: Weight | None = None  # [X]
    norm: Any = None  # layers.Norm, of x
    norm_scale: float = 1.0


@dataclass(frozen=True)
class Experts:
    """X feed-forwards: (act(n w_gate^T + b_gate, n w_up^T + b_up)) w_down^T + b_down of each.

    act is activation(gate) * up; "swiglu_oai" is g sigmoid(OAI_ALPHA g) (u + 1) with g = min(gate,
    OAI_LIMIT) and u = up between -OAI_LIMIT and OAI_LIMIT.
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
    w_down^T, without the sigmoid where there is no gate.
    """

    w_gate: Weight  # [F, D]
    w_up: Weight  # [F, D]
    w_down: Weight  # [D, F]
    gate: Weight | None = None  # [D]
