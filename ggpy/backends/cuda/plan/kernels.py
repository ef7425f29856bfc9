"""The GEMM kernels of one GPU, as launch wrappers: plans ask them what fits, products launch them.

Constructing them compiles nothing and allocates nothing.
"""

from __future__ import annotations

from typing import Any

from ....kernels.gemm.gemm import STATIC_SHARED
from ....kernels.gemm.gemm_decode import GemmDecode, Limits, warps_for
from ....kernels.gemm.gemm_prefill import GemmPrefill
from ....kernels.gemm.gemm_skinny import GemmSkinny
from ....kernels.gemm.gemm_wgmma import DEFERRED_NORM_TOKENS, GemmWgmma
from ....kernels.gemm.hopper import ROW_BLOCK, SplitKWorkspace
from ....kernels.layout.pack import Pack
from ....kernels.layout.tile import ROWS
from ....kernels.moe.expert_gemm import ExpertGemm
from ....kernels.moe.expert_rows import ExpertRows
from ....kernels.norm.rms_norm import RmsNorm
from ....kernels.w8a8.quantize_rows import QuantizeRows
from ....kernels.w8a8.w8a8_decode import W8A8Decode
from ....kernels.w8a8.w8a8_prefill import W8A8Prefill
from ....kernels.w8a8.w8a8_wgmma import W8A8Wgmma


class GemmKernels:
    """All GEMM kernels, whether or not the GPU supports them; plans choose among the supported
    ones.
    """

    # tokens of GemmWgmma's smallest tile, the only one that defers norms
    deferred_tokens = DEFERRED_NORM_TOKENS

    def __init__(self, device: Any) -> None:
        shared, n_sms = device.shared_bytes - STATIC_SHARED, device.sm_count
        self.warps = warps_for(shared)
        limits = Limits(shared, n_sms=n_sms, warps=self.warps)
        workspace = SplitKWorkspace(device, n_sms)
        self.decode = GemmDecode(device, limits)
        self.skinny = GemmSkinny(device, n_sms, workspace)
        self.wgmma = GemmWgmma(device, n_sms, workspace)
        self.prefill = GemmPrefill(device)
        self.experts = ExpertGemm(device)
        self.expert_rows = ExpertRows(device)
        self.pack = Pack(device)
        self.rms_norm = RmsNorm(device, self.warps)
        self.w8a8_decode = W8A8Decode(device, limits)
        self.w8a8_prefill = W8A8Prefill(device)
        self.w8a8_wgmma = W8A8Wgmma(device, n_sms)
        self.quantize_rows = QuantizeRows(device, self.warps)

    @staticmethod
    def square_columns(is_skinny: bool) -> int:
        """Columns per sum of squares that a GEMM with a deferred norm stores."""
        return ROWS if is_skinny else ROW_BLOCK
