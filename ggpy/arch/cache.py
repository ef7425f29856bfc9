"""The groups of the KV cache: layers with equal state specs share page tables.

This module knows sizes and windows; the runtime knows which pages a sequence holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..backends.interface import CacheGroup, CacheShape, Recurrent, StateSpec, pages_for
from ..backends.states import SPARE_STATES


class CacheGroups:
    """The states of all layers. Groups are in the order of their first layers; groups of recurrent
    states come last.
    """

    def __init__(self, specs: Iterable[StateSpec], owners: Mapping[int, int] | None = None) -> None:
        """specs: one for each layer. owners: layer without a state of its own -> the layer whose
        state it reads.
        """
        self._layers: dict[StateSpec, list[int]] = {}
        self._owners = dict(owners or {})
        found = [(i, spec) for i, spec in enumerate(specs) if i not in self._owners]
        for layer, spec in sorted(found, key=lambda pair: isinstance(pair[1], Recurrent)):
            self._layers.setdefault(spec, []).append(layer)

    def place(self, layer: int) -> tuple[StateSpec, int, int]:
        """The spec, the group, and the slot in the group of a layer, or of its owner."""
        layer = self._owners.get(layer, layer)
        for group, (spec, layers) in enumerate(self._layers.items()):
            if layer in layers:
                return spec, group, layers.index(layer)
        raise IndexError(f"there is no layer {layer}")

    def shape(
        self, n_seq: int, n_ctx: int, n_batch: int, n_positions: int | None = None
    ) -> CacheShape:
        """The cache for n_seq sequences of n_ctx positions, in steps of n_batch tokens.

        n_positions: the positions that all sequences share, at least n_ctx, else ValueError; None
        reserves n_ctx for each sequence.
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
    """The pages of a group. reserved: so many that no sequence ever lacks one."""
    if n_positions is None or isinstance(spec, Recurrent):
        return reserved
    shared = pages_for(n_positions)
    return min(reserved, shared) if spec.is_bounded else shared
