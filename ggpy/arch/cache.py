"""Which layers share page tables: those whose state is alike are a group of the KV cache.

Knows sizes and windows; which pages a sequence holds is the runtime's matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..backends.interface import CacheGroup, CacheShape, PagedKV


class CacheGroups:
    """The states of all layers; groups are in the order of their first layers."""

    def __init__(self, specs: Iterable[PagedKV]) -> None:
        """specs: of each layer."""
        self._layers: dict[PagedKV, list[int]] = {}
        for layer, spec in enumerate(specs):
            self._layers.setdefault(spec, []).append(layer)

    def place(self, layer: int) -> tuple[PagedKV, int, int]:
        """A layer's spec, its group, and its slot among the layers of that."""
        for group, (spec, layers) in enumerate(self._layers.items()):
            if layer in layers:
                return spec, group, layers.index(layer)
        raise IndexError(f"there is no layer {layer}")

    def shape(self, n_seq: int, n_ctx: int, n_batch: int) -> CacheShape:
        """For n_seq sequences of n_ctx positions, in steps of n_batch tokens."""
        return CacheShape(
            tuple(
                CacheGroup(spec, tuple(layers), n_seq * spec.pages(n_ctx, n_batch))
                for spec, layers in self._layers.items()
            )
        )
