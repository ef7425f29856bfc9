"""Matrices of 4-bit codes in groups with a scale and a zero point: what GPTQ, AWQ and
compressed-tensors store, as blocks of Q4_0 or Q4_1.

w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], where g is the group of column k. Codes are never
rounded again: a group becomes one block for each 32 columns. If all zero points are 8, the blocks
are Q4_0, with the same scales as f16 numbers; else Q4_1, whose minimum -zero * scale is rounded to
f16. A 32-bit word has eight codes, the first in the lowest bits; each library has its own order.

Letters: N rows of the matrix, K columns, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, by_name
from ..formats.base import F32, U8
from ..util.messages import shown
from .folder import ConvertError
from .quantization import Quantization
from .safetensors import Shard
from .weights import FLOATS

CODES = 8  # in a word
BLOCK = 32  # columns
SQUARE = 128  # rows and columns of a tile in `transposed`
MIDDLE = 8  # the zero point that Q4_0 implies
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column that each nibble of a word holds


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix of 4-bit codes: codes are still in the file, scales and zero points are read."""

    name: str
    shape: tuple[int, ...]  # [N, K]
    shard: Shard
    codes: Callable[[], U8]  # reads codes[N, K]
    scales: F32  # [N, G]
    zeros: U8  # [N, G]
    groups: NDArray[np.intp]  # [K], the group of each column

    @property
    def problem(self) -> str:
        """Why the codes cannot be kept in blocks; "" if they can."""
        columns, n_groups = self.shape[1], self.scales.shape[1]
        size = columns // n_groups
        if columns % n_groups or size % BLOCK:
            return f"groups of {columns / n_groups:g} columns are no multiples of {BLOCK}"
        if not np.array_equal(self.groups, np.arange(columns) // size):
            return "its columns are not in the order of their groups (desc_act)"
        return ""

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        if self.problem:
            return by_name("F32")
        return by_name("Q4_0" if (self.zeros == MIDDLE).all() else "Q4_1")

    @property
    def kept(self) -> Packed:
        """What a file can have without rounding a code: this matrix; ConvertError if `problem`."""
        if self.problem:
            raise ConvertError(
                f"{self.shard.path}: tensor {shown(self.name)}: {self.problem}: its codes cannot be"
                " kept; with a --type, such as q4_k_m, its weights are rounded again"
            )
        return self

    scale = None  # of rows: groups have scales instead

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop, bytes[rows, bytes of a row], perhaps in another order."""
        found = _all_rows(self)[start:stop]
        return np.ascontiguousarray(found if order is None else found[order])


@lru_cache(maxsize=1)
def _all_rows(packed: Packed) -> U8:
    """The whole matrix, bytes[N, bytes of a row]: a word may have codes of eight rows."""
    codes = packed.codes()
    if packed.problem:
        weights = codes.astype(np.float32)
        weights -= packed.zeros[:, packed.groups]
        weights *= packed.scales[:, packed.groups]
        return weights.view(np.uint8)
    n, k = packed.shape
    repeated = k // BLOCK // packed.scales.shape[1]
    blocks = np.empty((n, k // BLOCK), packed.format.dtype)
    blocks["d"] = np.repeat(_as_f16(packed, packed.scales), repeated, axis=1)
    if packed.format.name == "Q4_1":
        minimums = packed.scales * -packed.zeros.astype(np.float32)
        blocks["m"] = np.repeat(_as_f16(packed, minimums), repeated, axis=1)
    halves = codes.reshape(n, k // BLOCK, 2, BLOCK // 2)
    blocks["qs"] = halves[:, :, 0] | halves[:, :, 1] << 4
    return blocks.view(np.uint8).reshape(n, -1)


def _as_f16(packed: Packed, values: F32) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    bad = ~np.isfinite(rounded).all(axis=1)
    if bad.any():
        raise ConvertError(
            f"tensor {shown(packed.name)}: row {int(bad.argmax())} holds a scale that is NaN,"
            " infinite or beyond 65504, the largest f16 number"
        )
    return rounded


def nibbles(words: NDArray[Any]) -> U8:
    """int32 words[..., n] -> codes[..., n, 8], the lowest bits first."""
    raw = np.ascontiguousarray(words, "<i4").view(np.uint8)
    codes = np.empty((*raw.shape, 2), np.uint8)
    codes[..., 0], codes[..., 1] = raw & 15, raw >> 4
    return codes.reshape(*words.shape, CODES)


def along_first(words: NDArray[Any]) -> U8:
    """words[n / 8, m] of codes that follow each other along the first axis -> codes[n, m]."""
    return nibbles(words).swapaxes(-1, -2).reshape(-1, words.shape[-1])


def along_last(words: NDArray[Any]) -> U8:
    """words[n, m / 8] -> codes[n, m]."""
    return nibbles(words).reshape(len(words), -1)


def awq_columns(words: NDArray[Any]) -> U8:
    """words[n, m / 8] in AWQ's order -> codes[n, m]."""
    return nibbles(words)[..., np.argsort(AWQ_ORDER)].reshape(len(words), -1)


def transposed(codes: U8) -> U8:
    """codes[m, n] -> codes[n, m], in tiles that fit in a cache, which is five times as fast."""
    m, n = codes.shape
    out = np.empty((n, m), np.uint8)
    for i in range(0, n, SQUARE):
        for j in range(0, m, SQUARE):
            out[i : i + SQUARE, j : j + SQUARE] = codes[j : j + SQUARE, i : i + SQUARE].T
    return out


# The three libraries


class Parts:
    """The tensors that make the matrix `stem`, by the endings of their names.

    found: all tensors of the checkpoint by name. A tensor is checked when it is read.
    """

    def __init__(self, stem: str, found: Mapping[str, Any], q: Quantization) -> None:
        self.stem, self.q, self._found = stem, q, found

    def has(self, part: str) -> bool:
        return self.stem + part in self._found

    def place(self, part: str) -> Any:
        """The tensor with this ending, unread; ConvertError if there is none."""
        if not self.has(part):
            raise ConvertError(
                f"tensor {shown(self.stem + '.weight')} is quantised, but there is no"
                f" {shown(self.stem + part)}: the checkpoint is not whole"
            )
        return self._found[self.stem + part]

    def read(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """The numbers; ConvertError unless type and shape are as expected."""
        place = self.place(part)
        if place.dtype not in dtypes or place.shape != shape:
            raise self.wrong(part, f"expected {' or '.join(dtypes)} of shape {shape}")
        data = place.shard.read(place.name)
        if dtypes is FLOATS:
            floats = by_name(place.dtype).dequantize(np.ascontiguousarray(data).view(np.uint8))
            return floats.reshape(shape)
        return np.asarray(data)

    def wrong(self, part: str, problem: str) -> ConvertError:
        place = self.place(part)
        return ConvertError(
            f"{place.shard.path}: tensor {shown(place.name)} is {place.dtype} of shape"
            f" {tuple(place.shape)}: {problem}"
        )


def gptq(parts: Parts) -> Packed:
    """qweight [K/8, N], qzeros [G, N/8], scales [G, N], g_idx [K]."""
    words = _matrix(parts, ".qweight")
    n, k = words.shape[1], words.shape[0] * CODES
    scales, zeros = _scales_and_zeros(parts, n, k, along_last)
    zeros = (zeros + np.uint8(parts.q.zero_offset)) & np.uint8(15)
    groups = _groups(parts, ".g_idx", k, len(scales))
    return _packed(parts, words, (n, k), lambda codes: along_last(codes.T), scales, zeros, groups)


def awq(parts: Parts) -> Packed:
    """qweight [K, N/8], qzeros [G, N/8], scales [G, N]."""
    words = _matrix(parts, ".qweight")
    n, k = words.shape[1] * CODES, words.shape[0]
    scales, zeros = _scales_and_zeros(parts, n, k, awq_columns)
    groups = _groups(parts, "", k, len(scales))
    return _packed(
        parts, words, (n, k), lambda codes: transposed(awq_columns(codes)), scales, zeros, groups
    )


def compressed(parts: Parts) -> Packed:
    """weight_packed [N, K/8], weight_scale [N, G], weight_zero_point [N/8, G], weight_shape."""
    words = _matrix(parts, ".weight_packed")
    n, k = (int(x) for x in parts.read(".weight_shape", ("I64", "I32"), (2,)))
    if words.shape != (n, -(-k // CODES)):
        raise parts.wrong(".weight_packed", f"weight_shape says {n} x {k} weights of 4 bits")
    place = parts.place(".weight_scale")
    n_groups = place.shape[1] if len(place.shape) == 2 else 0
    _check_groups(parts, ".weight_scale", k, n_groups)
    scales = parts.read(".weight_scale", FLOATS, (n, n_groups))
    zeros = np.full((n, n_groups), MIDDLE, np.uint8)
    if parts.has(".weight_zero_point"):
        stored = parts.read(".weight_zero_point", ("I32",), (-(-n // CODES), n_groups))
        zeros = along_first(stored)[:n]
    groups = _groups(parts, ".weight_g_idx", k, n_groups)

    def codes(words: NDArray[Any]) -> U8:
        return along_last(words)[:, :k]

    return _packed(parts, words, (n, k), codes, scales.T, zeros.T, groups)


def _matrix(parts: Parts, part: str) -> Any:
    place = parts.place(part)
    if place.dtype != "I32" or len(place.shape) != 2 or 0 in place.shape:
        raise parts.wrong(part, "expected a matrix of I32, with eight codes in each")
    return place


def _scales_and_zeros(
    parts: Parts, n: int, k: int, unpack: Callable[[NDArray[Any]], U8]
) -> tuple[F32, U8]:
    """scales[G, N] and zeros[G, N]."""
    n_groups = parts.place(".scales").shape[0] if parts.place(".scales").shape else 0
    _check_groups(parts, ".scales", k, n_groups)
    scales = parts.read(".scales", FLOATS, (n_groups, n))
    return scales, unpack(parts.read(".qzeros", ("I32",), (n_groups, n // CODES)))


def _check_groups(parts: Parts, part: str, k: int, n_groups: int) -> None:
    """ConvertError unless there are as many groups as config.json says."""
    size = parts.q.group_size
    wanted = 1 if size == -1 else None if size is None else -(-k // size)
    if n_groups < 1 or (wanted is not None and n_groups != wanted):
        what = "no group" if wanted is None else f"{wanted} groups of {size}"
        raise parts.wrong(part, f"group_size in config.json says {what} for {k} columns")


def _groups(parts: Parts, part: str, k: int, n_groups: int) -> NDArray[np.intp]:
    """The group of each column."""
    size = parts.q.group_size
    if not part or not parts.has(part):
        usual = size if size and size > 0 else -(-k // n_groups)
        return np.arange(k) // usual
    found = parts.read(part, ("I32", "I64"), (k,)).astype(np.intp)
    if found.min() < 0 or found.max() >= n_groups:
        raise parts.wrong(part, f"expected groups from 0 to {n_groups - 1}")
    return found


def _packed(
    parts: Parts,
    words: Any,
    shape: tuple[int, int],
    unpack: Callable[[NDArray[Any]], U8],
    scales: F32,
    zeros: U8,
    groups: NDArray[np.intp],
) -> Packed:
    """The packed matrix with scales[G, N] and zeros[G, N]."""

    def codes() -> U8:
        return np.ascontiguousarray(unpack(words.shard.read(words.name)))

    name = parts.stem + ".weight"
    by_row = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)
    return Packed(name, shape, words.shard, codes, *by_row, groups)
