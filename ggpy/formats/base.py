"""What a block format is: a numpy structured dtype with ggml's field names, and functions over
arrays of blocks.

This module knows no format by name; each file beside it declares one and registers it. Nothing here
knows files, tensors of more than one dimension of blocks, or the GPU, except that `cuda_asserts`
lets a CUDA header check itself against the dtype.

Letters: n blocks, b weights per block, k scales per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[Any]  # n elements of a format's dtype
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Weights of a chunk: its temporaries stay in a core's L2 cache, and yet each numpy call is so long
# that threads seldom wait for the GIL.
CHUNK = 1 << 17
SEARCH_CHUNK = 1 << 16  # where scales are searched for, with more temporaries

PRIVATE_ID = 1 << 16  # the first id of ggpy's own types, which neither ggml nor files have


@dataclass(frozen=True)
class ScaleCodec:
    """How scales that are not fields of a float type are read and written."""

    # blocks[n] -> scales[n, k]; a bit pattern that stands for no number becomes NaN
    read: Callable[[Blocks], F32]
    # stores the nearest scales[n, k], in place; a sign is lost where none is stored
    write: Callable[[Blocks, F32], None]


@dataclass(frozen=True)
class Format:
    """One GGML type: `block_size` weights are stored in one element of `dtype`."""

    name: str  # ggml's name, "Q4_K"
    type_id: int  # ggml_type, as stored in a GGUF file; PRIVATE_ID and above: in no file
    block_size: int  # weights per block, b
    dtype: np.dtype[Any]  # the block; a plain scalar for F32, F16, ...
    # blocks[n] -> weights[n, b]
    dequantize_blocks: Callable[[Blocks], F32]
    # weights[n, b] -> blocks[n]
    quantize_blocks: Callable[[F32], Blocks] | None = None
    # weights[n, b], importance[m, b] of the columns of a row -> blocks[n]; n is a multiple of m
    quantize_weighted: Callable[[F32, F32], Blocks] | None = None
    scale_codec: ScaleCodec | None = None
    # recomputes, in place, the fields that follow from others
    derive_fields: Callable[[Blocks], None] | None = None
    # The layout of matrices on a GPU: bits of a code, weights with one scale, kind of scales
    # (cuda/layout/tile.cuh). None: as in the file.
    tile: tuple[int, int, str] | None = None
    # The values of a tile's codes, if these are not integers: numbers, "E2M1" or "E4M3".
    tile_values: tuple[int, ...] | str = ()
    # quantize_blocks tries many scales: hundreds of small operations on each block
    searches: bool = False

    @property
    def is_private(self) -> bool:
        """Whether files have no type for it."""
        return self.type_id >= PRIVATE_ID

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    @property
    def struct(self) -> str:
        """ggml's name of the block's C struct, `block_q4_K`."""
        head, _, tail = self.name.partition("_")
        return f"block_{head.lower()}" + (
            f"_{tail if tail == 'K' else tail.lower()}" if tail else ""
        )

    @property
    def scale_fields(self) -> list[str]:
        """The fields of a float type: d, dmin, m, s."""
        return [name for name in self.dtype.names or () if self.dtype[name].base.kind == "f"]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; ValueError unless it is a whole number of blocks."""
        if columns % self.block_size:
            raise ValueError(
                f"{self.name} rows are multiples of {self.block_size} weights, not {columns}"
            )
        return columns // self.block_size * self.nbytes

    def blocks(self, data: NDArray[Any]) -> Blocks:
        """bytes[..., m * nbytes] -> blocks[n], a view where the bytes are contiguous; ValueError
        unless rows are whole blocks.
        """
        if data.dtype == self.dtype and data.ndim:
            return np.ascontiguousarray(data).reshape(-1)
        if data.dtype != np.uint8:
            raise ValueError(f"{self.name} blocks are passed as uint8, not {data.dtype}")
        if data.ndim == 0 or data.shape[-1] % self.nbytes:
            raise ValueError(
                f"{self.name} blocks are {self.nbytes} bytes; "
                f"the last axis of shape {data.shape} is no multiple"
            )
        return np.ascontiguousarray(data).reshape(-1).view(self.dtype)

    def dequantize(self, data: U8) -> F32:
        """bytes[..., m * nbytes] -> weights[..., m * b]."""
        blocks = self.blocks(data)
        weights = np.empty((len(blocks), self.block_size), np.float32)
        with np.errstate(all="ignore"):  # a broken file's scales may overflow; `scales` tells
            for part in _chunks(len(blocks), self.block_size):
                weights[part] = self.dequantize_blocks(blocks[part]).reshape(-1, self.block_size)
        return weights.reshape(*data.shape[:-1], data.shape[-1] // self.nbytes * self.block_size)

    def quantize(
        self,
        weights: NDArray[Any],
        importance: NDArray[Any] | None = None,
        first_row: int = 0,
    ) -> U8:
        """weights[..., m * b] -> bytes[..., m * nbytes].

        importance[m * b] weighs the error of each column (an importance matrix); formats that
        search for no best scale ignore it, as ggml does. ValueError on NaN, infinity, a row that is
        no multiple of b, and a weight whose scale cannot be stored; rows are counted from
        `first_row`.
        """
        if self.quantize_blocks is None:
            can = ", ".join(quantizable())
            raise ValueError(f"{self.name} cannot be quantised to; these can: {can}")
        weights = np.asarray(weights)
        if weights.ndim == 0:
            raise ValueError("a scalar has no blocks; pass at least one row")
        columns = weights.shape[-1]
        row_bytes = self.row_bytes(columns)
        encode, unit = self.quantize_blocks, 1
        size = SEARCH_CHUNK if self.searches or importance is not None else CHUNK
        if importance is not None:
            by_column = checked_importance(importance, columns).reshape(-1, self.block_size)
            if (weighted := self.quantize_weighted) is not None:
                encode, unit = (lambda chunk: weighted(chunk, by_column)), len(by_column)
        chunks = _chunks(weights.size // self.block_size, self.block_size, unit, size)
        blocks = self._quantize(
            weights.reshape(-1, self.block_size), encode, chunks, columns, first_row
        )
        return blocks.view(np.uint8).reshape(*weights.shape[:-1], row_bytes)

    def _quantize(
        self,
        weights: NDArray[Any],
        encode: Callable[[F32], Blocks],
        chunks: Iterator[slice],
        columns: int,
        first_row: int,
    ) -> Blocks:
        """weights[n, b] -> blocks[n], chunk by chunk."""
        blocks = np.empty(len(weights), self.dtype)
        for part in chunks:
            chunk = np.ascontiguousarray(weights[part], np.float32)
            if not (good := np.isfinite(chunk)).all():
                row = first_row + self._bad_row(good, part, columns)
                raise ValueError(f"row {row} holds NaN or infinity")
            with np.errstate(all="ignore"):
                blocks[part] = encode(chunk).reshape(-1)
            if not (good := np.isfinite(self.scales(blocks[part]))).all():
                reason = f"a weight that needs a scale beyond {self.scale_limit:g}, the largest of "
                reason += f"{self.name}; scale the tensor down or store it as F32"
                row = first_row + self._bad_row(good, part, columns)
                raise ValueError(f"row {row} holds {reason}")
        return blocks

    def _bad_row(self, good: NDArray[np.bool_], part: slice, columns: int) -> int:
        """The row of the first block of `part` that is not good[n, ...]."""
        block = part.start + int(good.all(axis=1).argmin())
        return int(block * self.block_size // columns)

    def scales(self, data: NDArray[Any]) -> F32:
        """The float scales of blocks, [n, k] (k is 0 for integers).

        Weights are finite if their scales are.
        """
        blocks = self.blocks(data)
        if self.scale_codec is not None:
            return self.scale_codec.read(blocks)
        if self.dtype.names is None:
            with np.errstate(over="ignore"):
                return blocks.astype(np.float32)[:, None][:, : self.dtype.kind == "f"]
        fields = [
            blocks[name].astype(np.float32).reshape(len(blocks), -1) for name in self.scale_fields
        ]
        return np.concatenate(fields, axis=1)

    def set_scales(self, blocks: Blocks, scales: F32) -> None:
        """Stores scales[n, k], in the order in which `scales` reads them, rounded to what the
        blocks can hold.
        """
        if self.scale_codec is not None:
            self.scale_codec.write(blocks, scales)
        elif self.dtype.names is None:
            blocks[:] = scales[:, 0]
        else:
            for i, name in enumerate(self.scale_fields):
                blocks[name] = scales[:, i]
        if self.derive_fields is not None:
            self.derive_fields(blocks)

    @property
    def scale_limit(self) -> float:
        """The largest scale that a float field can hold; infinity where none limits it."""
        types = [self.dtype[name].base for name in self.scale_fields] or [self.dtype]
        return min((float(np.finfo(t).max) for t in types if t.kind == "f"), default=float("inf"))


def cuda_asserts(format: Format) -> str:
    """C++ lines that fail to compile unless the struct has the size of the dtype, and each field
    its offset and size. Offsets are checked by compilers with __builtin_offsetof: NVRTC before 13.4
    has none.
    """
    struct, fields = format.struct, (format.dtype.fields or {}).items()
    sizes = [_assert(f"sizeof({struct}) == {format.nbytes}")]
    sizes += [_assert(f"sizeof({struct}::{name}) == {field[0].itemsize}") for name, field in fields]
    places = [
        _assert(f"__builtin_offsetof({struct}, {name}) == {field[1]}") for name, field in fields
    ]
    return "\n".join([*sizes, HAS_OFFSETOF, *places, "#endif\n"])


HAS_OFFSETOF = (
    "#if !defined(__CUDACC_RTC__) || __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1304"
)


def _assert(condition: str) -> str:
    return f'static_assert({condition}, "{condition}");'


def _chunks(n: int, block_size: int, unit: int = 1, size: int = CHUNK) -> Iterator[slice]:
    """Slices of n blocks: about `size` weights in each, and a multiple of `unit` blocks."""
    step = max(1, size // (block_size * unit)) * unit
    return (slice(start, start + step) for start in range(0, n, step))


def checked_importance(importance: NDArray[Any], columns: int) -> F32:
    """`importance` as f32 [columns]; ValueError for another shape, NaN, infinity or a negative."""
    importance = np.asarray(importance, np.float32)
    if importance.shape != (columns,):
        raise ValueError(f"importance has shape {importance.shape}; rows have {columns} columns")
    if not (np.isfinite(importance) & (importance >= 0)).all():
        raise ValueError("importance holds NaN, infinity or a negative number")
    return importance


_by_name: dict[str, Format] = {}
_by_id: dict[int, Format] = {}


def register(format: Format) -> Format:
    """Registers a format by its name (any case) and its ggml id; ValueError if either is taken."""
    if format.name.upper() in _by_name or format.type_id in _by_id:
        raise ValueError(
            f"two block formats are called {format.name} or have the ggml id {format.type_id}"
        )
    _by_name[format.name.upper()] = format
    _by_id[format.type_id] = format
    return format


def by_name(name: str) -> Format:
    """The format called `name` in any case; ValueError lists those that exist."""
    try:
        return _by_name[name.upper()]
    except KeyError:
        known = ", ".join(f.name for f in all_formats())
        raise ValueError(f"unknown block format {name!r}; known: {known}") from None


def by_id(type_id: int) -> Format | None:
    """The format with this ggml type id, or None."""
    return None if type_id >= PRIVATE_ID else _by_id.get(type_id)


def all_formats() -> list[Format]:
    """Every format, in the order of ggml's ids; those that ggml does not have are the last."""
    return [_by_id[i] for i in sorted(_by_id)]


def quantizable() -> list[str]:
    """Names of the formats that can be quantised to."""
    return [f.name for f in all_formats() if f.quantize_blocks is not None]
