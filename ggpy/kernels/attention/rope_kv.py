"""Launches cuda/attention/rope_kv.cu: bias, head norms and rotation between the projections and attention.

Also says how a layer's pages lie in memory, which attend.py reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache_types import CacheTypes
from ...device.base import Device, Kernel
from ...formats import by_name
from ..address import Address, address
from ..gemm.gemm import Epilogue
from ..gemm.hopper import ROW_BLOCK
from ..layout.tile import TiledMatrix

HALVES = CacheTypes("f16", "f16")
WARPS, THREADS = 4, 256
MAX_HEAD = 256
# Where tokens alone keep a GPU busy, a warp turns several heads by the angles that it found once.
MANY_TOKENS, HEADS_OF_A_WARP = 128, 6
# Of those tokens, heads of these sizes, where they turn in whole and have no norm, are moved by
# larger blocks, three of which fit on a multiprocessor.
WHOLE, TOKENS_OF_A_BLOCK, BLOCKS = (64, 128, 256), 8, 3


@dataclass(frozen=True)
class Heads:
    """H query heads and G key/value heads of E elements; pages of page_size positions.

    ValueError for head sizes that no kernel takes: two elements are written at a time.
    """

    n_head: int
    n_head_kv: int
    head_size: int
    page_size: int
    types: CacheTypes = HALVES

    def __post_init__(self) -> None:
        if self.head_size % 2 or not 2 <= self.head_size <= MAX_HEAD:
            raise ValueError(
                f"attention.key_length is {self.head_size}: on a GPU, heads have an even number of "
                f"elements, at most {MAX_HEAD}; use --device cpu"
            )

    @property
    def row(self) -> int:
        """Elements of a head in memory: E rounded up to 32, zeros behind."""
        return -(-self.head_size // 32) * 32

    @property
    def key_bytes(self) -> int:
        """Bytes of one page of keys of one layer."""
        return self.page_size * self.n_head_kv * by_name(self.types.k).row_bytes(self.row)

    @property
    def value_bytes(self) -> int:
        """Bytes of one page of values of one layer."""
        return self.page_size * self.n_head_kv * by_name(self.types.v).row_bytes(self.row)

    @property
    def has_halves(self) -> bool:
        """Keys and values are both f16."""
        return self.types == HALVES

    @property
    def structs(self) -> str:
        """The types of keys and values in C++ (cuda/attention/kv_types.cuh)."""
        return f"Cache{self.types.k.upper()}, Cache{self.types.v.upper()}"


def turns(inv_freq: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Radians per position -> 64-bit fractions of a circle, rounded to the nearest."""
    part = np.asarray(inv_freq, np.longdouble) / (2 * np.longdouble(np.pi))
    return np.array([round(int(p * 2**80) / 2**16) % 2**64 for p in part], np.uint64)


class RopeParameters(ctypes.Structure):
    _fields_ = (
        ("projected", ctypes.c_uint64 * 3),
        ("bias", ctypes.c_uint64 * 3),
        ("norm", ctypes.c_uint64 * 2),
        ("turns", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("sequences", ctypes.c_uint64),
        ("page_tables", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("k_pages", ctypes.c_uint64),
        ("v_pages", ctypes.c_uint64),
        ("n_head", ctypes.c_int),
        ("n_head_kv", ctypes.c_int),
        ("head_size", ctypes.c_int),
        ("row", ctypes.c_int),
        ("n_pairs", ctypes.c_int),
        ("neox", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("magnitude", ctypes.c_float),
        ("eps", ctypes.c_float * 2),
    )


class TurningParameters(ctypes.Structure):
    _fields_ = (
        ("turns", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * 3),
        ("head_size", ctypes.c_int),
        ("n_pairs", ctypes.c_int),
        ("neox", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("magnitude", ctypes.c_float),
    )


@dataclass(frozen=True)
class Batch:
    """A step's integers on the device: positions[T] and their pages[T], sequences[T],
    page_tables[S, stride].
    """

    positions: Address
    pages: Address
    sequences: Address
    page_tables: Address
    stride: int


@dataclass(frozen=True)
class Rotation:
    """What a layer does to its heads: bias of q, k, v; norms of q, k; rotation of n_pairs pairs."""

    turns: Address
    n_pairs: int
    neox: bool
    magnitude: float = 1.0
    bias: Sequence[Address | None] = (None, None, None)
    norm: Sequence[Address | None] = (None, None)
    eps: Sequence[float] = (0.0, 0.0)


@dataclass(frozen=True)
class Turning:
    """For a product that rotates what it makes of a layer's q, k and v: float2 turns[T, n_pairs]
    and int rows[T], as RopeKv.find_turns leaves them.
    """

    turns: Address
    rows: Address
    rotation: Rotation
    heads: Heads

    def parameters(self) -> TurningParameters:
        """The structure of cuda/gemm/gemm.cuh."""
        how, heads = self.rotation, self.heads
        result = TurningParameters(address(self.turns), address(self.rows))
        result.bias[:] = [address(b) for b in how.bias]
        result.head_size, result.page_size = heads.head_size, heads.page_size
        result.n_pairs, result.neox = how.n_pairs, how.neox
        result.magnitude = how.magnitude
        return result


@dataclass(frozen=True)
class TurningRows:
    """For a product of tokens that are alone with their sequences: half q[T, H, row] and the pages
    of keys and values where what it makes goes.
    """

    q: Address
    pages: tuple[Address, Address]
    batch: Batch
    rotation: Rotation
    heads: Heads

    def parameters(self) -> RopeParameters:
        """The structure of cuda/attention/rope.cuh."""
        given = self.heads, self.batch, self.pages, self.q
        return parameters(*given, [None] * 3, self.rotation)


def give_turning(
    product: Any, weights: Sequence[TiledMatrix], epilogue: Epilogue, turning: Turning | None
) -> None:
    """Set `turning` of a product's parameters; ValueError unless that is given for QKV, of q, k and
    v which fill its blocks, and for nothing else.
    """
    if (epilogue == "QKV") != (turning is not None and len(weights) == 3):
        raise ValueError("q, k and v are rotated by one product, and nothing else is")
    if turning is None:
        return
    if any(w.n_rows % ROW_BLOCK for w in weights):
        raise ValueError(f"rows of q, k and v that are rotated are multiples of {ROW_BLOCK}")
    product.turning = turning.parameters()


def turns_bytes(n_tokens: int, n_pairs: int) -> int:
    """Of the turns of so many tokens."""
    return 8 * n_tokens * n_pairs


def parameters(
    heads: Heads,
    batch: Batch,
    pages: tuple[Address | None, Address | None],
    q: Address | None,
    projected: Sequence[Address | None] = (),
    rotation: Rotation | None = None,
) -> RopeParameters:
    """The structure of cuda/attention/rope.cuh; projected: float q[T, H*E], k and v [T, G*E]."""
    result = RopeParameters(
        positions=address(batch.positions),
        pages=address(batch.pages),
        sequences=address(batch.sequences),
        page_tables=address(batch.page_tables),
        table_stride=batch.stride,
        q=address(q),
        k_pages=address(pages[0]),
        v_pages=address(pages[1]),
        n_head=heads.n_head,
        n_head_kv=heads.n_head_kv,
        head_size=heads.head_size,
        row=heads.row,
    )
    if rotation is not None:
        result.projected[:] = [address(part) for part in projected]
        result.bias[:] = [address(b) for b in rotation.bias]
        result.norm[:] = [address(n) for n in rotation.norm]
        result.eps[:] = rotation.eps
        result.turns, result.n_pairs = address(rotation.turns), rotation.n_pairs
        result.neox, result.magnitude = rotation.neox, rotation.magnitude
    return result


class RopeKv:
    """Rotation for heads of one shape."""

    def __init__(self, device: Device, heads: Heads) -> None:
        self.device, self.heads = device, heads
        heads.types.check_head(heads.head_size)
        self._kernels: dict[str, Kernel] = {}
        self._kernel(f"rope_kv<{heads.structs}>")

    def launch(
        self,
        projected: Sequence[Address],
        rotation: Rotation,
        batch: Batch,
        n_tokens: int,
        pages: tuple[Address, Address],
        q: Address,
    ) -> None:
        """Enqueue half q[T, H, row], and k and v to the layer's pages (keys, values)."""
        heads = self.heads
        args = parameters(heads, batch, pages, q, projected, rotation)
        if n_tokens >= MANY_TOKENS and self.turns_whole(rotation):
            kernel = self._kernel(f"rope_kv_whole<{heads.head_size}>")
            grid, threads = self._grid(n_tokens), TOKENS_OF_A_BLOCK * 32
            kernel.launch(grid, threads, (args, n_tokens), pdl=True)
            return
        per_warp = HEADS_OF_A_WARP if n_tokens >= MANY_TOKENS else 1
        grid = -(-(heads.n_head + 2 * heads.n_head_kv) // (WARPS * per_warp)), n_tokens
        self._kernel(f"rope_kv<{heads.structs}>").launch(grid, WARPS * 32, (args,), pdl=True)

    def find_turns(
        self, rotation: Rotation, batch: Batch, n_tokens: int, turns: Address, rows: Address
    ) -> None:
        """Enqueue what a Turning has of a step's tokens; of the rotation only turns and n_pairs
        count.
        """
        args = parameters(self.heads, batch, (None, None), None, [None] * 3, rotation)
        blocks = -(-n_tokens * rotation.n_pairs // THREADS)
        to = turns, rows, n_tokens
        self._kernel("find_turns").launch(blocks, THREADS, (args, *to), pdl=True)

    def product_turns(self, rotation: Rotation) -> bool:
        """Whether a product may do all of `launch`: heads have no norms, pages are of halves and
        have no columns of padding, a product's blocks are of one part, and have heads in whole
        where pairs are half a head apart.
        """
        h = self.heads
        whole = h.row == h.head_size and rotation.n_pairs % 2 == 0
        blocks = [n * h.head_size % ROW_BLOCK for n in (h.n_head, h.n_head_kv)]
        fit = not rotation.neox or ROW_BLOCK % h.head_size == 0
        normed = any(n is not None for n in rotation.norm)
        return fit and whole and h.has_halves and not any(blocks) and not normed

    def rows_turn(self, rotation: Rotation) -> bool:
        """The same of a product of few tokens, whose threads have a row each: pairs are neighbours,
        heads have no norms, and pages are of halves. Padding stays what it is: zeros.
        """
        plain = not rotation.neox and not any(n is not None for n in rotation.norm)
        return plain and self.heads.has_halves

    def turns_whole(self, rotation: Rotation) -> bool:
        """Whether heads are such that many tokens' are moved 16 bytes at a time."""
        whole = self.heads.head_size in WHOLE and 2 * rotation.n_pairs == self.heads.head_size
        return whole and self.heads.has_halves and not any(rotation.norm)

    def _grid(self, n_tokens: int) -> tuple[int, int]:
        """Blocks of many tokens: no more parts of heads than run at the same time."""
        heads, groups = self.heads, -(-n_tokens // TOKENS_OF_A_BLOCK)
        turned = -(-(heads.n_head + heads.n_head_kv) * heads.head_size // 256)  # at once by a warp
        return min(turned, max(1, BLOCKS * self.device.sm_count // groups)), groups

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            defines = {"PAGE_SIZE": self.heads.page_size}
            self._kernels[name] = self.device.kernel("attention/rope_kv.cu", name, defines=defines)
        return self._kernels[name]
