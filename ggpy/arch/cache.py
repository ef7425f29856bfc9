"""Which layers share page tables: those whose state is alike are a group of the KV cache.

Knows sizes and windows; which pages a sequence holds is the runtime's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..backends.interface import CacheGroup, CacheShape, Recurrent, StateSpec, pages_for
from ..backends.states import SPARE_STATES


class CacheGroups:
    """The states of all layers; groups are in the order of their first layers, those of recurrent
    states last.
    """

    def __init__(self, specs: Iterable[StateSpec], owners: Mapping[int, int] | None = None) -> None:
        """specs: of each layer. owners: of layers that have no state of their own, the layer whose
        state they read.
        """
        self._layers: dict[StateSpec, list[int]] = {}
        self._owners = dict(owners or {})
        found = [(i, spec) for i, spec in enumerate(specs) if i not in self._owners]
        for layer, spec in sorted(found, key=lambda pair: isinstance(pair[1], Recurrent)):
            self._layers.setdefault(spec, []).append(layer)

    def place(self, layer: int) -> tuple[StateSpec, int, int]:
        """A layer's spec, its group, and its slot among the layers of that, or its owner's."""
        layer = self._owners.get(layer, layer)
        for group, (spec, layers) in enumerate(self._layers.items()):
            if layer in layers:
                return spec, group, layers.index(layer)
        raise IndexError(f"there is no layer {layer}")

    def shape(
        self, n_seq: int, n_ctx: int, n_batch: int, n_positions: int | None = None
    ) -> CacheShape:
        """For n_seq sequences of n_ctx positions, in steps of n_batch tokens.

        n_positions: what all sequences share, at least n_ctx, else ValueError; None reserves n_ctx
        for each of them.
        """
        if n_positions is not None and n_positions < n_ctx:
            raise ValueError(
                f"the KV cache has {n_positions} positions, a context {n_ctx}: "
                "raise n_positions or lower n_ctx"
            )
        groups = []
        for spec, layers in self._layers.items():
            limit = spec.pages(n_ctx, n_batch)
            n_pages = _n_pages(spec, n_seq * limit, n_positions)
            n_pages += min(n_seq, SPARE_STATES) if isinstance(spec, Recurrent) else 0
            groups.append(CacheGroup(spec, tuple(layers), n_pages, limit))
        return CacheShape(tuple(groups))


def _n_pages(spec: StateSpec, reserved: int, n_positions: int | None) -> int:
    """Pages of a group. reserved: those with which no sequence can lack one."""
    if n_positions is None or isinstance(spec, Recurrent):
        return reserved
    shared = pages_for(n_positions)
    return min(reserved, shared) if spec.is_bounded else shared
