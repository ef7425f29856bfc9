"""What launches on Hopper share: who has its instructions, how blocks are made up, and the memory
through which they leave sums to each other (cuda/shares.cuh).
"""

from __future__ import annotations

from typing import Any

from ..device.base import Buffer, Device
from .schedule import TOKENS

THREADS = 384  # two warpgroups that multiply, one that copies
WARPS = 8  # that multiply
TILE_ROWS = 8  # of a block
ROW_BLOCK = TILE_ROWS * 16


def has_wgmma(arch: str) -> bool:
    """Whether a GPU of this architecture ("sm_90a") has the instructions."""
    return arch == "sm_90a"


class LeftSums:
    """Sums that blocks leave to others, and flags that say so; launches clear the flags."""

    def __init__(self, device: Device, multiprocessors: int) -> None:
        self.device, self.multiprocessors = device, multiprocessors
        self._made: tuple[Buffer, Buffer] | None = None

    def give(self, product: Any) -> None:
        """Set `partial` and `ready` of a product's parameters."""
        if self._made is None:
            floats = self.multiprocessors * ROW_BLOCK * TOKENS[-1]
            flags = 2 * self.multiprocessors * WARPS
            self._made = (
                self.device.alloc(4 * floats, "partial sums"),
                self.device.zeros(4 * flags, "flags of partial sums"),
            )
        product.partial, product.ready = (buffer.address for buffer in self._made)
