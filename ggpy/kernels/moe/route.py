"""Launches cuda/moe/route.cu: the router of a mixture of experts, and the norm before it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...device.base import Device, Kernel
from ..address import Address, address
from ..struct_asserts import struct_asserts

WARPS = 8
TOKENS = (1, 4)  # of a CTA: for few tokens, and from MANY on
MANY = 64
MAX_USED, MAX_GROUPS, MAX_EXPERTS = 32, 32, 1024
SCORES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
STATIC_SHARED = 1 << 10


class RouteArgs(ctypes.Structure):
    """struct RouteArgs of cuda/moe/route.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "norm", "weight", "bias", "choice_bias")),
        *((name, ctypes.c_uint64) for name in ("shared_gate", "normed", "ids", "weights")),
        ("strength", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("n_tokens", "k", "n_expert", "n_used", "score")),
        *((name, ctypes.c_int) for name in ("normalise", "n_group", "n_group_used")),
        *((name, ctypes.c_float) for name in ("scale", "least_sum", "eps")),
    )


ASSERTS = struct_asserts(RouteArgs)


@dataclass(frozen=True)
class RouterChoice:
    """How experts are chosen, but for the weights of the router: see backends/experts.py."""

    n_expert: int
    n_used: int
    score: str = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    least_sum: float = 2.0**-14

    @property
    def problem(self) -> str:
        """What the kernel cannot do; empty if it can."""
        limits = (
            ("experts", self.n_expert, MAX_EXPERTS),
            ("experts of a token", self.n_used, MAX_USED),
            ("groups of experts", self.groups[0], MAX_GROUPS),
        )
        return next(
            (f"{n} {what}, {most} are the most" for what, n, most in limits if n > most), ""
        )


@dataclass(frozen=True)
class RouterWeights:
    """What a router multiplies and adds, f32: norm[k], weight[n_expert, k], biases[n_expert], and
    the gate[k] of a shared expert.
    """

    norm: Address
    eps: float
    weight: Address
    bias: Address | None = None
    choice_bias: Address | None = None
    shared_gate: Address | None = None


@dataclass(frozen=True)
class Routes:
    """Outputs of the router: f16 normed[T, k], int ids[T, n_used], f32 weights[T, n_used], and f32
    strength[T] of the shared expert, if that has a gate.
    """

    normed: Address
    ids: Address
    weights: Address
    strength: Address | None = None


class Route:
    """The router's kernel. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple[int, int], Kernel] = {}

    def launch(
        self, x: Address, w: RouterWeights, choice: RouterChoice, out: Routes, n_tokens: int, k: int
    ) -> None:
        """Enqueue the routing of x, f32 [n_tokens, k]. ValueError for what the kernel cannot do."""
        if k % 8 or choice.problem:
            raise ValueError(choice.problem or f"rows of {k} columns: a multiple of 8 is needed")
        args = RouteArgs(
            *map(address, (x, w.norm, w.weight, w.bias, w.choice_bias, w.shared_gate)),
            *map(address, (out.normed, out.ids, out.weights, out.strength)),
            *(n_tokens, k, choice.n_expert, choice.n_used, SCORES[choice.score]),
            *(choice.normalise, *choice.groups),
            *(choice.scale, choice.least_sum, w.eps),
        )
        shared = [4 * n * (k + 2 * choice.n_expert) for n in TOKENS]
        many = n_tokens >= MANY and shared[1] + STATIC_SHARED <= self.device.shared_bytes
        kernel = self._kernel(TOKENS[many], -(-k // (8 * 32 * WARPS)))
        grid = -(-n_tokens // TOKENS[many])
        kernel.launch(grid, 32 * WARPS, (args,), smem=shared[many], pdl=True)

    def _kernel(self, tokens: int, pieces: int) -> Kernel:
        key = tokens, pieces
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/route.cu",
                f"route<{tokens}>",
                defines={"WARPS": WARPS, "NORM_PIECES": pieces},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
