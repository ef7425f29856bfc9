"""Launches cuda/delta/delta_decode.cu: a gated delta net of one token a sequence, in one kernel."""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from ..gemm.hopper import has_clusters
from ..struct_asserts import struct_asserts
from .delta import (
    LANES,
    ROW,
    DeltaArgs,
    DeltaBuffers,
    DeltaShape,
    DeltaStep,
    DeltaWeights,
    args_of,
)

MOST_THREADS = 1024
ASSERTS = struct_asserts(DeltaArgs)


def cluster_of(shape: DeltaShape, arch: str) -> int:
    """CTAs that take a value head: with clusters, one for each 32 columns; 0: no kernel fits."""
    if has_clusters(arch) and shape.quads in (1, 2, 4, 8):
        return shape.quads
    return int(shape.quads * ROW * LANES <= MOST_THREADS)


class DeltaDecode:
    """The kernel of one shape."""

    def __init__(self, device: Device, shape: DeltaShape, cluster: int | None = None) -> None:
        """cluster: CTAs of a value head; None: as cluster_of says. ValueError for what the kernel
        does not compute.
        """
        self.shape = shape
        self.cluster = cluster_of(shape, device.arch) if cluster is None else cluster
        if shape.problem or not self.cluster:
            raise ValueError(shape.problem or f"heads of {shape.size} on {device.arch}")
        name = f"delta_decode<{shape.quads}, {self.cluster}, {shape.taps}>"
        (self._kernel,) = device.kernels("delta/delta_decode.cu", [name], extra_source=ASSERTS)

    def launch(
        self,
        step: DeltaStep,
        state: tuple[Address, Address],
        weights: DeltaWeights,
        buffers: DeltaBuffers,
    ) -> None:
        """Enqueue out, with the bits of DeltaNet; u, decay and o are not used. Each token of the
        step is the only one of its sequence.
        """
        if step.n_tokens != step.n_sequences:
            raise ValueError(f"{step.n_tokens} tokens of {step.n_sequences} sequences")
        args = (args_of(self.shape, step, state, weights, buffers),)
        quads, columns = self.shape.quads, self.shape.quads * ROW // self.cluster
        floats = 2 * ROW * quads + 2 * columns + 2 * quads + 2 * quads
        grid = self.cluster * self.shape.n_v_head, step.n_tokens
        threads, smem = columns * LANES, 4 * floats
        self._kernel.launch(grid, threads, args, smem=smem, pdl=True, cluster=self.cluster)
