"""Products with weights on a GPU, whatever these lie in: tiles, or blocks of a file.

Which launches a product takes is decided here; where its operands come from is not. Activations
are multiplied as halves, or, with weights in quantised blocks, as block_q8_1 where that is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..device.base import Buffer
from ..formats import Format
from ..kernels.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ..kernels.elementwise import Elementwise
from ..kernels.mul_mat_q import MulMatQ
from ..kernels.mul_mat_tile import Epilogue, Limits, MulMatTile, warps_for
from ..kernels.mul_mat_vec_q import mul_mat_vec_q
from ..kernels.quantize_q8_1 import q8_1_bytes, quantize_q8_1
from .cuda_arrays import Array, Matrix, one_layout
from .cuda_hopper import HopperProducts
from .interface import Norm

MANY_TOKENS = 32  # of a step with a prompt, from which on the product for many is faster
Activations = Literal["f16", "q8_1"]
Room = Callable[[str, int], Buffer]  # scratch memory by name and bytes

STATIC_SHARED = 1 << 10  # bytes of a block's shared memory that kernels declare themselves


class Products:
    """Multiplies; kernels are compiled as they are needed."""

    def __init__(
        self,
        device: Any,
        elementwise: Elementwise,
        activations: Activations = "f16",
        room: Room | None = None,
    ) -> None:
        """room: where activations of 8 bits go; by default to an allocation of each product."""
        shared = device.shared_bytes - STATIC_SHARED
        self.warps = warps_for(shared)
        limits = Limits(shared, multiprocessors=device.sm_count, warps=self.warps)
        self.device = device
        self._tiles = MulMatTile(device, limits)
        self._elementwise = elementwise
        self._activations = activations
        self._room = room or (lambda name, nbytes: device.alloc(nbytes, name))
        self._many = MulMatQ(device) if MulMatQ.fits(shared) else None
        self.hopper = HopperProducts(device, self._room)
        self.prompt = False  # the step has a prompt: what rounds weights to halves may be used

    def keeps_blocks(self, format: Format) -> bool:
        """Whether a matrix of the format is multiplied in its blocks, even if it has tiles."""
        return self._activations == "q8_1" and format.block_size > 1

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
        quantized: Buffer | None = None
        for part in by_layout(weights):
            to = outs if epilogue == "GLU" else outs[part]
            residual = to[0].data if epilogue == "ADD" else None
            tiles = [w.tiles for w in weights[part] if w.tiles is not None]
            if not tiles:
                w = weights[part][0]
                if self.keeps_blocks(w.in_blocks.format):
                    quantized = quantized or self._quantize(x, n, w.k)
                self._multiply_blocks(x, quantized, w, to[0], epilogue == "ADD", soft_cap)
                continue
            if self.hopper.takes(n):
                self.hopper.multiply(x, tiles, to, epilogue, activation)
                if soft_cap:
                    self._elementwise.soft_cap(to[0].data, n * to[0].shape[1], soft_cap)
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

    def _quantize(self, x: Array, n_tokens: int, k: int) -> Buffer:
        """x[T, K] as block_q8_1."""
        out = self._room("q8_1", q8_1_bytes(n_tokens, k))
        quantize_q8_1(self.device, x.data, out, n_tokens, k, x_type="half", pdl=True)
        return out

    def _multiply_blocks(
        self, x: Array, quantized: Buffer | None, w: Matrix, y: Array, add: bool, soft_cap: float
    ) -> None:
        """y[T, N] = x w^T, of x as halves, or `quantized` where the weights are as well."""
        n, residual = y.shape[0], y.data if add else None
        to: dict[str, Any] = {"y": y.data, "n_tokens": n, "residual": residual, "pdl": True}
        if quantized is not None and self.keeps_blocks(w.in_blocks.format):
            mul_mat_vec_q(self.device, w.in_blocks, quantized, **to)
        else:
            dequantize_mul_mat_vec(self.device, w.in_blocks, x.data, **to)
        if soft_cap:
            self._elementwise.soft_cap(y.data, n * y.shape[1], soft_cap)


def by_layout(weights: list[Matrix]) -> list[slice]:
    """Neighbours that one launch can multiply; a matrix in blocks is alone."""
    groups: list[slice] = []
    for i, w in enumerate(weights):
        if groups and one_layout([weights[groups[-1].start], w]):
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups
