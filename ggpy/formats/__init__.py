"""Block formats: every way in which GGML stores weights, in numpy. One file per format; adding a
file adds a format.

Nothing here imports another part of ggpy. `quantize` and `dequantize` look up a `Format` by name.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from numpy.typing import NDArray

from .base import F32, U8, Format, all_formats, by_id, by_name, cuda_asserts

__all__ = ["Format", "all_formats", "by_id", "by_name", "cuda_asserts", "dequantize", "quantize"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def quantize(array: NDArray[Any], name: str) -> U8:
    """weights[..., m * b] -> bytes[..., m * nbytes] of the format `name` (any case).

    Each row becomes m blocks of b weights. ValueError for an unknown name, NaN or infinity, and
    rows that are not whole blocks.

    >>> import ggpy, numpy
    >>> weights = numpy.linspace(-1, 1, 128, dtype=numpy.float32).reshape(2, 64)
    >>> ggpy.quantize(weights, "q8_0").shape  # 2 blocks in a row: 32 bytes and a scale each
    (2, 68)
    """
    return by_name(name).quantize(array)


def dequantize(blocks: U8, name: str) -> F32:
    """bytes[..., m * nbytes] of the format `name` (any case) -> weights[..., m * b] in float32.

    ValueError for an unknown name, and rows that are not whole blocks.

    >>> import ggpy, numpy
    >>> weights = numpy.linspace(-1, 1, 128, dtype=numpy.float32).reshape(2, 64)
    >>> again = ggpy.dequantize(ggpy.quantize(weights, "q8_0"), "q8_0")
    >>> bool(abs(again - weights).max() < 0.004)
    True
    """
    return by_name(name).dequantize(blocks)
