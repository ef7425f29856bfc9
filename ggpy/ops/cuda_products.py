"""Products with weights on a GPU, whatever these lie in: tiles, or blocks of a file.

Which launches a product takes is decided here; where its operands come from is not.
"""

from __future__ import annotations

from typing import Any

from ..kernels.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ..kernels.elementwise import Elementwise
from ..kernels.mul_mat_q import MulMatQ
from ..kernels.mul_mat_tile import Epilogue, Limits, MulMatTile, warps_for
from .cuda_arrays import Array, Matrix, one_layout
from .interface import Norm

MANY_TOKENS = 32  # of a step with a prompt, from which on the product for many is faster
STATIC_SHARED = 1 << 10  # bytes of a block's shared memory that kernels declare themselves


class Products:
    """Multiplies; kernels are compiled as they are needed."""

    def __init__(self, device: Any, elementwise: Elementwise) -> None:
        shared = device.shared_bytes - STATIC_SHARED
        self.warps = warps_for(shared)
        limits = Limits(shared, multiprocessors=device.sm_count, warps=self.warps)
        self.device = device
        self._tiles = MulMatTile(device, limits)
        self._elementwise = elementwise
        self._many = MulMatQ(device) if MulMatQ.fits(shared) else None
        self.prompt = False  # the step has a prompt: what rounds weights to halves may be used

    def multiply(
        self,
        x: Array,
        weights: list[Matrix],
        outs: list[Array],
        epilogue: Epilogue = "STORE",
        norm: Norm | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
    ) -> None:
        """outs[i] = epilogue(x weights[i]^T), in as few launches as the layouts allow.

        ADD adds to what out holds; GLU makes one output of two weights of one layout. norm: of x,
        which is one token in float then, for weights of one layout.
        """
        n = outs[0].shape[0]
        for part in _by_layout(weights):
            to = outs if epilogue == "GLU" else outs[part]
            residual = to[0].data if epilogue == "ADD" else None
            tiles = [w.tiles for w in weights[part] if w.tiles is not None]
            if not tiles:
                self._multiply_blocks(x, weights[part][0], to[0], epilogue == "ADD", soft_cap)
                continue
            if self.prompt and self._many is not None and n >= MANY_TOKENS:
                self._many.launch(
                    tiles,
                    x.data,
                    [out.data for out in to],
                    n,
                    epilogue=epilogue,
                    residual=residual,
                    activation=activation,
                    soft_cap=soft_cap,
                )
                continue
            self._tiles.launch(
                tiles,
                x.data,
                [out.data for out in to],
                n,
                epilogue=epilogue,
                norm=norm.weight if norm else None,
                eps=norm.eps if norm else 0.0,
                residual=residual,
                activation=activation,
                soft_cap=soft_cap,
            )

    def _multiply_blocks(self, x: Array, w: Matrix, y: Array, add: bool, soft_cap: float) -> None:
        n = y.shape[0]
        residual = y.data if add else None
        dequantize_mul_mat_vec(
            self.device, w.in_blocks, x.data, y.data, n, residual=residual, pdl=True
        )
        if soft_cap:
            self._elementwise.soft_cap(y.data, n * y.shape[1], soft_cap)


def _by_layout(weights: list[Matrix]) -> list[slice]:
    """Neighbours that one launch can multiply; a matrix in blocks is alone."""
    groups: list[slice] = []
    for i, w in enumerate(weights):
        if groups and one_layout([weights[groups[-1].start], w]):
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups
