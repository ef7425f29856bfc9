"""Launches cuda/gemm/gemm_decode.cu: tiled matrices times the activations of a few tokens.

Knows how many columns of x and how many ring stages fit in shared memory; which product is made
when is ops' business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..attention.rope_kv import RopeParameters, TurningRows
from ..layout.tile import ROWS, Layout, TiledMatrix
from .gemm import STATIC_SHARED, Epilogue, Matrices
from .hopper import has_clusters

WARPS = 16  # of a block, where its shared memory allows
COLUMNS = (1, 2, 4, 8)  # tokens of one launch, an instance each
EARLY_BYTES = 16 << 20  # of weights, from which on two chunks of a warp may come before x
NORM_TOKENS = 2  # that a product normalises itself, for which each block has to: a launch less


class _Added(ctypes.Structure):
    _fields_ = (
        ("y", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("eps", ctypes.c_float),
    )


class _Product(Matrices):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("x", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("slab", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("patient", ctypes.c_int),
        ("early", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("rest", ctypes.c_int),
        ("added", _Added),
    )

    def deal(self, blocks: int) -> int:
        """Its tile rows to so many blocks; how many one of them has at most."""
        self.rounds, self.rest = divmod(self.n_tiles, blocks)
        return self.rounds + (self.rest > 0)


class _PartProduct(_Product):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("first_block", ctypes.c_int),
        ("n_blocks", ctypes.c_int),
    )

    def deal_from(self, first_block: int, blocks: int) -> int:
        """To so many blocks of the launch, from first_block on."""
        self.first_block, self.n_blocks = first_block, blocks
        return self.deal(blocks)


_HEADS = (("rope", RopeParameters), ("first_part", ctypes.c_int))


class _HeadsProduct(_Product):
    _fields_ = _HEADS


class _HeadsPartProduct(_PartProduct):
    _fields_ = _HEADS


@dataclass(frozen=True)
class Added:
    """norm(y[n_tokens, k]), which is added to x before that is normalised; both are floats. sum:
    where what x becomes goes, which is not where x is.
    """

    y: Address
    weight: Address
    eps: float
    sum: Address

    def parameters(self, offset: int = 0) -> _Added:
        """Of rows that begin `offset` bytes further on."""
        y, to = address(self.y) + offset, address(self.sum) + offset
        return _Added(y, address(self.weight), to, self.eps)


@dataclass(frozen=True)
class Fit:
    """How a launch takes n_tokens: by the instance for `columns` tokens, with so many warps of a
    block and stages of their rings, `slab` columns of x at a time, and so many bytes of shared
    memory.
    """

    n_tokens: int
    columns: int
    warps: int
    stages: int
    slab: int
    shared: int


@dataclass(frozen=True)
class Limits:
    """What the launches of one GPU share: `shared` bytes of a block, `multiprocessors`, `warps` of
    a block and ring `stages` at most. few_chunks: that a block takes, up to which half as many
    warps need less time, since they meet sooner; few_normed: with a norm, before which they meet,
    too. The warps decide the order of sums.
    """

    shared: int
    multiprocessors: int
    stages: int = 3
    warps: int = WARPS
    few_chunks: int = 12
    few_normed: int = 64


def warps_for(shared: int) -> int:
    """Warps of a block with `shared` bytes: 16 with 227 KB, 8 with 163 or 99 KB, 4 with 64 KB."""
    return WARPS if shared >= 200 << 10 else WARPS // 2 if shared >= 90 << 10 else WARPS // 4


class MulMatTile:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, limits: Limits) -> None:
        """ValueError where the limits are beyond the device."""
        if limits.shared + STATIC_SHARED > device.shared_bytes:
            raise ValueError(
                f"{limits.shared} bytes of dynamic shared memory and {STATIC_SHARED} of static are "
                f"more than the {device.shared_bytes} that a CTA may have on {device.arch}"
            )
        self.device, self.limits = device, limits
        self._least = device.shared_bytes // 2 if has_clusters(device.arch) else 0
        self._kernels: dict[tuple, Kernel] = {}
        self._fits: dict[tuple, Fit] = {}

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
        added: Added | None = None,
        residual: Address | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
        patient: bool = False,
        turning: TurningRows | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is half, or with `norm` (NORM_TOKENS at most) float that is RMS-normalised first, or is
        when `added` has been added to it. STORE: floats, capped to soft_cap * tanh(y / soft_cap) if
        that is not 0. ADD: float out = residual + y, for one weight. patient: what makes x takes
        long, so that weights are copied meanwhile at leisure. GLU: of two weights, one half out =
        activation(y0) * y1. QKV: of three, what goes where `turning` says, with a norm and where
        `takes_all` says so; outs are not used. All weights have one k, and one layout, unless
        `takes_two` says that they need not. More than max(COLUMNS) tokens, or than there is room
        for, are several launches.
        """
        if norm is not None and n_tokens > NORM_TOKENS:
            raise ValueError(f"{n_tokens} tokens are not normalised inside a product")
        if added is not None and norm is None:
            raise ValueError("only to what is normalised something is added")
        first, prologue = weights[0], "SUM" if added else "NORM" if norm is not None else "PLAIN"
        options: dict[str, Any] = {"norm": address(norm), "eps": eps, "soft_cap": soft_cap}
        options |= {"patient": patient, "early": not patient and _asks_early(weights[0], epilogue)}
        options |= {"added": added.parameters() if added else _Added()}
        if turning is not None:
            options["rope"] = turning.parameters()
        if epilogue in ("STORE", "QKV") and self.takes_two(weights, n_tokens, norm is not None):
            kind = _PartProduct if turning is None else _HeadsPartProduct
            pair = kind(x=address(x), **options), kind(x=address(x), **options)
            self._launch_two(pair, weights, outs, n_tokens, prologue, turning, pdl)
            return
        product = _Product(**options) if turning is None else _HeadsProduct(**options)
        product.take(weights, outs, n_tokens, epilogue, activation)
        x_size, out_size = (4 if norm is not None else 2), (2 if epilogue == "GLU" else 4)
        grid = min(self.limits.multiprocessors, product.n_tiles)
        tile_rows = product.deal(grid) * (2 if epilogue == "GLU" else 1)
        warps = self._warps(first, tile_rows, norm is not None)
        at_once = self.tokens_at_once(first, n_tokens, norm is not None, warps)
        for token in range(0, n_tokens, at_once):
            count = min(at_once, n_tokens - token)
            product.n_tokens = count
            product.x = address(x) + token * first.k * x_size
            if added:
                product.added = added.parameters(token * first.k * 4)
            for segment, out in zip(product.segment, outs, strict=False):
                segment.out = address(out) + token * segment.n_rows * out_size
            product.residual = (
                address(residual) + token * first.n_rows * 4 if residual is not None else 0
            )
            fit = self._fit(first, count, norm is not None, warps)
            product.slab = fit.slab
            kernel = self._kernel([first], fit, prologue, epilogue, turning)
            kernel.launch(grid, fit.warps * 32, (product,), smem=fit.shared, pdl=pdl)

    def _warps(self, w: TiledMatrix, tile_rows: int, norm: bool) -> int:
        """Of a block that takes so many tile rows of matrices like w."""
        few = self.limits.few_normed if norm else self.limits.few_chunks
        is_few = tile_rows * w.layout.chunks(w.k) <= few
        return min(WARPS // 2 if is_few else WARPS, self.limits.warps)

    def takes_two(self, weights: Sequence[TiledMatrix], n_tokens: int, norm: bool = False) -> bool:
        """Whether one launch takes weights of two layouts, those of the second behind the others:
        if there is room for all tokens at once.
        """
        split = first_of_another(weights)
        if split is None or first_of_another(weights[split:]) is not None:
            return False
        few = n_tokens <= COLUMNS[-1] and weights[0].k == weights[split].k
        both, warps = [weights[0], weights[split]], self.limits.warps
        return few and self._fit_two(both, n_tokens, norm, warps) is not None

    def _launch_two(
        self,
        products: tuple[_PartProduct, _PartProduct],
        weights: Sequence[TiledMatrix],
        outs: Sequence[Address],
        n_tokens: int,
        prologue: str,
        turning: TurningRows | None,
        pdl: bool,
    ) -> None:
        """Each layout's matrices by blocks of their own, so that all have about as much to read.
        They have fewer warps up to half as many chunks as others do.
        """
        split = first_of_another(weights)
        parts = weights[:split], weights[split:]
        for product, part, to in zip(products, parts, (outs[:split], outs[split:]), strict=True):
            product.take(part, to, n_tokens, "STORE", "silu")
            product.slab = columns_of(part[0])
        a, b = products
        if turning is not None:
            b.first_part = split
        firsts = [part[0] for part in parts]
        tile_rows = a.n_tiles, b.n_tiles
        grid = min(self.limits.multiprocessors, sum(tile_rows))
        of_first = shared_out(tile_rows, tuple(w.layout.nbytes(ROWS, w.k) for w in firsts), grid)
        dealt = a.deal_from(0, of_first), b.deal_from(of_first, grid - of_first)
        norm = prologue != "PLAIN"
        warps = max(self._warps(w, 2 * n, norm) for w, n in zip(firsts, dealt, strict=True))
        fit = self._fit_two(firsts, n_tokens, norm, warps)
        assert fit is not None
        kernel = self._kernel(firsts, fit, prologue, "STORE", turning)
        kernel.launch(grid, warps * 32, products, smem=fit.shared, pdl=pdl)

    def takes_all(self, w: TiledMatrix, n_tokens: int, norm: bool) -> bool:
        """Whether one launch has room for all of x, of so many tokens."""
        fit = self._fit(w, min(n_tokens, COLUMNS[-1]), norm, self.limits.warps)
        return fit.n_tokens == n_tokens and fit.slab >= columns_of(w)

    def tokens_at_once(self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int) -> int:
        """How many of n_tokens one launch takes: max(COLUMNS), or what there is room for."""
        return self._fit(w, min(n_tokens, COLUMNS[-1]), norm, warps).n_tokens

    def _fit(self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int) -> Fit:
        """Two stages and all of x are better than three and a part; a norm needs all of x. Where
        the next kernel may begin early, a block has more than half of the memory: of two blocks of
        small chunks, one would ask for the first weights of its product while the other still does
        for those of this one, which takes a fifth longer (SCHEDULES.md).
        """
        key = w.layout, w.k, n_tokens, norm, warps
        if key not in self._fits:
            self._fits[key] = self._find_fit(w, n_tokens, norm, warps)
        return self._fits[key]

    def _fit_two(
        self, weights: Sequence[TiledMatrix], n_tokens: int, norm: bool, warps: int
    ) -> Fit | None:
        """For one of each layout at once, or None."""
        fits = [self._fit(w, n_tokens, norm, warps) for w in weights]
        whole = all(fit.slab >= columns_of(w) for fit, w in zip(fits, weights, strict=True))
        if not whole or any(fit.n_tokens < n_tokens for fit in fits):
            return None
        stages = min(fit.stages for fit in fits)
        return replace(max(fits, key=lambda fit: fit.shared), stages=stages)

    def _find_fit(self, w: TiledMatrix, n_tokens: int, norm: bool, warps: int) -> Fit:
        whole = columns_of(w)
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
                    return Fit(count, columns, warps, stages, slab, max(shared, self._least))
        raise ValueError(
            f"{w.layout.type_name} of {w.k} columns needs more than {self.limits.shared} bytes of "
            "shared memory"
        )

    def _kernel(
        self,
        weights: Sequence[TiledMatrix],
        fit: Fit,
        prologue: str,
        epilogue: Epilogue,
        turning: TurningRows | None,
    ) -> Kernel:
        """Of weights of one layout, or of two."""
        widest = max(columns_of(w) for w in weights)
        pieces = -(-widest // (8 * 32 * fit.warps)) if prologue != "PLAIN" else 1
        arguments = [*(w.layout.type_name for w in weights), str(fit.columns), prologue]
        name = "gemm_decode" if len(weights) == 1 else "gemm_decode_two"
        defines = {"WARPS": fit.warps, "STAGES": fit.stages, "NORM_PIECES": pieces}
        if turning is not None:
            name += "_heads"
            defines["PAGE_SIZE"] = turning.heads.page_size
        elif len(weights) == 1:
            arguments += [epilogue, str(fit.slab >= columns_of(weights[0])).lower()]
        instance = f"{name}<{', '.join(arguments)}>"
        key = instance, *defines.values()
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "gemm/gemm_decode.cu", instance, defines=defines
            )
        return self._kernels[key]


def columns_of(w: TiledMatrix) -> int:
    """Of a row, in whole chunks."""
    return w.layout.chunks(w.k) * w.layout.chunk_k


def _asks_early(w: TiledMatrix, epilogue: Epilogue) -> bool:
    """Whether two chunks of each warp are asked for before x, which they delay: where a large gated
    product comes before, whose blocks end far apart.
    """
    return epilogue == "ADD" and w.layout.nbytes(w.n_rows, w.k) >= EARLY_BYTES


def first_of_another(weights: Sequence[TiledMatrix]) -> int | None:
    """Which of the weights is the first that has not the first one's layout."""
    others = (i for i, w in enumerate(weights) if w.layout != weights[0].layout)
    return next(others, None)


@cache
def shared_out(tile_rows: tuple[int, int], nbytes: tuple[int, int], blocks: int) -> int:
    """How many blocks the first of two products should have, whose tile rows have so many bytes, so
    that no block reads more than it must.
    """

    def most(first: int) -> int:
        each = (first, blocks - first)
        return max(-(-n // b) * size for n, b, size in zip(tile_rows, each, nbytes, strict=True))

    least, largest = max(1, blocks - tile_rows[1]), min(tile_rows[0], blocks - 1)
    return min(range(least, largest + 1), key=most)


def shared_bytes(
    layout: Layout, columns: int, slab: int, k: int, stages: int, n_tokens: int, warps: int = WARPS
) -> int:
    """Dynamic shared memory of a block (struct Room in shared_storage.cuh), of `slab` columns at a time."""
    batch, scaled = {1: 8, 2: 4, 4: 2, 8: 2}[columns], layout.is_scaled
    ring = warps * stages * layout.chunk_bytes
    sums_of_lane = 2 * columns if scaled else 4
    sums = batch * warps * 4 * (2 * ROWS * columns if slab >= k else sums_of_lane * 32)
    pad = 0 if columns == 1 else layout.chunk_k // (4 if columns == 8 else 2) if scaled else 64
    scales = slab // layout.group * 8 if scaled else 0
    return ring + sums + n_tokens * (scales + 2 * slab + pad)
