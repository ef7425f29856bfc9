"""The KV cache in GPU memory: the pages of every group and layer, and scratch memory in which one
layer's pages are converted to f16 for prefill attention.

The kernels define the layout inside a page; kernels/attention/rope_kv.py gives its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...cache_types import ON_GPU
from ...device.base import Buffer, OutOfMemory, Ptr
from ...gguf import GGUFError
from ...kernels.attention.pages_to_f16 import as_f16
from ...kernels.attention.rope_kv import Heads
from ..interface import PAGE_SIZE, CacheShape, PagedKV, StateSpec


def heads_of(spec: StateSpec) -> Heads:
    """The heads of a layer's KV cache, f16 unless another type is requested. Raises ValueError if
    the head size does not fit a type, GGUFError if no kernel supports the heads.
    """
    if not isinstance(spec, PagedKV):
        raise GGUFError(
            "the CUDA backend keeps no recurrent state in pages: it belongs to cuda/delta"
        )
    if spec.key_size != spec.value_size:
        raise GGUFError(
            f"keys have {spec.key_size} elements and values {spec.value_size}: the CUDA backend "
            "has no kernel for heads that differ; use --device cpu"
        )
    types = spec.types.resolved(ON_GPU)
    types.check_head(spec.key_size)
    return Heads(spec.n_head, spec.n_head_kv, spec.key_size, PAGE_SIZE, types)


def page_bytes(heads: Heads, n_layer: int) -> int:
    """Bytes of a page in all layers of its group."""
    return n_layer * (heads.key_bytes + heads.value_bytes)


def f16_page_bytes(heads: Heads) -> int:
    """Bytes of a page of one layer, converted to f16."""
    f16 = as_f16(heads)
    return f16.key_bytes + f16.value_bytes


@dataclass(frozen=True)
class _Group:
    keys: Buffer
    values: Buffer
    heads: Heads
    n_layer: int
    n_pages: int

    @property
    def key_bytes(self) -> int:
        """Bytes of one layer's keys."""
        return self.n_pages * self.heads.key_bytes

    @property
    def value_bytes(self) -> int:
        """Bytes of one layer's values."""
        return self.n_pages * self.heads.value_bytes


class PageMemory:
    """The pages of all groups. Each group has one spare page, for tokens that pad a step
    (steps/padding.py). Zero-initialised: kernels multiply masked values by 0, so these must be
    finite.
    """

    def __init__(self, device: Any, shape: CacheShape, converts: Sequence[bool]) -> None:
        """converts: for each group, whether its pages are converted to f16 for prefill attention.
        Raises MemoryError, which says what would fit.
        """
        self._device = device
        shapes = [heads_of(group.spec) for group in shape.groups]
        try:
            self.f16_scratch = self._scratch(shape, shapes, converts)
            self._groups = [
                self._allocate(heads, group.n_layer, group.n_pages + 1)
                for heads, group in zip(shapes, shape.groups, strict=True)
            ]
        except OutOfMemory as error:
            sizes = [
                page_bytes(heads, group.n_layer)
                for heads, group in zip(shapes, shape.groups, strict=True)
            ]
            raise shape.too_large(sizes, error.free) from None

    def _scratch(
        self, shape: CacheShape, shapes: Sequence[Heads], converts: Sequence[bool]
    ) -> tuple[Buffer, Buffer] | None:
        """Memory for the f16 keys and values of one layer, for the largest group that is
        converted.
        """
        pairs = zip(shape.groups, shapes, converts, strict=True)
        found = [(g.n_pages, as_f16(h)) for g, h, converted in pairs if converted]
        if not found:
            return None
        keys = max(n * heads.key_bytes for n, heads in found)
        values = max(n * heads.value_bytes for n, heads in found)
        alloc = self._device.alloc
        return alloc(keys, "keys as f16"), alloc(values, "values as f16")

    def _allocate(self, heads: Heads, n_layer: int, n_pages: int) -> _Group:
        keys = self._device.zeros(n_layer * n_pages * heads.key_bytes, "keys")
        values = self._device.zeros(n_layer * n_pages * heads.value_bytes, "values")
        return _Group(keys, values, heads, n_layer, n_pages)

    @property
    def spare(self) -> list[tuple[int]]:
        """The spare page of each group, which no sequence holds."""
        return [(group.n_pages - 1,) for group in self._groups]

    def clear(self, group: int, pages: Sequence[int]) -> None:
        """Enqueue zeroing of these pages in all layers of a group."""
        g = self._groups[group]
        for memory, page, layer_bytes in (
            (g.keys, g.heads.key_bytes, g.key_bytes),
            (g.values, g.heads.value_bytes, g.value_bytes),
        ):
            for layer in range(g.n_layer):
                for i in pages:
                    self._device.fill(memory.part(layer * layer_bytes + i * page, page), 0)

    def of(self, group: int, slot: int) -> tuple[Ptr, Ptr]:
        """Addresses of a layer's keys and values; slot: index of the layer in its group."""
        g = self._groups[group]
        return g.keys.at(slot * g.key_bytes), g.values.at(slot * g.value_bytes)
