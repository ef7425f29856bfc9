"""What launches on Hopper share: who has its instructions, how blocks are made up, and the memory
through which they leave sums to each other (cuda/gemm/tile_scheduler.cuh).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...device.base import Buffer, Device, capability
from .tile_scheduler import TOKENS, Schedule

THREADS = 384  # two warpgroups that multiply, one that copies
TILE_ROWS = 8  # of a block
ROW_BLOCK = TILE_ROWS * 16
EMPTY = 0x80  # each byte of memory for sums where there is none


def has_wgmma(arch: str) -> bool:
    """Whether a GPU of this architecture ("sm_90a") has the instructions."""
    return arch == "sm_90a"


def has_clusters(arch: str) -> bool:
    """Whether blocks of a GPU of this architecture can share their shared memory."""
    return capability(arch) >= 90


class Dealt(ctypes.Structure):
    """The structure of cuda/gemm/tile_scheduler.cuh."""

    _fields_ = (
        ("n_tiles", ctypes.c_int),
        ("token_blocks", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("each", ctypes.c_int),
        ("more", ctypes.c_int),
        ("by_stages", ctypes.c_uint32),
        ("by_token_blocks", ctypes.c_uint32),
        ("paired", ctypes.c_int),
    )


@cache
def dealt(schedule: Schedule, stages: int) -> Dealt:
    """A schedule of tiles with so many stages of K each, as kernels have it."""
    cut = max(0, schedule.tiles - schedule.rounds * schedule.blocks)
    each, more = divmod(cut * stages, schedule.blocks)
    inverses = inverse(stages), inverse(schedule.token_blocks)
    token_blocks, rounds = schedule.token_blocks, schedule.rounds
    sizes = schedule.tiles, token_blocks, rounds, stages, each, more
    return Dealt(*sizes, *inverses, schedule.sharers > 1)


def inverse(divisor: int) -> int:
    """What `divided` of cuda/gemm/tile_scheduler.cuh divides by."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


class LeftSums:
    """Sums that blocks leave to others; launches find and leave it EMPTY (cuda/gemm/tile_scheduler.cuh)."""

    def __init__(self, device: Device, multiprocessors: int) -> None:
        self.device = device
        self.floats = 2 * multiprocessors * ROW_BLOCK * TOKENS[-1]  # of two tiles a block
        self._made: Buffer | None = None

    def give(self, product: Any) -> None:
        """Set `partial` of a product's parameters."""
        if self._made is None:
            self._made = self.device.alloc(4 * self.floats, "partial sums")
            self.device.fill(self._made, EMPTY)
        product.partial = self._made.address
