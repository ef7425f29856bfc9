"""Common parts of GEMM launches on Hopper: which GPUs support them, the shape of a CTA, the
parameters of a tile schedule, and the split-K workspace (cuda/gemm/tile_scheduler.cuh).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...device.base import Buffer, Device, capability
from .tile_scheduler import TOKENS, TileSchedule

THREADS = 384  # two consumer warpgroups and a producer warpgroup
TILE_ROWS = 8  # tile rows of a CTA
ROW_BLOCK = TILE_ROWS * 16
EMPTY = 0x80  # each byte of an empty word of the split-K workspace


def has_wgmma(arch: str) -> bool:
    """Whether a GPU of this architecture ("sm_90a") has wgmma."""
    return arch == "sm_90a"


def has_clusters(arch: str) -> bool:
    """Whether a GPU of this architecture has clusters of CTAs."""
    return capability(arch) >= 90


class TileSchedulerArgs(ctypes.Structure):
    """struct TileSchedulerArgs of cuda/gemm/tile_scheduler.cuh."""

    _fields_ = (
        ("n_tiles", ctypes.c_int),
        ("token_blocks", ctypes.c_int),
        ("waves", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("team", ctypes.c_int),
        ("stages_per_cta", ctypes.c_int),
        ("remainder", ctypes.c_int),
        ("inverse_stages", ctypes.c_uint32),
        ("inverse_token_blocks", ctypes.c_uint32),
        ("inverse_team", ctypes.c_uint32),
        ("paired", ctypes.c_int),
    )


@cache
def tile_scheduler_args(schedule: TileSchedule, stages: int) -> TileSchedulerArgs:
    """Kernel parameters of a schedule whose tiles have `stages` stages of K each."""
    split_tiles = max(0, schedule.tiles - schedule.waves * schedule.ctas)
    token_blocks, waves, split_k = schedule.token_blocks, schedule.waves, schedule.tiling.split_k
    shared, ctas = (stages, split_k) if split_k else (split_tiles * stages, schedule.ctas)
    sizes = schedule.tiles, token_blocks, waves, stages, split_k, *divmod(shared, ctas)
    inverses = map(inverse, (stages, token_blocks, split_k or 1))
    return TileSchedulerArgs(*sizes, *inverses, schedule.cluster > 1)


def inverse(divisor: int) -> int:
    """The inverse that `divided` in cuda/gemm/tile_scheduler.cuh multiplies by: floor(2^32 / d) +
    1, or 0 for d = 1.
    """
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


class SplitKWorkspace:
    """The split-K workspace: partial sums that CTAs pass to each other. Every word is EMPTY before
    and after each launch (cuda/gemm/tile_scheduler.cuh).
    """

    def __init__(self, device: Device, n_sms: int) -> None:
        self.device = device
        self.floats = 2 * n_sms * ROW_BLOCK * TOKENS[-1]  # two tiles per SM
        self._made: Buffer | None = None

    def attach(self, args: Any, first: int = 0) -> None:
        """Set `partial` in a GEMM's parameters, at so many floats; allocates the workspace at the
        first call.
        """
        if self._made is None:
            self._made = self.device.alloc(4 * self.floats, "partial sums")
            self.device.fill(self._made, EMPTY)
        args.partial = self._made.address + 4 * first
