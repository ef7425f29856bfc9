"""Where keys and values of all layers lie on a GPU, and those of one layer as halves for prompts.

Their layout inside a page is the kernels' matter; how large a page is, kernels/rope_kv.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...device.base import Buffer, OutOfMemory, Ptr
from ...kernels.attention.pages_to_f16 import as_halves
from ...kernels.attention.rope_kv import Heads
from ..interface import CacheShape


def page_bytes(heads: Heads, n_layer: int, halved: bool) -> int:
    """Bytes that a page takes in all layers; halved: and once more as halves, for prompts."""
    halves = as_halves(heads)
    once = halves.key_bytes + halves.value_bytes if halved else 0
    return n_layer * (heads.key_bytes + heads.value_bytes) + once


def halves_of(device: Any, heads: Heads, n_pages: int) -> tuple[Buffer, Buffer]:
    """Room for so many pages of one layer as halves: keys and values; OutOfMemory."""
    halves = as_halves(heads)
    keys = device.alloc(n_pages * halves.key_bytes, "keys as halves")
    return keys, device.alloc(n_pages * halves.value_bytes, "values as halves")


class Pages:
    """Zeroed at first: kernels multiply values that are masked by 0, so these must be finite."""

    def __init__(self, device: Any, heads: Heads, shape: CacheShape, halved: bool = False) -> None:
        """halved: with room for one layer's pages as halves. MemoryError says what would fit."""
        page = page_bytes(heads, shape.n_layer, halved)
        self._heads, self._n_layer = heads, shape.n_layer
        self._key_bytes = shape.n_pages * heads.key_bytes  # of a layer
        self._value_bytes = shape.n_pages * heads.value_bytes
        try:
            self.halves = halves_of(device, heads, shape.n_pages) if halved else None
            self._keys = device.zeros(shape.n_layer * self._key_bytes, "keys")
            self._values = device.zeros(shape.n_layer * self._value_bytes, "values")
        except OutOfMemory as error:
            raise shape.too_large(page, error.free) from None

    def clear(self, device: Any, pages: Sequence[int]) -> None:
        """Enqueue zeros for these pages of all layers."""
        sizes = self._heads.key_bytes, self._heads.value_bytes
        layers = self._key_bytes, self._value_bytes
        for memory, size, of_layer in zip((self._keys, self._values), sizes, layers, strict=True):
            for layer in range(self._n_layer):
                for page in pages:
                    device.fill(memory.part(layer * of_layer + page * size, size), 0)

    def of(self, layer: int) -> tuple[Ptr, Ptr]:
        """Its keys and its values."""
        return self._keys.at(layer * self._key_bytes), self._values.at(layer * self._value_bytes)
