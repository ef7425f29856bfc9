"""Chooses the kernel of a product, and the layout of its input.

`ProductPlanner.choose` asks CANDIDATES in order of preference; a new kernel is one class in that
list. Thresholds were measured (docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ....formats import Format
from ....kernels.gemm.gemm import SEGMENTS, Epilogue
from ....kernels.gemm.gemm_decode import NORM_TOKENS
from ....kernels.gemm.hopper import has_wgmma
from ....kernels.layout.blocks_to_f16 import F16_TILES
from ....kernels.layout.pack import BOTH, CODES, F16, PLAIN, UNIT, order_of
from ....kernels.layout.tile import Layout, TiledMatrix, grows
from ....kernels.norm.deferred_norm import MAX_TOKENS as DEFERRED_TOKENS
from ....kernels.w8a8.w8a8_prefill import MAX_K, runs_on, supports_kind
from ...interface import ActivationType, Demand
from ..arrays import Matrix, one_layout
from ..weights_f16 import can_be_f16, scratch_bytes
from .candidates import CANDIDATES, PREFILL_TOKENS, GemmDecodeTwoCandidate
from .kernels import GemmKernels
from .problem import LaunchPlan, NormIn, Problem, ProductPlan, StepClass

Activations = Literal["f16", "q8_1"]  # activations that quantised blocks are multiplied by
GemmChoice = Literal["auto", "cublas"]

WGMMA_TOKENS = 5  # least number of tokens for which GemmWgmma is faster than GemmDecode
# least and most tokens of GemmSkinny
SKINNY_TOKENS = 2, 16  # for weights of 8 bits or more
SKINNY_TOKENS_FEW_BITS = 3, 8
SKINNY_TOKENS_TABLE = WGMMA_TOKENS, 8  # for codes that index a table
SKINNY_COLUMNS = 2048  # least k for which GemmSkinny is faster than the other kernels
# for up to PAIR tokens, GemmSkinny needs matrices of at least PAIR_SIZE rows and columns
PAIR, PAIR_SIZE = 2, 4096
# most elements of x that GemmDecode normalises, because its CTAs keep them in registers
MOST_NORMED = 2 * 12288
MOST_ADDED = 2 * 4096  # most elements of x if GemmDecode also adds norm(y) to x


class ProductPlanner:
    """Plans of one model on one GPU.

    batch_invariant: no choice depends on the number of tokens, so the bits of a sequence do not
    depend on other sequences in its steps. activations: the type of the input of quantised weights;
    "q8_1" keeps the blocks of the weights. gemm: the library of prefill GEMMs.
    """

    def __init__(
        self,
        kernels: GemmKernels,
        arch: str,
        *,
        activations: Activations = "f16",
        gemm: GemmChoice = "auto",
        batch_invariant: bool = False,
    ) -> None:
        self.kernels, self.arch = kernels, arch
        self.activations, self.gemm, self.batch_invariant = activations, gemm, batch_invariant
        self.has_wgmma = has_wgmma(arch)
        self.has_skinny = self.has_wgmma and not batch_invariant
        self.compact = False  # memory is short: keep blocks of formats whose tiles take much more

    # Weights

    def takes_q8_1(self, format: Format) -> bool:
        """Whether a matrix of the format is multiplied by block_q8_1."""
        return self.activations == "q8_1" and format.block_size > 1

    def keeps_blocks(self, format: Format) -> bool:
        """Whether a matrix of the format stays in blocks although it could be in tiles."""
        return self.takes_q8_1(format) or (self.compact and grows(format))

    def runs_w8a8(self, activations: ActivationType, tiles: TiledMatrix | None) -> bool:
        """Whether a weight is multiplied by 8-bit activations, as its file asks; otherwise f16 is
        used.
        """
        if activations == "f16" or tiles is None or tiles.k % 8 or tiles.k > MAX_K:
            return False
        return runs_on(activations, self.arch) and supports_kind(tiles, activations)

    def scratch_bytes(self, demand: Demand) -> int:
        """The most scratch memory, in bytes, that the demand's steps need for weights converted to
        f16.
        """
        n, many = demand.n_batch, not self.batch_invariant
        if not (self.on_hopper(n) or (many and n >= PREFILL_TOKENS)):
            return 0
        matrices = [
            (w.format, w.shape[-2], w.shape[-1])
            for w, role in demand.weights
            if not role.lookup and len(w.shape) > 1 and not self.takes_q8_1(w.format)
        ]
        return scratch_bytes(matrices, self.gemm, self.keeps_blocks)

    # Kernels

    def on_hopper(self, n_tokens: int, w: TiledMatrix | None = None) -> bool:
        """Whether Hopper kernels multiply n_tokens tokens by w; None: by some weight."""
        skinny = w is not None and is_faster_skinny(w.layout, w.n_rows, w.k, n_tokens)
        return self.has_skinny and (skinny or n_tokens >= WGMMA_TOKENS)

    def is_skinny(self, w: TiledMatrix, n_tokens: int) -> bool:
        """Whether GemmSkinny multiplies n_tokens tokens by w."""
        faster = is_faster_skinny(w.layout, w.n_rows, w.k, n_tokens)
        return faster and self.kernels.skinny.config_for(w, n_tokens) is not None

    def by_cublas(self, w: Matrix, n_tokens: int) -> bool:
        """Whether cuBLAS multiplies n_tokens tokens by w; weights with row scales use other
        kernels.
        """
        asked = self.gemm == "cublas" and w.activations == "f16" and w.scale is None
        return asked and n_tokens >= PREFILL_TOKENS and w.k % 8 == 0

    def becomes_f16(self, w: Matrix, n_tokens: int, prefill: bool) -> bool:
        """Whether w, which is in blocks, is converted to f16 tiles for a GEMM of n_tokens
        tokens.
        """
        if w.tiles is not None or w.scale is not None or self.takes_q8_1(w.in_blocks.format):
            return False
        many = prefill and n_tokens >= PREFILL_TOKENS
        return (many or self.on_hopper(n_tokens)) and can_be_f16(w.k)

    def choose(self, p: Problem) -> LaunchPlan | None:
        """The launch of the first candidate that computes all of p; None if several launches are
        needed.
        """
        if len(p.weights) > 1 and any(self.by_cublas(w, p.n_tokens) for w in p.weights):
            return None
        found = (candidate.fits(self, p) for candidate in CANDIDATES)
        return next((plan for plan in found if plan is not None), None)

    def product(
        self,
        weights: Sequence[Matrix],
        s: StepClass,
        epilogue: Epilogue = "STORE",
        norm: NormIn = NormIn.NONE,
        n_tokens: int | None = None,
        out_layout: int = PLAIN,
    ) -> ProductPlan:
        """The plan of a product with as few launches as possible; each takes as many adjacent
        weights as it can.
        """
        n = s.n_tokens if n_tokens is None else n_tokens
        launches: list[LaunchPlan] = []
        start = 0
        while start < len(weights):
            for stop in range(min(len(weights), start + SEGMENTS), start, -1):
                whole = (start, stop) == (0, len(weights))
                options = norm is NormIn.PROLOGUE, self.is_prefill(s), out_layout, whole
                plan = self.choose(Problem(weights[start:stop], n, epilogue, *options))
                if plan is not None:
                    launches.append(replace(plan, part=slice(start, stop)))
                    start = stop
                    break
        by_kernel = norm in (NormIn.KERNEL, NormIn.SHARED)
        layout = (self.normed_layout if by_kernel else self.x_layout)(weights, s, n)
        leaves = norm is NormIn.KERNEL and self.defers(n)
        return ProductPlan(tuple(launches), epilogue, n, layout, norm, leaves)

    def is_prefill(self, s: StepClass) -> bool:
        """Whether prefill kernels may be chosen."""
        return not (s.decode or self.batch_invariant)

    def x_layout(self, weights: Sequence[Matrix], s: StepClass, n: int | None = None) -> int:
        """The layout in which the kernels for these weights take x; PLAIN if they differ."""
        found = self._orders(weights, s, s.n_tokens if n is None else n)
        return found.pop() if len(found) == 1 else PLAIN

    def normed_layout(self, weights: Sequence[Matrix], s: StepClass, n: int | None = None) -> int:
        """The layout in which a norm kernel stores x for these weights; no other makes BOTH."""
        both = self._orders(weights, s, s.n_tokens if n is None else n) == {CODES, F16}
        return BOTH if both else self.x_layout(weights, s, n)

    def _orders(self, weights: Sequence[Matrix], s: StepClass, n: int) -> set[int]:
        """The layouts in which the kernels for these weights take x."""
        if any(w.activations != "f16" or self.by_cublas(w, n) for w in weights):
            return {PLAIN}
        first, found = weights[0], set()
        for w in weights:
            f16 = w.tiles is None and self.becomes_f16(w, n, self.is_prefill(s))
            layout = w.tiles.layout if w.tiles is not None else F16_TILES if f16 else None
            if layout is None:
                return {PLAIN}
            like = TiledMatrix(layout, first.n_rows, first.k, None)  # type: ignore[arg-type]
            found.add(order_of(layout) if self.on_hopper(n, like) else PLAIN)
        return found

    def normalises(self, weights: Sequence[Matrix], s: StepClass, n: int, all_rows: bool) -> bool:
        """Whether one launch for all weights also computes the norm of x. The order of sums then
        differs from that of a norm kernel.
        """
        if len(weights) > SEGMENTS:
            return False
        two = Problem(weights, n, "STORE", norm=True)
        if not (one_layout(weights) or GemmDecodeTwoCandidate().takes(self, two)):
            return False
        if all(w.activations != "f16" for w in weights):
            return True
        few = n <= NORM_TOKENS and all_rows and n * weights[0].k <= MOST_NORMED
        return few and not self.batch_invariant and self.x_layout(weights, s, n) == PLAIN

    def adds(self, weights: Sequence[Matrix], s: StepClass) -> bool:
        """Whether one launch adds norm(y) to x and normalises the sum."""
        few = s.n_tokens * weights[0].k <= MOST_ADDED
        w8a8 = all(w.activations != "f16" for w in weights)
        return few and not w8a8 and self.normalises(weights, s, s.n_tokens, True)

    def defers(self, n_tokens: int, tiles: Sequence[TiledMatrix] = ()) -> bool:
        """Whether GEMMs of n_tokens tokens with these tiles defer norms to each other; without
        tiles: whether any GEMMs do.
        """
        if not self.has_skinny or not SKINNY_TOKENS[0] <= n_tokens <= DEFERRED_TOKENS:
            return False
        skinny = (self.is_skinny(w, n_tokens) and w.n_rows % UNIT == 0 for w in tiles)
        return n_tokens <= self.kernels.deferred_tokens or all(skinny)


def is_faster_skinny(layout: Layout, n_rows: int, k: int, n_tokens: int) -> bool:
    """Whether GemmSkinny is the fastest kernel, if x fits in shared memory."""
    least, most = SKINNY_TOKENS
    if layout.bits < 8:
        least, most = SKINNY_TOKENS_TABLE if layout.is_table else SKINNY_TOKENS_FEW_BITS
    large = n_tokens > PAIR or min(n_rows, k) >= PAIR_SIZE
    return least <= n_tokens <= most and large and k >= SKINNY_COLUMNS and k % UNIT == 0
