"""The most static shared memory that a kernel with dynamic shared memory may have, in bytes.

Wrappers leave room for it; tests of compilation compare it with what ptxas reports.
"""

from __future__ import annotations

import re

from ggpy.kernels.attention.paged_attention import ROWS
from ggpy.kernels.attention.paged_attention import STATIC_SHARED as ATTEND
from ggpy.kernels.gemm.gemm import STATIC_SHARED as PRODUCT


def most_static(source: str, name: str) -> int:
    """Of the kernel `name` of cuda/`source`."""
    if source in ("attention/prefill_attention.cu", "attention/prefill_attention_wgmma.cu"):
        return 0
    if source != "attention/paged_attention.cu":
        return PRODUCT
    fused = re.match(r"paged_attention<(\d+), true", name)  # which keeps its queries there
    return ATTEND + (2 * ROWS * int(fused[1]) if fused else 0)
