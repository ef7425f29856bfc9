"""Launches cuda/probe/ceilings.cu: reads memory, or multiplies matrices, as fast as the GPU can."""

from __future__ import annotations

from ...device.base import Device
from ..address import Address

MATRIX_THREADS = 256
FLOPS_PER_ITERATION = 1 << 21  # of a block of matrix_rate


AT_ONCE = (2, 4, 8)  # loads of 16 bytes that a thread has under way, an instance each


class Ceilings:
    """The two kernels; those that read are compiled together."""

    def __init__(self, device: Device) -> None:
        names = [f"read_rate<{n}>" for n in AT_ONCE]
        *reads, self._matrix = device.kernels("probe/ceilings.cu", [*names, "matrix_rate"])
        self._read = dict(zip(AT_ONCE, reads, strict=True))

    def read(
        self, data: Address, nbytes: int, result: Address, blocks: int, threads: int, at_once: int
    ) -> None:
        """Enqueue uint32 result[blocks * threads / 32]: all 4-byte words of the first nbytes of
        data, combined by exclusive or, are those of the result.
        """
        if nbytes % 16 or threads % 32:
            raise ValueError(f"{nbytes} bytes by {threads} threads: multiples of 16 and of 32")
        self._read[at_once].launch(blocks, threads, (data, nbytes // 16, result))

    def multiply(self, result: Address, blocks: int, iterations: int) -> None:
        """Enqueue blocks * iterations * FLOPS_PER_ITERATION operations, f16 into f32.

        result: f32[blocks * MATRIX_THREADS].
        """
        self._matrix.launch(blocks, MATRIX_THREADS, (iterations, result))
