"""Launches cuda/mul_mat_tile.cu: tiled matrices times the activations of a few tokens.

Knows how many columns of x and how many ring stages fit in shared memory; which product is made
when is ops' business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ..device.base import Device, Kernel
from .address import Address, address
from .hopper import has_clusters
from .product import Epilogue, Matrices
from .tile import ROWS, Layout, TiledMatrix

WARPS = 16  # of a block, where its shared memory allows
COLUMNS = (1, 2, 4, 8)  # tokens of one launch, an instance each
NORM_TOKENS = 2  # that a product normalises itself, for which each block has to: a launch less


class _Added(ctypes.Structure):
    _fields_ = (
        ("y", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("eps", ctypes.c_float),
    )


class _Product(Matrices):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("slab", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("patient", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("rest", ctypes.c_int),
        ("added", _Added),
    )


@dataclass(frozen=True)
class Added:
    """norm(y[n_tokens, k]), which is added to x before that is normalised; both are floats. sum:
    where what x becomes goes, which is not where x is.
    """

    y: Address
    weight: Address
    eps: float
    sum: Address


@dataclass(frozen=True)
class Limits:
    """What the launches of one GPU share: `shared` bytes of a block, `multiprocessors`, `warps` of
    a block and ring `stages` at most. The warps decide the order of sums.
    """

    shared: int
    multiprocessors: int
    stages: int = 3
    warps: int = WARPS


def warps_for(shared: int) -> int:
    """Warps of a block with `shared` bytes: 16 with 227 KB, 8 with 163 or 99 KB, 4 with 64 KB."""
    return WARPS if shared >= 200 << 10 else WARPS // 2 if shared >= 90 << 10 else WARPS // 4


class MulMatTile:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.device, self.limits = device, limits
        self._least = device.shared_bytes // 2 if has_clusters(device.arch) else 0
        self._kernels: dict[tuple, Kernel] = {}
        self._fits: dict[tuple, tuple[int, int, int, int, int]] = {}

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
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is half, or with `norm` (NORM_TOKENS at most) float that is RMS-normalised first, or is
        when `added` has been added to it. STORE: floats, capped to soft_cap * tanh(y / soft_cap) if
        that is not 0. ADD: float out = residual + y, for one weight. patient: what makes x takes
        long, so that weights are copied meanwhile at leisure. GLU: of two weights, one half out =
        activation(y0) * y1. All weights have one layout and one k. More than max(COLUMNS) tokens,
        or than there is room for, are several launches.
        """
        first = weights[0]
        if norm is not None and n_tokens > NORM_TOKENS:
            raise ValueError(f"{n_tokens} tokens are not normalised inside a product")
        if added is not None and norm is None:
            raise ValueError("only to what is normalised something is added")
        product = _Product(norm=address(norm), eps=eps, soft_cap=soft_cap, patient=patient)
        product.take(weights, outs, n_tokens, epilogue, activation)
        x_size, out_size = (4 if norm is not None else 2), (2 if epilogue == "GLU" else 4)
        grid = min(self.limits.multiprocessors, product.n_tiles)
        product.rounds, product.rest = divmod(product.n_tiles, grid)
        at_once = self.tokens_at_once(first, n_tokens, norm is not None)
        for token in range(0, n_tokens, at_once):
            count = min(at_once, n_tokens - token)
            product.n_tokens = count
            product.x = address(x) + token * first.k * x_size
            if added is not None:
                y, to = (address(a) + token * first.k * 4 for a in (added.y, added.sum))
                product.added = _Added(y, address(added.weight), to, added.eps)
            for segment, out in zip(product.segment, outs, strict=False):
                segment.out = address(out) + token * segment.n_rows * out_size
            product.residual = (
                address(residual) + token * first.n_rows * 4 if residual is not None else 0
            )
            _, columns, stages, product.slab, shared = self._fit(first, count, norm is not None)
            whole = product.slab >= product.n_chunk * first.layout.chunk_k
            prologue = "SUM" if added is not None else "NORM" if norm is not None else "PLAIN"
            kernel = self._kernel(first, columns, stages, prologue, epilogue, whole)
            kernel.launch(grid, self.limits.warps * 32, (product,), smem=shared, pdl=pdl)

    def tokens_at_once(self, w: TiledMatrix, n_tokens: int, norm: bool = False) -> int:
        """How many of n_tokens one launch takes: max(COLUMNS), or what there is room for."""
        return self._fit(w, min(n_tokens, COLUMNS[-1]), norm)[0]

    def _fit(self, w: TiledMatrix, n_tokens: int, norm: bool) -> tuple[int, int, int, int, int]:
        """(tokens at once, columns of the instance, ring stages, columns of x in shared memory at
        a time, bytes of shared memory).

        Two stages and all of x are better than three and a part; a norm needs all of x. Where the
        next kernel may begin early, a block has more than half of the memory: of two blocks of
        small chunks, one would ask for the first weights of its product while the other still does
        for those of this one, which takes a fifth longer (SCHEDULES.md).
        """
        key = w.layout, w.k, n_tokens, norm
        if key not in self._fits:
            self._fits[key] = self._find_fit(w, n_tokens, norm)
        return self._fits[key]

    def _find_fit(
        self, w: TiledMatrix, n_tokens: int, norm: bool
    ) -> tuple[int, int, int, int, int]:
        whole = w.layout.chunks(w.k) * w.layout.chunk_k
        warps = self.limits.warps
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
                    return count, columns, stages, slab, max(shared, self._least)
        raise ValueError(
            f"{w.layout.type_name} of {w.k} columns needs more than {self.limits.shared} bytes of "
            "shared memory"
        )

    def _kernel(
        self,
        w: TiledMatrix,
        columns: int,
        stages: int,
        prologue: str,
        epilogue: Epilogue,
        whole: bool,
    ) -> Kernel:
        warps, padded = self.limits.warps, w.layout.chunks(w.k) * w.layout.chunk_k
        pieces = -(-padded // (8 * 32 * warps)) if prologue != "PLAIN" else 1
        key = w.layout, columns, stages, pieces, prologue, epilogue, whole
        if key not in self._kernels:
            instance = w.layout.type_name, columns, prologue, epilogue, str(whole).lower()
            name = f"mul_mat_tile<{', '.join(map(str, instance))}>"
            defines = {"WARPS": warps, "STAGES": stages, "NORM_PIECES": pieces}
            self._kernels[key] = self.device.kernel("mul_mat_tile.cu", name, defines=defines)
        return self._kernels[key]


def shared_bytes(
    layout: Layout, columns: int, slab: int, k: int, stages: int, n_tokens: int, warps: int = WARPS
) -> int:
    """Dynamic shared memory of a block (struct Room in room.cuh), of `slab` columns at a time."""
    batch, scaled = {1: 8, 2: 4, 4: 2, 8: 2}[columns], layout.is_scaled
    ring = warps * stages * layout.chunk_bytes
    sums_of_lane = 2 * columns if scaled else 4
    sums = batch * warps * 4 * (2 * ROWS * columns if slab >= k else sums_of_lane * 32)
    pad = 0 if columns == 1 else layout.chunk_k // (4 if columns == 8 else 2) if scaled else 64
    scales = slab // layout.group * 8 if scaled else 0
    return ring + sums + n_tokens * (scales + 2 * slab + pad)
