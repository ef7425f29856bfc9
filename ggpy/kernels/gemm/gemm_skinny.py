"""Launches cuda/gemm/gemm_skinny.cu: matrices in tiles of 8 or 16 bits times the packed activations of
few tokens, which lie in shared memory in whole.

When this product is made is ops' business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.pack import PLAIN, STEP, UNIT, steps_of
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..norm.deferred_norm import MOST_TOKENS, Handed, HandedParameters
from .gemm import SEGMENTS, STATIC_SHARED, Epilogue, Matrices
from .hopper import LeftSums, has_clusters

WARPS = 16  # of a block
TOKENS = (4, 8, 16)  # of one launch, an instance each
STAGES = (3, 2)  # of a ring: as many as there is room for
CLUSTERS = (1, 2)  # blocks that share x, where they can: as few as leave room for these
PARTS = 4  # blocks that share x otherwise, and leave sums to each other in memory
OUTPUTS = 16  # tokens of the rounds between two barriers: an output for each thread of a block


@dataclass(frozen=True)
class Fit:
    """How a product is made: tokens of the instance, blocks that share x as a cluster, or that do
    without, stages, rounds between two barriers, bytes of shared memory.
    """

    tokens: int
    cluster: int
    parts: int
    stages: int
    batch: int
    shared: int


class _Product(Matrices):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("handed", HandedParameters),
        ("partial", ctypes.c_uint64),
        ("order", ctypes.c_int),
        ("patient", ctypes.c_int),
        ("each", ctypes.c_int),
        ("rest", ctypes.c_int),
    )


class MulMatFew:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, multiprocessors: int, sums: LeftSums | None = None) -> None:
        """sums: memory that other products leave sums in as well; by default it has its own."""
        self.device, self.multiprocessors = device, multiprocessors
        self._sums = sums or LeftSums(device, multiprocessors)
        self._shared = device.shared_bytes - STATIC_SHARED
        self._kernels: dict[tuple, Kernel] = {}

    def fit(self, w: TiledMatrix, n_tokens: int) -> Fit | None:
        """How a product of so many tokens with w is made; None: x would not lie in shared memory in
        whole.
        """
        tokens = next((t for t in TOKENS if t >= n_tokens), None)
        if tokens is None:
            return None
        clusters = CLUSTERS if has_clusters(self.device.arch) else (1,)
        batches = [b for b in (4, 2, 1) if b * tokens <= OUTPUTS]
        choices = [(*first, 1, batch) for *first, batch in product(STAGES, clusters, batches)]
        if SEGMENTS * w.tile_rows * PARTS * ROWS * tokens <= self._sums.floats:
            choices += [(stages, 1, PARTS, 1) for stages in STAGES]
        for stages, cluster, parts, batch in choices:
            if w.k % (cluster * parts * max(UNIT, w.layout.chunk_k)):
                continue
            shared = shared_bytes(w, tokens, cluster, parts, stages, batch)
            if shared <= self._shared:
                return Fit(tokens, cluster, parts, stages, batch, shared)
        return None

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: Address,
        outs: Sequence[Address],
        n_tokens: int,
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        order: int = PLAIN,
        late: bool = False,
        handed: Handed | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is packed in the order of the weights' layout. STORE: floats. ADD: float out += y, for one
        weight. GLU: of two weights, one half out = activation(y0) * y1, in rows or packed. All
        weights have one layout and one k. late: what makes x takes long, so that weights are copied
        meanwhile at leisure. handed: a norm of at most MOST_TOKENS, of what ADD leaves, or that of
        x. pdl: weights are read before the kernel before has ended. ValueError without a `fit`.
        """
        first, fit = weights[0], self.fit(weights[0], n_tokens)
        if fit is None:
            raise ValueError(f"{n_tokens} tokens of {first.k} columns do not lie in shared memory")
        parameters = _Product(x=address(x), order=order, patient=late)
        parameters.take(weights, outs, n_tokens, epilogue, activation)
        sharers = fit.cluster * fit.parts
        clusters = min(self.multiprocessors // sharers, parameters.n_tiles)
        parameters.each, parameters.rest = divmod(parameters.n_tiles, clusters)
        if handed is not None:
            if n_tokens > MOST_TOKENS:
                raise ValueError(f"a norm of {n_tokens} tokens is not handed on")
            parameters.handed = handed.parameters()
        if fit.parts > 1:
            self._sums.give(parameters)
        kernel = self._kernel(first.layout, fit, epilogue)
        grid, threads, args = clusters * sharers, WARPS * 32, (parameters,)
        shape: dict[str, Any] = {"smem": fit.shared, "cluster": fit.cluster}
        kernel.launch(grid, threads, args, pdl=pdl, cooperative=fit.parts > 1, **shape)

    def _kernel(self, layout: Layout, fit: Fit, epilogue: Epilogue) -> Kernel:
        instance = layout.type_name, fit.tokens, epilogue, fit.cluster, fit.parts
        defines = {"WARPS": WARPS, "STAGES": fit.stages, "BATCH": fit.batch}
        key = *instance, *defines.values()
        if key not in self._kernels:
            name = f"gemm_skinny<{', '.join(map(str, instance))}>"
            self._kernels[key] = self.device.kernel("gemm/gemm_skinny.cu", name, defines=defines)
        return self._kernels[key]


def shared_bytes(
    w: TiledMatrix, tokens: int, cluster: int, parts: int, stages: int, batch: int
) -> int:
    """Dynamic shared memory of a block: rings, sums of two batches of rounds, x."""
    ring = WARPS * stages * w.layout.chunk_bytes
    sums = 2 * batch * cluster * WARPS * ROWS * tokens * 4
    return ring + sums + steps_of(w.k) * 2 * STEP * tokens // (cluster * parts)
