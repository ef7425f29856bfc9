"""Executes product plans: launches GEMM kernels with operands in the layouts that they take.

This module makes no choices; plan/ decides which kernel multiplies which matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...device.base import Buffer
from ...device.cublas import Cublas
from ...kernels.attention.rope_kv import RopeEpilogue, RopeEpilogueRows
from ...kernels.blocks.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ...kernels.blocks.mul_mat_vec_q import mul_mat_vec_q
from ...kernels.blocks.quantize_q8_1 import q8_1_bytes, quantize_q8_1
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.gemm.gemm_decode import PostNorm
from ...kernels.gemm.gemm_wgmma import WgmmaPart, by_layout
from ...kernels.layout.pack import BOTH, CODES, PLAIN, order_of, packed_bytes
from ...kernels.layout.tile import TiledMatrix
from ...kernels.norm.deferred_norm import DeferredNorm
from ...kernels.w8a8.quantize_rows import QuantizedRows, codes_bytes
from ...kernels.w8a8.w8a8_decode import Row
from ..interface import Norm
from .arrays import Array, Matrix, Memory
from .plan import GemmKernels, LaunchPlan, ProductPlan
from .weights_f16 import F16Rows, F16Tiles, Scratch, columns_of, fit_scratch


@dataclass(frozen=True)
class ProductOperands:
    """Operands of a product besides x, its matrices and outputs.

    | operand | meaning |
    |---|---|
    | norm | the norm of x (f32), or of its rows int[T], if the plan has it in the prologue |
    | deferred | the norm that this product defers to the next, or takes from the previous one |
    | rope | how the epilogue QKV rotates q and k |
    | factors | f32 [T, N], by which the epilogue INPUT multiplies |
    | bias | f32 [N], which the epilogue ADD adds, if plan.takes_bias |
    """

    norm: Norm | None = None
    activation: str = "silu"
    soft_cap: float = 0.0
    rows: Memory | None = None
    deferred: DeferredNorm | None = None
    rope: RopeEpilogue | RopeEpilogueRows | None = None
    factors: Memory | None = None
    bias: Memory | None = None


NOTHING = ProductOperands()


@dataclass(frozen=True)
class GemmCall:
    """One launch of a product: its inputs, and where its outputs go."""

    plan: ProductPlan
    launch: LaunchPlan
    x: Array
    weights: Sequence[Matrix]
    outs: Sequence[Array]
    operands: ProductOperands

    @property
    def tiles(self) -> list[TiledMatrix]:
        """The weights, which are all in tiles."""
        return [w.tiles for w in self.weights if w.tiles is not None]

    @property
    def options(self) -> dict[str, Any]:
        """Options of kernels whose epilogue adds a residual and applies a soft cap."""
        epilogue, o = self.plan.epilogue, self.operands
        residual = self.outs[0].data if epilogue == "ADD" else o.factors
        options: dict[str, Any] = {"epilogue": epilogue, "activation": o.activation}
        return options | {"residual": residual, "soft_cap": o.soft_cap}


class Gemms:
    """Products on one device. Kernels are compiled at their first launch."""

    def __init__(
        self, device: Any, kernels: GemmKernels, elementwise: Elementwise, scratch: Scratch
    ) -> None:
        """scratch(name, bytes): memory that the next product reuses under the same name."""
        self.device, self._kernels, self._elementwise = device, kernels, elementwise
        self._scratch = scratch
        self._f16_tiles = F16Tiles(device, scratch)
        self._cublas: Any = None
        self._launchers: dict[str, Callable[..., None]] = {
            "gemm_decode": self._decode,
            "gemm_decode_two": self._decode,
            "gemm_skinny": self._hopper,
            "gemm_wgmma": self._hopper,
            "gemm_wgmma_two": self._wgmma_two,
            "gemm_prefill": self._prefill,
            "w8a8_decode": self._w8a8,
            "w8a8_prefill": self._w8a8,
            "w8a8_wgmma": self._w8a8,
            "blocks_to_f16": self._blocks_to_f16,
            "mul_mat_vec_q": self._blocks,
            "dequantize_mul_mat_vec": self._blocks,
        }

    def use_cublas(self) -> None:
        """Enable plans with cuBLAS; raises CublasMissing."""
        self._cublas = Cublas(self.device)
        self._f16_rows = F16Rows(self.device, self._scratch)
        self._launchers["cublas"] = self._by_cublas

    def run(
        self,
        plan: ProductPlan,
        x: Array,
        weights: Sequence[Matrix],
        outs: Sequence[Array],
        operands: ProductOperands = NOTHING,
    ) -> None:
        """outs[i] = epilogue(x weights[i]^T).

        | epilogue | output |
        |---|---|
        | STORE | f32 |
        | ADD | f32, added to out |
        | GLU | one f16 output of two matrices |
        | QKV | q as f16, k and v in pages, rotated as operands.rope says |
        | INPUT | f16, act(out) * operands.factors; GemmDecode only |
        """
        for launch in plan.launches:
            dst = outs if plan.epilogue == "GLU" else outs[launch.part]
            call = GemmCall(plan, launch, x, weights[launch.part], dst, operands)
            self._launchers[launch.kernel](call)

    def _decode(self, c: GemmCall) -> None:
        o, x = c.operands, c.x
        options = c.options
        if o.norm:
            options |= {"norm": o.norm.weight, "eps": o.norm.eps}
        source = x.data
        if x.sum:
            post, source = x.sum.norm, x.sum.x
            options["post_norm"] = PostNorm(x.sum.y, post.weight, post.eps, x.data)
        if o.rope is not None:
            options["rope_epilogue"] = o.rope
        if o.bias is not None:
            options["bias"] = o.bias
        dst, n, slow = [out.data for out in c.outs], c.plan.n_tokens, x.slow_producer
        self._kernels.decode.launch(c.tiles, source, dst, n, slow_producer=slow, **options)

    def _prefill(self, c: GemmCall) -> None:
        dst, n = [out.data for out in c.outs], c.plan.n_tokens
        self._kernels.prefill.launch(c.tiles, c.x.data, dst, n, **c.options)

    def _hopper(self, c: GemmCall, pdl: bool = True) -> None:
        o, x, tiles, n = c.operands, c.x, c.tiles, c.plan.n_tokens
        dst = [out.data for out in c.outs]
        layout = order_of(tiles[0].layout)
        packed = x.data if x.layout == layout else self._packed(x, n, layout)
        options: dict[str, Any] = {"epilogue": c.plan.epilogue, "activation": o.activation}
        options |= {
            "order": c.outs[0].layout,
            "slow_producer": x.slow_producer,
            "deferred_norm": o.deferred,
        }
        if c.launch.kernel == "gemm_skinny":
            self._kernels.skinny.launch(tiles, packed, dst, n, pdl=pdl, **options)
        else:
            options |= {"rope_epilogue": o.rope, "pdl": pdl}
            self._kernels.wgmma.launch(tiles, packed, dst, n, **options)
        self._cap(c)

    def _wgmma_two(self, c: GemmCall) -> None:
        x, tiles, n = c.x, c.tiles, c.plan.n_tokens
        parts = []
        for part in by_layout(tiles):
            packed = self._packed(x, n, order_of(tiles[part[0]].layout))
            outs = [c.outs[i].data for i in part]
            parts.append(WgmmaPart([tiles[i] for i in part], packed, outs))
        options: dict[str, Any] = {"slow_producer": x.slow_producer}
        options["deferred_norm"] = c.operands.deferred
        self._kernels.wgmma.launch_two(parts, n, **options)

    def _w8a8(self, c: GemmCall) -> None:
        o, x, n, tiles = c.operands, c.x, c.plan.n_tokens, c.tiles
        dst = [out.data for out in c.outs]
        kind: Any = c.weights[0].activations
        if n == 1 and o.rows is None:  # the kernel quantises a single token itself
            normed = (o.norm.weight, o.norm.eps) if o.norm else ()
            row = Row(kind, x.shape[-1], x.data, *normed)
            self._kernels.w8a8_decode.launch(tiles, row, dst, **c.options)
            return
        codes = self._quantized_rows(x, n, kind, o)
        if c.launch.kernel == "w8a8_wgmma":
            options: dict[str, Any] = {
                "epilogue": c.plan.epilogue,
                "activation": o.activation,
                "rope_epilogue": o.rope,
            }
            self._kernels.w8a8_wgmma.launch(tiles, codes, dst, **options)
            self._cap(c)
        elif c.launch.kernel == "w8a8_prefill":
            self._kernels.w8a8_prefill.launch(tiles, codes, dst, **c.options)
        else:
            self._kernels.w8a8_decode.launch(tiles, codes, dst, **c.options)

    def _blocks_to_f16(self, c: GemmCall) -> None:
        """Converts weights to f16 tiles before the GEMM: all at once, or in pieces if one is too
        large.
        """
        weights, inner = list(c.weights), c.launch.inner
        assert inner is not None
        if len(weights) > 1 or fit_scratch(weights):
            tiles = self._f16_tiles.make(weights)
            made = [Matrix(w.n_rows, w.k, t, None) for w, t in zip(weights, tiles, strict=True)]
            self._inner(replace(c, launch=inner, weights=made))
            return
        w, operands = weights[0], ProductOperands(activation=c.operands.activation)
        for tile, out in self._f16_tiles.parts(w, c.outs[0]):
            piece = [Matrix(w.n_rows, w.k, tile, None)]
            self._inner(replace(c, launch=inner, weights=piece, outs=[out], operands=operands))
        self._cap(c)

    def _inner(self, c: GemmCall) -> None:
        """Launch the GEMM, without PDL if PDL would let it read weights before the previous kernel
        has written them.
        """
        launcher = self._launchers[c.launch.kernel]
        pdl = {"pdl": False} if launcher == self._hopper else {}
        launcher(c, **pdl)

    def _blocks(self, c: GemmCall) -> None:
        w, y, n = c.weights[0].in_blocks, c.outs[0], c.plan.n_tokens
        residual = y.data if c.plan.epilogue == "ADD" else None
        dst: dict[str, Any] = {"y": y.data, "n_tokens": n, "residual": residual, "pdl": True}
        if c.launch.kernel == "mul_mat_vec_q":
            first = not _quantised_before(c.plan, c.launch)
            mul_mat_vec_q(self.device, w, self._q8_1(c.x, n, w.columns, first), **dst)
        else:
            dequantize_mul_mat_vec(self.device, w, c.x.data, **dst)
        self._cap(c)

    def _by_cublas(self, c: GemmCall) -> None:
        """Converts the matrix to f16 rows, piece by piece, and multiplies each with cuBLAS."""
        if c.x.layout != PLAIN:
            raise RuntimeError("activations were packed for tiles")
        w, y, add = c.weights[0], c.outs[0], c.plan.epilogue == "ADD"
        for rows, first, count in self._f16_rows.parts(w):
            out, row = columns_of(y, first).data, y.shape[1]
            shape = c.plan.n_tokens, count, w.k
            self._cublas.multiply(c.x.data, rows, out, *shape, stride=row, add=add)
        self._cap(c)

    # Operands

    def _packed(self, x: Array, n_tokens: int, layout: int) -> Memory:
        """x[T, K] in the packed order of a launch's tiles."""
        k = x.shape[-1]
        if x.layout == BOTH:
            assert isinstance(x.data, Buffer)
            return x.data if layout == CODES else x.data.at(packed_bytes(n_tokens, k))
        if x.layout == layout:
            return x.data
        if x.layout != PLAIN:
            raise RuntimeError("activations were packed for tiles of another kind")
        packed = self._scratch(f"packed {layout}", packed_bytes(n_tokens, k))
        self._kernels.pack.launch(x.data, packed, n_tokens, k, layout)
        return packed

    def _quantized_rows(
        self, x: Array, n_tokens: int, kind: Any, o: ProductOperands
    ) -> QuantizedRows:
        k = x.shape[-1]
        codes = self._scratch("codes", codes_bytes(n_tokens, k))
        dst = QuantizedRows(kind, n_tokens, k, codes, self._scratch("code scales", 4 * n_tokens))
        if o.norm is None:
            self._kernels.quantize_rows.launch(x.data, dst)
        else:
            options = {"rows": o.rows, "norm": o.norm.weight, "eps": o.norm.eps}
            self._kernels.quantize_rows.launch(x.data, dst, x_type="float", **options)
        return dst

    def _q8_1(self, x: Array, n_tokens: int, k: int, first: bool) -> Buffer:
        """x[T, K] as block_q8_1, made by the first launch of a product that needs it."""
        out = self._scratch("q8_1", q8_1_bytes(n_tokens, k))
        if first:
            quantize_q8_1(self.device, x.data, out, n_tokens, k, x_type="half", pdl=True)
        return out

    def _cap(self, c: GemmCall) -> None:
        """y = soft_cap * tanh(y / soft_cap) in a separate kernel, if the product has a soft cap."""
        if soft_cap := c.operands.soft_cap:
            y = c.outs[0]
            self._elementwise.soft_cap(y.data, y.shape[0] * y.shape[1], soft_cap)


def _quantised_before(plan: ProductPlan, launch: LaunchPlan) -> bool:
    """Whether an earlier launch of the product has converted x to block_q8_1."""
    before = plan.launches[: plan.launches.index(launch)]
    return any(other.kernel == launch.kernel for other in before)
