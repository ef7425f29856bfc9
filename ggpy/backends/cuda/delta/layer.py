"""Gated delta nets on a GPU: four products of the normalised x, the kernels of kernels/delta, and
the product that adds to x. This module executes plans; plan/ decides how products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....kernels.delta.delta import DeltaBuffers, DeltaShape, DeltaStep, DeltaWeights
from ....kernels.delta.delta_decode import DeltaDecode
from ....kernels.delta.delta_net import DeltaNet
from ...interface import CacheGroup, GatedDeltaNet, Layer
from ..arrays import Array
from ..context import StepContext
from ..plan import DeltaPlan, Recurrence
from .states import StateMemory, shape_of

PROJECTED = ("mixed", "z", "beta", "alpha")  # names of scratch memory


class DeltaOps:
    """Executes the plans of gated delta nets."""

    def __init__(self, context: StepContext, groups: Sequence[CacheGroup], n_paged: int) -> None:
        """Allocates the states of the groups, which follow n_paged groups with pages in the cache.
        Raises OutOfMemory.
        """
        self._context, self._n_paged = context, n_paged
        self.states = StateMemory(context.device, groups)
        self._kernels: dict[tuple[DeltaShape, Recurrence], DeltaNet | DeltaDecode] = {}

    def mix(self, x: Array, layer: Layer) -> Array:
        """x[T, D] plus the output of the layer's gated delta net."""
        c, d = self._context, layer.mixer
        assert isinstance(d, GatedDeltaNet)
        plan = c.planner.delta(layer, c.s, c.stream)
        c.stream = plan.after
        parts = self.delta_in(x, d, plan)
        u, out = self.delta_net(parts, d, plan)
        if c.probe:
            c.probe(layer.index, "qkv", u)
            c.probe(layer.index, "attention", out)
        x = self.delta_out(out, x, d, plan)
        if c.probe:
            c.probe(layer.index, "attn_out", x)
        return x

    def delta_in(self, x: Array, d: GatedDeltaNet, plan: DeltaPlan) -> list[Array]:
        """The projections of the normalised x: f32 [T, C], [T, Hv*S], [T, Hv] and [T, Hv]."""
        c, n = self._context, x.shape[0]
        named = zip(PROJECTED, d.projections, strict=True)
        parts = [c.f32(name, n, w.n_rows) for name, w in named]
        c.input_product(plan.projections, x, d.norm, d.projections, parts)
        return parts

    def delta_net(
        self, parts: list[Array], d: GatedDeltaNet, plan: DeltaPlan
    ) -> tuple[Array, Array]:
        """Writes the new states, and returns u f32 [T, C], which decode steps do not write, and
        the input of wo, f16 [T, Hv*S].
        """
        c, shape = self._context, shape_of(d.spec)
        mixed, gate, beta, alpha = (part.data for part in parts)
        n, values = c.batch.n_tokens, shape.n_v_head * shape.size
        u, o = c.f32("u", n, shape.channels), c.f32("heads", n, values)
        decay = c.f32("decay", n, 2 * shape.n_v_head)
        slow = plan.recurrence is Recurrence.DECODE
        out = c.f16("o", n, values, plan.o_layout, slow_producer=slow)
        group = d.group - self._n_paged
        batch = c.batch
        step = DeltaStep(batch.sequences, batch.first, batch.states[group], n, batch.n_sequences)
        weights = DeltaWeights(d.conv, d.a, d.dt, d.out_norm.weight, d.out_norm.eps, d.tiled)
        made = u.data, decay.data, o.data, out.data, plan.o_layout
        kernel, state = self._kernel(shape, plan.recurrence), self.states.of(group, d.slot)
        kernel.launch(step, state, weights, DeltaBuffers(mixed, gate, beta, alpha, *made))
        return u, out

    def delta_out(self, o: Array, x: Array, d: GatedDeltaNet, plan: DeltaPlan) -> Array:
        """x + o wo^T."""
        return self._context.output_product(plan.out, o, d.wo, x, d)

    def _kernel(self, shape: DeltaShape, recurrence: Recurrence) -> DeltaNet | DeltaDecode:
        key, device = (shape, recurrence), self._context.device
        if key not in self._kernels:
            if recurrence is Recurrence.DECODE:
                self._kernels[key] = DeltaDecode(device, shape)
            else:
                self._kernels[key] = DeltaNet(device, shape, recurrence is Recurrence.CHUNKS)
        return self._kernels[key]
