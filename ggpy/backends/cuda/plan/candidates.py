"""The kernels that may compute a product, in order of preference.

The first candidate that fits is chosen; a new kernel is one class in CANDIDATES. Thresholds were
measured (docs/schedules.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....kernels.gemm.gemm_decode import NORM_TOKENS
from ....kernels.gemm.gemm_wgmma import by_layout
from ....kernels.layout.blocks_to_f16 import F16_TILES
from ....kernels.layout.pack import PLAIN, UNIT
from ....kernels.layout.tile import TiledMatrix
from ....kernels.w8a8.w8a8_decode import COLUMNS as W8A8_COLUMNS
from ..arrays import Matrix, one_layout
from ..weights_f16 import fit_scratch
from .problem import LaunchPlan, Problem

if TYPE_CHECKING:
    from .products import ProductPlanner

PREFILL_TOKENS = 32  # least number of tokens of prefill GEMMs on GPUs without wgmma


class Candidate:
    """A kernel that may compute a product. `fits` returns its launch, or None if it does not
    fit.
    """

    name = ""

    def fits(self, planner: ProductPlanner, p: Problem) -> LaunchPlan | None:
        """The launch that computes all of p."""
        return LaunchPlan(self.name, slice(0, len(p.weights))) if self.takes(planner, p) else None

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        """Whether one launch computes all of p, and this is the kernel for it."""
        raise NotImplementedError


class GemmDecodeTwoCandidate(Candidate):
    """Two layouts of tiles in one launch of GemmDecode: q, k and v have two in most files."""

    name = "gemm_decode_two"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        n = p.n_tokens
        if not p.whole or p.epilogue not in ("STORE", "QKV") or planner.batch_invariant:
            return False
        if one_layout(p.weights) or (p.norm and n > NORM_TOKENS):
            return False
        tiles = [w.tiles for w in p.weights if w.tiles is not None and w.activations == "f16"]
        if len(tiles) < len(p.weights) or any(planner.on_hopper(n, w) for w in tiles):
            return False
        return planner.kernels.decode.supports_two_layouts(tiles, n, p.norm)


class CublasCandidate(Candidate):
    """cuBLAS, if the user asks for it: one matrix, converted to f16 rows."""

    name = "cublas"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        return len(p.weights) == 1 and planner.by_cublas(p.weights[0], p.n_tokens)


class W8A8Candidate(Candidate):
    """8-bit weights and activations. Integer sums are exact, so all kernels give the same bits;
    f32 sums depend on the kernel, and thus on the number of tokens.
    """

    name = "w8a8"

    def fits(self, planner: ProductPlanner, p: Problem) -> LaunchPlan | None:
        kind = p.weights[0].activations
        if kind == "f16" or not one_layout(p.weights):
            return None
        free = kind == "int8" or not planner.batch_invariant
        if free and planner.has_wgmma and p.n_tokens > W8A8_COLUMNS[-1]:
            name = "w8a8_wgmma"
        else:
            name = "w8a8_prefill" if free and p.n_tokens >= PREFILL_TOKENS else "w8a8_decode"
        return LaunchPlan(name, slice(0, len(p.weights)))


class GemmSkinnyCandidate(Candidate):
    """2 to 16 tokens on Hopper; all of x fits in shared memory."""

    name = "gemm_skinny"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        first = p.weights[0].tiles
        if first is None or not one_layout(p.weights) or not planner.has_skinny:
            return False
        packs = p.epilogue == "GLU" and p.out_layout != PLAIN
        return planner.is_skinny(first, p.n_tokens) and not (packs and first.n_rows % UNIT)


class GemmWgmmaCandidate(Candidate):
    """A few tokens and more, on Hopper."""

    name = "gemm_wgmma"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        first = p.weights[0].tiles
        return first is not None and one_layout(p.weights) and planner.on_hopper(p.n_tokens, first)


class GemmWgmmaTwoCandidate(Candidate):
    """Two layouts of tiles in one launch of GemmWgmma: q, k and v of up to 256 tokens."""

    name = "gemm_wgmma_two"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        n = p.n_tokens
        if not p.whole or p.norm or p.epilogue != "STORE" or one_layout(p.weights):
            return False
        tiles = [w.tiles for w in p.weights if w.tiles is not None and w.activations == "f16"]
        if len(tiles) < len(p.weights) or not all(planner.on_hopper(n, w) for w in tiles):
            return False
        parts = [[tiles[i] for i in part] for part in by_layout(tiles)]
        skinny = any(planner.is_skinny(w, n) for w in tiles)
        return not skinny and planner.kernels.wgmma.supports_two(parts, n)


class GemmPrefillCandidate(Candidate):
    """Prefill on other GPUs."""

    name = "gemm_prefill"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        return p.prefill and p.n_tokens >= PREFILL_TOKENS and one_layout(p.weights)


class GemmDecodeCandidate(Candidate):
    """Up to 8 tokens per launch; more tokens take several launches."""

    name = "gemm_decode"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        return one_layout(p.weights)


class BlocksToF16Candidate(Candidate):
    """Converts weights in blocks to f16 tiles in scratch memory, for a prefill GEMM."""

    name = "blocks_to_f16"

    def fits(self, planner: ProductPlanner, p: Problem) -> LaunchPlan | None:
        n = p.n_tokens
        if not all(planner.becomes_f16(w, n, p.prefill) for w in p.weights):
            return None
        if len(p.weights) > 1 and not fit_scratch(p.weights):
            return None
        tiled = [replace(w, tiles=_f16(w), blocks=None) for w in p.weights]
        inner = planner.choose(replace(p, weights=tiled, norm=False))
        assert inner is not None
        return LaunchPlan(self.name, slice(0, len(p.weights)), inner)


class MulMatVecQCandidate(Candidate):
    """One matrix in quantised blocks times block_q8_1, if that is requested."""

    name = "mul_mat_vec_q"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        is_single = len(p.weights) == 1 and p.weights[0].tiles is None
        return is_single and planner.takes_q8_1(p.weights[0].in_blocks.format)


class DequantizeMulMatVecCandidate(Candidate):
    """One matrix in blocks times f16 activations."""

    name = "dequantize_mul_mat_vec"

    def takes(self, planner: ProductPlanner, p: Problem) -> bool:
        return len(p.weights) == 1 and p.weights[0].tiles is None


CANDIDATES: tuple[Candidate, ...] = (
    GemmDecodeTwoCandidate(),
    CublasCandidate(),
    W8A8Candidate(),
    GemmSkinnyCandidate(),
    GemmWgmmaCandidate(),
    GemmWgmmaTwoCandidate(),
    GemmPrefillCandidate(),
    GemmDecodeCandidate(),
    BlocksToF16Candidate(),
    MulMatVecQCandidate(),
    DequantizeMulMatVecCandidate(),
)


def _f16(w: Matrix) -> TiledMatrix:
    return TiledMatrix(F16_TILES, w.n_rows, w.k, w.in_blocks.data)
