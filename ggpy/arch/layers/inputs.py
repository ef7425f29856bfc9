"""Layers' own inputs besides the residual stream: for each token, made from a row of a table."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.inputs import LayerInput, LayerInputs
from ...backends.interface import Activation
from .weights import LayerWeights

# Axes are Dimensions.letters; TABLE is outside of all layers.
TABLE = {
    "per_layer_token_embd.weight": "V LI",
    "per_layer_model_proj.weight": "LI D",
    "per_layer_proj_norm.weight": "I",
}
TENSORS = {"inp_gate.weight": "I D", "proj.weight": "D I", "post_norm.weight": "D"}
SCALE = {"layer_output_scale.weight": "1"}  # of x after a layer: a setting, not a weight
INPUT_TABLE = "per_layer_token_embd.weight"  # on the host: most of a small model


@dataclass(frozen=True)
class InputSettings:
    """The settings of one layer's input."""

    activation: Activation

    def build(self, w: LayerWeights) -> LayerInput:
        """The weights with which the layer adds its input to x."""
        return LayerInput(
            gate=w["inp_gate.weight"],
            w=w["proj.weight"],
            post_norm=w.norm("post_norm"),
            activation=self.activation,
        )


def build_inputs(w: LayerWeights) -> LayerInputs | None:
    """The weights that make the inputs of all layers; None if the file has no table."""
    table = w.get("per_layer_token_embd.weight")
    if table is None:
        return None
    return LayerInputs(table, w["per_layer_model_proj.weight"], w.norm("per_layer_proj_norm"))
