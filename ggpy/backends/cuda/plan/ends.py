"""Plans of layers' inputs: how their kernels are combined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...inputs import LayerInputs
from ...interface import Layer
from ..arrays import Matrix
from .problem import ProductPlan, StepClass
from .successors import next_mixer

if TYPE_CHECKING:
    from .layers import OutputPlan, Planner, ResidualState


@dataclass(frozen=True, eq=False)
class EndPlan:
    """The plan of a layer's input. gate: with the epilogue INPUT it multiplies act(gate) by the
    input; otherwise a kernel does.
    """

    gate: ProductPlan
    out: OutputPlan


def plan_end(planner: Planner, layer: Layer, s: StepClass, start: ResidualState) -> EndPlan:
    """The plan of a layer's input, which takes x without a norm. start: the state of a residual
    stream without a deferred norm.
    """
    own = layer.input
    assert own is not None
    gate = _without_norm(planner, own.gate, s, start)
    if [launch.kernel for launch in gate.launches] == ["gemm_decode"]:
        gate = replace(gate, epilogue="INPUT")
    return EndPlan(gate, planner.output(own.w, own, next_mixer(layer), s, start)[0])


def plan_projection(
    planner: Planner, inputs: LayerInputs, s: StepClass, start: ResidualState
) -> ProductPlan:
    """The plan of the product of the embedding that makes layers' inputs."""
    return _without_norm(planner, inputs.w, s, start)


def _without_norm(planner: Planner, w: Matrix, s: StepClass, start: ResidualState) -> ProductPlan:
    norm, _ = planner.input_norm(None, [w], s, start, s.n_tokens, True)
    return replace(planner.product([w], s, "STORE", norm), leaves_factors=False)
