"""Launches cuda/mul_mat_wgmma.cu: tiled matrices times packed activations, on Hopper.

Knows how output is cut into tiles, and which cut is the fastest for a shape; when this product is
made is ops' business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ..device.base import Buffer, Device, Kernel
from .address import Address, address
from .mul_mat_tile import ACTIVATIONS, Epilogue, Segment, check_product, fill
from .pack import PLAIN, STEP, steps_of
from .tile import Layout, TiledMatrix

THREADS = 384
TILE_ROWS = 8  # of a block
ROW_BLOCK = TILE_ROWS * 16
TOKENS = (16, 32, 64, 128, 256)  # of a block, an instance each
WARPS = 8  # that multiply


class _Product(ctypes.Structure):
    _fields_ = (
        ("segment", Segment * 3),
        ("x", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("ready", ctypes.c_uint64),
        ("n_segments", ctypes.c_int),
        ("n_tiles", ctypes.c_int),
        ("n_tokens", ctypes.c_int),
        ("n_chunk", ctypes.c_int),
        ("token_blocks", ctypes.c_int),
        ("n_blocks", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("activation", ctypes.c_int),
        ("order", ctypes.c_int),
    )


@dataclass(frozen=True)
class Cut:
    """How a product is dealt out: tokens of a block, and whether blocks share tiles of output."""

    tokens: int
    split: bool

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that a multiprocessor runs at the same time."""
        return 2 if self.tokens <= 64 else 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return (112 if self.per_multiprocessor == 2 else 226) << 10

    def rounds(self, tiles: int, token_blocks: int, blocks: int) -> int:
        """Rounds of whole tiles. Where each weight is used once, none of them need be whole."""
        if not self.split:
            return -(-tiles // blocks)
        return tiles // blocks if token_blocks > 1 else 0


def workspace_bytes(multiprocessors: int) -> int:
    """Device memory for the sums that blocks leave to others."""
    return multiprocessors * ROW_BLOCK * TOKENS[-1] * 4


class MulMatWgmma:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, multiprocessors: int) -> None:
        self.device, self.multiprocessors = device, multiprocessors
        self._kernels: dict[tuple, Kernel] = {}
        self._shared: tuple[Buffer, Buffer] | None = None

    @staticmethod
    def runs_on(arch: str) -> bool:
        """Whether a GPU of this architecture ("sm_90a") has the instructions."""
        return arch == "sm_90a"

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
        cut: Cut | None = None,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is packed in the order of the weights' layout. STORE: floats. ADD: float out += y, for one
        weight. GLU: of two weights, one half out = activation(y0) * y1, in rows or packed. All
        weights have one layout and one k.
        """
        check_product(weights, len(outs), epilogue)
        first, glu = weights[0], epilogue == "GLU"
        product = _Product(
            x=address(x),
            n_segments=len(weights),
            n_tokens=n_tokens,
            n_chunk=first.layout.chunks(first.k),
            activation=ACTIVATIONS[activation],
            order=order,
        )
        product.n_tiles = fill(product.segment, weights, epilogue)
        for segment, out in zip(product.segment, outs, strict=False):
            segment.out = address(out)
        rows = TILE_ROWS // 2 if glu else TILE_ROWS
        row_blocks = -(-product.n_tiles // rows)
        if order != PLAIN:  # the zeros behind the last column, too
            row_blocks = steps_of(first.n_rows)
        stages = -(-steps_of(first.k) * STEP // max(first.layout.chunk_k, 2 * STEP))
        cut = cut or self.cut(row_blocks, n_tokens, stages)
        product.token_blocks = -(-n_tokens // cut.tokens)
        product.n_blocks = row_blocks * product.token_blocks
        blocks = min(
            self.multiprocessors * cut.per_multiprocessor,
            product.n_blocks * (stages if cut.split else 1),
        )
        product.rounds = cut.rounds(product.n_blocks, product.token_blocks, blocks)
        if cut.split:
            partial, ready = self._workspace()
            product.partial, product.ready = address(partial), address(ready)
        kernel = self._kernel(first.layout, cut.tokens, epilogue)
        kernel.launch(blocks, THREADS, (product,), smem=cut.shared, pdl=True)

    def cut(self, row_blocks: int, n_tokens: int, stages: int) -> Cut:
        """The fastest cut of row_blocks x n_tokens outputs with so many stages of K each."""
        if n_tokens <= TOKENS[-1] // 2:
            return Cut(next(t for t in TOKENS if t >= n_tokens), True)
        return min(
            (Cut(tokens, split) for tokens in TOKENS[-2:] for split in (False, True)),
            key=lambda cut: self._cost(cut, row_blocks, n_tokens, stages),
        )

    def _cost(self, cut: Cut, row_blocks: int, n_tokens: int, stages: int) -> float:
        """Time of a launch in units of a stage of 128 tokens; fitted to an H200."""
        tiles = row_blocks * -(-n_tokens // cut.tokens)
        stage, handing_over = (1.0, 4.0) if cut.tokens == TOKENS[-2] else (1.53, 10.0)
        if cut.split:
            # Whole tiles share what they read better: nearly as good is not good enough.
            return 1.05 * (tiles * stages * stage / self.multiprocessors + handing_over)
        return -(-tiles // self.multiprocessors) * stages * stage

    def _workspace(self) -> tuple[Buffer, Buffer]:
        """Sums that blocks leave to others, and flags that say so; launches clear the flags."""
        if self._shared is None:
            partial = self.device.alloc(workspace_bytes(self.multiprocessors), "partial sums")
            flags = self.device.zeros(2 * self.multiprocessors * WARPS * 4, "flags of partial sums")
            self._shared = partial, flags
        return self._shared

    def _kernel(self, layout: Layout, tokens: int, epilogue: Epilogue) -> Kernel:
        key = layout, tokens, epilogue
        if key not in self._kernels:
            name = f"mul_mat_wgmma<{layout.type_name}, {tokens}, {epilogue}>"
            self._kernels[key] = self.device.kernel("mul_mat_wgmma.cu", name)
        return self._kernels[key]
