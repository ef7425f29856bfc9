"""Launches cuda/delta/delta_net.cu: a gated delta net between its products."""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from ..struct_asserts import struct_asserts
from .delta import (
    CHUNK,
    LANES,
    DeltaArgs,
    DeltaBuffers,
    DeltaShape,
    DeltaStep,
    DeltaWeights,
    args_of,
)
from .delta_chunks import DeltaChunks

COLUMNS = 16  # of a CTA of delta_scan
HEADS, CONV_TOKENS = 8, 4  # of a CTA of delta_conv and delta_norm; of a warp of delta_conv
LONG = 8  # tokens of a sequence on average: see ahead_of
ASSERTS = struct_asserts(DeltaArgs)


def ahead_of(shape: DeltaShape) -> tuple[int, int]:
    """Tokens in flight of delta_scan, of steps with few tokens for each sequence, and with LONG or
    more. A token takes less time than its loads; but with few, more CTAs on an SM, which take fewer
    registers each, are faster.
    """
    return 1, 4 if shape.quads <= 4 else 2


class DeltaNet:
    """The kernels of one shape for steps of any number of tokens."""

    def __init__(self, device: Device, shape: DeltaShape, chunked: bool = False) -> None:
        """chunked: chunks of CHUNK tokens are computed by tensor cores. ValueError for what no
        kernel computes.
        """
        if shape.problem:
            raise ValueError(shape.problem)
        self.shape = shape
        names = [f"delta_conv<{shape.quads}, {shape.taps}>", f"delta_norm<{shape.quads}>"]
        names += [f"delta_scan<{shape.quads}, {n}>" for n in ahead_of(shape)]
        found: list[Kernel] = device.kernels("delta/delta_net.cu", names, extra_source=ASSERTS)
        self._conv, self._norm, *self._scans = found
        self._chunks = DeltaChunks(device, shape) if chunked else None

    def launch(
        self,
        step: DeltaStep,
        state: tuple[Address, Address],
        weights: DeltaWeights,
        buffers: DeltaBuffers,
    ) -> None:
        """Enqueue u, o and out; see args_of."""
        s, n, chunks = self.shape, step.n_tokens, self._chunks
        args = args_of(s, step, state, weights, buffers, chunks is not None)
        heads = -(-(2 * s.n_k_head + s.n_v_head) // HEADS)
        self._conv.launch((heads, -(-n // CONV_TOKENS)), HEADS * 32, (args,), pdl=True)
        if chunks is not None:
            chunks.launch(args)
        if chunks is None or step.n_sequences > 1 or n % CHUNK:
            grid = s.n_v_head * -(-s.size // COLUMNS), step.n_sequences
            scan = self._scans[n >= LONG * step.n_sequences]
            scan.launch(grid, COLUMNS * LANES, (args,), pdl=True)
        self._norm.launch((-(-s.n_v_head // HEADS), n), HEADS * 32, (args,), pdl=True)
