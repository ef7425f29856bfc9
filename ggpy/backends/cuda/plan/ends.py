"""How the kernels of a layer's input are combined, and what takes x behind a feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...inputs import LayerInputs
from ...interface import Dense, Layer, Mixer
from ..arrays import Matrix
from .problem import ProductPlan, StepClass

if TYPE_CHECKING:
    from .layers import OutputPlan, Planner, ResidualState


@dataclass(frozen=True)
class InputGate:
    """What takes x behind a feed-forward, as it is, where the layer has an input."""

    projections: Sequence[Matrix]
    norm: None = None


Successor = Mixer | Dense | InputGate  # what takes x, and may normalise it


@dataclass(frozen=True, eq=False)
class EndPlan:
    """The plan of a layer's input. gate: its epilogue is INPUT, or a kernel multiplies the gate by
    the input.
    """

    gate: ProductPlan
    out: OutputPlan


def behind(layer: Layer) -> Mixer | InputGate | None:
    """What takes x behind a layer's feed-forward; None for a kernel that takes x as it is."""
    if layer.input is not None:
        return InputGate((layer.input.gate,))
    return layer.next.mixer if layer.next and layer.scale == 1 else None


def plan_end(planner: Planner, layer: Layer, s: StepClass, start: ResidualState) -> EndPlan:
    """The plan of a layer's input, which takes x without a norm; start: the state of a stream of
    which nothing has been deferred.
    """
    own = layer.input
    assert own is not None
    gate = _without_norm(planner, own.gate, s, start)
    if [launch.kernel for launch in gate.launches] == ["gemm_decode"]:
        gate = replace(gate, epilogue="INPUT")
    successor = layer.next.mixer if layer.next and layer.scale == 1 else None
    return EndPlan(gate, planner.output(own.w, own.norm, successor, s, start)[0])


def plan_projection(
    planner: Planner, inputs: LayerInputs, s: StepClass, start: ResidualState
) -> ProductPlan:
    """The plan of the product of the embedding of which layers' inputs are made."""
    return _without_norm(planner, inputs.w, s, start)


def _without_norm(planner: Planner, w: Matrix, s: StepClass, start: ResidualState) -> ProductPlan:
    norm, _ = planner.input_norm([w], s, start, s.n_tokens, True)
    return replace(planner.product([w], s, "STORE", norm), leaves_factors=False)
