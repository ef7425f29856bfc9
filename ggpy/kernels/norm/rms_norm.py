"""Launches cuda/norm/rms_norm.cu, RMS norm of rows: one CTA per row, or resident CTAs that take
several rows each. Layer norms and biases are options.
"""

from __future__ import annotations

from typing import Literal

from ...device.base import Device, Kernel
from ..address import Address
from ..gemm.gemm_decode import WARPS
from ..layout.pack import BOTH, PLAIN, steps_of

# for few rows, for many rows
NAMES = ["rms_norm", "add_rms_norm", "rms_norm_rows", "add_rms_norm_rows"]
NEXT = "add_rms_norm_next"  # for few rows, of RMS norms without a bias
MANY = 2  # rows per SM from which on a CTA takes several
NormKind = Literal["rms", "rms with bias", "layer"]
STATIC_SHARED = 1024  # maximum bytes of static shared memory of a CTA


class RmsNorm:
    """Norms of rows of k floats; k is a multiple of 8."""

    def __init__(self, device: Device, warps: int = WARPS, kind: NormKind = "rms") -> None:
        """`warps` per CTA. kind: of all but "rms", weights are [2, k] with the biases in the second
        row, and "layer" subtracts the mean first.
        """
        self.device, self.warps = device, warps
        self._defines = (
            {} if kind == "rms" else {"NORM_BIAS": 1, "NORM_CENTRED": int(kind == "layer")}
        )
        self._kernels: dict[tuple[int, bool], dict[str, Kernel]] = {}

    def to_f16(
        self,
        x: Address,
        rows: Address | None,
        weight: Address,
        out: Address,
        n_rows: int,
        k: int,
        eps: float,
        order: int = PLAIN,
        next_prescale: Address | None = None,
    ) -> None:
        """Enqueues f16 out[n_rows, k] = norm(x[rows]); without `rows`, of the first n_rows rows of
        x.

        order: layout of out (pack.py). next_prescale: f32 [n_rows] that a deferred norm reads
        (deferred_norm.py). ValueError unless k is a multiple of 8.
        """
        arguments = (x, rows, weight, out)
        options, both = (float(eps), steps_of(k), order), order == BOTH
        self._launch(0, arguments, n_rows, k, options, (next_prescale,), both)

    def add(self, x: Address, y: Address, weight: Address, n_rows: int, k: int, eps: float) -> None:
        """Enqueues x[n_rows, k] += norm(y). ValueError unless k is a multiple of 8."""
        self._launch(1, (x, y, weight), n_rows, k, (float(eps),))

    def add_next(
        self,
        x: Address,
        y: Address,
        norm: tuple[Address, float],
        next_norm: tuple[Address, float],
        out: Address,
        n_rows: int,
        k: int,
        order: int = PLAIN,
    ) -> None:
        """Enqueues x[n_rows, k] += norm(y), then f16 out[n_rows, k] = next_norm(x), in one launch
        with the bits of `add` and `to_f16`.

        norm, next_norm: (weight, eps). order: layout of out (pack.py). ValueError unless takes_next
        is true and k is a multiple of 8.
        """
        if not self.takes_next(n_rows):
            raise ValueError(f"{n_rows} rows are too many for two norms in one launch")
        (weight, eps), (next_weight, next_eps) = norm, next_norm
        pointers = x, y, weight, next_weight, out
        options = k, float(eps), float(next_eps), steps_of(k), order
        kernel = self._of(k, order == BOTH)[NEXT]
        kernel.launch(n_rows, 32 * self.warps, (*pointers, *options), pdl=True)

    def takes_next(self, n_rows: int) -> bool:
        """Whether `add_next` takes n_rows rows."""
        return not self._defines and n_rows < MANY * self.device.sm_count

    def resident_ctas(self, k: int) -> int:
        """CTAs of the kernels for many rows that run at the same time; 0 if two rows do not fit in
        the shared memory of a CTA.
        """
        pieces = self._pieces(k)
        if self._shared(k) + STATIC_SHARED > self.device.shared_bytes:
            return 0
        registers = 16 + 8 * (4 if self._defines else 3) * pieces
        return self.device.sm_count * max(1, 65536 // (registers * 32 * self.warps))

    def _launch(
        self,
        which: int,
        pointers: tuple,
        n_rows: int,
        k: int,
        options: tuple,
        of_few: tuple = (),
        both: bool = False,
    ) -> None:
        few, many = (self._of(k, both)[name] for name in NAMES[which::2])
        threads, resident_ctas = 32 * self.warps, self.resident_ctas(k)
        if n_rows < MANY * self.device.sm_count or not resident_ctas or any(of_few):
            few.launch(n_rows, threads, (*pointers, k, *options, *of_few), pdl=True)
            return
        arguments = (*pointers, n_rows, k, *options)
        many.launch(min(n_rows, resident_ctas), threads, arguments, smem=self._shared(k), pdl=True)

    def _pieces(self, k: int) -> int:
        """Pieces of eight columns per thread."""
        return -(-k // (8 * 32 * self.warps))

    def _shared(self, k: int) -> int:
        """Bytes of dynamic shared memory of a CTA that takes many rows: two rows, rounded up."""
        return 2 * self._pieces(k) * 32 * self.warps * 32

    def _of(self, k: int, both: bool) -> dict[str, Kernel]:
        if k % 8:
            raise ValueError(f"rows of {k} columns: the norm kernels need a multiple of 8")
        pieces = self._pieces(k)
        if (pieces, both) not in self._kernels:
            defines = {"WARPS": self.warps, "NORM_PIECES": pieces, **self._defines}
            defines |= {"BOTH_ORDERS": 1} if both else {}
            names = NAMES if self._defines else [*NAMES, NEXT]
            kernels = self.device.kernels("norm/rms_norm.cu", names, defines=defines)
            self._kernels[pieces, both] = dict(zip(names, kernels, strict=True))
        return self._kernels[pieces, both]
