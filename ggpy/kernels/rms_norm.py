"""Launches cuda/rms_norm.cu: RMS norm of rows, a block each."""

from __future__ import annotations

from ..device.base import Device, Kernel
from .address import Address
from .mul_mat_tile import WARPS
from .pack import PLAIN, steps_of


class RmsNorm:
    """Norms of rows of k floats, k a multiple of 8."""

    def __init__(self, device: Device, warps: int = WARPS) -> None:
        """`warps` as in the products, whose own norm must give the same bits."""
        self.device, self.warps = device, warps
        self._kernels: dict[int, list[Kernel]] = {}

    def to_half(
        self,
        x: Address,
        rows: Address | None,
        weight: Address,
        out: Address,
        n_rows: int,
        k: int,
        eps: float,
        order: int = PLAIN,
    ) -> None:
        """Enqueue half out[n_rows, k] = norm(x[rows]), or of the first n_rows of x.

        order: out is packed (see pack.py).
        """
        arguments = (x, rows, weight, out, k, float(eps), steps_of(k), order)
        self._of(k)[0].launch(n_rows, self.warps * 32, arguments, pdl=True)

    def add(self, x: Address, y: Address, weight: Address, n_rows: int, k: int, eps: float) -> None:
        """Enqueue x[n_rows, k] += norm(y)."""
        self._of(k)[1].launch(n_rows, self.warps * 32, (x, y, weight, k, float(eps)), pdl=True)

    def _of(self, k: int) -> list[Kernel]:
        if k % 8:
            raise ValueError(f"rows of {k} columns: the norm kernels take multiples of 8")
        pieces = -(-k // (8 * 32 * self.warps))
        if pieces not in self._kernels:
            defines = {"WARPS": self.warps, "NORM_PIECES": pieces}
            self._kernels[pieces] = self.device.kernels(
                "rms_norm.cu", ["rms_norm", "add_rms_norm"], defines=defines
            )
        return self._kernels[pieces]
