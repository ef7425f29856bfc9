"""Device memory for tests of kernels: matrices, and outputs that are NaN before the launch and
followed by bytes that must survive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import Case, repeated

from ggpy.device import Buffer
from ggpy.kernels.blocks.block_kernel import BlockMatrix

POISON, GUARD = 0xFF, 0xA5  # 0xff... is NaN in every float type
GUARD_BYTES = 1024


class Output:
    """An output of `nbytes` bytes. A kernel must write all of them and nothing else."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        # Under the sanitizer, the end of the allocation is the better guard.
        self.guard = 0 if getattr(device, "sanitize", False) else GUARD_BYTES
        self.buffer: Buffer = device.alloc(nbytes + self.guard, "output")
        bytes_ = np.full(nbytes + self.guard, POISON, np.uint8)
        bytes_[nbytes:] = GUARD
        device.upload(self.buffer, bytes_)

    def read(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The output. AssertionError if it is not `nbytes` long or the guard bytes changed."""
        data = self.device.download(self.buffer, np.uint8, self.nbytes + self.guard)
        assert (data[self.nbytes :] == GUARD).all(), "bytes after the output were written"
        return data[: self.nbytes].view(dtype).reshape(shape)


def upload(device: Any, array: np.ndarray) -> Buffer:
    """A buffer that holds exactly the array."""
    array = np.ascontiguousarray(array)
    buffer: Buffer = device.alloc(array.nbytes, "input")
    device.upload(buffer, array)
    return buffer


def matrix_of(device: Any, case: Case, blocks: np.ndarray) -> BlockMatrix:
    """The matrix of a case on the device; `blocks` comes from random_matrix."""
    data = upload(device, repeated(blocks, case.rows))
    return BlockMatrix(case.block, case.rows, case.columns, data)
