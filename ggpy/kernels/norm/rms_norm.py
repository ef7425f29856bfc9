"""Launches cuda/norm/rms_norm.cu: RMS norm of rows, of few a block each, of many several a block."""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from ..gemm.gemm_decode import WARPS
from ..layout.pack import PLAIN, steps_of

NAMES = ["rms_norm", "add_rms_norm", "rms_norm_rows", "add_rms_norm_rows"]  # for few, for many
MANY = 2  # rows per multiprocessor, from which on blocks take several
STATIC_SHARED = 1024  # bytes, at most


class RmsNorm:
    """Norms of rows of k floats, k a multiple of 8."""

    def __init__(self, device: Device, warps: int = WARPS) -> None:
        """`warps` of a block."""
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
        after: Address | None = None,
    ) -> None:
        """Enqueue half out[n_rows, k] = norm(x[rows]), or of the first n_rows of x.

        order: out is packed (see pack.py). after: see handed.py.
        """
        arguments = (x, rows, weight, out)
        self._launch(0, arguments, n_rows, k, (float(eps), steps_of(k), order), (after,))

    def add(self, x: Address, y: Address, weight: Address, n_rows: int, k: int, eps: float) -> None:
        """Enqueue x[n_rows, k] += norm(y)."""
        self._launch(1, (x, y, weight), n_rows, k, (float(eps),))

    def at_once(self, k: int) -> int:
        """Blocks for many rows that run at the same time; 0 where two rows do not fit in one."""
        pieces = self._pieces(k)
        if self._shared(k) + STATIC_SHARED > self.device.shared_bytes:
            return 0
        return self.device.sm_count * max(1, 65536 // ((16 + 24 * pieces) * 32 * self.warps))

    def _launch(
        self,
        which: int,
        pointers: tuple,
        n_rows: int,
        k: int,
        options: tuple,
        of_few: tuple = (),
    ) -> None:
        few, many = self._of(k)[which::2]
        threads, at_once = 32 * self.warps, self.at_once(k)
        if n_rows < MANY * self.device.sm_count or not at_once or any(of_few):
            few.launch(n_rows, threads, (*pointers, k, *options, *of_few), pdl=True)
            return
        arguments = (*pointers, n_rows, k, *options)
        many.launch(min(n_rows, at_once), threads, arguments, smem=self._shared(k), pdl=True)

    def _pieces(self, k: int) -> int:
        """Of eight columns each, that a thread has."""
        return -(-k // (8 * 32 * self.warps))

    def _shared(self, k: int) -> int:
        """Bytes of dynamic shared memory of a block for many rows: two rows, rounded up."""
        return 2 * self._pieces(k) * 32 * self.warps * 32

    def _of(self, k: int) -> list[Kernel]:
        if k % 8:
            raise ValueError(f"rows of {k} columns: the norm kernels take multiples of 8")
        pieces = self._pieces(k)
        if pieces not in self._kernels:
            defines = {"WARPS": self.warps, "NORM_PIECES": pieces}
            self._kernels[pieces] = self.device.kernels("norm/rms_norm.cu", NAMES, defines=defines)
        return self._kernels[pieces]
