"""Joins experts that old converters stored in one tensor each: blk.0.ffn_up.3.weight belongs to
expert 3. Mixtral was stored so until April 2024.

This module knows names and shapes, but no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..gguf import Tensor
from .architecture import Declared
from .config import UnsupportedModel


def join_experts(tensors: dict[str, Tensor], layer: int, wanted: Mapping[str, Declared]) -> None:
    """Replace the tensors of a layer's experts by those that have all of them."""
    for part in ("gate", "up", "down"):
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        if name not in wanted or name in tensors:
            continue
        names = [f"blk.{layer}.ffn_{part}.{x}.weight" for x in range(wanted[name].shape[0])]
        if all(x in tensors for x in names):
            tensors[name] = joined(name, [tensors.pop(x) for x in names])


def joined(name: str, parts: list[Tensor]) -> Tensor:
    """One tensor of several: a view, if they lie at equal distances in their file, else a copy.
    UnsupportedModel unless all have one type and one shape.
    """
    first = parts[0]
    for part in parts:
        if (part.format, part.shape) != (first.format, first.shape):
            raise UnsupportedModel(
                f"{part.path}: tensor {part.name!r} is {part.format.name} {part.shape}, but"
                f" {first.name!r} is {first.format.name} {first.shape}: experts of one layer have"
                " to be alike: convert or quantise the model again"
            )
    shape = (len(parts), *first.shape)
    if len({part.path for part in parts}) > 1 or len(_distances(parts)) > 1:
        data = np.stack([part.data for part in parts])
    else:
        (step,) = _distances(parts) or {first.nbytes}
        layout = (len(parts), *first.data.shape), (step, *first.data.strides)
        data = as_strided(first.data, *layout, writeable=False)
    return replace(first, name=name, shape=shape, data=data)


def _distances(parts: list[Tensor]) -> set[int]:
    """From each of them to the next one, in bytes."""
    at = [part.data.__array_interface__["data"][0] for part in parts]
    return {b - a for a, b in pairwise(at)}
