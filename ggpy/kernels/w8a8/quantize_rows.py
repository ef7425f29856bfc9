"""Launches cuda/w8a8/quantize_rows.cu: activations to 8-bit codes with one scale per token, in the order
that the products of cuda/w8a8/w8a8.cuh take.

Knows the order's size, nothing of the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...device.base import Device, Kernel
from ..address import Address
from ..gemm.gemm_decode import WARPS

Kind = Literal["int8", "e4m3"]

VALUES: dict[Kind, str] = {"int8": "Integers", "e4m3": "E4M3"}  # C++ types of cuda/layout/tile.cuh
STEP = 128  # columns up to a multiple of which rows are padded with zeros
TOKENS = 8  # up to a multiple of which rows of zeros follow


@dataclass(frozen=True)
class QuantizedRows:
    """x[n_tokens, k] as codes of `kind`, packed, and scales[n_tokens], float."""

    kind: Kind
    n_tokens: int
    k: int
    codes: Address
    scales: Address


def steps_of(k: int) -> int:
    """Steps of 128 columns of rows of k columns."""
    return -(-k // STEP)


def codes_bytes(n_tokens: int, k: int) -> int:
    """Bytes of the codes of x[n_tokens, k]."""
    return steps_of(k) * STEP * -(-n_tokens // TOKENS) * TOKENS


class QuantizeRows:
    """Quantises rows of k numbers, k a multiple of 8."""

    def __init__(self, device: Device, warps: int = WARPS) -> None:
        """`warps` as in the norm kernel, whose norm must give the same bits."""
        self.device, self.warps = device, warps
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        x: Address,
        to: QuantizedRows,
        *,
        x_type: Literal["float", "half"] = "half",
        rows: Address | None = None,
        norm: Address | None = None,
        eps: float = 0.0,
    ) -> None:
        """Enqueue the codes and scales of x[n_tokens, k], or of its rows int[n_tokens].

        norm: of norm(x), rounded to halves; x is float then. A row that holds NaN or infinity gets
        such a scale.
        """
        if norm is not None and x_type != "float":
            raise ValueError("what is normalised is float, not half")
        kernel = self._kernel(to.kind, x_type, to.k, norm is not None)
        grid = -(-to.n_tokens // TOKENS) * TOKENS
        arguments = (x, rows, norm, to.codes, to.scales, to.n_tokens, to.k, float(eps))
        kernel.launch(grid, self.warps * 32, arguments, pdl=True)

    def _kernel(self, kind: Kind, x_type: str, k: int, norm: bool) -> Kernel:
        if k % 8:
            raise ValueError(f"rows of {k} columns cannot be quantised: take a multiple of 8")
        pieces = -(-k // (8 * 32 * self.warps))
        key = kind, x_type, pieces, norm
        if key not in self._kernels:
            name = f"quantize_rows<{VALUES[kind]}, {x_type}, {'true' if norm else 'false'}>"
            defines = {"WARPS": self.warps, "NORM_PIECES": pieces}
            self._kernels[key] = self.device.kernel("w8a8/quantize_rows.cu", name, defines=defines)
        return self._kernels[key]
