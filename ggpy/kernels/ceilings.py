"""Launches cuda/ceilings.cu: reads memory, or multiplies matrices, as fast as the GPU can."""

from __future__ import annotations

from ..device.base import Device
from .address import Address

MATRIX_THREADS = 256
FLOPS_PER_ITERATION = 1 << 21  # of a block of matrix_rate


class Ceilings:
    """The two kernels."""

    def __init__(self, device: Device) -> None:
        self._read, self._matrix = device.kernels("ceilings.cu", ["read_rate", "matrix_rate"])

    def read(self, data: Address, nbytes: int, result: Address, blocks: int, threads: int) -> None:
        """Enqueue *result (uint32) ^= every 4 bytes of the first nbytes of data."""
        if nbytes % 16 or threads % 32:
            raise ValueError(f"{nbytes} bytes by {threads} threads: multiples of 16 and of 32")
        self._read.launch(blocks, threads, (data, nbytes // 16, result))

    def multiply(self, result: Address, blocks: int, iterations: int) -> None:
        """Enqueue blocks * iterations * FLOPS_PER_ITERATION operations, f16 into f32.

        result: f32[blocks * MATRIX_THREADS].
        """
        self._matrix.launch(blocks, MATRIX_THREADS, (iterations, result))
