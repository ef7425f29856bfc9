"""Matrices of 8-bit numbers with one scale for each row, or one for all: int8, and floats E4M3.

A file can keep them as they are, with their scales in a tensor of its own; for any other type they
are multiplied out. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, by_name
from ..formats.base import F32, U8
from .safetensors import Shard


@dataclass(frozen=True, eq=False)
class Values:
    """The numbers of a matrix, without their scales."""

    name: str
    shape: tuple[int, ...]  # [N, K]
    shard: Shard
    format: Format  # I8 or F8_E4M3
    scale: F32 | None  # [N]; None: they have none

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop, bytes[rows, K], perhaps in another order."""
        data = self.shard.read(self.name, start, stop).view(np.uint8)
        return np.ascontiguousarray(data if order is None else data[order])


@dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix w[n, k] = value[n, k] * scale[n]; its rows come multiplied out."""

    name: str
    shape: tuple[int, ...]
    shard: Shard
    values: Format
    scale: F32  # [N]

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        return by_name("F32")

    @property
    def kept(self) -> Values:
        """The numbers as they are."""
        return Values(self.name, self.shape, self.shard, self.values, self.scale)

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop of weights, bytes[rows, 4 K], perhaps in another order."""
        weights = self.values.dequantize(self.kept.rows(start, stop))
        weights *= self.scale[start:stop, None]
        return np.ascontiguousarray(weights if order is None else weights[order]).view(np.uint8)
