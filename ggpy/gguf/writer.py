"""Writes a GGUF file: metadata, then tensors one after the other, in pieces of any size.

The file appears under its name when the last tensor is written, and not before (`output_file`). The
bytes are those that llama.cpp writes for the same values. Knows how values are stored, but not what
they mean to a model.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..formats import Format
from ..util.disk import check_room
from ..util.messages import shown
from ..util.output_file import OutputFile, is_stream
from .cursor import ARRAY, SCALARS, STRING
from .header import DEFAULT_ALIGNMENT, MAGIC, MAX_NAME

VERSION = 3
_TYPE_IDS = {name: type_id for type_id, (name, _) in SCALARS.items()} | {"str": STRING}
_CODES = {name: code for name, code in SCALARS.values()}


class Slot(NamedTuple):
    """The name, shape and format of a tensor that will be written."""

    name: str
    shape: tuple[int, ...]  # numpy's order: the last axis is a row
    format: Format

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; ValueError if a row is no whole number of blocks."""
        return prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


Metadata = Mapping[
    str, tuple[str, Any]
]  # key -> type as in `File.types` ("u32", "arr[str]"), value


class Writer:
    """A file being written; use it in a `with`, which ends with all tensors or without a file.

    slots: the tensors in order. OSError if the disk lacks space for them; ValueError for names and
    values that GGUF cannot have.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata, slots: Sequence[Slot]):
        self.path = Path(path)
        self._alignment = int(metadata.get("general.alignment", ("u32", DEFAULT_ALIGNMENT))[1])
        self._slots = list(slots)
        self._left = [slot.nbytes for slot in self._slots]  # bytes to come of each
        self._at = 0  # the slot that is written
        head = header(metadata, self._slots, self._alignment)
        self.nbytes = len(head) + sum(self._padded(n) for n in self._left)
        if not self.path.is_dir() and not is_stream(self.path):
            check_room(self.path, self.nbytes)
        self._file = OutputFile(self.path)
        try:
            self._file.write(head)
            self._skip_full()
        except BaseException:
            self._file.discard()
            raise

    def write(self, data: bytes | np.ndarray) -> None:
        """Appends the next bytes of the tensors, in order; ValueError beyond the tensor's end."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).tobytes()
        piece = memoryview(data)
        if self._at == len(self._slots) or len(piece) > self._left[self._at]:
            raise ValueError(f"{self.path}: {len(piece)} bytes are more than the tensor has")
        self._file.write(piece)
        self._left[self._at] -= len(piece)
        self._skip_full()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if self._at < len(self._slots):
                    raise ValueError(f"{self.path}: tensor {self._slots[self._at].name} is missing")
                self._file.commit()
        finally:
            self._file.discard()

    def _skip_full(self) -> None:
        """Pads the current tensor if it is full, and goes on to the next one that is not."""
        while self._at < len(self._slots) and not self._left[self._at]:
            nbytes = self._slots[self._at].nbytes
            self._file.write(bytes(self._padded(nbytes) - nbytes))
            self._at += 1

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment


def header(metadata: Metadata, slots: Sequence[Slot], alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """All bytes before the tensors' data, padded to the alignment."""
    _check_names(slot.name for slot in slots)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(slots), len(metadata))]
    for key, (kind, value) in metadata.items():
        parts += [_string(key), _value(key, kind, value)]
    offset = 0
    for slot in slots:
        sizes = _dimensions(slot.shape)
        parts += [_string(slot.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts += [struct.pack("<IQ", slot.format.type_id, offset)]
        offset += -(-slot.nbytes // alignment) * alignment
    length = sum(map(len, parts))
    return b"".join([*parts, bytes(-length % alignment)])


def _dimensions(shape: Sequence[int]) -> list[int]:
    """The shape in ggml's order, without trailing ones."""
    sizes = list(shape[::-1])
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or len(name.encode()) > MAX_NAME or "\0" in name or name in seen:
            raise ValueError(
                f"{shown(name)} cannot name a tensor: names are different, have 1 to {MAX_NAME}"
                " bytes, and no NUL among them"
            )
        seen.add(name)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, kind: str, value: Any) -> bytes:
    """Type and value of a metadata key."""
    element = kind[4:-1] if kind.startswith("arr[") else kind
    if element not in _TYPE_IDS:
        raise ValueError(f"{key}: GGUF has no values of type {shown(kind)}")
    type_id = struct.pack("<I", _TYPE_IDS[element])
    if element == kind:
        return type_id + _scalar(key, kind, value)
    count = struct.pack("<IIQ", ARRAY, _TYPE_IDS[element], len(value))
    if element == "str":
        return count + b"".join(map(_string, value))
    return count + _numbers(key, element, value)


def _scalar(key: str, kind: str, value: Any) -> bytes:
    if kind == "str":
        return _string(value)
    try:
        return struct.pack("<" + _CODES[kind], value)
    except struct.error as error:
        raise ValueError(f"{key}: {shown(value)} is no {kind}: {error}") from None


def _numbers(key: str, kind: str, values: Any) -> bytes:
    dtype = np.dtype("<" + _CODES[kind])
    array = np.asarray(values)
    if array.size and dtype.kind in "iu" and array.dtype.kind in "iuf":
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max or array.dtype.kind == "f":
            raise ValueError(f"{key}: holds numbers that are no {kind}")
    return array.astype(dtype).tobytes()
