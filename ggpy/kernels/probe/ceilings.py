"""Launches cuda/probe/ceilings.cu, which measures memory bandwidth and tensor-core throughput."""

from __future__ import annotations

from ...device.base import Device
from ..address import Address

MATRIX_THREADS = 256
FLOPS_PER_ITERATION = 1 << 21  # floating-point operations of a CTA of matrix_rate per iteration


LOADS_IN_FLIGHT = (2, 4, 8)  # 16-byte loads in flight per thread; each is an instance of read_rate


class ProbeKernels:
    """The kernels read_rate and matrix_rate. All instances are compiled in one program."""

    def __init__(self, device: Device) -> None:
        names = [f"read_rate<{n}>" for n in LOADS_IN_FLIGHT]
        *reads, self._matrix = device.kernels("probe/ceilings.cu", [*names, "matrix_rate"])
        self._read = dict(zip(LOADS_IN_FLIGHT, reads, strict=True))

    def read(
        self,
        data: Address,
        nbytes: int,
        result: Address,
        ctas: int,
        threads: int,
        loads_in_flight: int,
    ) -> None:
        """Enqueue uint32 result[ctas * threads / 32] = the XOR of the words that each warp reads.

        The XOR of all results is the XOR of all 4-byte words of the first nbytes of data. Raises
        ValueError if nbytes is not a multiple of 16 or threads is not a multiple of 32.
        """
        if nbytes % 16 or threads % 32:
            raise ValueError(f"{nbytes} bytes by {threads} threads: multiples of 16 and of 32")
        self._read[loads_in_flight].launch(ctas, threads, (data, nbytes // 16, result))

    def multiply(self, result: Address, ctas: int, iterations: int) -> None:
        """Enqueue ctas * iterations * FLOPS_PER_ITERATION operations, f16 with f32 sums.

        result: f32 [ctas * MATRIX_THREADS].
        """
        self._matrix.launch(ctas, MATRIX_THREADS, (iterations, result))
