"""Launches cuda/w8a8/quantize_rows.cu: activations to 8-bit codes with one scale per token.

The codes are packed as cuda/w8a8/w8a8.cuh describes. This module knows the size of the packed
layout, but not the GEMMs that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...device.base import Device, Kernel
from ..address import Address
from ..gemm.gemm_decode import WARPS

Kind = Literal["int8", "e4m3"]

VALUES: dict[Kind, str] = {"int8": "Integers", "e4m3": "E4M3"}  # C++ types of cuda/layout/tile.cuh
STEP = 128  # rows are padded with zeros to a multiple of so many columns
TOKENS = 8  # tokens are padded with zero rows to a multiple of this number


@dataclass(frozen=True)
class QuantizedRows:
    """x[n_tokens, k] as codes of `kind`, packed, and scales[n_tokens], float."""

    kind: Kind
    n_tokens: int
    k: int
    codes: Address
    scales: Address


def steps_of(k: int) -> int:
    """The number of 128-column steps of packed rows with k columns."""
    return -(-k // STEP)


def codes_bytes(n_tokens: int, k: int) -> int:
    """Bytes of the packed codes of x[n_tokens, k]."""
    return steps_of(k) * STEP * -(-n_tokens // TOKENS) * TOKENS


class QuantizeRows:
    """Quantises activations to 8-bit codes."""

    def __init__(self, device: Device, warps: int = WARPS) -> None:
        """`warps` per CTA must equal those of the RMS-norm kernel, so norms have the same bits."""
        self.device, self.warps = device, warps
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        x: Address,
        dst: QuantizedRows,
        *,
        x_type: Literal["float", "half"] = "half",
        rows: Address | None = None,
        norm: Address | None = None,
        eps: float = 0.0,
    ) -> None:
        """Enqueue dst = quantize(x), of x[n_tokens, k] or of x[rows], rows: int32 [n_tokens].

        norm: float [k], the weight of an RMS norm that is applied to x first; x must be float, and
        norm(x) is rounded to f16. A row with a NaN or an infinity gets a NaN or infinite scale.
        Raises ValueError if k is not a multiple of 8.
        """
        if norm is not None and x_type != "float":
            raise ValueError("x with a norm must be float, not half")
        kernel = self._kernel(dst.kind, x_type, dst.k, norm is not None)
        grid = -(-dst.n_tokens // TOKENS) * TOKENS
        arguments = (x, rows, norm, dst.codes, dst.scales, dst.n_tokens, dst.k, float(eps))
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
