"""Launches cuda/delta/delta_chunks.cu: the recurrence of a gated delta net over whole chunks."""

from __future__ import annotations

from ...device.base import Device, capability
from ..struct_asserts import struct_asserts
from .delta import CHUNK, DeltaArgs, DeltaShape

SIZE = 128  # elements of a head
COLUMNS, THREADS = 32, 256  # of a CTA of delta_chunk_scan; of both
PITCH = SIZE + 8  # bf16 from a row of keys or queries to the next
SOLVE_SHARED = 2 * 2 * (2 * CHUNK) * PITCH  # bytes of SolveStorage
ASSERTS = struct_asserts(DeltaArgs)
FIRST_ARCH = 80  # compute capability of the first GPUs that multiply bf16


def has_chunks(shape: DeltaShape, arch: str) -> bool:
    """Whether there are kernels for chunks of heads of this size."""
    return shape.size == SIZE and capability(arch) >= FIRST_ARCH


class DeltaChunks:
    """The kernels for heads of SIZE elements."""

    def __init__(self, device: Device, shape: DeltaShape) -> None:
        """ValueError if there are none."""
        if not has_chunks(shape, device.arch):
            raise ValueError(f"chunks of heads of {shape.size} on {device.arch}")
        names = ["delta_chunk_solve", "delta_chunk_scan"]
        found = device.kernels("delta/delta_chunks.cu", names, extra_source=ASSERTS)
        self._solve, self._scan = found
        self._n_sms = device.sm_count

    def launch(self, args: DeltaArgs) -> None:
        """Enqueue o and the states of the whole chunks of each sequence, from u and decay. An SM
        has one CTA that scans; others would wait for it, even with nothing to do.
        """
        grid = args.n_v_head, -(-args.n_tokens // CHUNK)
        self._solve.launch(grid, THREADS, (args,), smem=SOLVE_SHARED, pdl=True)
        ctas = args.n_v_head * (SIZE // COLUMNS)
        most = min(args.n_sequences, args.n_tokens // CHUNK)  # sequences with chunks
        grid = ctas, max(1, min(most, self._n_sms // ctas))
        self._scan.launch(grid, THREADS, (args,), pdl=True)
