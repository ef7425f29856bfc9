"""The dense feed-forward: activation(gate) * up, and down."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.interface import Activation, Dense
from .weights import LayerWeights

# Sized by Dimensions.letters.
TENSORS = {
    "ffn_norm.weight": "D",
    "ffn_gate.weight": "F D",
    "ffn_up.weight": "F D",
    "ffn_down.weight": "D F",
}
NORM_BIAS = {"ffn_norm.bias": "D"}
POST_NORM = {"post_ffw_norm.weight": "D"}


@dataclass(frozen=True)
class DenseSettings:
    """The settings of one layer's feed-forward."""

    activation: Activation
    residual_scale: float = 1.0
    norm: str = (
        "ffn_norm"  # the stem of its norm's tensors: parallel layers share that of attention
    )
    post_norm_eps: float | None = None  # None: that of the other norms

    def build(self, w: LayerWeights) -> Dense:
        """The feed-forward."""
        return Dense(
            norm=w.get_norm(self.norm),
            w_gate=w["ffn_gate.weight"],
            w_up=w["ffn_up.weight"],
            w_down=w["ffn_down.weight"],
            activation=self.activation,
            post_norm=w.get_norm("post_ffw_norm", self.post_norm_eps),
            residual_scale=self.residual_scale,
        )
