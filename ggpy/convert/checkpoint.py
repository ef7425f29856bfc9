"""The weights of a checkpoint: safetensors files, one or many, as rows in a format of GGUF.

Weights in 8-bit floats are multiplied with their scales here, so that nobody else has to know of
them. This module knows nothing of architectures: names are as they stand in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, by_name
from .folder import ConvertError, Folder
from .safetensors import DAMAGED, Shard

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"  # what is behind a weight's name in that of its scales
OF_ACTIVATIONS = ("activation_scale", "input_scale")  # of no use without 8-bit activations
FLOATS = ("F64", "F32", "F16", "BF16")  # the same in safetensors and GGUF
FLOAT8 = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}  # bits of exponent and mantissa
PART = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Weights:
    """One tensor of a checkpoint, still in its file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard
    scales: NDArray[np.float32] | None = None  # [blocks of rows, blocks of columns]
    block: tuple[int, int] = (1, 1)  # rows and columns of a weight block that shares a scale

    @property
    def format(self) -> Format:
        """The format that `rows` are in; ConvertError for integers."""
        if self.dtype not in FLOATS and self.dtype not in FLOAT8:
            raise ConvertError(
                f"{self.shard.path}: tensor {self.name!r} is {self.dtype}: only weights in"
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


class Checkpoint:
    """All tensors of a folder by name; close it, or use it in a `with`. ConvertError if unfit.

    `quantization` is what config.json says under quantization_config, unchecked.
    """

    def __init__(self, folder: Folder, quantization: Any = None) -> None:
        self.folder = folder
        self._block = _block_of(folder, quantization)
        with ExitStack() as stack:
            self.tensors = self._with_scales(self._open(stack))
            self._open_files = stack.pop_all()

    def close(self) -> None:
        self._open_files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, stack: ExitStack) -> dict[str, Weights]:
        """The tensors of all files; each stands in one of them, the one that the index names."""
        index = _index(self.folder)
        files = sorted(set(index.values())) if index else _files(self.folder)
        found: dict[str, Weights] = {}
        for file in files:
            shard = stack.enter_context(_shard(self.folder, file))
            for name, place in shard.tensors.items():
                if name in found or (index and index.get(name) != file):
                    where = f"the index says {index.get(name)}" if index else "is in another too"
                    raise ConvertError(f"{shard.path}: tensor {name!r}: {where}; {DAMAGED}")
                found[name] = Weights(name, place.shape, place.dtype, shard)
        missing = [name for name in index if name not in found]
        if missing:
            raise ConvertError(
                f"{self.folder.path}: {index[missing[0]]} lacks tensor {missing[0]!r}, which the "
                f"index promises{_more(missing)}; {DAMAGED}"
            )
        return found

    def _with_scales(self, found: dict[str, Weights]) -> dict[str, Weights]:
        """Weights in 8-bit floats get their scales; the scales are no tensors of their own."""
        tensors = {}
        for name, weights in found.items():
            is_scale = name.endswith(SCALE) and name.removesuffix(SCALE) in found
            if is_scale or name.endswith(OF_ACTIVATIONS):
                continue
            scaled = weights.dtype in FLOAT8
            tensors[name] = self._scaled(weights, found.get(name + SCALE)) if scaled else weights
        return tensors

    def _scaled(self, weights: Weights, scales: Weights | None) -> Weights:
        path, name, shape = weights.shard.path, weights.name, weights.shape
        if scales is None or scales.dtype not in FLOATS or len(shape) != 2:
            raise ConvertError(f"{path}: tensor {name!r}, in {weights.dtype}, has no scales")
        format = by_name(scales.dtype)
        data = scales.shard.read(scales.name).reshape(-1).view(np.uint8)
        values = format.dequantize(data)
        block = self._block if values.size > 1 else shape
        wanted = tuple(-(-n // b) for n, b in zip(shape, block or (0, 0), strict=True) if b)
        if block is None or values.size != int(np.prod(wanted)):
            raise ConvertError(
                f"{path}: tensor {name!r} has {values.size} scales, which do not fit to blocks of "
                f"{block} in {shape}: quantization_config.weight_block_size is not theirs"
            )
        return Weights(name, shape, weights.dtype, weights.shard, values.reshape(wanted), block)


def _block_of(folder: Folder, quantization: Any) -> tuple[int, int] | None:
    """Rows and columns with one scale; ConvertError for another quantisation than 8-bit floats."""
    at = f"{folder.path / 'config.json'}: quantization_config"
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ConvertError(f"{at} = {quantization!r}: expected an object")
    method = quantization.get("quant_method")
    if method not in (None, "fp8"):
        raise ConvertError(
            f"{at}: weights quantised with {method!r} cannot be converted: take the original"
        )
    block = quantization.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int for x in block):
        raise ConvertError(f"{at}.weight_block_size = {block!r}: expected rows and columns")
    if min(block) < 1:
        raise ConvertError(f"{at}.weight_block_size = {block!r}: expected positive numbers")
    return block[0], block[1]


def _index(folder: Folder) -> dict[str, str]:
    """Tensor -> file, of checkpoints in several files; empty for others."""
    found = folder.json(INDEX)
    if found is None:
        return {}
    weights = found.get("weight_map")
    if not isinstance(weights, dict) or not weights or set(map(type, weights.values())) != {str}:
        raise ConvertError(f"{folder.path / INDEX}: has no weight_map from tensors to files")
    return weights


def _files(folder: Folder) -> list[str]:
    """The files of a checkpoint without an index."""
    names = folder.names()
    if "model.safetensors" in names:
        return ["model.safetensors"]
    parts = [name for name in names if PART.fullmatch(name)]
    if not parts:
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        what = "only pickles, which are never opened: save it as safetensors" if pickled else ""
        raise ConvertError(f"{folder.path}: has no model.safetensors{what and ', ' + what}")
    count = int(PART.fullmatch(parts[0])[2])  # type: ignore[index]
    _check_all_there(folder, parts, count)
    return parts


def _check_all_there(folder: Folder, parts: Iterable[str], count: int) -> None:
    numbers = {int(PART.fullmatch(part)[1]) for part in parts}  # type: ignore[index]
    missing = sorted(set(range(1, min(count, 100000) + 1)) - numbers)
    if missing:
        raise ConvertError(
            f"{folder.path}: part {missing[0]} of {count} is missing{_more(missing)}: download it"
        )


def _shard(folder: Folder, name: str) -> Shard:
    path = folder.find(name)
    if path is None:
        raise ConvertError(f"{folder.path}: {name}, which the index names, is missing: download it")
    return Shard(path)


def _more(missing: list[Any]) -> str:
    return f", and {len(missing) - 1} more" if len(missing) > 1 else ""
