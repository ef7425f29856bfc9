"""Launches cuda/gemm/gemm_wgmma.cu: tiled matrices times packed x, on Hopper.

tile_scheduler.py assigns work tiles to CTAs; the plan (backends/cuda/plan) decides which GEMMs use
this kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...device.base import Device, Kernel
from ..address import Address, address
from ..attention.rope_kv import RopeEpilogue, RopeEpilogueArgs, set_rope_epilogue
from ..layout.pack import PLAIN, STEP, steps_of
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..norm.deferred_norm import DeferredNorm, DeferredNormArgs
from ..struct_asserts import struct_asserts
from .gemm import Epilogue, GemmArgs
from .hopper import (
    ROW_BLOCK,
    THREADS,
    TILE_ROWS,
    SplitKWorkspace,
    TileSchedulerArgs,
    tile_scheduler_args,
)
from .tile_scheduler import TOKENS, Cost, KStages, TileCosts, TileSchedule, Tiling, fastest

DEFERRED_NORM_TOKENS = 8  # tokens of the only work tile that supports a deferred norm
PREFETCH_BYTES = 52 << 10  # weights that a CTA requests before x is available
TILE_COSTS = TileCosts(
    {
        32: Cost(step=0.57, output=0.0, to_all=5.0, to_each=0.0, of_all=2.0),
        64: Cost(step=1.04, output=0.0, to_all=10.9, to_each=0.35, of_all=3.0),
        128: Cost(step=0.87, output=0.0, to_all=12.2, to_each=1.52),
        256: Cost(step=1.44, output=0.0, to_all=18.3, to_each=3.05),
    },
    always_split=(8, 16),
    memory=0.109,
    halves_few=3.0,
    pairs=True,
)
TWO_TOKENS = 256  # of two GEMMs in one launch, at most
# of these: tiles of one size in both GEMMs, and no clusters
TWO_COSTS = replace(
    TILE_COSTS,
    costs={n: cost for n, cost in TILE_COSTS.costs.items() if n < TOKENS[-1]},
    halves_few=0.0,
    pairs=False,
)


class GemmWgmmaArgs(GemmArgs):
    """struct GemmWgmmaArgs of cuda/gemm/gemm_wgmma.cu."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("scheduler", TileSchedulerArgs),
        ("deferred_norm", DeferredNormArgs),
        ("order", ctypes.c_int),
        ("prefetch_stages", ctypes.c_int),
        ("rope_epilogue", RopeEpilogueArgs),
    )


ASSERTS = struct_asserts(GemmWgmmaArgs)


@dataclass(frozen=True)
class WgmmaPart:
    """One of two GEMMs of a launch: matrices of one layout, and x packed in their order."""

    weights: Sequence[TiledMatrix]
    x: Address
    outs: Sequence[Address]


class GemmWgmma:
    """The Hopper prefill GEMM y = x W^T. Instances of the kernel are compiled at their first
    launch.
    """

    def __init__(
        self, device: Device, n_sms: int, workspace: SplitKWorkspace | None = None
    ) -> None:
        """workspace: split-K workspace shared with other GEMMs; None: allocate one."""
        self.device, self.n_sms = device, n_sms
        self._kernels: dict[str, Kernel] = {}
        self._workspace = workspace or SplitKWorkspace(device, n_sms)

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: Address,
        outs: Sequence[Address],
        n_tokens: int,
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        order: int = PLAIN,
        tiling: Tiling | None = None,
        slow_producer: bool = False,
        deferred_norm: DeferredNorm | None = None,
        rope_epilogue: RopeEpilogue | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is f16, packed in the order of the weights' layout. All weights have the same layout and
        k.

        | epilogue | weights  | output                                                         |
        | STORE    | up to 4  | f32 y                                                          |
        | ADD      | 1        | f32 out += y                                                   |
        | GLU      | gate, up | one f16 activation(y0) * y1, as rows or packed in `order`      |
        | QKV      | q, k, v  | as `rope_epilogue` says: f16 q[T, H * E], a layer's KV pages   |

        QKV needs RopeKv.supports_rope_epilogue. slow_producer: few CTAs make x, while CTAs of this
        kernel wait on the other SMs. deferred_norm: the norm of the output of ADD, which the next
        GEMM applies, or the norm of x that the previous GEMM deferred; at most DEFERRED_NORM_TOKENS
        tokens. pdl: read weights before the previous kernel has ended.

        Raises ValueError if a deferred norm has too many tokens.
        """
        first = weights[0]
        args = GemmWgmmaArgs(x=address(x), order=order)
        args.set_matrices(weights, outs, n_tokens, epilogue, activation)
        tiling, schedule = self.schedule(weights, n_tokens, epilogue, order, tiling)
        set_rope_epilogue(args, weights, epilogue, rope_epilogue)
        self._prepare(args, first, schedule, slow_producer, deferred_norm)
        cluster = schedule.cluster
        kernel = self._kernel(first.layout, tiling.tokens, epilogue, cluster)
        kernel.launch(schedule.ctas, THREADS, (args,), smem=tiling.shared, cluster=cluster, pdl=pdl)

    def launch_two(
        self,
        parts: Sequence[WgmmaPart],
        n_tokens: int,
        *,
        tiling: Tiling | None = None,
        slow_producer: bool = False,
        deferred_norm: DeferredNorm | None = None,
    ) -> None:
        """Enqueue two GEMMs that store f32 y, in one launch; see `launch`. supports_two says for
        which matrices and tokens. tiling: of both.
        """
        schedules = self.schedule_two([part.weights for part in parts], n_tokens, tiling)
        both = sorted(zip(parts, schedules, strict=True), key=lambda one: one[1].ctas)
        pair, first_sum = [], 0
        for part, schedule in both:
            args = GemmWgmmaArgs(x=address(part.x))
            args.set_matrices(part.weights, part.outs, n_tokens, "STORE", "silu")
            self._prepare(args, part.weights[0], schedule, slow_producer, deferred_norm, first_sum)
            first_sum += 2 * schedule.ctas * ROW_BLOCK * schedule.tiling.tokens
            pair.append(args)
        tiling, ctas = schedules[0].tiling, [schedule.ctas for _, schedule in both]
        layouts = ", ".join(part.weights[0].layout.type_name for part, _ in both)
        kernel = self._instance(f"gemm_wgmma_two<{layouts}, {tiling.tokens}>")
        kernel.launch((ctas[1], 2), THREADS, (*pair, ctas[0]), smem=tiling.shared, pdl=True)

    def _prepare(
        self,
        args: GemmWgmmaArgs,
        first: TiledMatrix,
        schedule: TileSchedule,
        slow_producer: bool,
        deferred_norm: DeferredNorm | None,
        first_sum: int = 0,
    ) -> None:
        """Set what the parameters of all epilogues have; first_sum: where the GEMM's part of the
        split-K workspace begins, in floats.
        """
        tiling = schedule.tiling
        args.scheduler = tile_scheduler_args(schedule, k_stages(first.layout, first.k).count)
        args.prefetch_stages = 1 if slow_producer else prefetch_stages(first.layout)
        if deferred_norm is not None:
            if tiling.tokens != DEFERRED_NORM_TOKENS or args.n_tokens > tiling.tokens:
                raise ValueError(f"{args.n_tokens} tokens are too many for a deferred norm")
            args.deferred_norm = deferred_norm.args()
        if tiling.split:
            self._workspace.attach(args, first_sum)

    def schedule(
        self,
        weights: Sequence[TiledMatrix],
        n_tokens: int,
        epilogue: Epilogue,
        order: int = PLAIN,
        tiling: Tiling | None = None,
    ) -> tuple[Tiling, TileSchedule]:
        """The tiling and the schedule of the output; by default the fastest tiling."""
        first, tiles = weights[0], sum(w.tile_rows for w in weights)
        row_blocks = -(-tiles // TILE_ROWS)
        if epilogue == "GLU":
            row_blocks = -(-first.tile_rows // (TILE_ROWS // 2))
        if order != PLAIN:  # a packed output has zeros after the last column
            row_blocks = steps_of(first.n_rows)
        stages = k_stages(first.layout, first.k)
        tiling = tiling or fastest(TILE_COSTS, row_blocks, n_tokens, stages, self.n_sms)
        return tiling, tiling.schedule(row_blocks, n_tokens, stages.count, self.n_sms)

    def schedule_two(
        self,
        parts: Sequence[Sequence[TiledMatrix]],
        n_tokens: int,
        tiling: Tiling | None = None,
    ) -> list[TileSchedule]:
        """The schedules of two GEMMs of one launch, each on its part of the SMs."""
        rows = [sum(w.tile_rows for w in weights) for weights in parts]
        of_second = max(1, round(self.n_sms * rows[1] / sum(rows)))
        sms, schedules = (self.n_sms - of_second, of_second), []
        for weights, n_tiles, n_sms in zip(parts, rows, sms, strict=True):
            stages, row_blocks = k_stages(weights[0].layout, weights[0].k), -(-n_tiles // TILE_ROWS)
            own = tiling or fastest(TWO_COSTS, row_blocks, n_tokens, stages, n_sms)
            schedules.append(own.schedule(row_blocks, n_tokens, stages.count, n_sms))
        return schedules

    def supports_two(self, parts: Sequence[Sequence[TiledMatrix]], n_tokens: int) -> bool:
        """Whether one launch takes these matrices, each part of one layout, which is so for few
        tokens if the part with fewer CTAs has whole tiles in one wave, or shares all tiles.
        """
        if len(parts) != 2 or n_tokens > TWO_TOKENS or self.n_sms < 2:
            return False
        smaller = min(self.schedule_two(parts, n_tokens), key=lambda schedule: schedule.ctas)
        one_wave = smaller.waves == 1 and not smaller.tiling.split
        return (one_wave or smaller.waves == 0) and parts[0][0].k == parts[1][0].k

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the split-K workspace."""
        return 4 * self._workspace.floats

    def _kernel(self, layout: Layout, tokens: int, epilogue: Epilogue, cluster: int) -> Kernel:
        return self._instance(instance(layout, tokens, epilogue, cluster))

    def _instance(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = self.device.kernel(
                "gemm/gemm_wgmma.cu", name, extra_source=ASSERTS
            )
        return self._kernels[name]


def by_layout(weights: Sequence[TiledMatrix]) -> list[list[int]]:
    """The indices of the matrices of each layout."""
    found: dict[Layout, list[int]] = {}
    for i, w in enumerate(weights):
        found.setdefault(w.layout, []).append(i)
    return list(found.values())


def stage_columns(layout: Layout) -> int:
    """Columns of a stage: one chunk, or two chunks of 64 columns."""
    return max(layout.chunk_k, 2 * STEP)


def k_stages(layout: Layout, k: int) -> KStages:
    """The stages of K for matrices of this layout."""
    columns = stage_columns(layout)
    bits = 8 * layout.used_bytes / (ROWS * layout.chunk_k)
    return KStages(-(-steps_of(k) * STEP // columns), columns, bits)


def instance(layout: Layout, tokens: int, epilogue: Epilogue, cluster: int = 1) -> str:
    """The name of a kernel instance."""
    return f"gemm_wgmma<{layout.type_name}, {tokens}, {epilogue}, {cluster}>"


def prefetch_stages(layout: Layout) -> int:
    """Stages of weights to request before x is available. More stages would delay x."""
    chunks = 2 if layout.chunk_k == STEP else 1
    return max(1, PREFETCH_BYTES // (chunks * TILE_ROWS * layout.chunk_bytes))
