"""Ops that show the input of each matrix, from which importance matrices and smoothing are made.

ObservedOps wraps any backend, and does not depend on how it computes. Inputs are copied to the host
and normalised there again, in float32, so that the backend may fuse its norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..gguf import Tensor
from .experts import Router
from .forwarding import Forwarding, chained
from .inputs import LayerInputs
from .interface import (
    ActivationType,
    Array,
    Dense,
    FeedForward,
    Head,
    Layer,
    MoE,
    Norm,
    Ops,
    Probe,
    Role,
    Step,
    Weight,
)
from .numpy.functions import normalised

F32 = NDArray[np.float32]
Ids = NDArray[np.int32]
See = Callable[[str, F32], None]  # gets a tensor's name, and its input x[T, K]
# Gets the name of a tensor of experts, X, its input x[T, J, K], and the ids[T, J] of the experts.
SeeExperts = Callable[[str, int, F32, Ids], None]


class ObservedOps(Forwarding):
    """A backend that calls see(name, x[T, K]) for the matrices of each product, then computes.

    Parts of a fused tensor have its name, and their input is shown once. see_experts is called for
    tensors of experts; without it, `see` is called with x[T * J, K].
    """

    def __init__(self, ops: Ops, see: See, see_experts: SeeExperts | None = None) -> None:
        super().__init__(ops)
        self.asynchronous = False  # every input is read at once
        self._see = see
        self._see_experts = see_experts or (
            lambda name, n, x, ids: see(name, x.reshape(ids.size, -1))
        )
        self._moe: tuple[MoE, F32] | None = None  # the MoE of this layer, and its input
        self._ids: Ids = np.zeros((0, 0), np.int32)  # the ids of its chosen experts
        # The weight is kept, so that its id() is not reused.
        self._tensors: dict[int, tuple[Weight, Tensor]] = {}
        self._meets: dict[str, Weight] = {}  # name of an inner output -> the weight that takes it

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        weight = super().weight(tensor, role, scale, activations)
        self._tensors[id(weight)] = weight, tensor
        return weight

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        return super().run(step, forward, chained(self._show_inner, probe))

    def mix(self, x: Array, layer: Layer, step: Step) -> Array:
        self._show(self._normalised(x, layer.mixer.norm), *layer.mixer.projections)
        self._meets, self._moe = {"attention": layer.mixer.wo}, None
        if layer.parallel and layer.ffn is not None:
            self._show_inputs(x, layer.ffn)
        return super().mix(x, layer, step)

    def feed_forward(self, x: Array, layer: Layer, step: Step) -> Array:
        assert layer.ffn is not None
        self._meets = {}
        self._show_inputs(x, layer.ffn)
        return super().feed_forward(x, layer, step)

    def _show_inputs(self, x: Array, ffn: FeedForward) -> None:
        """Show the input of a feed-forward; inner outputs come later."""
        n = self._normalised(x, ffn.norm)
        self._moe = (ffn, n) if isinstance(ffn, MoE) else None
        if not isinstance(ffn, MoE):
            self._show(n, *ffn.projections)
            self._meets["ffn_act"] = ffn.w_down
        elif ffn.dense is None:
            self._show(n, *ffn.projections)
            if ffn.shared:
                self._meets["shared_act"] = ffn.shared.w_down
        else:
            self._show_beside(x, n, ffn.router, ffn.dense)

    def _show_beside(self, x: Array, n: F32, router: Router, dense: Dense) -> None:
        """Show the inputs of a router, and of a dense feed-forward beside its experts."""
        if router.norm is not None:
            n = self._normalised(x, router.norm) * np.float32(router.norm_scale)
        self._show(n, router.weight)
        self._show(self._normalised(x, dense.norm), *dense.projections)
        self._meets["shared_act"] = dense.w_down

    def layer_inputs(self, x: Array, inputs: LayerInputs, step: Step) -> Array:
        self._show(self._host(x), inputs.w)
        return super().layer_inputs(x, inputs, step)

    def end_layer(self, x: Array, layer: Layer, inputs: Array | None, step: Step) -> Array:
        self._meets, self._moe = {}, None
        if layer.input is not None:
            self._show(self._host(x), layer.input.gate)
            self._meets = {"input_act": layer.input.w}
        return super().end_layer(x, layer, inputs, step)

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        self._show(self._normalised(x, head.norm), head.weight)
        return super().logits(x, head, step)

    def _show_inner(self, layer: int, name: str, array: Array) -> None:
        if name in self._meets:
            self._show(self._host(array), self._meets[name])
        elif self._moe is not None:
            self._show_experts(*self._moe, name, array)

    def _show_experts(self, ffn: MoE, n: F32, name: str, array: Array) -> None:
        """Show n[T, D] for gate and up of the chosen experts, or h[T, J, F] for down."""
        e = ffn.experts
        if name == "experts":
            self._ids = np.asarray(self.read(array)).astype(np.int32)
            shape = (*self._ids.shape, n.shape[-1])
            self._show_to(np.broadcast_to(n[:, None], shape), e.w_gate, e.w_up)
        elif name == "ffn_act":
            h = np.asarray(self.read(array), np.float32)
            self._show_to(h.reshape(*self._ids.shape, -1), e.w_down)

    def _show_to(self, x: F32, *weights: Weight) -> None:
        for tensor in (self._tensors[id(w)][1] for w in weights):
            self._see_experts(tensor.name, tensor.shape[0], x, self._ids)

    def _show(self, x: F32, *weights: Weight) -> None:
        for name in dict.fromkeys(self._tensors[id(w)][1].name for w in weights):
            self._see(name, x)

    def _host(self, x: Array) -> F32:
        values = np.asarray(self.read(x), np.float32)
        return values.reshape(len(values), -1)

    def _normalised(self, x: Array, norm: Norm | None) -> F32:
        if norm is None:
            return self._host(x)
        weight, bias = (
            None if w is None else self._tensors[id(w)][1].dequantize()
            for w in (norm.weight, norm.bias)
        )
        return normalised(self._host(x), replace(norm, weight=weight, bias=bias))
