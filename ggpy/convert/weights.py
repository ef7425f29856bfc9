"""One tensor of a checkpoint whose parts need no joining: floats, or 8-bit floats with scales of
blocks.

The latter are multiplied by their scales here, so that no other module has to know of them. Knows
no name of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, by_name
from ..util.messages import shown
from .folder import ConvertError
from .safetensors import Shard

FLOATS = ("F64", "F32", "F16", "BF16")  # the same in safetensors and GGUF
FLOAT8 = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}  # bits of exponent and mantissa


@dataclass(frozen=True)
class Weights:
    """One tensor of a checkpoint, still in its file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard
    scales: NDArray[np.float32] | None = None  # [blocks of rows, blocks of columns]
    block: tuple[int, int] = (1, 1)  # rows and columns of a weight block that shares a scale

    kept = None  # only quantised weights have rows that a file can keep as they are
    scale = None

    @property
    def format(self) -> Format:
        """The format that `rows` are in; ConvertError for integers."""
        if self.dtype not in FLOATS and self.dtype not in FLOAT8:
            raise ConvertError(
                f"{self.shard.path}: tensor {shown(self.name)} is {self.dtype}: only weights in"
                f" {', '.join((*FLOATS, *FLOAT8))} can be converted"
            )
        return by_name(self.dtype if self.dtype in FLOATS else "F32")

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """Rows start:stop, bytes[rows, bytes of a row], perhaps in another order."""
        data = self.shard.read(self.name, start, stop)
        if self.dtype in FLOAT8:
            data = self._scaled(float8_table(self.dtype)[data], start)
        if order is not None:
            data = data[order]
        return np.ascontiguousarray(data).view(np.uint8).reshape(stop - start, -1)

    def _scaled(self, weights: NDArray[np.float32], start: int) -> NDArray[np.float32]:
        assert self.scales is not None
        rows = (start + np.arange(len(weights))) // self.block[0]
        columns = np.arange(weights.shape[1]) // self.block[1]
        return weights * self.scales[rows[:, None], columns]


@cache
def float8_table(dtype: str) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float. Source: Micikevicius et al. 2022, FP8 Formats."""
    n_exponent, n_mantissa = FLOAT8[dtype]
    codes = np.arange(256)
    exponent = codes >> n_mantissa & (1 << n_exponent) - 1
    mantissa = codes & (1 << n_mantissa) - 1
    bias = (1 << n_exponent - 1) - 1
    fraction = mantissa / (1 << n_mantissa) + (exponent > 0)
    values = fraction * 2.0 ** (np.maximum(exponent, 1) - bias)
    values = np.where(codes & 128, -values, values)
    if dtype == "F8_E4M3":  # no infinities, and only one NaN for each sign
        values[codes & 127 == 127] = np.nan
    else:
        top = exponent == (1 << n_exponent) - 1
        values[top] = np.where(mantissa[top] > 0, np.nan, np.copysign(np.inf, values[top]))
    return values.astype(np.float32)
