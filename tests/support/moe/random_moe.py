"""One random mixture of experts on any ops, in every form that the contract has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cases import random_rows

from ggpy.backends.experts import Experts, GatedActivation, Router, Score, SharedExpert
from ggpy.backends.interface import MoE, Norm, Role
from ggpy.formats import by_name
from ggpy.gguf import Tensor


@dataclass(frozen=True)
class Form:
    """Sizes and parts of a mixture; letters as in ggpy/backends/interface.py."""

    X: int = 8
    J: int = 2
    D: int = 64
    F: int = 32
    score: Score = "softmax"
    bias: bool = False
    choice_bias: bool = False
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    weighs_input: bool = False
    activation: GatedActivation = "silu"
    expert_bias: bool = False
    shared: str = ""  # "", "plain" or "gated"
    type: str = "Q8_0"
    down_type: str = ""  # "": as `type`
    up_type: str = ""
    expert_scale: bool = False


FORMS = {
    "softmax": Form(),
    "normalised": Form(normalise=True, J=3),
    "scaled": Form(normalise=True, scale=2.5),
    "sigmoid": Form(score="sigmoid", normalise=True, scale=2.5),
    "choice bias": Form(score="sigmoid", choice_bias=True, normalise=True),
    "groups": Form(score="sigmoid", choice_bias=True, groups=(4, 2), J=3),
    "softmax of chosen": Form(score="softmax_chosen", bias=True),
    "gpt-oss": Form(score="softmax_chosen", bias=True, expert_bias=True, activation="swiglu_oai"),
    "gelu": Form(activation="gelu_tanh", bias=True),
    "shared": Form(shared="plain"),
    "gated shared": Form(shared="gated", normalise=True),
    "llama4": Form(score="sigmoid_chosen", weighs_input=True, shared="plain"),
    "all experts": Form(J=8),
    "one of one": Form(X=1, J=1),
    "two types": Form(type="Q4_0", down_type="Q8_0", D=96, F=160),
    "three types": Form(type="Q4_0", up_type="Q5_0", down_type="MXFP4", expert_bias=True, F=96),
}
FORMS_WITH_SCALES = {
    "NVFP4": Form(type="NVFP4", D=128, F=64, expert_scale=True, normalise=True, J=3),
    "NVFP4 with biases": Form(
        type="NVFP4", D=128, F=64, expert_scale=True, expert_bias=True, activation="swiglu_oai"
    ),
    "three types with scales": replace(FORMS["three types"], expert_scale=True),
}


class Maker:
    """Random weights, handed to ops; scaled so that outputs have the size of x."""

    def __init__(self, ops: Any, seed: int = 1) -> None:
        self.ops, self.rng = ops, np.random.default_rng(seed)

    def f32(self, name: str, *shape: int, size: float = 1.0, mean: float = 0.0) -> Any:
        """Vectors, and rows that are looked up."""
        values = (mean + size * self.rng.standard_normal(shape)).astype(np.float32)
        data = values.view(np.uint8).reshape(*shape[:-1], -1)
        matrix = name.endswith("weight")
        role = Role("X D" if len(shape) == 2 else "D", len(shape) == 2 and not matrix)
        return self.ops.weight(Tensor(name, shape, by_name("F32"), data), role)

    def matrix(self, name: str, type: str, *shape: int, scaled: bool = False) -> Any:
        format = by_name(type)
        rows = [random_rows(format, *shape[-2:], self.rng, rms=1.5 * shape[-1] ** -0.5)
                for _ in range(shape[0] if len(shape) == 3 else 1)]  # fmt: skip
        data = np.stack(rows) if len(shape) == 3 else rows[0]
        axes = "X F D" if len(shape) == 3 else "F D"
        scale = None
        if scaled:
            values = self.rng.uniform(0.5, 1.5, shape[0]).astype(np.float32)
            scale = Tensor(f"{name}.scale", shape[:1], by_name("F32"), values.view(np.uint8))
        return self.ops.weight(Tensor(name, shape, format, data), Role(axes), scale)


def random_moe(ops: Any, f: Form, seed: int = 1) -> MoE:
    """A mixture of this form, whose weights ops have taken over."""
    m = Maker(ops, seed)
    router = Router(
        m.f32("r.weight", f.X, f.D, size=0.3),
        f.J,
        f.score,
        m.f32("r.bias", f.X, size=0.5) if f.bias else None,
        m.f32("c.bias", f.X, size=0.2) if f.choice_bias else None,
        f.normalise,
        f.scale,
        f.groups,
        f.weighs_input,
    )
    experts = Experts(
        m.matrix("gate", f.type, f.X, f.F, f.D, scaled=f.expert_scale),
        m.matrix("up", f.up_type or f.type, f.X, f.F, f.D, scaled=f.expert_scale),
        m.matrix("down", f.down_type or f.type, f.X, f.D, f.F, scaled=f.expert_scale),
        f.activation,
        *(
            m.f32(f"{name}.bias", f.X, n, size=0.5) if f.expert_bias else None
            for name, n in (("gate", f.F), ("up", f.F), ("down", f.D))
        ),
    )
    shared = None
    if f.shared:
        shared = SharedExpert(
            m.matrix("sg", f.type, f.F, f.D),
            m.matrix("su", f.type, f.F, f.D),
            m.matrix("sd", f.down_type or f.type, f.D, f.F),
            m.f32("s", f.D, size=0.2) if f.shared == "gated" else None,
        )
    return MoE(Norm(m.f32("norm", f.D, size=0.2, mean=1.0), 1e-5), router, experts, shared)


def random_x(f: Form, n_tokens: int, seed: int = 2) -> np.ndarray:
    """x[T, D], float32."""
    return np.random.default_rng(seed).standard_normal((n_tokens, f.D)).astype(np.float32)
