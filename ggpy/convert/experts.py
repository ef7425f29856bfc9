"""The matrices of all experts as one tensor of three axes, whichever way a checkpoint has them.

Released checkpoints have a tensor for each expert, X.experts.3.gate_proj.weight. Others have one
for all, X.experts.gate_up_proj [X, 2 N, K], with the rows of gate before those of up; in those of
gpt-oss the rows take turns and the last two axes are exchanged, or codes and scales of MXFP4 are
two tensors. All become X.experts.gate_proj.weight, .up_proj.weight and .down_proj.weight.

Letters: X experts, N rows of a matrix, K columns, M rows of a tensor that is taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, by_name
from ..formats.base import U8
from ..formats.mxfp4 import QK_MXFP4, block_mxfp4
from ..util.messages import shown
from .assemble import Stored
from .folder import ConvertError
from .safetensors import Shard
from .weights import Weights

APART = re.compile(r"(.*\.experts)\.(\d{1,5})\.(.*)")
TOGETHER = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(\.weight|_bias|_blocks|)")
SHARED_GATE = ".shared_expert_gate.weight"
SCALES = "_scales"  # beside _blocks
ALL = slice(None)
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
        """Where the first one is."""
        return self.parts[0].shard

    @property
    def format(self) -> Format:
        """The format that `rows` are in: that of all, or F32 if they differ."""
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
class Cut:
    """w[X, N, K] of t[X, M, K], or of t[X, K, M] if that is transposed; or b[X, N] of t[X, M]."""

    name: str
    whole: Weights
    part: slice  # of M
    transposed: bool

    kept = None
    scale = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[X, N, K], or [X, N]."""
        n_expert, *axes = self.whole.shape
        m, *k = axes[::-1] if self.transposed else axes
        return n_expert, len(range(m)[self.part]), *k

    @property
    def shard(self) -> Shard:
        """Where it is."""
        return self.whole.shard

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        return self.whole.format

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
class Row:
    """The vector v[K] of a matrix [1, K]: the gate of a shared expert."""

    whole: Weights

    kept = None
    scale = None

    @property
    def name(self) -> str:
        """That of the matrix."""
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[K]."""
        return self.whole.shape[1:]

    @property
    def shard(self) -> Shard:
        """Where it is."""
        return self.whole.shard

    @property
    def format(self) -> Format:
        """The format that `rows` are in."""
        return self.whole.format

    def rows(self, start: int, stop: int, order: NDArray[np.intp] | None = None) -> U8:
        """Elements start:stop, a row for each."""
        row = self.shard.read(self.name, 0, 1)[0, start:stop]
        return _ordered(_bytes(row).reshape(stop - start, -1), order)


@dataclass(frozen=True, eq=False)
class Microscaled:
    """w[X, N, K] of codes[X, M, K / 32, 16] and exponents[X, M, K / 32], as blocks of MXFP4.

    A byte of codes has two neighbours, in a block those that are 16 apart. No number is rounded.
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
        """Where the codes are."""
        return self.codes.shard

    @property
    def format(self) -> Format:
        """MXFP4."""
        return by_name("MXFP4")

    @property
    def kept(self) -> Microscaled:
        """The rows that a file can have without rounding: these."""
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
        halves = codes.reshape(*codes.shape[:-1], 2, 8)  # of a block: bytes of 16 neighbours each
        pairs = np.stack([halves & 15, halves >> 4], axis=-1).reshape(*codes.shape[:-1], 2, 16)
        blocks["qs"] = pairs[..., 0, :] | pairs[..., 1, :] << 4
        return blocks.view(np.uint8).reshape(len(blocks), -1)


Gathered = Stored | Stacked | Cut | Row | Microscaled
Found = dict[str, Gathered]


def gathered(tensors: Mapping[str, Stored], interleaved: bool) -> Found:
    """The tensors by name, with one for the same matrices of all experts; ConvertError if an expert
    is missing. interleaved: see the top.
    """
    found: Found = {}
    apart: dict[str, dict[int, Stored]] = {}
    for name, weights in tensors.items():
        if match := APART.fullmatch(name):
            apart.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weights
        elif (match := TOGETHER.fullmatch(name)) and isinstance(weights, Weights):
            found |= _taken_apart(match, weights, tensors, interleaved)
        elif name.endswith(SHARED_GATE) and isinstance(weights, Weights) and weights.shape[0] == 1:
            found[name] = Row(weights)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + "_blocks" in tensors):
            found[name] = weights
    return {**found, **{name: _stacked(name, parts) for name, parts in apart.items()}}


def _taken_apart(
    match: re.Match[str], weights: Weights, tensors: Mapping[str, Stored], interleaved: bool
) -> Found:
    """The parts of one tensor of all experts."""
    stem, kind, ending = match[1], match[2], match[3]
    scales = None
    if ending == "_blocks":
        scales = _scales_of(weights, tensors.get(f"{stem}.{kind}{SCALES}"))
    n_axes, ours = (2, ".bias") if ending == "_bias" else (3 if scales is None else 4, ".weight")
    transposed = interleaved and n_axes == 3
    m = weights.shape[-1 if transposed else 1] if len(weights.shape) == n_axes else 1
    if len(weights.shape) != n_axes or (kind == "gate_up_proj" and m % 2):
        raise ConvertError(
            f"{weights.shard.path}: tensor {shown(weights.name)} has the shape {weights.shape}, "
            f"expected {n_axes} axes, experts first, and as many rows of gate as of up"
        )
    found: Found = {}
    for part, rows in _parts(kind, m, interleaved).items():
        cut = Cut(weights.name, weights, rows, transposed)
        whole = cut if scales is None else Microscaled(weights.name, weights, scales, rows)
        found[f"{stem}.{part}{ours}"] = whole
    return found


def _parts(kind: str, m: int, interleaved: bool) -> dict[str, slice]:
    """Which of m rows belong to which matrix."""
    if kind == "down_proj":
        return {kind: ALL}
    if interleaved:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {"gate_proj": slice(0, m // 2), "up_proj": slice(m // 2, None)}


def _scales_of(codes: Weights, scales: Stored | None) -> Weights:
    """The scales of MXFP4 codes; ConvertError unless both are what they should be."""
    good = isinstance(scales, Weights) and {codes.dtype, scales.dtype} == {"U8"}
    if not good or (*scales.shape, QK_MXFP4 // 2) != codes.shape:  # type: ignore[union-attr]
        raise ConvertError(
            f"{codes.shard.path}: tensor {shown(codes.name)}, {codes.dtype} {codes.shape}, has no"
            " scales that fit to it"
        )
    assert isinstance(scales, Weights)
    return scales


def _stacked(name: str, parts: Mapping[int, Stored]) -> Stacked:
    """One tensor of several, which are of the experts 0, 1, .."""
    first = next(iter(parts.values()))
    missing = next((i for i in range(len(parts)) if i not in parts), None)
    if missing is not None:
        raise ConvertError(
            f"{first.shard.path}: there is no {shown(name)} of expert {missing}, but of"
            f" {len(parts)} others: the checkpoint is not whole"
        )
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1 or len(first.shape) != 2:
        raise ConvertError(
            f"{first.shard.path}: {shown(name)} has the shapes {sorted(shapes)}: one of two axes is"
            " expected"
        )
    return Stacked(name, tuple(parts[i] for i in range(len(parts))))


def _pieces(start: int, stop: int, n_rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last row) of rows start:stop of matrices that have n_rows each."""
    while start < stop:
        expert, first = divmod(start, n_rows)
        last = min(n_rows, first + stop - start)
        yield expert, first, last
        start += last - first


@lru_cache(maxsize=2)
def _expert(shard: Shard, name: str, expert: int) -> NDArray[Any]:
    """One expert's part of a tensor; codes and exponents are read in turn."""
    return shard.read(name, expert, expert + 1)[0]


def _bytes(rows: NDArray[Any]) -> U8:
    return np.ascontiguousarray(rows).view(np.uint8)


def _ordered(rows: U8, order: NDArray[np.intp] | None) -> U8:
    return rows if order is None else np.ascontiguousarray(rows[order])
