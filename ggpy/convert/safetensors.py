"""A reader of safetensors files that trusts nothing in them: file -> rows of tensors.

A file has eight bytes with the length of a header, the header (JSON: type, shape and offsets of
each tensor), and the tensors, which cover the rest without gaps. Rows are read when they are asked
for. Source: huggingface/safetensors. Knows no model.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..util.messages import shown
from .folder import ConvertError, Limit, parse_object

MAX_TENSORS = 65536  # of a file: as many as a GGUF file may have
MAX_NAME = 256  # characters of a tensor's name
# A tensor takes three objects and about six values. The format's own library takes 100 MB.
HEADER = Limit(16 << 20, 3 * MAX_TENSORS + 2, 8 * MAX_TENSORS)
MAX_DIMS = 8
DAMAGED = "the file is damaged or not whole: download it again"

# Name of a type -> dtype of numpy; BF16 and 8-bit floats are read as unsigned integers.
DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"},
}


class Place(NamedTuple):
    """A tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    nbytes: int


class Shard:
    """An open file; close it, or use it in a `with`. ConvertError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("rb")
        try:
            size = path.stat().st_size
            start, header = self._header(size)
            self.tensors = self._places(header, start, size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows start:stop of a tensor (stop=None: to the last), in the dtype of `DTYPES`.

        The result has the tensor's shape, but for its first axis; a scalar has the shape [1].
        """
        place = self.tensors[name]
        dtype = np.dtype(DTYPES[place.dtype])
        rows = place.shape[0] if place.shape else 1
        stop = rows if stop is None else stop
        row = prod(place.shape[1:])
        data = np.empty((stop - start) * row, dtype)
        self._stream.seek(place.start + start * row * dtype.itemsize)
        if self._stream.readinto(data.view(np.uint8)) != data.nbytes:  # type: ignore[arg-type]
            raise ConvertError(f"{self.path}: tensor {shown(name)} cannot be read: {DAMAGED}")
        return data.reshape(stop - start, *place.shape[1:]) if place.shape else data

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, problem: str) -> ConvertError:
        return ConvertError(f"{self.path}: {problem}")

    def _header(self, size: int) -> tuple[int, dict[str, Any]]:
        """(where the data starts, the header)."""
        head = self._stream.read(8)
        length = int.from_bytes(head, "little")
        if head.startswith(b"version "):
            raise self._fail("is a Git LFS pointer, not the weights: run `git lfs pull`")
        if len(head) < 8 or length > size - 8:
            problem = f"a header of {length} bytes cannot be in a file of {size}"
            raise self._fail(f"{problem}; {DAMAGED}")
        if length > HEADER.nbytes:
            most = HEADER.nbytes
            raise self._fail(f"a header of {length} bytes; {most} are the most there may be")
        data = self._stream.read(length)
        return 8 + length, parse_object(data, f"{self.path}: the header", HEADER)

    def _places(self, header: dict[str, Any], start: int, size: int) -> dict[str, Place]:
        header.pop("__metadata__", None)
        found = {name: self._place(name, entry, start) for name, entry in header.items()}
        at = start
        for name, place in sorted(found.items(), key=lambda item: item[1].start):
            if place.start != at and place.nbytes:
                what = "overlaps with another" if place.start < at else "leaves a gap before it"
                raise self._fail(f"tensor {shown(name)} {what}, at byte {place.start}; {DAMAGED}")
            at += place.nbytes
        if at != size:
            problem = f"the tensors end at byte {at}, the file has {size}"
            raise self._fail(f"{problem}; {DAMAGED}")
        return found

    def _place(self, name: str, entry: Any, start: int) -> Place:
        entry = entry if isinstance(entry, dict) else {}
        if len(name) > MAX_NAME:
            raise self._fail(f"tensor {shown(name)} has a name of {len(name)} characters")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise self._fail(f"tensor {shown(name)} is of type {shown(dtype)}; known are {known}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMS or prod(shape) >= 1 << 60:
            raise self._fail(f"tensor {shown(name)} has the shape {shown(shape)}; {DAMAGED}")
        nbytes = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            problem = (
                f"has {nbytes} bytes by its shape {shown(shape)}, and the place {shown(offsets)}"
            )
            raise self._fail(f"tensor {shown(name)} {problem}; {DAMAGED}")
        return Place(dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 1 << 60 for x in values)
