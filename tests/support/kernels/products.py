"""GEMMs as the CUDA backend computes them: planned for a class of steps, then launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ggpy.backends.cuda.arrays import Array, Matrix
from ggpy.backends.cuda.context import StepContext
from ggpy.backends.cuda.gemm import ProductOperands
from ggpy.backends.cuda.plan import NormIn, ProductPlan, StepClass
from ggpy.backends.cuda.steps.graphs import Graphs


class Products:
    """The GEMMs of a prefill step or of a decode step."""

    def __init__(self, device: Any, prompt: bool = True, **policy: Any) -> None:
        self.context = StepContext(device, Graphs(device), **policy)
        if policy.get("gemm") == "cublas":
            self.context.gemms.use_cublas()
        self.planner, self.prompt = self.context.planner, prompt

    def step(self, n_tokens: int) -> StepClass:
        """The class of a step with n_tokens tokens."""
        return StepClass(n_tokens, n_tokens, not self.prompt, True)

    def plan(
        self, weights: Sequence[Matrix], n_tokens: int, epilogue: Any = "STORE", norm: bool = False
    ) -> ProductPlan:
        """The plan of a GEMM."""
        where = NormIn.PROLOGUE if norm else NormIn.NONE
        return self.planner.product(list(weights), self.step(n_tokens), epilogue, where)

    def multiply(
        self,
        x: Array,
        weights: Sequence[Matrix],
        outs: Sequence[Array],
        epilogue: Any = "STORE",
        **operands: Any,
    ) -> None:
        """Plan a GEMM and launch it."""
        plan = self.plan(weights, outs[0].shape[0], epilogue, operands.get("norm") is not None)
        self.context.gemms.run(plan, x, list(weights), outs, ProductOperands(**operands))

    def kernels(
        self, weights: Sequence[Matrix], n_tokens: int, epilogue: Any = "STORE"
    ) -> list[str]:
        """The kernel of each launch; for converted weights also the kernel after the conversion."""
        launches = self.plan(weights, n_tokens, epilogue).launches
        inner = (f" {plan.inner.kernel}" if plan.inner else "" for plan in launches)
        return [plan.kernel + more for plan, more in zip(launches, inner, strict=True)]
