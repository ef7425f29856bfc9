"""Launches cuda/attention/rope_kv.cu: bias, head norms and RoPE between the QKV projections and
attention.

Also defines the layout of a layer's KV cache pages (Heads), which paged_attention.py reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
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
from ..struct_asserts import struct_asserts

F16_KV = CacheTypes("f16", "f16")
WARPS, THREADS = 4, 256
MAX_HEAD = 512
USUAL_HEAD = 256  # elements up to which all kernels are compiled for any head
WIDE_UNIT = 128  # of larger heads in memory: two warps share one
# From MANY_TOKENS tokens on, a warp rotates several heads with the angles that it computed once:
# the tokens alone give enough CTAs to keep the GPU busy.
MANY_TOKENS, HEADS_PER_WARP = 128, 6
# From MANY_TOKENS tokens on, heads of these sizes whose elements all rotate, without a head norm,
# go through rope_kv_whole, whose CTAs are larger: three fit on an SM.
WHOLE_HEAD_SIZES, TOKENS_PER_CTA, CTAS_PER_SM = (64, 128, 256), 8, 3


@dataclass(frozen=True)
class Heads:
    """Shape of attention heads and of KV cache pages: H query heads and G KV heads of E elements;
    pages of page_size positions.

    ValueError if no kernel supports the head size: kernels write two elements at a time.
    """

    n_head: int
    n_head_kv: int
    head_size: int
    page_size: int
    types: CacheTypes = F16_KV

    def __post_init__(self) -> None:
        if self.head_size % 2 or not 2 <= self.head_size <= MAX_HEAD:
            raise ValueError(
                f"attention.key_length is {self.head_size}: on a GPU, heads have an even number of "
                f"elements, at most {MAX_HEAD}; use --device cpu"
            )

    @property
    def row(self) -> int:
        """Elements of a head in memory: E rounded up to 32, or from USUAL_HEAD on to WIDE_UNIT; the
        padding is 0.
        """
        unit = 32 if self.head_size <= USUAL_HEAD else WIDE_UNIT
        return -(-self.head_size // unit) * unit

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernels for these heads."""
        wide = {"MAX_HEAD": MAX_HEAD} if self.row > USUAL_HEAD else {}
        return {"PAGE_SIZE": self.page_size, **wide}

    @property
    def key_bytes(self) -> int:
        """Bytes of one page of K of one layer."""
        return self.page_size * self.n_head_kv * by_name(self.types.k).row_bytes(self.row)

    @property
    def value_bytes(self) -> int:
        """Bytes of one page of V of one layer."""
        return self.page_size * self.n_head_kv * by_name(self.types.v).row_bytes(self.row)

    @property
    def is_f16(self) -> bool:
        """Whether K and V are both f16."""
        return self.types == F16_KV

    @property
    def cpp_types(self) -> str:
        """KV cache types as C++ names (cuda/attention/kv_types.cuh)."""
        return f"Cache{self.types.k.upper()}, Cache{self.types.v.upper()}"


def angles(inv_freq: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Radians per position -> turns per position times 2^64, rounded to the nearest."""
    part = np.asarray(inv_freq, np.longdouble) / (2 * np.longdouble(np.pi))
    return np.array([round(int(p * 2**80) / 2**16) % 2**64 for p in part], np.uint64)


class RopeArgs(ctypes.Structure):
    _fields_ = (
        ("projected", ctypes.c_uint64 * 3),
        ("bias", ctypes.c_uint64 * 3),
        ("norm", ctypes.c_uint64 * 2),
        ("angles", ctypes.c_uint64),
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
        ("eps", ctypes.c_float * 3),
    )


class UnusualHeads(ctypes.Structure):
    """Rare operations on heads, for rope_kv_unusual.

    norm_last: norms of q and k follow RoPE. centred: they are layer norms. by_head: their weights
    are [H, E] and [G, E]. q at position p is multiplied by 1 + growth * ln(1 + (p + offset) //
    length).
    """

    _fields_ = (
        *((name, ctypes.c_int) for name in ("norm_last", "centred", "by_head")),
        ("length", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("growth", ctypes.c_float),
    )


ASSERTS = struct_asserts(RopeArgs, UnusualHeads)


class RopeEpilogueArgs(ctypes.Structure):
    _fields_ = (
        ("angles", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * 3),
        ("head_size", ctypes.c_int),
        ("n_pairs", ctypes.c_int),
        ("neox", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("magnitude", ctypes.c_float),
    )


@dataclass(frozen=True)
class AttentionMetadata:
    """A step's metadata on the device, int32: positions[T], their pages[T], sequences[T],
    page_tables[S, stride].
    """

    positions: Address
    pages: Address
    sequences: Address
    page_tables: Address
    stride: int


@dataclass(frozen=True)
class Rotation:
    """The operations on a layer's heads: biases of q, k, v; norms of q, k; rotation of n_pairs
    pairs.

    value_eps: of a norm of v without weights; None for no norm. shared: there is only q, because
    another layer of the step has written k and v. `unusual` heads take a separate kernel.
    """

    angles: Address
    n_pairs: int
    neox: bool
    magnitude: float = 1.0
    bias: Sequence[Address | None] = (None, None, None)
    norm: Sequence[Address | None] = (None, None)
    eps: Sequence[float] = (0.0, 0.0)
    value_eps: float | None = None
    shared: bool = False
    unusual: UnusualHeads | None = None

    @property
    def defines(self) -> dict[str, int]:
        """Macros for norms of v, and for layers without k and v."""
        found = {"VALUE_NORM": self.value_eps is not None, "SHARED_KV": self.shared}
        return {name: 1 for name, there in found.items() if there}

    @property
    def is_usual(self) -> bool:
        """Whether there are q, k and v without norms, which epilogues of GEMMs can rotate."""
        return not self.defines and not any(n is not None for n in self.norm)


@dataclass(frozen=True)
class RopeEpilogue:
    """For a GEMM that rotates a layer's q, k and v in its epilogue: float2 angles[T, n_pairs] and
    int rows[T], written by RopeKv.compute_angles.
    """

    angles: Address
    rows: Address
    rotation: Rotation
    heads: Heads

    def args(self) -> RopeEpilogueArgs:
        """Returns the structure of cuda/gemm/gemm.cuh."""
        how, heads = self.rotation, self.heads
        result = RopeEpilogueArgs(address(self.angles), address(self.rows))
        result.bias[:] = [address(b) for b in how.bias]
        result.head_size, result.page_size = heads.head_size, heads.page_size
        result.n_pairs, result.neox = how.n_pairs, how.neox
        result.magnitude = how.magnitude
        return result


@dataclass(frozen=True)
class RopeEpilogueRows:
    """For a decode GEMM that rotates q, k and v in its epilogue: the outputs are f16 q[T, H, row]
    and the KV cache pages.
    """

    q: Address
    pages: tuple[Address, Address]
    batch: AttentionMetadata
    rotation: Rotation
    heads: Heads

    def args(self) -> RopeArgs:
        """Returns the structure of cuda/attention/rope.cuh."""
        operands = self.heads, self.batch, self.pages, self.q
        return rope_args(*operands, [None] * 3, self.rotation)


def set_rope_epilogue(
    product: Any,
    weights: Sequence[TiledMatrix],
    epilogue: Epilogue,
    rope_epilogue: RopeEpilogue | None,
) -> None:
    """Sets `product.rope_epilogue`. ValueError if rope_epilogue is set for an epilogue other than
    QKV or missing for QKV, or if rows of q, k and v do not fill the GEMM's tiles.
    """
    if (epilogue == "QKV") != (rope_epilogue is not None and len(weights) == 3):
        raise ValueError("the epilogue QKV needs q, k, v and rope_epilogue; no other takes one")
    if rope_epilogue is None:
        return
    if any(w.n_rows % ROW_BLOCK for w in weights):
        raise ValueError(f"rows of rotated q, k and v must be multiples of {ROW_BLOCK}")
    product.rope_epilogue = rope_epilogue.args()


def angles_bytes(n_tokens: int, n_pairs: int) -> int:
    """Bytes of the angles of n_tokens tokens."""
    return 8 * n_tokens * n_pairs


def rope_args(
    heads: Heads,
    batch: AttentionMetadata,
    pages: tuple[Address | None, Address | None],
    q: Address | None,
    projected: Sequence[Address | None] = (),
    rotation: Rotation | None = None,
) -> RopeArgs:
    """Returns the structure of cuda/attention/rope.cuh; projected: float q[T, H*E], k and v [T,
    G*E].
    """
    result = RopeArgs(
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
        result.eps[:] = *rotation.eps, rotation.value_eps or 0.0
        result.angles, result.n_pairs = address(rotation.angles), rotation.n_pairs
        result.neox, result.magnitude = rotation.neox, rotation.magnitude
    return result


class RopeKv:
    """RoPE for heads of one shape."""

    def __init__(self, device: Device, heads: Heads) -> None:
        self.device, self.heads = device, heads
        heads.types.check_head(heads.head_size)
        self._kernels: dict[tuple, Kernel] = {}
        self._kernel(f"rope_kv<{heads.cpp_types}>")

    def launch(
        self,
        projected: Sequence[Address | None],
        rotation: Rotation,
        batch: AttentionMetadata,
        n_tokens: int,
        pages: tuple[Address, Address],
        q: Address,
    ) -> None:
        """Enqueues f16 q[T, H, row], and k and v to the layer's pages (K, V)."""
        heads = self.heads
        args = rope_args(heads, batch, pages, q, projected, rotation)
        per_warp = HEADS_PER_WARP if n_tokens >= MANY_TOKENS else 1
        n_heads = heads.n_head + (0 if rotation.shared else 2 * heads.n_head_kv)
        grid = -(-n_heads // (WARPS * per_warp)), n_tokens
        if rotation.unusual is not None:
            kernel = self._kernel(f"rope_kv_unusual<{heads.cpp_types}>")
            kernel.launch(grid, WARPS * 32, (args, rotation.unusual), pdl=True)
            return
        if n_tokens >= MANY_TOKENS and self.rotates_whole_heads(rotation):
            kernel = self._kernel(f"rope_kv_whole<{heads.head_size}>")
            ctas, threads = self._grid(n_tokens), TOKENS_PER_CTA * 32
            kernel.launch(ctas, threads, (args, n_tokens), pdl=True)
            return
        kernel = self._kernel(f"rope_kv<{heads.cpp_types}>", rotation.defines)
        kernel.launch(grid, WARPS * 32, (args,), pdl=True)

    def compute_angles(
        self,
        rotation: Rotation,
        batch: AttentionMetadata,
        n_tokens: int,
        angles: Address,
        rows: Address,
    ) -> None:
        """Enqueues `angles` and `rows` of RopeEpilogue for a step's tokens. Reads only `angles` and
        `n_pairs` of the rotation.
        """
        args = rope_args(self.heads, batch, (None, None), None, [None] * 3, rotation)
        ctas = -(-n_tokens * rotation.n_pairs // THREADS)
        self._kernel("compute_angles").launch(
            ctas, THREADS, (args, angles, rows, n_tokens), pdl=True
        )

    def supports_rope_epilogue(self, rotation: Rotation) -> bool:
        """Whether the prefill GEMM's epilogue can do all of `launch`. Conditions: no head norms;
        f16 pages without padding columns; every tile of the GEMM lies in q, k or v alone; for NeoX
        pairs, which lie half a head apart, a tile holds whole heads.
        """
        h = self.heads
        whole = h.row == h.head_size and rotation.n_pairs % 2 == 0
        blocks = [n * h.head_size % ROW_BLOCK for n in (h.n_head, h.n_head_kv)]
        fit = not rotation.neox or ROW_BLOCK % h.head_size == 0
        return fit and whole and h.is_f16 and not any(blocks) and rotation.is_usual

    def supports_rope_epilogue_rows(self, rotation: Rotation) -> bool:
        """Whether the decode GEMM's epilogue can do all of `launch`; each of its threads has one
        row. Conditions: neighbouring elements form pairs; no head norms; f16 pages. The epilogue
        does not write padding, which stays 0.
        """
        plain = not rotation.neox and rotation.is_usual
        return plain and self.heads.is_f16 and self.heads.row <= USUAL_HEAD

    def rotates_whole_heads(self, rotation: Rotation) -> bool:
        """Whether rope_kv_whole supports the heads: it moves 16 bytes at a time."""
        size = self.heads.head_size
        whole = size in WHOLE_HEAD_SIZES and 2 * rotation.n_pairs == size
        return whole and self.heads.is_f16 and rotation.is_usual

    def _grid(self, n_tokens: int) -> tuple[int, int]:
        """Grid for many tokens: no more CTAs along x than run at the same time."""
        heads, groups = self.heads, -(-n_tokens // TOKENS_PER_CTA)
        # heads / heads per warp
        rotated = -(-(heads.n_head + heads.n_head_kv) * heads.head_size // 256)
        return min(rotated, max(1, CTAS_PER_SM * self.device.sm_count // groups)), groups

    def _kernel(self, name: str, more: Mapping[str, int] | None = None) -> Kernel:
        defines = self.heads.defines | dict(more or {})
        key = name, *defines
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "attention/rope_kv.cu", name, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]
