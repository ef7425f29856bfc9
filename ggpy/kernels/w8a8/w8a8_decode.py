"""Launches cuda/w8a8/w8a8_decode.cu: the decode GEMM of 8-bit weights and 8-bit activations.

This module computes how many tokens and pipeline stages fit in shared memory. The backend's plan
selects the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import Epilogue
from ..gemm.gemm_decode import Limits
from ..layout.tile import ROWS, TiledMatrix
from .quantize_rows import STEP, VALUES, Kind, QuantizedRows, steps_of
from .w8a8_prefill import ASSERTS, CHUNK_BYTES, w8a8_args

COLUMNS = (1, 8)  # maximum number of tokens per launch; each is an instance of the kernel
BATCH = {1: 8, 8: 2}  # COLUMNS -> tile rows between two barriers


@dataclass(frozen=True)
class Row:
    """x[k] of one token that the GEMM itself quantises.

    x is f16, or float if `norm` is set: float [k], the weight of an RMS norm that the GEMM applies.
    """

    kind: Kind
    k: int
    data: Address
    norm: Address | None = None
    eps: float = 0.0


class W8A8Decode:
    """y = x W^T for decode steps. An instance is compiled at its first launch."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device, self.limits = device, limits
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: QuantizedRows | Row,
        outs: Sequence[Address],
        *,
        epilogue: Epilogue = "STORE",
        residual: Address | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
    ) -> None:
        """See W8A8Prefill.launch. Tokens that do not fit into one launch take several launches.

        A single token may also be a Row, which the kernel quantises.
        """
        prologue = "CODES" if isinstance(x, QuantizedRows) else "NORM" if x.norm else "F16"
        rows = x if isinstance(x, QuantizedRows) else QuantizedRows(x.kind, 1, x.k, x.data, x.data)
        args = w8a8_args(weights, rows, outs, epilogue, residual, activation, soft_cap)
        if isinstance(x, Row):
            args.norm, args.eps = address(x.norm), x.eps
        grid = min(self.limits.n_sms, args.n_tiles)
        args.end_token = 0
        while args.end_token < rows.n_tokens:
            args.first_token = args.end_token
            count, columns, stages, shared = self._fit(rows.n_tokens - args.first_token, x.k)
            args.end_token = args.first_token + count
            kernel = self._kernel(x.kind, x.k, columns, stages, prologue, epilogue)
            kernel.launch(grid, self.limits.warps * 32, (args,), smem=shared, pdl=True)

    def _fit(self, n_tokens: int, k: int) -> tuple[int, int, int, int]:
        """(tokens of a launch, COLUMNS of its instance, stages, bytes of shared memory).

        First maximises the tokens with at least two stages, then the stages. Raises ValueError if
        one token with one stage does not fit.
        """
        for least in (2, 1):
            for count in range(min(n_tokens, COLUMNS[-1]), 0, -1):
                columns = next(c for c in COLUMNS if c >= count)
                for stages in range(self.limits.stages, least - 1, -1):
                    shared = shared_bytes(columns, count, k, stages, self.limits.warps)
                    if shared <= self.limits.shared:
                        return count, columns, stages, shared
        raise ValueError(
            f"a token of {k} columns needs more than {self.limits.shared} bytes of shared memory"
        )

    def _kernel(
        self, kind: Kind, k: int, columns: int, stages: int, prologue: str, epilogue: Epilogue
    ) -> Kernel:
        warps = self.limits.warps
        pieces = -(-k // (8 * 32 * warps)) if prologue != "CODES" else 1
        key = kind, pieces, columns, stages, prologue, epilogue
        if key not in self._kernels:
            name = f"w8a8_decode<{VALUES[kind]}, {columns}, {prologue}, {epilogue}>"
            defines = {"WARPS": warps, "STAGES": stages, "NORM_PIECES": pieces}
            self._kernels[key] = self.device.kernel(
                "w8a8/w8a8_decode.cu", name, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]


def shared_bytes(columns: int, n_tokens: int, k: int, stages: int, warps: int) -> int:
    """Dynamic shared memory of a CTA: pipeline stages, partial sums, x."""
    partial = 2 * BATCH[columns] * warps * ROWS * columns * 4
    return warps * stages * CHUNK_BYTES + partial + n_tokens * steps_of(k) * STEP
