"""Recurrent states in GPU memory: of every group and layer, one beside the other.

A state has two parts, the last inputs of the convolution and the matrices; kernels/delta says how
large they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....device.base import Ptr
from ....kernels.delta.delta import DeltaShape
from ...interface import CacheGroup, Recurrent


def shape_of(spec: Recurrent) -> DeltaShape:
    """The sizes that kernels take."""
    return DeltaShape(spec.n_k_head, spec.n_v_head, spec.size, spec.taps)


def state_bytes(spec: Recurrent) -> int:
    """Bytes of one state of one layer."""
    shape = shape_of(spec)
    return shape.conv_bytes + shape.matrix_bytes


class StateMemory:
    """The states of groups. What a step does not write is not read, so nothing is cleared."""

    def __init__(self, device: Any, groups: Sequence[CacheGroup]) -> None:
        """Raises OutOfMemory."""
        self._groups = []
        for group in groups:
            assert isinstance(group.spec, Recurrent)
            shape, n = shape_of(group.spec), group.n_layer * group.n_pages
            conv = device.alloc(n * shape.conv_bytes, "inputs of convolutions")
            matrices = device.alloc(n * shape.matrix_bytes, "recurrent states")
            self._groups.append((conv, matrices, shape, group.n_pages))

    def of(self, group: int, slot: int) -> tuple[Ptr, Ptr]:
        """Addresses of a layer's parts; group: among those with states; slot: of the layer."""
        conv, matrices, shape, n_pages = self._groups[group]
        n = slot * n_pages
        return conv.at(n * shape.conv_bytes), matrices.at(n * shape.matrix_bytes)
