"""The most static shared memory that a kernel with dynamic shared memory may have, in bytes.

Wrappers subtract it from the dynamic shared memory; compile tests compare it with ptxas's report.
"""

from __future__ import annotations

import re

from ggpy.kernels.attention.paged_attention import ROWS
from ggpy.kernels.attention.paged_attention import STATIC_SHARED as ATTEND
from ggpy.kernels.gemm.gemm import STATIC_SHARED as PRODUCT


def most_static(source: str, name: str) -> int:
    """The maximum of kernel `name` of cuda/`source`."""
    if source.startswith("attention/prefill_attention"):
        return 0
    if source != "attention/paged_attention.cu":
        return PRODUCT
    fused = re.match(r"paged_attention<(\d+), true", name)  # keeps its queries in shared memory
    return ATTEND + (2 * ROWS * int(fused[1]) if fused else 0)
