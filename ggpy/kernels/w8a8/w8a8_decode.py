"""Launches cuda/w8a8/w8a8_decode.cu: tiles of 8 bits times 8-bit activations of a few tokens.

Knows how many tokens and ring stages fit in shared memory; which product is made when is ops'
business.
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
from .w8a8_prefill import CHUNK_BYTES, w8a8_product

COLUMNS = (1, 8)  # tokens of one launch at most, an instance each
BATCH = {1: 8, 8: 2}  # tile rows between two barriers


@dataclass(frozen=True)
class Row:
    """x[k] of one token: halves, or with a norm, float [k], floats that are normalised first."""

    kind: Kind
    k: int
    data: Address
    norm: Address | None = None
    eps: float = 0.0


class MulMatW8A8Few:
    """y = x W^T for a few tokens. Instances are compiled as they are asked for."""

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
        """See MulMatW8A8.launch. More tokens than fit into one launch are several.

        One token alone may also be given as a Row, which is quantised inside.
        """
        prologue = "CODES" if isinstance(x, QuantizedRows) else "NORM" if x.norm else "HALVES"
        rows = x if isinstance(x, QuantizedRows) else QuantizedRows(x.kind, 1, x.k, x.data, x.data)
        product = w8a8_product(weights, rows, outs, epilogue, residual, activation, soft_cap)
        if isinstance(x, Row):
            product.norm, product.eps = address(x.norm), x.eps
        grid = min(self.limits.multiprocessors, product.n_tiles)
        product.end_token = 0
        while product.end_token < rows.n_tokens:
            product.first_token = product.end_token
            count, columns, stages, shared = self._fit(rows.n_tokens - product.first_token, x.k)
            product.end_token = product.first_token + count
            kernel = self._kernel(x.kind, x.k, columns, stages, prologue, epilogue)
            kernel.launch(grid, self.limits.warps * 32, (product,), smem=shared, pdl=True)

    def _fit(self, n_tokens: int, k: int) -> tuple[int, int, int, int]:
        """(tokens of a launch, its COLUMNS, ring stages, bytes of shared memory).

        As many tokens as possible with two stages, then as many stages.
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
            self._kernels[key] = self.device.kernel("w8a8/w8a8_decode.cu", name, defines=defines)
        return self._kernels[key]


def shared_bytes(columns: int, n_tokens: int, k: int, stages: int, warps: int) -> int:
    """Dynamic shared memory of a block: rings, partial sums, x."""
    partial = 2 * BATCH[columns] * warps * ROWS * columns * 4
    return warps * stages * CHUNK_BYTES + partial + n_tokens * steps_of(k) * STEP
