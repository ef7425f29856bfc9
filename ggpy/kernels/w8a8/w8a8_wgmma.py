"""Launches cuda/w8a8/w8a8_wgmma.cu: the GEMM of 8-bit weights and 8-bit activations on Hopper.

tile_scheduler.py schedules the work tiles; the backend's plan selects the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ...device.base import Device, Kernel
from ..address import Address
from ..attention.rope_kv import RopeEpilogue, set_rope_epilogue
from ..gemm.gemm import Epilogue
from ..gemm.hopper import THREADS, TILE_ROWS, SplitKWorkspace, tile_scheduler_args
from ..gemm.tile_scheduler import Cost, KStages, TileCosts, Tiling, fastest
from ..layout.tile import TiledMatrix
from .quantize_rows import STEP, VALUES, Kind, QuantizedRows
from .w8a8_prefill import ASSERTS, w8a8_args

COSTS = {
    16: Cost(step=0.29, output=1.1, to_all=4.9, to_each=0.7),
    32: Cost(step=0.34, output=2.1, to_all=4.3, to_each=0.5),
    64: Cost(step=0.35, output=2.3, to_all=6.6, to_each=0.6),
    128: Cost(step=0.42, output=4.7, to_all=12.1, to_each=2.3),
    256: Cost(step=0.68, output=7.7, to_all=22.7, to_each=3.1),
}
# One CTA per SM with many stages is faster than two CTAs. w8a8_decode.py takes up to 8 tokens.
TILE_COSTS: dict[Kind, TileCosts] = {
    "int8": TileCosts(COSTS, one_cta_per_sm=True, halves_few=inf),
    "e4m3": TileCosts(
        {t: cost for t, cost in COSTS.items() if t < 256}, one_cta_per_sm=True, halves_few=inf
    ),
}


class W8A8Wgmma:
    """y = x W^T with wgmma. An instance is compiled at its first launch."""

    def __init__(self, device: Device, n_sms: int) -> None:
        self.device, self.n_sms = device, n_sms
        self._kernels: dict[tuple, Kernel] = {}
        self._workspace = SplitKWorkspace(device, n_sms)

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: QuantizedRows,
        outs: Sequence[Address],
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        tiling: Tiling | None = None,
        rope_epilogue: RopeEpilogue | None = None,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = (x weights[i]^T) * x_scale * row_scale.

        STORE: float out = y. ADD: float out += y, with one weight. GLU: f16 out = activation(y0) *
        y1, with two weights. QKV, with `rope_epilogue`: as in GemmWgmma.launch. All weights have
        one layout, with codes of x.kind.
        """
        args = w8a8_args(weights, x, outs, epilogue, None, activation, 0.0)
        set_rope_epilogue(args, weights, epilogue, rope_epilogue)
        row_blocks = -(-args.n_tiles // (TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS))
        stages = KStages(args.n_chunk, STEP, 8.0)
        tiling = tiling or fastest(TILE_COSTS[x.kind], row_blocks, x.n_tokens, stages, self.n_sms)
        tiling = replace(tiling, one_cta_per_sm=True)  # the kernel's shared memory allows only one
        schedule = tiling.schedule(row_blocks, x.n_tokens, args.n_chunk, self.n_sms)
        args.scheduler = tile_scheduler_args(schedule, args.n_chunk)
        if tiling.split:
            self._workspace.attach(args)
        kernel = self._kernel(x.kind, tiling.tokens, epilogue)
        kernel.launch(schedule.ctas, THREADS, (args,), smem=tiling.shared, pdl=True)

    def _kernel(self, kind: Kind, tokens: int, epilogue: Epilogue) -> Kernel:
        key = kind, tokens, epilogue
        if key not in self._kernels:
            name = f"w8a8_wgmma<{VALUES[kind]}, {tokens}, {epilogue}>"
            self._kernels[key] = self.device.kernel(
                "w8a8/w8a8_wgmma.cu", name, extra_source=ASSERTS
            )
        return self._kernels[key]
