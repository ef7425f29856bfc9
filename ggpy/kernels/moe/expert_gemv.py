"""Launches cuda/moe/expert_gemv.cu: one token times the experts that it chose, for decode steps.

Chooses how many warps and pipeline stages a CTA has, by the shape of a matrix alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import STATIC_SHARED, Epilogue, GemmArgs
from ..gemm.hopper import has_clusters
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..struct_asserts import struct_asserts
from .combine import ACTIVATIONS
from .route import ChoiceArgs, LateChoice

ExpertEpilogue = Literal["STORE", "GLU", "SUM"]
UNIT = 256  # columns of x that a warp converts together
MOST_UNITS = (4, 8)  # that a warp has in shared memory, of which a CTA has less or more than LARGE
LARGE = 90 << 10
WARPS = (4, 8)  # of a CTA: with few units, and with WIDE_UNITS
WIDE_UNITS = 24
MOST_WARPS = 16  # of a CTA whose warps have two units each
RESIDENT_WARPS = 18  # of an SM, that multiply two tile rows at once
# Bytes of weights that the CTAs of an SM have in flight for a token. Half of an SM's shared memory
# is left to the next kernel, which requests its weights meanwhile.
IN_FLIGHT = 110 << 10
MOST_STAGES = 8
# A tile row has a cluster only if the most loaded SM then has so many times less work: the CTAs of
# a cluster wait for each other.
MORE_EQUAL = 1.1
NEARLY_ALL = 0.9  # of the SMs


class ExpertGemvArgs(GemmArgs):
    """struct ExpertGemvArgs of cuda/moe/expert_gemv.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        *((name, ctypes.c_uint64) for name in ("x", "ids", "weights")),
        ("bias", ctypes.c_uint64 * 2),
        *((name, ctypes.c_uint64) for name in ("shared", "strength", "expert_bytes")),
        ("choice", ChoiceArgs),
        *((name, ctypes.c_int) for name in ("n_used", "warp_units")),
    )


ASSERTS = struct_asserts(ExpertGemvArgs)


@dataclass(frozen=True)
class ExpertAddends:
    """Operands of the epilogue SUM, which adds bias[n_expert, rows] and shared[T, rows] times
    strength[T] to products, and the f32 weights [T, n_used] of products and biases, unless the
    kernel chooses experts itself.
    """

    weights: Address | None = None
    bias: Address | None = None
    shared: Address | None = None
    strength: Address | None = None


@dataclass(frozen=True)
class GemvShape:
    """A launch: CTAs of a cluster, tile rows that a warp of a SUM multiplies at once, warps of a
    CTA, stages of each warp's pipeline, units of x that a warp has in shared memory, whether these
    are all of them, and bytes of dynamic shared memory.
    """

    cluster: int
    tiles: int
    warps: int
    stages: int
    warp_units: int
    whole: bool
    shared: int


def cluster_of(tile_rows: int, n_sms: int) -> int:
    """CTAs that share a tile row of a SUM: two, if SMs then have more equal work."""

    def work(ctas: int) -> float:
        """The work of the busiest SM; 1 if all SMs have the same work."""
        return -(-ctas // n_sms) * n_sms / ctas

    return 2 if MORE_EQUAL * work(2 * tile_rows) < work(tile_rows) else 1


def takes_two(layout: Layout, tile_rows: int, cluster: int, n_tokens: int, n_sms: int) -> bool:
    """Whether a warp of a SUM multiplies two tile rows at once, so that x is prepared once for
    both.

    | clusters share tile rows | if codes are looked up, which takes many instructions            |
    | more tile rows than SMs  | no                                                               |
    | chunks of less than UNIT | if there is a CTA of one tile row for nearly each SM             |
    | other chunks, for which  | if CTAs of one tile row share SMs, and no SM has more tile rows  |
    | registers are short      | with CTAs of two                                                 |
    """
    if tile_rows % 2:
        return False
    if cluster > 1:
        return layout.chunk_k < UNIT and layout.is_table
    if tile_rows > n_sms:
        return False
    ctas = tile_rows * n_tokens
    if layout.chunk_k < UNIT:
        return ctas >= NEARLY_ALL * n_sms
    return ctas > n_sms and 2 * -(-ctas // (2 * n_sms)) <= -(-ctas // n_sms)


def gemv_shape(
    layout: Layout,
    ctas: int,
    k: int,
    rows_of_x: int,
    width: int,
    n_sms: int,
    most: int,
    cluster: int = 1,
    tiles: int = 1,
) -> GemvShape:
    """The shape of CTAs, or clusters of them, that each multiply `rows_of_x` rows of k columns by
    `tiles` tile rows of `width` matrices, with at most `most` bytes of shared memory, if one stage
    fits. A token has `ctas` CTAs.
    """
    units = -(-rows_of_x * -(-k // UNIT) // cluster)  # of a CTA
    of_sm = -(-ctas // n_sms)
    warps = WARPS[units >= WIDE_UNITS]
    with_two = max(WARPS[0], units // 2)  # units each
    fits = of_sm == 1 or (tiles > 1 and of_sm * with_two <= RESIDENT_WARPS)
    if fits and with_two <= MOST_WARPS and 2 * with_two * layout.chunk_bytes <= most:
        warps = with_two
    all_units = -(-units // warps)
    warp_units = min(all_units, MOST_UNITS[most >= LARGE])
    x = warps * warp_units * (2 * UNIT + (8 * UNIT // layout.group if layout.is_scaled else 0))
    rest = x + 4 * ROWS * tiles * (width * warps + rows_of_x)
    chunks = all_units * (UNIT // layout.chunk_k)
    stage = warps * layout.chunk_bytes * width * tiles
    of_cta = min(IN_FLIGHT // of_sm, most - rest)
    stages = max(1, min(chunks, of_cta // stage, MOST_STAGES))
    whole = warp_units == all_units
    return GemvShape(cluster, tiles, warps, stages, warp_units, whole, stages * stage + rest)


def sum_shape(
    matrix: TiledMatrix, n_tokens: int, n_used: int, n_sms: int, most: int, clusters: bool
) -> GemvShape:
    """The shape of a SUM. How many warps share a tile row does not depend on n_tokens."""
    layout, tile_rows, k = matrix.layout, matrix.tile_rows, matrix.k
    cluster = cluster_of(tile_rows, n_sms) if clusters else 1
    if takes_two(layout, tile_rows, cluster, n_tokens, n_sms):
        of_two = 2 * cluster if cluster > 1 else 1
        ctas = tile_rows // 2 * of_two
        shape = gemv_shape(layout, ctas, k, n_used, 1, n_sms, most, of_two, tiles=2)
        if shape.shared <= most:
            return shape
    return gemv_shape(layout, tile_rows * cluster, k, n_used, 1, n_sms, most, cluster)


class ExpertGemv:
    """Products with experts in decode steps. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        ids: Address | LateChoice,
        x: Address,
        out: Address,
        n_tokens: int,
        n_used: int,
        *,
        epilogue: ExpertEpilogue = "STORE",
        activation: str = "silu",
        biases: Sequence[Address | None] = (),
        addends: ExpertAddends | None = None,
    ) -> None:
        """Enqueue products of n_tokens tokens with the experts ids[n_tokens, n_used], or those
        that the kernel chooses.

        weights: the first of the experts, which follow each other; x is f16 of k columns.

        | epilogue | weights  | x             | out                                               |
        | STORE    | 1        | [n_tokens, k] | f32 [pairs, rows]                                 |
        | GLU      | gate, up | [n_tokens, k] | f16 [pairs, rows], with `biases` [n_expert, rows] |
        | SUM      | 1        | [pairs, k]    | f32 [n_tokens, rows], which grows by the experts' |
        |          |          |               | outputs and by `addends`                          |

        The kernel before a SUM must be an ExpertGemv or Combine.glu: both let the next kernel start
        only when all before them have ended, so ids or logits are read at once.
        """
        first, adds = weights[0], epilogue == "SUM"
        args, per_lane = ExpertGemvArgs(x=address(x), n_used=n_used), 0
        if isinstance(ids, LateChoice):
            args.choice = ids.choice.args(ids.logits, ids.bias)
            per_lane = ids.choice.experts_per_lane
        else:
            args.ids = address(ids)
        as_gemm: Epilogue = "GLU" if epilogue == "GLU" else "STORE"
        args.set_matrices(weights, [out], n_tokens, as_gemm, "silu")
        args.activation = ACTIVATIONS[activation]
        args.expert_bytes = first.layout.nbytes(first.n_rows, first.k)
        if addends is not None:
            args.weights, args.bias[0] = address(addends.weights), address(addends.bias)
            args.shared, args.strength = address(addends.shared), address(addends.strength)
        for i, bias in enumerate(biases):
            args.bias[i] = address(bias)
        n_sms, most = self.device.sm_count, self.device.shared_bytes - STATIC_SHARED
        if adds:
            clusters = has_clusters(self.device.arch)
            shape = sum_shape(first, n_tokens, n_used, n_sms, most, clusters)
        else:
            ctas = first.tile_rows * n_used
            shape = gemv_shape(first.layout, ctas, first.k, 1, len(weights), n_sms, most)
        args.warp_units = shape.warp_units
        kernel = self._kernel(first.layout.type_name, epilogue, shape, per_lane)
        grid = first.tile_rows // shape.tiles * shape.cluster, n_tokens * (1 if adds else n_used)
        block, smem = shape.warps * 32, shape.shared
        kernel.launch(grid, block, (args,), smem=smem, pdl=True, cluster=shape.cluster)

    def _kernel(
        self, layout: str, epilogue: ExpertEpilogue, shape: GemvShape, per_lane: int
    ) -> Kernel:
        flags = f"{str(shape.whole).lower()}, {shape.cluster}, {shape.tiles}"
        instance = f"expert_gemv<{layout}, {epilogue}, {flags}>"
        defines = {"WARPS": shape.warps, "STAGES": shape.stages, "NORM_PIECES": 1}
        defines["EXPERTS_PER_LANE"] = per_lane
        key = instance, *defines.values()
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_gemv.cu", instance, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]
