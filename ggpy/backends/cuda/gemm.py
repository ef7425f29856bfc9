"""Products with weights on a GPU, whatever these lie in: tiles, or blocks of a file.

Which launches a product takes is decided here; where its operands come from is not. Activations
are multiplied as halves, as 8-bit numbers where weights want that, or, with weights in quantised
blocks, as block_q8_1 where that is asked for. Blocks that have no tiles become tiles of halves for
a product of many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ...device.base import Buffer
from ...formats import Format
from ...kernels.attention.rope_kv import Turning, TurningRows
from ...kernels.blocks.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ...kernels.blocks.mul_mat_vec_q import mul_mat_vec_q
from ...kernels.blocks.quantize_q8_1 import q8_1_bytes, quantize_q8_1
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.gemm.gemm import STATIC_SHARED, Epilogue
from ...kernels.gemm.gemm_decode import NORM_TOKENS, Added, Limits, MulMatTile, warps_for
from ...kernels.gemm.gemm_prefill import MulMatQ
from ...kernels.layout.blocks_to_f16 import TILES as HALF_TILES
from ...kernels.layout.pack import PLAIN, UNIT
from ...kernels.layout.tile import Layout, TiledMatrix, grows
from ...kernels.norm.deferred_norm import Handed
from ..interface import Demand, Norm
from .arrays import Array, Matrix, Memory, one_layout
from .gemm_f16 import MANY_TOKENS, Gemm, HalfTiles, Room, can_be_halves, scratch_bytes
from .gemm_hopper import HopperProducts
from .gemm_w8a8 import W8A8Products

Activations = Literal["f16", "q8_1"]

TURN_FROM_TOKENS = 1024  # of which q and k are turned by the product: fewer gain nothing
MOST_NORMED = 2 * 12288  # numbers of x that a product's blocks have registers to normalise
MOST_ADDED = 2 * 4096  # to which they have registers to add others, normalised, before


class Products:
    """Multiplies; kernels are compiled as they are needed."""

    def __init__(
        self,
        device: Any,
        elementwise: Elementwise,
        activations: Activations = "f16",
        room: Room | None = None,
        gemm: Gemm = "auto",
        batch_invariant: bool = False,
    ) -> None:
        """room: scratch memory; by default an allocation of each product. gemm: what multiplies
        many tokens; CublasMissing. batch_invariant: how many tokens there are does not decide in
        which order sums are added up.
        """
        shared = device.shared_bytes - STATIC_SHARED
        self.warps = warps_for(shared)
        limits = Limits(shared, multiprocessors=device.sm_count, warps=self.warps)
        self.device = device
        self._tiles = MulMatTile(device, limits)
        self._elementwise = elementwise
        self._activations = activations
        self._room = room or (lambda name, nbytes: device.alloc(nbytes, name))
        self._many = MulMatQ(device)
        self.hopper = HopperProducts(device, self._room)
        self.w8a8 = W8A8Products(device, limits, elementwise, self._room)
        self._half_tiles = HalfTiles(device, self._room)
        self._cublas: Any = None
        if gemm == "cublas":
            from .gemm_cublas import CublasProducts

            self._cublas = CublasProducts(device, self._room)
        self.compact = False  # memory is short: blocks stay blocks where tiles take much more
        self.prompt = False  # the step has a prompt: what rounds weights to halves may be used
        self._any_order = not batch_invariant
        self.hopper.allowed = self.w8a8.any_order = not batch_invariant

    def takes_q8_1(self, format: Format) -> bool:
        """Whether a matrix of the format is multiplied with block_q8_1."""
        return self._activations == "q8_1" and format.block_size > 1

    def keeps_blocks(self, format: Format) -> bool:
        """Whether a matrix of the format is multiplied in its blocks, even if it has tiles."""
        return self.takes_q8_1(format) or (self.compact and grows(format))

    def scratch_bytes(self, demand: Demand) -> int:
        """What products of the demand's steps need at most for weights that become halves."""
        n, many = demand.n_batch, self.hopper.allowed
        if not (self.hopper.takes(n) or (many and n >= MANY_TOKENS)):
            return 0
        matrices = [
            (w.format, w.shape[0], w.shape[1])
            for w, lookup in demand.weights
            if not lookup and len(w.shape) == 2 and not self.takes_q8_1(w.format)
        ]
        return scratch_bytes(matrices, "cublas" if self._cublas else "auto", self.keeps_blocks)

    def becomes_halves(self, w: Matrix, n_tokens: int) -> bool:
        """Whether tiles of halves are made of w for a product of so many tokens, which there is."""
        many = self.prompt and n_tokens >= MANY_TOKENS
        mine = w.tiles is None and w.scale is None and not self.takes_q8_1(w.in_blocks.format)
        return mine and (many or self.hopper.takes(n_tokens)) and can_be_halves(w.k)

    @property
    def may_be_recorded(self) -> bool:
        """Whether products of many tokens may be part of a graph: cuBLAS' are not."""
        return self._cublas is None

    def together(self, weights: list[Matrix], n_tokens: int) -> bool:
        """Whether one launch can multiply all of them."""
        if any(self._by_cublas(w, n_tokens) for w in weights):
            return len(weights) == 1
        if one_layout(weights):
            return True
        return all(self.becomes_halves(w, n_tokens) for w in weights) and HalfTiles.fit(weights)

    def order(self, weights: list[Matrix], n_tokens: int) -> int:
        """In which order x should come for these weights."""
        if any(w.activations != "f16" or self._by_cublas(w, n_tokens) for w in weights):
            return PLAIN
        layouts = [self._layout(w, n_tokens) for w in weights]
        return self.hopper.order(layouts, weights[0].n_rows, weights[0].k, n_tokens)

    def _layout(self, w: Matrix, n_tokens: int) -> Layout | None:
        """Of the tiles that w has for a product of so many tokens, or that are made of it."""
        if w.tiles is not None:
            return w.tiles.layout
        return HALF_TILES if self.becomes_halves(w, n_tokens) else None

    def handed_order(self, w: Matrix, weights: list[Matrix], n_tokens: int) -> int:
        """In which order a product with w hands a norm on to those with the others; PLAIN: none."""
        tiles = [one.tiles for one in (w, *weights) if one.tiles is not None]
        tiled = len(tiles) == 1 + len(weights)
        if not tiled or not self.hopper.hands_on(n_tokens, tiles) or w.n_rows % UNIT:
            return PLAIN
        return self.order(weights, n_tokens) if self.order([w], n_tokens) != PLAIN else PLAIN

    def handed_part(self, w: Matrix, n_tokens: int) -> int:
        """Columns whose squares a product with w adds up, where it hands a norm on."""
        assert w.tiles is not None
        return self.hopper.handed_part(w.tiles, n_tokens)

    def turn_heads(self, projections: list[Matrix], n_tokens: int) -> bool:
        """Whether one launch makes q, k and v and rotates them (RopeKv.product_turns)."""
        kinds = {w.activations for w in projections}
        if n_tokens < TURN_FROM_TOKENS or len(kinds) > 1 or not one_layout(projections):
            return False
        (kind,) = kinds
        if kind != "f16":
            return self.w8a8.turns_heads(kind)
        return self.hopper.turns_heads and not self._by_cublas(projections[0], n_tokens)

    def turn_rows(self, projections: list[Matrix], n_tokens: int) -> bool:
        """The same of few tokens, which are alone with their sequences (RopeKv.rows_turn)."""
        tiles = projections[0].tiles
        if tiles is None or W8A8Products.all_mine(projections):
            return False
        normed = self.normalises(projections, n_tokens, True)
        return normed and self._tiles.takes_all(tiles, n_tokens, norm=True)

    def _by_cublas(self, w: Matrix, n_tokens: int) -> bool:
        mine = self._cublas is not None and w.activations == "f16"
        return mine and bool(self._cublas.takes(w, n_tokens))

    def normalises(self, weights: list[Matrix], n_tokens: int, all_rows: bool) -> bool:
        """Whether `multiply` takes x before its norm: one launch does it for all weights, and adds
        up in another order than with a norm before it.
        """
        if not (one_layout(weights) or self._of_two(weights, n_tokens, norm=True)):
            return False
        if W8A8Products.all_mine(weights):
            return True
        few = n_tokens <= NORM_TOKENS and all_rows and n_tokens * weights[0].k <= MOST_NORMED
        return few and self._any_order and self.order(weights, n_tokens) == PLAIN

    def _of_two(self, weights: list[Matrix], n_tokens: int, norm: bool) -> list[TiledMatrix] | None:
        """The tiles of weights of two layouts, as in most files q, k and v are, if one launch
        multiplies them.
        """
        if one_layout(weights) or not self._any_order or (norm and n_tokens > NORM_TOKENS):
            return None
        tiles = [w.tiles for w in weights if w.tiles is not None and w.activations == "f16"]
        others = [self._by_cublas(w, n_tokens) for w in weights]
        others += [self.hopper.takes(n_tokens, w.layout, w.n_rows, w.k) for w in tiles]
        mine = len(tiles) == len(weights) and not any(others)
        return tiles if mine and self._tiles.takes_two(tiles, n_tokens, norm) else None

    def adds(self, weights: list[Matrix], n_tokens: int) -> bool:
        """Whether `multiply` takes an x that is a Sum yet, with a norm."""
        few = n_tokens * weights[0].k <= MOST_ADDED and not W8A8Products.all_mine(weights)
        return few and self.normalises(weights, n_tokens, True)

    def multiply(
        self,
        x: Array,
        weights: list[Matrix],
        outs: list[Array],
        epilogue: Epilogue = "STORE",
        norm: Norm | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
        rows: Memory | None = None,
        handed: Handed | None = None,
        turning: Turning | TurningRows | None = None,
    ) -> None:
        """outs[i] = epilogue(x weights[i]^T), in as few launches as the layouts allow.

        ADD adds to what out holds; GLU makes one output of two weights of one layout; QKV, where
        `turn_heads` or `turn_rows` says so, leaves q as halves and k and v in pages, as `turning`
        says. norm: of x, or of its rows, which is float then, where `normalises` says so. handed: a
        norm, where `handed_order` says so.
        """
        n = outs[0].shape[0]
        may_be_two = epilogue in ("STORE", "QKV")
        two = self._of_two(weights, n, norm is not None) if may_be_two else None
        if two:
            options = norm, activation, soft_cap
            self._multiply_tiles(x, two, outs, epilogue, *options, turning=turning)
            return
        quantized: Buffer | None = None
        for part in by_launch(weights, lambda some: self.together(some, n)):
            to = outs if epilogue == "GLU" else outs[part]
            w = weights[part][0]
            tiles = [w.tiles for w in weights[part] if w.tiles is not None]
            if self._by_cublas(w, n):
                self._cublas.multiply(x, w, to[0], epilogue == "ADD")
                self._cap(to[0], soft_cap)
            elif tiles and w.activations != "f16":
                assert not isinstance(turning, TurningRows)
                given = norm, activation, soft_cap, rows
                self.w8a8.multiply(x, w.activations, tiles, to, epilogue, *given, turning=turning)
            elif tiles:
                options = norm, activation, soft_cap
                self._multiply_tiles(
                    x, tiles, to, epilogue, *options, handed=handed, turning=turning
                )
            elif self.becomes_halves(w, n):
                some = weights[part]
                self._multiply_halves(x, some, to, epilogue, activation, soft_cap)
            else:
                if self.takes_q8_1(w.in_blocks.format):
                    quantized = quantized or self._quantize(x, n, w.k)
                self._multiply_blocks(x, quantized, w, to[0], epilogue == "ADD", soft_cap)

    def _multiply_tiles(
        self,
        x: Array,
        tiles: list[TiledMatrix],
        outs: list[Array],
        epilogue: Epilogue,
        norm: Norm | None,
        activation: str,
        soft_cap: float,
        just_made: bool = False,
        handed: Handed | None = None,
        turning: Turning | TurningRows | None = None,
    ) -> None:
        """outs[i] = epilogue(x tiles[i]^T) in one launch; see multiply."""
        n = outs[0].shape[0]
        to = [out.data for out in outs]
        residual = to[0] if epilogue == "ADD" else None
        options: dict[str, Any] = {"epilogue": epilogue, "activation": activation}
        if self.hopper.takes(n, tiles[0].layout, tiles[0].n_rows, tiles[0].k):
            options |= {"just_made": just_made, "handed": handed, "turning": turning}
            self.hopper.multiply(x, tiles, outs, **options)
            self._cap(outs[0], soft_cap)
            return
        options |= {"residual": residual, "soft_cap": soft_cap}
        if self.prompt and n >= MANY_TOKENS:
            self._many.launch(tiles, x.data, to, n, **options)
            return
        if norm:
            options |= {"norm": norm.weight, "eps": norm.eps}
        if x.sum:
            post = x.sum.norm
            options["added"] = Added(x.sum.y, post.weight, post.eps, x.data)
        if isinstance(turning, TurningRows):
            options["turning"] = turning
        source = x.sum.x if x.sum else x.data
        self._tiles.launch(tiles, source, to, n, patient=x.late, **options)

    def _multiply_halves(
        self,
        x: Array,
        weights: list[Matrix],
        outs: list[Array],
        epilogue: Epilogue,
        activation: str,
        soft_cap: float,
    ) -> None:
        """The same of weights in blocks, which become tiles of halves first."""
        if len(weights) > 1 or HalfTiles.fit(weights):
            tiles = self._half_tiles.make(weights)
            self._multiply_tiles(x, tiles, outs, epilogue, None, activation, soft_cap, True)
            return
        for piece, out in self._half_tiles.parts(weights[0], outs[0]):
            self._multiply_tiles(x, [piece], [out], epilogue, None, activation, 0.0, True)
        self._cap(outs[0], soft_cap)

    def _cap(self, y: Array, soft_cap: float) -> None:
        if soft_cap:
            self._elementwise.soft_cap(y.data, y.shape[0] * y.shape[1], soft_cap)

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
        if quantized is not None and self.takes_q8_1(w.in_blocks.format):
            mul_mat_vec_q(self.device, w.in_blocks, quantized, **to)
        else:
            dequantize_mul_mat_vec(self.device, w.in_blocks, x.data, **to)
        self._cap(y, soft_cap)


def by_launch(weights: list[Matrix], together: Callable[[list[Matrix]], bool]) -> list[slice]:
    """Neighbours that one launch can multiply; a matrix in blocks is alone."""
    groups: list[slice] = []
    for i in range(len(weights)):
        if groups and together(weights[groups[-1].start : i + 1]):
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups
