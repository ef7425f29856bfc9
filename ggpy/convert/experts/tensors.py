"""Tensors of experts [X, N, K], made of a checkpoint's tensors: the rows of one expert after those
of the other.

Each class has the interface of weights.Weights: a name, a shape, a format, and `rows`. Knows no
name of a tensor.

Letters: X experts, N rows of a matrix, K columns, M rows of a tensor that is split into parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats import Format, by_name
from ...formats.base import U8
from ...formats.mxfp4 import QK_MXFP4, block_mxfp4
from ...util.messages import shown
from ..assemble import Stored
from ..folder import ConvertError
from ..packed import Packed
from ..safetensors import Shard
from ..weights import Weights

NO_SCALE = 255  # an exponent of MXFP4 that is NaN


@dataclass(frozen=True, eq=False)
class Stacked:
    """w[X, N, K] of X tensors [N, K]."""

    name: str
    parts: tuple[Stored, ...]

    kept = None
    scale = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[X, N, K]."""
        return len(self.parts), *self.parts[0].shape

    @property
    def shard(self) -> Shard:
        """The shard of the first part."""
        return self.parts[0].shard

    @property
    def format(self) -> Format:
        """The format that `rows` are in: that of all parts, or F32 if their formats differ."""
        formats = {part.format.name for part in self.parts}
        return by_name(formats.pop() if len(formats) == 1 else "F32")

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Rows start:stop of all X * N, bytes[rows, bytes of a row], perhaps in another order."""
        found = []
        for expert, first, last in _pieces(start, stop, self.shape[1]):
            part = self.parts[expert]
            data = part.rows(first, last)
            if part.format is not self.format:
                data = part.format.dequantize(data).view(np.uint8)
            found.append(data)
        return _ordered(np.concatenate(found), order)


@dataclass(frozen=True, eq=False)
class PackedStack(Stacked):
    """w[X, N, K] of X matrices of 4-bit codes, all of which become blocks of one format."""

    parts: tuple[Packed, ...]

    @property
    def kept(self) -> Stacked:  # type: ignore[override]
        """The stack in the blocks that a file has without rounding a code (`Packed.kept`)."""
        return Stacked(self.name, tuple(part.kept for part in self.parts))


class _OfWhole:
    """The properties that a part inherits from the tensor `whole`."""

    whole: Weights
    kept = None
    scale = None

    @property
    def shard(self) -> Shard:
        """The shard of the whole tensor."""
        return self.whole.shard

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        return self.whole.format


@dataclass(frozen=True, eq=False)
class Cut(_OfWhole):
    """w[X, N, K] of t[X, M, K], or of t[X, K, M] if that is transposed; or b[X, N] of t[X, M]."""

    name: str
    whole: Weights
    part: slice  # of M
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """[X, N, K], or [X, N]."""
        n_expert, *axes = self.whole.shape
        m, *k = axes[::-1] if self.transposed else axes
        return n_expert, len(range(m)[self.part]), *k

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """See Stacked."""
        if len(self.shape) == 2:
            biases = self.shard.read(self.whole.name, start, stop)[:, self.part]
            return _ordered(_bytes(biases), order)
        found = []
        for expert, first, last in _pieces(start, stop, self.shape[1]):
            matrix = _expert(self.shard, self.whole.name, expert)
            found.append(_bytes((matrix.T if self.transposed else matrix)[self.part][first:last]))
        return _ordered(np.concatenate(found), order)


@dataclass(frozen=True, eq=False)
class SingleRow(_OfWhole):
    """The vector v[K] of a matrix [1, K]: the gate of a shared expert, a bias."""

    whole: Weights

    @property
    def name(self) -> str:
        """The name of the matrix."""
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[K]."""
        return self.whole.shape[1:]

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Elements start:stop, a row for each."""
        row = self.shard.read(self.name, 0, 1)[0, start:stop]
        return _ordered(_bytes(row).reshape(stop - start, -1), order)


@dataclass(frozen=True, eq=False)
class Microscaled:
    """w[X, N, K] of codes[X, M, K / 32, 16] and exponents[X, M, K / 32], as blocks of MXFP4.

    A byte of a checkpoint has two neighbouring codes; a byte of block_mxfp4 has two codes that are
    16 apart. No number is rounded.
    """

    name: str
    codes: Weights
    exponents: Weights
    part: slice  # of M

    scale = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[X, N, K]."""
        n_expert, m, n_blocks, _ = self.codes.shape
        return n_expert, len(range(m)[self.part]), n_blocks * QK_MXFP4

    @property
    def shard(self) -> Shard:
        """The shard of the codes."""
        return self.codes.shard

    @property
    def format(self) -> Format:
        """MXFP4."""
        return by_name("MXFP4")

    @property
    def kept(self) -> Microscaled:
        """What a file can have without rounding: this tensor."""
        return self

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """See Stacked."""
        found = []
        for expert, first, last in _pieces(start, stop, self.shape[1]):
            codes = _expert(self.shard, self.codes.name, expert)[self.part][first:last]
            exponents = _expert(self.exponents.shard, self.exponents.name, expert)
            found.append(self._blocks(codes, exponents[self.part][first:last]))
        return _ordered(np.concatenate(found), order)

    def _blocks(self, codes: U8, exponents: U8) -> U8:
        """codes[n, K / 32, 16], exponents[n, K / 32] -> bytes[n, bytes of a row]."""
        if (exponents == NO_SCALE).any():
            name = shown(self.exponents.name)
            raise ConvertError(f"{self.shard.path}: tensor {name} has a scale that is NaN")
        blocks = np.empty(exponents.shape, block_mxfp4)
        blocks["e"] = exponents
        halves = codes.reshape(*codes.shape[:-1], 2, 8)  # of a block: 16 codes each
        pairs = np.stack([halves & 15, halves >> 4], axis=-1).reshape(*codes.shape[:-1], 2, 16)
        blocks["qs"] = pairs[..., 0, :] | pairs[..., 1, :] << 4
        return blocks.view(np.uint8).reshape(len(blocks), -1)


def _pieces(start: int, stop: int, n_rows: int) -> Iterator[tuple[int, int, int]]:
    """Rows start:stop of matrices of n_rows each, as (expert, first row, row after the last)."""
    while start < stop:
        expert, first = divmod(start, n_rows)
        last = min(n_rows, first + stop - start)
        yield expert, first, last
        start += last - first


@lru_cache(maxsize=2)
def _expert(shard: Shard, name: str, expert: int) -> NDArray[Any]:
    """One expert's part of a tensor. Two are cached, since codes and exponents are read in turn."""
    return shard.read(name, expert, expert + 1)[0]


def _bytes(rows: NDArray[Any]) -> U8:
    return np.ascontiguousarray(rows).view(np.uint8)


def _ordered(rows: U8, order: NDArray[np.intp] | None) -> U8:
    return rows if order is None else np.ascontiguousarray(rows[order])
