"""Which weights stay in the memory of the host: the experts of a model's first layers.

A layer has its number in the names of its tensors; what a backend does with the wish is its own.
"""

from __future__ import annotations

import re

from ..gguf import Tensor
from .config import Dimensions

ALL_LAYERS = 999  # more than any model has


def layer_of(name: str) -> int | None:
    """The layer whose tensor this is; None for a tensor of no layer."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None


def stays_on_host(tensor: Tensor, layer: int | None, n_cpu_moe: int) -> bool:
    """Whether a tensor has the experts of one of the first n_cpu_moe layers."""
    return len(tensor.shape) == 3 and layer is not None and layer < n_cpu_moe


def remark(sizes: Dimensions, n_cpu_moe: int) -> str:
    """What to tell a user whose n_cpu_moe changes nothing; "" if it changes something."""
    with_experts = [i for i, layer in enumerate(sizes.layers) if layer.n_expert]
    if not n_cpu_moe or (with_experts and with_experts[0] < n_cpu_moe):
        return ""
    if not with_experts:
        return "this model has no experts: --n-cpu-moe and --cpu-moe change nothing"
    return (
        f"the first layer with experts is layer {with_experts[0]}, counted from 0: --n-cpu-moe "
        f"{n_cpu_moe} changes nothing, take {with_experts[0] + 1} or more"
    )
