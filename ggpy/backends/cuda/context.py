"""The state that the ops of a step share: scratch memory, products with their norms, and the state
of the residual stream.

The kinds of layers (attention.py, dense.py, ...) execute their plans through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...device.base import Buffer
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.layout.pack import PLAIN, layout_bytes
from ..interface import Norm, Probe
from .arrays import Array, Matrix, Sum
from .gemm import Gemms, ProductOperands
from .norm import Norms
from .plan import (
    Adds,
    GemmKernels,
    NormIn,
    OutputPlan,
    Planner,
    ProductPlan,
    ResidualState,
    StepClass,
    SumPlan,
)
from .steps.graphs import Graphs
from .steps.upload import StepBatch


class StepContext:
    """One step at a time: call begin, then the ops in the order of the network."""

    def __init__(self, device: Any, graphs: Graphs, **policy: Any) -> None:
        """policy: options of Planner."""
        self.device, self._graphs = device, graphs
        kernels = GemmKernels(device)
        self.planner = Planner(kernels, device.arch, **policy)
        self.elementwise = Elementwise(device)
        self.gemms = Gemms(device, kernels, self.elementwise, self.scratch)
        self.norms = Norms(device, kernels.rms_norm, self.f16, self.scratch)
        self._memory: dict[str, Buffer] = {}
        self._batch: StepBatch | None = None
        self.probe: Probe | None = None
        self.stream = ResidualState()

    def begin(self, batch: StepBatch, probe: Probe | None) -> None:
        """Begin a step."""
        self._batch, self.probe, self.stream = batch, probe, ResidualState()
        self.s: StepClass = batch.step_class if probe is None else batch.unfused_class
        self.norms.begin()

    @property
    def batch(self) -> StepBatch:
        """The batch of the current step; RuntimeError outside of a step."""
        if self._batch is None:
            raise RuntimeError("ops are called inside run")
        return self._batch

    # Memory

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """Scratch memory of at least nbytes; its address stays the same while it is large enough.
        Zero-initialised: GEMMs read the padding rows of packed activations.
        """
        buffer = self._memory.get(name)
        if buffer is not None and buffer.nbytes < nbytes:
            self._graphs.forget()
            self.device.synchronize()
            buffer = None
            del self._memory[name]
        if buffer is None:
            buffer = self._memory[name] = self.device.zeros(nbytes, name)
        return buffer

    def f32(self, name: str, rows: int, columns: int) -> Array:
        """f32 scratch memory [rows, columns]."""
        memory = self.scratch(name, 4 * rows * columns)
        return Array(memory, np.float32, (rows, columns), columns)

    def f16(
        self, name: str, rows: int, columns: int, layout: int = PLAIN, slow_producer: bool = False
    ) -> Array:
        """f16 scratch memory [rows, columns] in a layout."""
        memory = self.scratch(name, layout_bytes(rows, columns, layout))
        return Array(memory, np.float16, (rows, columns), columns, layout, slow_producer)

    # Products

    def input_product(
        self,
        plan: ProductPlan,
        x: Array,
        norm: Norm | None,
        weights: Sequence[Matrix],
        outs: Sequence[Array],
        **options: Any,
    ) -> None:
        """outs = epilogue(norm(x[rows]) W^T); the plan says where the norm is computed. options:
        see ProductOperands.
        """
        norm = norm or self.norms.identity(x.shape[1])
        if plan.norm is NormIn.PROLOGUE:
            self.gemms.run(plan, x, weights, outs, ProductOperands(norm=norm, **options))
            return
        rows, deferred = options.pop("rows", None), None
        if plan.norm is NormIn.DEFERRED:
            normed, deferred = self.norms.take(norm)
        elif plan.norm is NormIn.SHARED:
            assert self.norms.last is not None
            normed = self.norms.last
        else:
            sizes = plan.n_tokens, plan.x_layout, rows, plan.leaves_factors
            normed = self.norms.compute(x, norm, *sizes)
        self.gemms.run(plan, normed, weights, outs, ProductOperands(deferred=deferred, **options))

    def output_product(
        self,
        plan: OutputPlan,
        h: Array,
        w: Matrix,
        x: Array,
        part: Adds,
        bias: Buffer | None = None,
    ) -> Array:
        """x + post_norm(h w^T + bias) * residual_scale, in place or in other memory. part: the part
        of the layer that this product ends.
        """
        if x.sum is not None:  # the previous input product has computed the sum
            x = replace(x, sum=None)
        if plan.post_norm is NormIn.NONE:
            deferred = None
            if plan.next_norm is not None:
                sizes = plan.next_layout, plan.square_columns
                deferred = self.norms.defer(plan.next_norm, x, *sizes)
            in_epilogue = bias if bias is not None and plan.product.takes_bias else None
            operands = ProductOperands(deferred=deferred, bias=in_epilogue)
            self.gemms.run(plan.product, h, [w], [x], operands)
            if bias is not None and in_epilogue is None:
                self.elementwise.add_bias(x.data, bias, *x.shape)
            return x
        n, k = x.shape
        post_norm = part.post_norm
        if part.residual_scale != 1:  # the scale is a part of the norm, or of an identity norm
            norm = post_norm or self.norms.identity(k)
            post_norm = self.norms.scaled(norm, k, part.residual_scale)
        assert post_norm is not None
        y = self.f32("y", n, k)
        self.gemms.run(plan.product, h, [w], [y])
        if bias is not None:
            self.elementwise.add_bias(y.data, bias, *y.shape)
        return self.add_normed(x, y, post_norm, plan)

    def add_normed(self, x: Array, y: Array, post_norm: Norm, plan: SumPlan) -> Array:
        """x + post_norm(y), in place; or pending, if the next product computes it (PROLOGUE)."""
        n, k = x.shape
        if plan.post_norm is NormIn.PROLOGUE:
            buffers = (self.f32(name, n, k) for name in ("x", "x, other"))
            to = next(buffer for buffer in buffers if buffer.data is not x.data)
            return replace(to, sum=Sum(x.data, y.data, post_norm), scale=x.scale)
        if plan.next_norm is None:
            self.norms.add(x, y, post_norm)
        else:
            self.norms.add_next(x, y, post_norm, plan.next_norm, plan.next_layout)
        return x
