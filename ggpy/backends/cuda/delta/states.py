"""Recurrent states in GPU memory, contiguous for each layer of a group.

A state has two parts: the last inputs of the convolution, and the matrices. kernels/delta defines
their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....device.base import Ptr
from ....kernels.delta.delta import DeltaShape
from ...interface import CacheGroup, Recurrent
from ...states import NO_STATE


def shape_of(spec: Recurrent) -> DeltaShape:
    """The sizes that kernels take."""
    return DeltaShape(spec.n_k_head, spec.n_v_head, spec.size, spec.taps)


def state_bytes(spec: Recurrent) -> int:
    """Bytes of one state of one layer."""
    shape = shape_of(spec)
    return shape.conv_bytes + shape.matrix_bytes


class StateMemory:
    """The states of all recurrent groups. Each group has one spare state, for tokens that pad a
    step (steps/padding.py). Nothing is cleared, because no state is read before it is written.
    """

    def __init__(self, device: Any, groups: Sequence[CacheGroup]) -> None:
        """Raises OutOfMemory."""
        self._groups = []
        for group in groups:
            assert isinstance(group.spec, Recurrent)
            shape, n_pages = shape_of(group.spec), group.n_pages + 1
            n = group.n_layer * n_pages
            conv = device.alloc(n * shape.conv_bytes, "inputs of convolutions")
            matrices = device.alloc(n * shape.matrix_bytes, "recurrent states")
            self._groups.append((conv, matrices, shape, n_pages))

    @property
    def spare(self) -> list[tuple[int, int]]:
        """For each group, the pages of a padding sequence: none to read, the spare one to write."""
        return [(NO_STATE, n_pages - 1) for *_, n_pages in self._groups]

    def of(self, group: int, slot: int) -> tuple[Ptr, Ptr]:
        """Addresses of a layer's two parts. group: index among the recurrent groups; slot: index of
        the layer in the group.
        """
        conv, matrices, shape, n_pages = self._groups[group]
        n = slot * n_pages
        return conv.at(n * shape.conv_bytes), matrices.at(n * shape.matrix_bytes)
