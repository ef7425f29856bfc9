"""Matrices of 8-bit numbers with one scale for each row, or one for all: int8, or E4M3 floats.

A file can keep the numbers as they are, with their scales in a separate tensor; for any other type
they are multiplied by their scales first. Knows no model.
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
    scale: F32 | None  # [N]; None: no scales

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop, bytes[rows, K], perhaps in another order."""
        data = self.shard.read(self.name, start, stop).view(np.uint8)
        return np.ascontiguousarray(data if order is None else data[order])


@dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix w[n, k] = value[n, k] * scale[n]; `rows` returns these products."""

    name: str
    shape: tuple[int, ...]  # [N, K]
    shard: Shard
    values: Format  # I8 or F8_E4M3
    scale: F32  # [N]

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        return by_name("F32")

    @property
    def kept(self) -> Values:
        """The numbers as the checkpoint has them."""
        return Values(self.name, self.shape, self.shard, self.values, self.scale)

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop of weights, bytes[rows, 4 K], perhaps in another order."""
        weights = self.values.dequantize(self.kept.rows(start, stop))
        weights *= self.scale[start:stop, None]
        return np.ascontiguousarray(weights if order is None else weights[order]).view(np.uint8)
