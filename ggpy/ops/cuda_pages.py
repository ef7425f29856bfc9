"""Where keys and values of all layers lie on a GPU.

Their layout inside a page is the kernels' matter; how large a page is, kernels/rope_kv.py says.
"""

from __future__ import annotations

from typing import Any

from ..device.base import OutOfMemory, Ptr
from ..kernels.rope_kv import Heads
from .interface import CacheShape


class Pages:
    """Zeroed: what attention masks must still be finite."""

    def __init__(self, device: Any, heads: Heads, shape: CacheShape) -> None:
        """MemoryError says what would fit."""
        page = shape.n_layer * (heads.key_bytes + heads.value_bytes)
        self._key_bytes = shape.n_pages * heads.key_bytes  # of a layer
        self._value_bytes = shape.n_pages * heads.value_bytes
        try:
            self._keys = device.zeros(shape.n_layer * self._key_bytes, "keys")
            self._values = device.zeros(shape.n_layer * self._value_bytes, "values")
        except OutOfMemory as error:
            raise shape.too_large(page, error.free) from None

    def of(self, layer: int) -> tuple[Ptr, Ptr]:
        """Its keys and its values."""
        return self._keys.at(layer * self._key_bytes), self._values.at(layer * self._value_bytes)
