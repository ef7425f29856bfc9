"""Launches cuda/moe/join.cu: the experts of each token beside a dense feed-forward."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...device.base import Device, Kernel
from ..address import Address, address
from ..struct_asserts import struct_asserts

WARPS = 8


class JoinArgs(ctypes.Structure):
    """struct JoinArgs of cuda/moe/join.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("dense", "y", "weights", "row_of")),
        *((name, ctypes.c_uint64) for name in ("dense_norm", "experts_norm", "out")),
        *((name, ctypes.c_int) for name in ("k", "n_used")),
        *((name, ctypes.c_float) for name in ("dense_eps", "experts_eps")),
    )


ASSERTS = struct_asserts(JoinArgs)


@dataclass(frozen=True)
class Beside:
    """Operands of `Join`: f32 dense[T, k]; f32 y[T * n_used, k] of the chosen experts, with f32
    weights [T * n_used]; and int row_of[T * n_used] in a sorted step.
    """

    dense: Address
    y: Address
    weights: Address
    row_of: Address | None = None


class Join:
    """The kernel. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[int, Kernel] = {}

    def launch(
        self,
        parts: Beside,
        norms: tuple[tuple[Address, float], tuple[Address, float]],
        out: Address,
        n_tokens: int,
        n_used: int,
        k: int,
    ) -> None:
        """Enqueue f32 out[n_tokens, k] = norm(dense) + norm(sum of the experts); norms: weights [k]
        and eps of both. ValueError unless k is a multiple of 8.
        """
        if k % 8:
            raise ValueError(f"rows of {k} columns: a multiple of 8 is needed")
        (dense, dense_eps), (experts, experts_eps) = norms
        memory = parts.dense, parts.y, parts.weights, parts.row_of, dense, experts, out
        args = JoinArgs(*map(address, memory), k, n_used, dense_eps, experts_eps)
        pieces = -(-k // (8 * 32 * WARPS))
        if pieces not in self._kernels:
            defines = {"WARPS": WARPS, "NORM_PIECES": pieces}
            self._kernels[pieces] = self.device.kernel(
                "moe/join.cu", "join", defines=defines, extra_source=ASSERTS
            )
        self._kernels[pieces].launch(n_tokens, 32 * WARPS, (args,), pdl=True)
