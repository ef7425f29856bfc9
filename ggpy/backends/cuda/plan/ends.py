"""Plans of layers' inputs: how their kernels are combined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....kernels.layout.pack import PLAIN, UNIT
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
    input; otherwise a kernel does. h_layout: of the result, the input of w. after: state of the
    residual stream after it.
    """

    gate: ProductPlan
    h_layout: int
    out: OutputPlan
    after: ResidualState


def plan_end(planner: Planner, layer: Layer, s: StepClass, start: ResidualState) -> EndPlan:
    """The plan of a layer's input. start: state of a residual stream without a deferred norm."""
    own = layer.input
    assert own is not None
    gate = _without_norm(planner, own.gate, s, start)
    h_layout = planner.x_layout([own.w], s) if own.w.k % UNIT == 0 and s.fused else PLAIN
    if [launch.kernel for launch in gate.launches] == ["gemm_decode"]:
        gate, h_layout = replace(gate, epilogue="INPUT"), PLAIN
    out, after = planner.output(own.w, own, next_mixer(layer), s, start._replace(normed=False))
    return EndPlan(gate, h_layout, out, after)


def plan_projection(
    planner: Planner, inputs: LayerInputs, s: StepClass, start: ResidualState
) -> ProductPlan:
    """The plan of the product of the embedding that makes layers' inputs."""
    return _without_norm(planner, inputs.w, s, start)


def _without_norm(planner: Planner, w: Matrix, s: StepClass, start: ResidualState) -> ProductPlan:
    norm, _ = planner.input_norm(None, [w], s, start, s.n_tokens, True)
    return replace(planner.product([w], s, "STORE", norm), leaves_factors=False)
