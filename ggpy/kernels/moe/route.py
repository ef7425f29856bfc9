"""Launches cuda/moe/route.cu: the router of a mixture of experts, and the norm before it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ...device.base import Buffer, Device, Kernel
from ..address import Address, address
from ..struct_asserts import struct_asserts

WARPS = 8
# (tokens of a CTA, experts of a warp at a time): large tiles read x and the router less often
SHAPES = ((8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (1, 1))
MAX_USED, MAX_GROUPS, MAX_EXPERTS = 32, 32, 1024
MAX_LATE_EXPERTS = 256  # of which each warp chooses for itself
SCORES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2, "sigmoid_chosen": 2}
PIECE, MOST_PIECES = 128, 32  # of route_late: columns of a piece, pieces of a row
STATIC_SHARED = 1 << 10
AHEAD_BYTES = 4 << 20  # of each matrix, at most, that are brought into L2
AHEAD_PIECE = 8192  # bytes of one request: what is brought into L2 is a multiple of it


class ChoiceArgs(ctypes.Structure):
    """struct ChoiceArgs of cuda/moe/choose.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("logits", "choice_bias")),
        *((name, ctypes.c_int) for name in ("n_expert", "n_used", "score", "normalise")),
        *((name, ctypes.c_int) for name in ("n_group", "n_group_used")),
        *((name, ctypes.c_float) for name in ("scale", "least_sum")),
    )


class RouteArgs(ctypes.Structure):
    """struct RouteArgs of cuda/moe/route.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "norm", "weight", "bias", "shared_gate")),
        *((name, ctypes.c_uint64) for name in ("normed", "ids", "weights", "strength", "arrived")),
        *((name, ctypes.c_uint64) for name in ("taken_norm", "expert_scale")),
        ("ahead", ctypes.c_uint64 * 2),
        *((name, ctypes.c_int) for name in ("ahead_bytes", "n_tokens", "k")),
        ("eps", ctypes.c_float),
        ("choice", ChoiceArgs),
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
    def experts_per_lane(self) -> int:
        """Experts of each lane of the warp that chooses: a power of two."""
        return 1 << (-(-self.n_expert // 32) - 1).bit_length()

    def args(self, logits: Address, choice_bias: Address | None) -> ChoiceArgs:
        """What kernels that choose take; logits: f32 [T, n_expert]."""
        return ChoiceArgs(
            *(address(logits), address(choice_bias), self.n_expert, self.n_used),
            *(SCORES[self.score], self.normalise, *self.groups, self.scale, self.least_sum),
        )

    @property
    def problem(self) -> str:
        """What the kernel cannot do; empty if it can."""
        limits = (
            ("experts", self.n_expert, MAX_EXPERTS),
            ("experts of a token", self.n_used, MAX_USED),
            ("groups of experts", self.groups[0], MAX_GROUPS),
        )
        if self.score not in SCORES:
            return f"routers with the score {self.score!r}"
        return next(
            (f"{n} {what}, {most} are the most" for what, n, most in limits if n > most), ""
        )


@dataclass(frozen=True)
class RouterWeights:
    """What a router multiplies and adds, f32: norm[k], weight[n_expert, k], biases[n_expert], and
    the gate[k] of a shared expert. Beside a dense feed-forward: the weights [k] of the norm of what
    experts take, with the same eps, and a scale[n_expert] of what they return.
    """

    norm: Address
    eps: float
    weight: Address
    bias: Address | None = None
    choice_bias: Address | None = None
    shared_gate: Address | None = None
    taken_norm: Address | None = None
    expert_scale: Address | None = None


@dataclass(frozen=True)
class Routes:
    """Outputs of the router: f16 normed[T, k], int ids[T, n_used] and f32 weights[T, n_used], or
    None if others choose, f32 logits[T, n_expert], and f32 strength[T] of the shared expert, if
    that has a gate.
    """

    normed: Address
    ids: Address | None
    weights: Address | None
    logits: Address
    strength: Address | None = None


@dataclass(frozen=True)
class LateChoice:
    """What kernels that multiply experts choose by: f32 logits[T, n_expert] of the router, and
    its bias [n_expert].
    """

    choice: RouterChoice
    logits: Address
    bias: Address | None = None


def shared_bytes(tokens: int, k: int) -> int:
    """Bytes of dynamic shared memory of a CTA."""
    return 4 * tokens * k


def _ctas(n_expert: int, rows: int) -> int:
    """CTAs that have `rows` experts of each warp."""
    return -(-n_expert // (WARPS * rows))


class Route:
    """The router's kernel. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}
        self._arrived: Buffer | None = None

    def launch(
        self,
        x: Address,
        w: RouterWeights,
        choice: RouterChoice,
        out: Routes,
        n_tokens: int,
        k: int,
        ahead: Sequence[Address] = (),
        ahead_bytes: int = 0,
    ) -> None:
        """Enqueue the routing of x, f32 [n_tokens, k]. ahead: two matrices of ahead_bytes each,
        whose beginning is brought into L2 meanwhile. ValueError for what the kernel cannot do.
        """
        if k % 8 or k < MAX_USED or choice.problem:
            wanted = f"rows of {k} columns: a multiple of 8 from {MAX_USED} on is needed"
            raise ValueError(choice.problem or wanted)
        args = RouteArgs(
            *map(address, (x, w.norm, w.weight, w.bias, w.shared_gate)),
            *map(address, (out.normed, out.ids, out.weights, out.strength, self._counters())),
            *map(address, (w.taken_norm, w.expert_scale)),
            (ctypes.c_uint64 * 2)(*map(address, ahead)),
            min(ahead_bytes, AHEAD_BYTES) // AHEAD_PIECE * AHEAD_PIECE,
            *(n_tokens, k, w.eps, choice.args(out.logits, w.choice_bias)),
        )
        pieces = -(-k // PIECE)
        if out.ids is None and pieces <= MOST_PIECES:
            rows = choice.n_expert + (w.shared_gate is not None)
            kernel = self._kernel(f"route_late<{pieces}>", {})
            shared = shared_bytes(1, pieces * PIECE)
            kernel.launch((_ctas(rows, 1), n_tokens), 32 * WARPS, (args,), smem=shared, pdl=True)
            return
        tokens, rows = self._shape(n_tokens, k, choice.n_expert)
        blocks = -(-n_tokens // tokens)
        ctas = min(_ctas(choice.n_expert, rows), max(1, self.device.sm_count // blocks))
        defines = {
            "NORM_PIECES": -(-k // (8 * 32 * WARPS)),
            "EXPERTS_PER_LANE": choice.experts_per_lane,
            "BESIDE": w.taken_norm is not None,
            "WEIGHTS_AHEAD": args.ahead_bytes > 0,
            "SIGMOID_OF_CHOSEN": choice.score == "sigmoid_chosen",
        }
        given = {name: int(n) for name, n in defines.items() if n}
        kernel = self._kernel(f"route<{tokens}, {rows}>", given)
        shared = shared_bytes(tokens, k)
        kernel.launch((ctas, blocks), 32 * WARPS, (args,), smem=shared, pdl=True)

    def _shape(self, n_tokens: int, k: int, n_expert: int) -> tuple[int, int]:
        """The largest tile whose CTAs have work for more than half of the SMs: those of a tile half
        as large would not be resident at once.
        """
        for tokens, rows in SHAPES[:-1]:
            fits = shared_bytes(tokens, k) + STATIC_SHARED <= self.device.shared_bytes
            ctas = -(-n_tokens // tokens) * _ctas(n_expert, rows)
            if fits and n_tokens >= tokens and 2 * ctas > self.device.sm_count:
                return tokens, rows
        return SHAPES[-1]

    def _counters(self) -> Buffer:
        """A counter for the tokens of a CTA, if several CTAs have them."""
        if self._arrived is None:
            self._arrived = self.device.alloc(4 * self.device.sm_count, "arrived CTAs")
            self.device.fill(self._arrived, 0)
        return self._arrived

    def _kernel(self, name: str, defines: dict[str, int]) -> Kernel:
        key = name, *defines.items()
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/route.cu",
                name,
                defines={"WARPS": WARPS, **defines},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
