"""The part of a GGUF file before the tensors' data: bytes -> metadata, and where the tensors are.

All of it is checked here, so that a hostile or damaged file ends in a GGUFError and in nothing
else. This module gets a buffer: it knows neither how a file is opened nor how parts belong together
(`file` does), and not what a model is.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..formats import Format, by_id
from ..util.messages import escaped, shown
from .cursor import ARRAY, DAMAGED, INT64_MAX, SCALARS, STRING, Budget, Cursor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes, of tensor data, unless general.alignment says otherwise
MAX_KEYS = 65536
MAX_KEY = 65535  # bytes of a metadata key
MAX_TENSORS = 65536
MAX_NAME = 63  # bytes of a tensor's name: ggml keeps 64 with a closing zero
MAX_DIMS = 4

# Bytes of memory for one entry, so that a count that is too large is refused before reading.
_KEY_COST = 450  # two dict entries, the type and a scalar
_TENSOR_COST = 1024  # its TensorInfo, and later its Tensor, array, shape and name

_MIN_KEY = 8 + 1 + 4 + 1  # bytes in the file: length, one character, type, one byte of value
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # length, one character, dimensions, one of them, type, offset

_REMOVED = {  # tensor types that ggml once had, and what to use instead
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
_OLD_GGML = "a GGML file from before GGUF: convert the original again, or fetch a .gguf of it"
_FOREIGN = (  # how other files start, what they are and what to do
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself: run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint: unpack or convert it"),
    (b"\x80\x02", "a Python pickle, perhaps a PyTorch checkpoint: convert it to GGUF"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"<", "a web page, not the model itself: download the file behind its link"),
    (b"lmgg", _OLD_GGML),
    (b"fmgg", _OLD_GGML),
    (b"tjgg", _OLD_GGML),
    (b"algg", "a GGML adapter (LoRA) from before GGUF: convert the original again"),
)


class TensorInfo(NamedTuple):
    """A tensor as the file describes it."""

    name: str
    shape: tuple[int, ...]  # numpy's order: the last axis is contiguous
    format: Format
    nbytes: int
    offset: int  # bytes from the start of the tensor data
    at: int  # byte of this description, for messages


class Header(NamedTuple):
    """All that precedes the tensors' data; that of tensor t starts at data_start + t.offset."""

    version: int
    metadata: dict[str, Any]
    types: dict[str, str]
    tensors: list[TensorInfo]
    data_start: int


def read_header(path: Path, buffer: mmap.mmap, budget: Budget) -> Header:
    """Reads all of a file but the tensors' data; GGUFError for whatever is invalid."""
    cursor = Cursor(path, buffer, budget)
    budget.file_bytes += cursor.size
    _check_magic(cursor)
    version = _read_version(cursor)
    n_tensors = cursor.count("tensor count", _MIN_TENSOR, _TENSOR_COST, MAX_TENSORS)
    n_keys = cursor.count("key count", _MIN_KEY, _KEY_COST, MAX_KEYS)
    metadata, types = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata, types)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    data_start = -(-cursor.pos // alignment) * alignment
    _check_layout(cursor, tensors, data_start)
    return Header(version, metadata, types, tensors, data_start)


def _check_magic(cursor: Cursor) -> None:
    start = cursor.skip(len(MAGIC), "magic")
    head = cursor.buffer[start:24]
    if head.startswith(MAGIC):
        return
    for prefix, what in _FOREIGN:
        if head.startswith(prefix):
            raise cursor.fail("magic", f"this is {what}", start)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < cursor.size:
        raise cursor.fail("magic", "this is a safetensors file: convert it to GGUF", start)
    raise cursor.fail("magic", f"is {head[:4]!r} and not {MAGIC!r}: this is no GGUF file", start)


def _read_version(cursor: Cursor) -> int:
    at = cursor.pos
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        problem = (
            f"is {swapped} in big-endian order: convert it with gguf-convert-endian (package gguf)"
        )
    elif version == 1:
        problem = "is 1, of August 2023: convert the original again, or fetch a newer file"
    else:
        problem = f"is {version}, this reader has 2 and 3: update ggpy, or download the file again"
    raise cursor.fail("version", problem, at)


def _read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, types) by key."""
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    for index in range(count):
        at = cursor.pos
        key = cursor.string(f"key {index}", MAX_KEY)
        if not key:
            raise cursor.fail(f"key {index}", "is empty", at)
        if key in metadata:
            raise cursor.fail(shown(key), "is there twice", at)
        types[key], metadata[key] = _read_value(cursor, shown(key))
    return metadata, types


def _read_value(cursor: Cursor, field: str) -> tuple[str, Any]:
    """(type, value) of a metadata key."""
    at = cursor.pos
    type_id = cursor.u32(f"{field}: type")
    if type_id == STRING:
        return "str", cursor.string(field)
    if type_id in SCALARS:
        return SCALARS[type_id][0], cursor.scalar(field, type_id)
    if type_id == ARRAY:
        return _read_array(cursor, field)
    raise cursor.fail(f"{field}: type", f"is {type_id}, types of values are 0 to 12", at)


def _read_array(cursor: Cursor, field: str) -> tuple[str, Any]:
    """(type, values) of a metadata key that holds an array."""
    at = cursor.pos
    type_id = cursor.u32(f"{field}: element type")
    if type_id == STRING:
        return "arr[str]", cursor.strings(field)
    if type_id in SCALARS:
        return f"arr[{SCALARS[type_id][0]}]", cursor.numbers(field, type_id)
    if type_id == ARRAY:
        raise cursor.fail(f"{field}: element type", "is array: arrays of arrays are refused", at)
    raise cursor.fail(f"{field}: element type", f"is {type_id}, types of values are 0 to 12", at)


def _alignment(cursor: Cursor, metadata: dict[str, Any], types: dict[str, str]) -> int:
    """general.alignment, in bytes."""
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    alignment = metadata[key]
    if types[key] != "u32" or alignment.bit_count() != 1:
        shown_as = f"{escaped(alignment, 80)} ({types[key]})"
        raise cursor.fail(key, f"is {shown_as}, it must be a power of two as u32")
    return int(alignment)


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> list[TensorInfo]:
    """All descriptions of tensors, each checked by itself; GGUFError."""
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    for index in range(count):
        info = _read_tensor(cursor, index)
        field = f"tensor {info.name!r}"
        if info.name in names:
            raise cursor.fail(field, "is there twice", info.at)
        if info.offset % alignment:
            problem = f"offset {info.offset} is no multiple of the alignment, {alignment}"
            raise cursor.fail(field, problem, info.at)
        names.add(info.name)
        tensors.append(info)
    return tensors


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    at = cursor.pos
    name = cursor.string(f"name of tensor {index}", MAX_NAME)
    if not name:
        raise cursor.fail(f"name of tensor {index}", "is empty", at)
    if "\0" in name:  # C code, as in ggml, would take it for the end of the name
        raise cursor.fail(f"name of tensor {index}", f"holds a NUL: {shown(name)}; {DAMAGED}", at)
    field = f"tensor {name!r}"
    n_dims = cursor.u32(field)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(field, f"has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed", at)
    shape = cursor.unpack(f"{n_dims}Q", field)[::-1]
    format = _read_format(cursor, field)
    nbytes = _tensor_bytes(cursor, field, shape, format, at)
    return TensorInfo(name, shape, format, nbytes, cursor.u64(field), at)


def _read_format(cursor: Cursor, field: str) -> Format:
    at = cursor.pos
    type_id = cursor.u32(f"{field}: type")
    if format := by_id(type_id):
        return format
    if type_id in _REMOVED:
        name, heir = _REMOVED[type_id]
        problem = (
            f"is {type_id} ({name}), which ggml has removed: quantise the model again, to {heir}"
        )
    else:
        problem = (
            f"is {type_id}, which ggpy does not know: update ggpy, or use another quantisation"
        )
    raise cursor.fail(f"{field}: type", problem, at)


def _tensor_bytes(
    cursor: Cursor, field: str, shape: tuple[int, ...], format: Format, at: int
) -> int:
    """The bytes of a tensor's data; GGUFError for a shape that its format cannot have."""
    for size in shape:
        if size > INT64_MAX:
            raise cursor.fail(field, f"has a dimension of {size - 2**64}, negative", at)
    if shape[-1] % format.block_size:
        rows = f"rows of {shape[-1]} weights"
        problem = f"has {rows}, {format.name} stores whole blocks of {format.block_size}"
        raise cursor.fail(field, problem, at)
    # numpy leaves zeros out of this product, too; 8 bytes are the most that a weight can take.
    if prod(size for size in shape if size) > INT64_MAX // 8:
        raise cursor.fail(field, f"has the shape {shape}, whose size overflows 64 bits", at)
    return prod(shape[:-1]) * format.row_bytes(shape[-1])


def _check_layout(cursor: Cursor, tensors: list[TensorInfo], data_start: int) -> None:
    """GGUFError unless the data of all tensors lies in the file and does not overlap."""
    by_offset = sorted(tensors, key=lambda info: (info.offset, info.nbytes))
    end = max((info.offset + info.nbytes for info in tensors), default=0)
    missing = data_start + end - cursor.size
    for before, info in zip([None, *by_offset], by_offset, strict=False):
        field = f"tensor {info.name!r}"
        if before and before.offset + before.nbytes > info.offset:
            raise cursor.fail(field, f"overlaps with tensor {before.name!r}", info.at)
        stop = data_start + info.offset + info.nbytes
        if stop > cursor.size:
            problem = (
                f"ends at byte {stop}, the file has {cursor.size}: {missing} bytes are missing"
            )
            raise cursor.fail(field, f"{problem}; {DAMAGED}", info.at)
