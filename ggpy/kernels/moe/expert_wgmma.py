"""Launches cuda/moe/expert_wgmma.cu: packed rows of sorted pairs times their experts, on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import Epilogue, GemmArgs
from ..gemm.gemm_wgmma import k_stages
from ..gemm.hopper import ROW_BLOCK, THREADS
from ..gemm.tile_scheduler import Tiling
from ..layout.pack import PLAIN, steps_of
from ..layout.tile import Layout, TiledMatrix
from ..struct_asserts import struct_asserts
from .combine import ACTIVATIONS
from .sort import SortedPairs, work_tiles

# Rows of a work tile, each with the most pairs an expert on average: two CTAs with tiles of 64 fit
# on an SM, and larger ones multiply only as many rows as they have. With 288, fewer stages fit.
TILES = ((64, 66), (256, 200), (288, None))
CLUSTERED_ROWS = 256  # of a work tile: CTAs with such tiles form pairs, which copy x for each other


class ExpertWgmmaArgs(GemmArgs):
    """struct ExpertWgmmaArgs of cuda/moe/expert_wgmma.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("x", ctypes.c_uint64),
        ("work", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * 2),
        ("expert_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("n_work", "n_stages", "row_blocks")),
        *((name, ctypes.c_int) for name in ("next_work", "next_block", "order")),
    )


ASSERTS = struct_asserts(ExpertWgmmaArgs)


@dataclass(frozen=True)
class GatedOutput:
    """The output of a GLU: its packed order, the activation, and the biases f32 [n_expert, rows] of
    gate and up.
    """

    order: int
    activation: str = "silu"
    biases: tuple[Address | None, Address | None] = (None, None)


def tile_rows(n_pairs: int, n_expert: int) -> int:
    """Rows of a work tile for so many pairs."""
    return next(n for n, most in TILES if most is None or n_pairs <= most * n_expert)


class ExpertWgmma:
    """The grouped GEMM of packed rows. Instances are compiled at their first launch."""

    def __init__(self, device: Device, n_sms: int) -> None:
        self.device, self.n_sms = device, n_sms
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        pairs: SortedPairs,
        x: Address,
        out: Address,
        n_pairs: int,
        n_expert: int,
        glu: GatedOutput | None = None,
    ) -> None:
        """Enqueue out[row] = x[row] weights[0][expert of the row]^T, f32 [pairs.n_rows, rows of the
        weights]; or with glu, of gate and up, f16 act(gate + bias) * (up + bias), packed.

        weights: the first of the experts, which follow each other; all have one shape and layout.
        x: f16, packed in the order of their layout (pack_pairs.py). pairs: as sort.SortPairs makes
        them, with the unit PACKED_UNIT.
        """
        first, tokens = weights[0], pairs.tile_rows
        epilogue: Epilogue = "STORE" if glu is None else "GLU"
        args = ExpertWgmmaArgs(x=address(x), work=address(pairs.work), order=PLAIN)
        args.set_matrices(weights, [out], pairs.n_rows, epilogue, "silu")
        row_blocks = -(-first.n_rows // ROW_BLOCK)
        if glu is not None:
            args.order, args.activation = glu.order, ACTIVATIONS[glu.activation]
            args.bias[:] = [address(bias) for bias in glu.biases]
            row_blocks = steps_of(first.n_rows)  # a packed output has zeros after the last column
        args.expert_bytes = first.layout.nbytes(first.n_rows, first.k)
        args.n_work = work_tiles(n_pairs, n_expert, tokens)
        args.n_stages = k_stages(first.layout, first.k).count
        cluster, tiling = 2 if tokens >= CLUSTERED_ROWS else 1, Tiling(tokens, False)
        args.row_blocks = -(-row_blocks // cluster)
        resident = self.n_sms * tiling.ctas_per_sm // cluster
        clusters = min(resident, args.n_work * args.row_blocks)
        args.next_work, args.next_block = divmod(clusters, args.row_blocks)
        kernel = self._kernel(first.layout, tokens, epilogue, cluster)
        shape = clusters * cluster, THREADS
        kernel.launch(*shape, (args,), smem=tiling.shared, cluster=cluster, pdl=True)

    def _kernel(self, layout: Layout, tokens: int, epilogue: Epilogue, cluster: int) -> Kernel:
        name = f"expert_wgmma<{layout.type_name}, {tokens}, {epilogue}, {cluster}>"
        key = layout, tokens, epilogue, cluster
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_wgmma.cu", name, extra_source=ASSERTS
            )
        return self._kernels[key]
