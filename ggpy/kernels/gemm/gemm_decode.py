"""Launches cuda/gemm/gemm_decode.cu: tiled matrices times x of up to 8 tokens per launch.

Chooses how many columns of x and how many pipeline stages fit in shared memory. The plan
(backends/cuda/plan) decides which GEMMs use this kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..attention.rope_kv import RopeArgs, RopeEpilogueRows
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..struct_asserts import struct_asserts
from .gemm import STATIC_SHARED, Epilogue, GemmArgs
from .hopper import has_clusters

WARPS = 16  # warps of a CTA, if its shared memory allows
COLUMNS = (1, 2, 4, 8)  # tokens of one launch at most; one instance of the kernel each
PREFETCH_BYTES = 16 << 20  # weights of an ADD from which a warp requests two chunks before x
NORM_TOKENS = 2  # tokens that a GEMM normalises itself at most: every CTA does, a launch is saved


class PostNormArgs(ctypes.Structure):  # as those below, of cuda/gemm/gemm_decode.cu
    _fields_ = (
        ("y", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("eps", ctypes.c_float),
    )


class GemmDecodeArgs(GemmArgs):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("x", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("slab", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("slow_producer", ctypes.c_int),
        ("prefetch_two", ctypes.c_int),
        ("tiles_per_cta", ctypes.c_int),
        ("remainder", ctypes.c_int),
        ("post_norm", PostNormArgs),
    )

    def split(self, ctas: int) -> int:
        """Divide the tile rows among `ctas` CTAs; return the most that one CTA gets."""
        self.tiles_per_cta, self.remainder = divmod(self.n_tiles, ctas)
        return self.tiles_per_cta + (self.remainder > 0)


class GemmDecodePartArgs(GemmDecodeArgs):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("first_cta", ctypes.c_int),
        ("n_ctas", ctypes.c_int),
    )

    def split_from(self, first_cta: int, ctas: int) -> int:
        """Divide the tile rows among `ctas` CTAs of the launch, from first_cta on."""
        self.first_cta, self.n_ctas = first_cta, ctas
        return self.split(ctas)


_ROPE = (("rope", RopeArgs), ("first_part", ctypes.c_int))


class GemmDecodeRopeArgs(GemmDecodeArgs):
    _fields_ = _ROPE


class GemmDecodePartRopeArgs(GemmDecodePartArgs):
    _fields_ = _ROPE


ASSERTS = struct_asserts(GemmDecodeRopeArgs, GemmDecodePartRopeArgs)


@dataclass(frozen=True)
class PostNorm:
    """x becomes x + norm(y) before its own norm, all f32 [n_tokens, k]; `sum` receives x + norm(y)
    and must not overlap x.
    """

    y: Address
    weight: Address
    eps: float
    sum: Address

    def args(self, offset: int = 0) -> PostNormArgs:
        """The parameters for rows that begin `offset` bytes further on."""
        y, sums = address(self.y) + offset, address(self.sum) + offset
        return PostNormArgs(y, address(self.weight), sums, self.eps)


@dataclass(frozen=True)
class GemmDecodeConfig:
    """A launch: tokens, COLS of the instance, warps of a CTA, stages of each warp's pipeline,
    columns of x in shared memory (slab), and bytes of dynamic shared memory."""

    n_tokens: int
    columns: int
    warps: int
    stages: int
    slab: int
    shared: int


@dataclass(frozen=True)
class Limits:
    """Limits of all launches on one GPU: bytes of dynamic shared memory of a CTA, SMs, and at most
    so many pipeline stages and warps of a CTA; `warps` determines the order of sums. few_chunks: a
    CTA with at most so many chunks is faster with half the warps, which reach the barrier sooner;
    few_chunks_with_norm: the same for a GEMM with a norm, which has more barriers."""

    shared: int
    n_sms: int
    stages: int = 3
    warps: int = WARPS
    few_chunks: int = 12
    few_chunks_with_norm: int = 64


def warps_for(shared: int) -> int:
    """Warps of a CTA with `shared` bytes: 16 with 227 KB, 8 with 163 or 99 KB, 4 with 64 KB."""
    return WARPS if shared >= 200 << 10 else WARPS // 2 if shared >= 90 << 10 else WARPS // 4


class GemmDecode:
    """The decode GEMM y = x W^T. Instances of the kernel are compiled at their first launch."""

    def __init__(self, device: Device, limits: Limits) -> None:
        """Raises ValueError if the limits exceed the device's shared memory."""
        if limits.shared + STATIC_SHARED > device.shared_bytes:
            raise ValueError(
                f"{limits.shared} bytes of dynamic shared memory and {STATIC_SHARED} of static are "
                f"more than the {device.shared_bytes} that a CTA may have on {device.arch}"
            )
        self.device, self.limits = device, limits
        self._min_shared = device.shared_bytes // 2 if has_clusters(device.arch) else 0
        self._kernels: dict[tuple, Kernel] = {}
        self._configs: dict[tuple, GemmDecodeConfig] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: Address,
        outs: Sequence[Address],
        n_tokens: int,
        *,
        epilogue: Epilogue = "STORE",
        norm: Address | None = None,
        eps: float = 0.0,
        post_norm: PostNorm | None = None,
        residual: Address | None = None,
        bias: Address | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
        slow_producer: bool = False,
        rope_epilogue: RopeEpilogueRows | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        norm: the weight [k] of an RMS norm that the kernel applies to f32 x, or to x + norm(y) with
        post_norm; None: x is f16.

        | epilogue | weights  | output                                                         |
        | STORE    | up to 4  | f32 y; soft_cap * tanh(y / soft_cap) if soft_cap is not 0      |
        | ADD      | 1        | f32 residual + y, + bias [rows] if there is one                |
        | GLU      | gate, up | one f16 activation(y0) * y1                                    |
        | QKV      | q, k, v  | as `rope_epilogue` says, not `outs`; needs a norm and all of x |
        | INPUT    | 1        | f16 activation(INPUT_RANGE * y) * residual                     |

        All weights have the same k, and one layout unless supports_two_layouts(weights).
        slow_producer: the kernel that makes x is slow: weights fill the pipeline first. More tokens
        than fit take several launches. ValueError for too many with a norm, or only a post_norm.
        """
        if norm is not None and n_tokens > NORM_TOKENS:
            raise ValueError(f"{n_tokens} tokens are too many: a GEMM normalises {NORM_TOKENS}")
        if post_norm is not None and norm is None:
            raise ValueError("post_norm needs norm: it is added to x before the norm of x")
        first, normed = weights[0], norm is not None
        prologue = "POST_NORM" if post_norm else "NORM" if normed else "PLAIN"
        options: dict[str, Any] = {"norm": address(norm), "eps": eps, "soft_cap": soft_cap}
        prefetch_two = not slow_producer and _prefetches_two(first, epilogue)
        options |= {"slow_producer": slow_producer, "prefetch_two": prefetch_two}
        options |= {"post_norm": post_norm.args() if post_norm else PostNormArgs()}
        options["bias"] = address(bias)
        if rope_epilogue is not None:
            options["rope"] = rope_epilogue.args()
        may_be_two = epilogue in ("STORE", "QKV")
        if may_be_two and self.supports_two_layouts(weights, n_tokens, normed):
            kind = GemmDecodePartArgs if rope_epilogue is None else GemmDecodePartRopeArgs
            pair = kind(x=address(x), **options), kind(x=address(x), **options)
            self._launch_two_layouts(pair, weights, outs, n_tokens, prologue, rope_epilogue, pdl)
            return
        args = GemmDecodeArgs(**options) if rope_epilogue is None else GemmDecodeRopeArgs(**options)
        args.set_matrices(weights, outs, n_tokens, epilogue, activation)
        x_size, out_size = (4 if normed else 2), (2 if epilogue in ("GLU", "INPUT") else 4)
        grid = min(self.limits.n_sms, args.n_tiles)
        tile_rows = args.split(grid) * (2 if epilogue == "GLU" else 1)
        warps = self._warps(first, tile_rows, normed)
        per_launch = self.tokens_per_launch(first, n_tokens, normed, warps)
        for token in range(0, n_tokens, per_launch):
            count = min(per_launch, n_tokens - token)
            args.n_tokens = count
            args.x = address(x) + token * first.k * x_size
            if post_norm:
                args.post_norm = post_norm.args(token * first.k * 4)
            for segment, out in zip(args.segment, outs, strict=False):
                segment.out = address(out) + token * segment.n_rows * out_size
            if residual is not None:
                args.residual = address(residual) + token * first.n_rows * 4
            config = self._config(first, count, normed, warps)
            args.slab = config.slab
            kernel = self._kernel([first], config, prologue, epilogue, rope_epilogue)
            kernel.launch(grid, config.warps * 32, (args,), smem=config.shared, pdl=pdl)

    def _warps(self, w: TiledMatrix, tile_rows: int, norm: bool) -> int:
        """Warps of a CTA that has so many tile rows of matrices like w."""
        few = self.limits.few_chunks_with_norm if norm else self.limits.few_chunks
        most = WARPS // 2 if tile_rows * w.layout.chunks(w.k) <= few else WARPS
        return min(most, self.limits.warps)

    def supports_two_layouts(
        self, weights: Sequence[TiledMatrix], n_tokens: int, norm: bool = False
    ) -> bool:
        """Whether one launch takes weights of two layouts (sorted): all tokens fit at once."""
        split = first_of_other_layout(weights)
        if split is None or first_of_other_layout(weights[split:]) is not None:
            return False
        few = n_tokens <= COLUMNS[-1] and weights[0].k == weights[split].k
        both, warps = [weights[0], weights[split]], self.limits.warps
        return few and self._config_two_layouts(both, n_tokens, norm, warps) is not None

    def _launch_two_layouts(
        self,
        pair: tuple[GemmDecodePartArgs, GemmDecodePartArgs],
        weights: Sequence[TiledMatrix],
        outs: Sequence[Address],
        n_tokens: int,
        prologue: str,
        rope_epilogue: RopeEpilogueRows | None,
        pdl: bool,
    ) -> None:
        """Launch CTAs for each layout, so that all CTAs read about the same number of bytes. The
        number of warps is chosen as if each CTA had twice its tile rows.
        """
        split = first_of_other_layout(weights)
        parts = weights[:split], weights[split:]
        for args, part, part_outs in zip(pair, parts, (outs[:split], outs[split:]), strict=True):
            args.set_matrices(part, part_outs, n_tokens, "STORE", "silu")
            args.slab = padded_k(part[0])
        a, b = pair
        if rope_epilogue is not None:
            b.first_part = split
        firsts = [part[0] for part in parts]
        tile_rows = a.n_tiles, b.n_tiles
        grid = min(self.limits.n_sms, sum(tile_rows))
        nbytes = tuple(w.layout.nbytes(ROWS, w.k) for w in firsts)
        ctas_of_a = ctas_of_first(tile_rows, nbytes, grid)
        tiles_each = a.split_from(0, ctas_of_a), b.split_from(ctas_of_a, grid - ctas_of_a)
        norm = prologue != "PLAIN"
        warps = max(self._warps(w, 2 * n, norm) for w, n in zip(firsts, tiles_each, strict=True))
        config = self._config_two_layouts(firsts, n_tokens, norm, warps)
        assert config is not None
        kernel = self._kernel(firsts, config, prologue, "STORE", rope_epilogue)
        kernel.launch(grid, warps * 32, pair, smem=config.shared, pdl=pdl)

    def holds_all_of_x(self, w: TiledMatrix, n_tokens: int, norm: bool) -> bool:
        """Whether x of all n_tokens fits in shared memory in one launch."""
        config = self._config(w, min(n_tokens, COLUMNS[-1]), norm, self.limits.warps)
        return config.n_tokens == n_tokens and config.slab >= padded_k(w)

    def tokens_per_launch(self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int) -> int:
        """Tokens of a launch: max(COLUMNS), or as many as fit in shared memory."""
        return self._config(w, min(n_tokens, COLUMNS[-1]), norm, warps).n_tokens

    def _config(self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int) -> GemmDecodeConfig:
        """Two stages with all of x are faster than three with a slab of it; a norm needs all of x.
        With PDL a CTA gets more than half of an SM's shared memory, so that no CTA of the next
        kernel is on the SM: its requests for small chunks would cost a fifth (LOG.md). Cached.
        """
        key = w.layout, w.k, n_tokens, norm, warps
        if key not in self._configs:
            self._configs[key] = self._find_config(w, n_tokens, norm, warps)
        return self._configs[key]

    def _config_two_layouts(
        self, weights: Sequence[TiledMatrix], n_tokens: int, norm: bool, warps: int
    ) -> GemmDecodeConfig | None:
        """The configuration for one matrix of each layout, or None if x does not fit."""
        configs = [self._config(w, n_tokens, norm, warps) for w in weights]
        whole = all(config.slab >= padded_k(w) for config, w in zip(configs, weights, strict=True))
        if not whole or any(config.n_tokens < n_tokens for config in configs):
            return None
        stages = min(config.stages for config in configs)
        return replace(max(configs, key=lambda config: config.shared), stages=stages)

    def _find_config(
        self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int
    ) -> GemmDecodeConfig:
        whole = padded_k(w)
        unit = warps * w.layout.chunk_k
        parts = [] if norm else range((whole - 1) // unit * unit, 0, -unit)
        every = range(self.limits.stages, 0, -1)
        choices = [(stages, whole) for stages in every if stages > 1]
        choices += [(stages, slab) for stages in every for slab in (whole, *parts)]
        for count in range(n_tokens, 0, -1):
            columns = next(c for c in COLUMNS if c >= count)
            for stages, slab in choices:
                shared = shared_bytes(w.layout, columns, slab, w.k, stages, count, warps)
                if shared <= self.limits.shared:
                    return GemmDecodeConfig(
                        count, columns, warps, stages, slab, max(shared, self._min_shared)
                    )
        raise ValueError(
            f"{w.layout.type_name} of {w.k} columns needs more than {self.limits.shared} bytes of "
            "shared memory"
        )

    def _kernel(
        self,
        weights: Sequence[TiledMatrix],
        config: GemmDecodeConfig,
        prologue: str,
        epilogue: Epilogue,
        rope_epilogue: RopeEpilogueRows | None,
    ) -> Kernel:
        """The instance for weights of one layout or of two."""
        widest = max(padded_k(w) for w in weights)
        pieces = -(-widest // (8 * 32 * config.warps)) if prologue != "PLAIN" else 1
        arguments = [*(w.layout.type_name for w in weights), str(config.columns), prologue]
        name = "gemm_decode" if len(weights) == 1 else "gemm_decode_two"
        defines = {"WARPS": config.warps, "STAGES": config.stages, "NORM_PIECES": pieces}
        if rope_epilogue is not None:
            name += "_rope"
            defines["PAGE_SIZE"] = rope_epilogue.heads.page_size
        elif len(weights) == 1:
            arguments += [epilogue, str(config.slab >= padded_k(weights[0])).lower()]
        instance = f"{name}<{', '.join(arguments)}>"
        key = instance, *defines.values()
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "gemm/gemm_decode.cu", instance, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]


def padded_k(w: TiledMatrix) -> int:
    """Columns of a row, rounded up to whole chunks."""
    return w.layout.chunks(w.k) * w.layout.chunk_k


def _prefetches_two(w: TiledMatrix, epilogue: Epilogue) -> bool:
    """Whether each warp requests two chunks before x: faster after a GLU, whose CTAs end apart."""
    return epilogue == "ADD" and w.layout.nbytes(w.n_rows, w.k) >= PREFETCH_BYTES


def first_of_other_layout(weights: Sequence[TiledMatrix]) -> int | None:
    """Index of the first weight whose layout differs from weights[0]'s, or None."""
    return next((i for i, w in enumerate(weights) if w.layout != weights[0].layout), None)


@cache
def ctas_of_first(tile_rows: tuple[int, int], nbytes: tuple[int, int], ctas: int) -> int:
    """CTAs of the first of two groups of tile rows, so that the largest number of bytes that a CTA
    reads is least. nbytes: of a tile row of each group.
    """

    def most(first: int) -> int:
        each = (first, ctas - first)
        return max(-(-n // b) * size for n, b, size in zip(tile_rows, each, nbytes, strict=True))

    least, largest = max(1, ctas - tile_rows[1]), min(tile_rows[0], ctas - 1)
    return min(range(least, largest + 1), key=most)


def shared_bytes(
    layout: Layout, columns: int, slab: int, k: int, stages: int, n_tokens: int, warps: int = WARPS
) -> int:
    """Bytes of dynamic shared memory of a CTA (DecodeSharedStorage in shared_storage.cuh) with
    `slab` columns of x.
    """
    batch, scaled = {1: 8, 2: 4, 4: 2, 8: 2}[columns], layout.is_scaled
    stage_bytes = warps * stages * layout.chunk_bytes
    sums_of_lane = 2 * columns if scaled else 4
    sums = batch * warps * 4 * (2 * ROWS * columns if slab >= k else sums_of_lane * 32)
    pad = 0 if columns == 1 else layout.chunk_k // (4 if columns == 8 else 2) if scaled else 64
    scales = slab // layout.group * 8 if scaled else 0
    return stage_bytes + sums + n_tokens * (scales + 2 * slab + pad)
