"""Launches cuda/gemm/gemm_skinny.cu: matrices in tiles times packed x of up to 16 tokens, all of
which lies in shared memory.

The plan (backends/cuda/plan) decides which GEMMs use this kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.pack import PLAIN, STEP, UNIT, steps_of
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..norm.deferred_norm import MAX_TOKENS, DeferredNorm, DeferredNormArgs
from ..struct_asserts import struct_asserts
from .gemm import SEGMENTS, STATIC_SHARED, Epilogue, GemmArgs
from .hopper import SplitKWorkspace, has_clusters

WARPS = 16  # warps of a CTA
TOKENS = (4, 8, 16)  # tokens of one launch at most; one instance of the kernel each
STAGES = (3, 2)  # of a warp's pipeline: as many as fit
CLUSTERS = (1, 2)  # CTAs of a cluster that shares x: as few as x fits into
SPLIT_K = 4  # CTAs that share x otherwise, and pass sums through the split-K workspace
OUTPUTS = 16  # tokens x rounds between two barriers at most: one output per thread of a CTA


@dataclass(frozen=True)
class GemmSkinnyConfig:
    """Configuration of a launch.

    tokens: TOKENS of the instance. cluster: CTAs of a cluster that shares x. split_k: CTAs that
    share x without a cluster. stages: of each warp's pipeline. batch: rounds between two barriers.
    shared: bytes of dynamic shared memory of a CTA.
    """

    tokens: int
    cluster: int
    split_k: int
    stages: int
    batch: int
    shared: int


class GemmSkinnyArgs(GemmArgs):
    """struct GemmSkinnyArgs of cuda/gemm/gemm_skinny.cu."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("deferred_norm", DeferredNormArgs),
        ("partial", ctypes.c_uint64),
        ("order", ctypes.c_int),
        ("slow_producer", ctypes.c_int),
        ("tiles_per_cluster", ctypes.c_int),
        ("remainder", ctypes.c_int),
    )


ASSERTS = struct_asserts(GemmSkinnyArgs)


class GemmSkinny:
    """The skinny GEMM y = x W^T. Instances of the kernel are compiled at their first launch."""

    def __init__(
        self, device: Device, n_sms: int, workspace: SplitKWorkspace | None = None
    ) -> None:
        """workspace: split-K workspace shared with other GEMMs; None: allocate one."""
        self.device, self.n_sms = device, n_sms
        self._workspace = workspace or SplitKWorkspace(device, n_sms)
        self._shared = device.shared_bytes - STATIC_SHARED
        self._kernels: dict[tuple, Kernel] = {}

    def config_for(self, w: TiledMatrix, n_tokens: int) -> GemmSkinnyConfig | None:
        """The configuration for n_tokens tokens and matrices like w; None if x does not fit in
        shared memory.
        """
        tokens = next((t for t in TOKENS if t >= n_tokens), None)
        if tokens is None:
            return None
        clusters = CLUSTERS if has_clusters(self.device.arch) else (1,)
        batches = [b for b in (4, 2, 1) if b * tokens <= OUTPUTS]
        choices = [(*first, 1, batch) for *first, batch in product(STAGES, clusters, batches)]
        if SEGMENTS * w.tile_rows * SPLIT_K * ROWS * tokens <= self._workspace.floats:
            choices += [(stages, 1, SPLIT_K, 1) for stages in STAGES]
        for stages, cluster, split_k, batch in choices:
            if w.k % (cluster * split_k * max(UNIT, w.layout.chunk_k)):
                continue
            shared = shared_bytes(w, tokens, cluster, split_k, stages, batch)
            if shared <= self._shared:
                return GemmSkinnyConfig(tokens, cluster, split_k, stages, batch, shared)
        return None

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
        slow_producer: bool = False,
        deferred_norm: DeferredNorm | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is f16, packed in the order of the weights' layout. All weights have the same layout and
        k.

        | epilogue | weights  | output                                                    |
        | STORE    | up to 4  | f32 y                                                     |
        | ADD      | 1        | f32 out += y                                              |
        | GLU      | gate, up | one f16 activation(y0) * y1, as rows or packed in `order` |

        slow_producer: the kernel that makes x takes long, so weights fill the whole pipeline before
        x is requested. deferred_norm: the norm of the output of ADD, which the next GEMM applies,
        or the norm of x that the previous GEMM deferred; at most MAX_TOKENS tokens. pdl: read
        weights before the previous kernel has ended.

        Raises ValueError if config_for() returns None or a deferred norm has too many tokens.
        """
        first, config = weights[0], self.config_for(weights[0], n_tokens)
        if config is None:
            raise ValueError(f"{n_tokens} tokens of {first.k} columns do not fit in shared memory")
        args = GemmSkinnyArgs(x=address(x), order=order, slow_producer=slow_producer)
        args.set_matrices(weights, outs, n_tokens, epilogue, activation)
        ctas_sharing_x = config.cluster * config.split_k
        clusters = min(self.n_sms // ctas_sharing_x, args.n_tiles)
        args.tiles_per_cluster, args.remainder = divmod(args.n_tiles, clusters)
        if deferred_norm is not None:
            if n_tokens > MAX_TOKENS:
                raise ValueError(f"{n_tokens} tokens are too many for a deferred norm")
            args.deferred_norm = deferred_norm.args()
        if config.split_k > 1:
            self._workspace.attach(args)
        kernel = self._kernel(first.layout, config, epilogue)
        grid, threads = clusters * ctas_sharing_x, WARPS * 32
        shape: dict[str, Any] = {"smem": config.shared, "cluster": config.cluster}
        cooperative = config.split_k > 1
        kernel.launch(grid, threads, (args,), pdl=pdl, cooperative=cooperative, **shape)

    def _kernel(self, layout: Layout, config: GemmSkinnyConfig, epilogue: Epilogue) -> Kernel:
        instance = layout.type_name, config.tokens, epilogue, config.cluster, config.split_k
        defines = {"WARPS": WARPS, "STAGES": config.stages, "BATCH": config.batch}
        key = *instance, *defines.values()
        if key not in self._kernels:
            name = f"gemm_skinny<{', '.join(map(str, instance))}>"
            self._kernels[key] = self.device.kernel(
                "gemm/gemm_skinny.cu", name, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]


def shared_bytes(
    w: TiledMatrix, tokens: int, cluster: int, split_k: int, stages: int, batch: int
) -> int:
    """Bytes of dynamic shared memory of a CTA: pipelines, sums of two batches of rounds, x and the
    sums of its groups.
    """
    stages_bytes = WARPS * stages * w.layout.chunk_bytes
    partials = 2 * batch * cluster * WARPS * ROWS * tokens * 4
    x = steps_of(w.k) * 2 * STEP * tokens
    if w.layout.bits < 8:
        x += 4 * -(-tokens // 8) * 8 * w.layout.group_sums * w.k // w.layout.group
    return stages_bytes + partials + x // (cluster * split_k)
