"""Inputs that layers have of their own besides the residual stream: of each token, from a table."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.inputs import LayerInput, LayerInputs
from ...backends.interface import Activation
from .weights import LayerWeights

# Sized by Dimensions.letters; TABLE stands outside of all layers.
TABLE = {
    "per_layer_token_embd.weight": "V LI",
    "per_layer_model_proj.weight": "LI D",
    "per_layer_proj_norm.weight": "I",
}
TENSORS = {"inp_gate.weight": "I D", "proj.weight": "D I", "post_norm.weight": "D"}
SCALE = {"layer_output_scale.weight": "1"}  # of x behind a layer: a setting, not a weight
ON_HOST = "per_layer_token_embd.weight"  # the table, which is larger than all else of a small model


@dataclass(frozen=True)
class InputSettings:
    """What the settings of a file say about the input of one layer."""

    activation: Activation

    def build(self, w: LayerWeights) -> LayerInput:
        """What the layer makes of its input."""
        return LayerInput(
            gate=w["inp_gate.weight"],
            w=w["proj.weight"],
            post_norm=w.norm("post_norm"),
            activation=self.activation,
        )


def build_inputs(w: LayerWeights) -> LayerInputs | None:
    """What the inputs of all layers are made of; None where the file has no table."""
    table = w.get("per_layer_token_embd.weight")
    if table is None:
        return None
    return LayerInputs(table, w["per_layer_model_proj.weight"], w.norm("per_layer_proj_norm"))
