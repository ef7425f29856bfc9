"""Which weights stay in host memory: the experts of a model's first layers.

A backend may ignore this wish.
"""

from __future__ import annotations

from collections.abc import Callable

from ..gguf import Tensor
from .config import Dimensions


def stays_on_host(tensor: Tensor, layer: int | None, n_cpu_moe: int) -> bool:
    """Whether a tensor has the experts of one of the first n_cpu_moe layers."""
    return len(tensor.shape) == 3 and layer is not None and layer < n_cpu_moe


def remark_offload(sizes: Dimensions, n_cpu_moe: int, note: Callable[[str], None] | None) -> None:
    """Tell a user if n_cpu_moe layers have no experts."""
    first = next((i for i, layer in enumerate(sizes.layers) if layer.n_expert), None)
    if note is None or n_cpu_moe == 0 or (first is not None and first < n_cpu_moe):
        return
    if first is None:
        note("this model has no experts: --n-cpu-moe and --cpu-moe change nothing")
        return
    note(
        f"--n-cpu-moe {n_cpu_moe} changes nothing: before layer {first + 1}, this model has no "
        f"experts; take {first + 1} or more"
    )
