"""The KV cache in numpy: pages of numbers or blocks, encoded when written, decoded when read.

This is the specification of the cache's types: the head of each position is quantised by itself, in
blocks of 32 elements. Nothing here knows attention or sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...cache_types import IN_NUMPY, CacheTypes
from ...formats import by_name
from ...formats.base import F32
from .. import host
from ..interface import PAGE_SIZE, CacheGroup, CacheShape, PagedKV, Recurrent

HALF_LIMIT = 65504.0  # larger values are clipped to this
NORM = np.float32(32**-0.5)
BLOCK_LIMIT = (
    65408.0  # and here this: so that codes times scales fit f16 (cuda/attention/kv_blocks.cuh)
)


class Pages:
    """Keys or values of the layers of a group: array[layer, page, position, G, blocks of a head],
    with layers by their slots.
    """

    def __init__(self, group: CacheGroup, head_size: int, type: str) -> None:
        self.format, self.type, self.head_size = by_name(type), type, head_size
        blocks = head_size // self.format.block_size
        assert isinstance(group.spec, PagedKV)
        size = (group.n_layer, group.n_pages, PAGE_SIZE, group.spec.n_head_kv, blocks)
        self.array = host.lazy_zeros(size, self.format.dtype)

    @property
    def spreads(self) -> bool:
        """Keys, and the queries that are multiplied with them, are spread before they come here."""
        return self.type.startswith("q")

    def write(self, slot: int, page: NDArray, offset: NDArray, x: F32) -> None:
        """x[T, G, E] at offsets in pages."""
        self.array[slot, page, offset] = self._encoded(x)

    def read(self, slot: int, pages: NDArray, first: int, last: int) -> F32:
        """[last - first, G, E] of a sequence's positions, without a copy if it has none to make."""
        return self._decoded(_gather(self.array[slot], pages, first, last))

    def _encoded(self, x: F32) -> NDArray:
        """x[T, G, E] -> [T, G, blocks]; NaN stays NaN, infinity becomes the largest."""
        if self.type == "f32":
            return x
        if self.type == "f16":
            x = np.clip(x, -HALF_LIMIT, HALF_LIMIT)
        elif self.type.startswith("q"):
            x = np.clip(x, -BLOCK_LIMIT, BLOCK_LIMIT)
        quantize = self.format.quantize_blocks
        assert quantize is not None, self.type
        with np.errstate(all="ignore"):
            blocks = quantize(
                np.ascontiguousarray(x, np.float32).reshape(-1, self.format.block_size)
            )
        return blocks.reshape(*x.shape[:-1], -1)

    def _decoded(self, blocks: NDArray) -> F32:
        """[n, G, blocks] -> [n, G, E]."""
        if self.type == "f32":
            return blocks
        flat = np.ascontiguousarray(blocks).reshape(-1)
        with np.errstate(all="ignore"):
            values = self.format.dequantize_blocks(flat)
        return values.reshape(*blocks.shape[:-1], self.head_size)


class GroupPages:
    """Zeroed pages of one group of the cache, which take memory as they are written."""

    def __init__(self, group: CacheGroup) -> None:
        assert isinstance(group.spec, PagedKV)
        types = resolved(group.spec)
        self.keys = Pages(group, group.spec.key_size, types.k)
        self.values = Pages(group, group.spec.value_size, types.v)


def spread(x: F32) -> F32:
    """Each 32 elements of heads x[..., E] times the Hadamard matrix over its norm.

    The matrix is its own inverse, and does not change dot products of heads. But some elements of
    keys are always large; after the product they no longer set the scale of their 31 neighbours
    alone (QuaRot, arXiv 2404.00456; llama.cpp does the same).
    """
    y = np.clip(x, -BLOCK_LIMIT, BLOCK_LIMIT).astype(np.float32)
    for step in (1, 2, 4, 8, 16):  # as cuda/attention/kv_blocks.cuh does, for the same bits
        pairs = y.reshape(-1, 2, step)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
    return y.reshape(x.shape) * NORM


def resolved(spec: PagedKV) -> CacheTypes:
    """The types of keys and values in this backend; ValueError if heads do not fit them."""
    types = spec.types.resolved(IN_NUMPY)
    types.check_head(spec.key_size, spec.value_size)
    return types


def check_memory(shape: CacheShape) -> None:
    """MemoryError when the KV cache needs more memory than is free."""
    page_bytes = [_page_bytes(group) for group in shape.groups]
    free = host.available_memory()
    pairs = zip(page_bytes, shape.groups, strict=True)
    if free is not None and sum(n * group.n_pages for n, group in pairs) > free:
        raise shape.too_large(page_bytes, free)


def _page_bytes(group: CacheGroup) -> int:
    """Bytes of a page in all layers of a group."""
    spec = group.spec
    if isinstance(spec, Recurrent):
        return group.n_layer * spec.nbytes
    head = resolved(spec).nbytes(spec.key_size, spec.value_size)
    return group.n_layer * PAGE_SIZE * spec.n_head_kv * head


def _gather(storage: NDArray, pages: NDArray, first: int, last: int) -> NDArray:
    """storage[page, position, ...] -> [last - first, ...], without a copy if pages adjoin."""
    begin, end = first // PAGE_SIZE, -(-last // PAGE_SIZE)
    used = pages[begin:end]
    consecutive = used[-1] - used[0] == len(used) - 1 and (np.diff(used) == 1).all()
    part = storage[used[0] : used[-1] + 1] if consecutive else storage[used]
    return part.reshape(-1, *storage.shape[2:])[
        first - begin * PAGE_SIZE : last - begin * PAGE_SIZE
    ]
