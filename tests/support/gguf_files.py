"""GGUF files written byte by byte, so that a test can write files that no writer would.

`gguf` joins the pieces; each piece is bytes, and tests make pieces wrong on purpose.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
TYPE_F32, TYPE_F16, TYPE_Q8_0, TYPE_Q4_K, TYPE_I8 = 0, 1, 8, 12, 24  # ggml's ids


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length` is the stored length, which may be wrong."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    """A metadata entry."""
    return text(name) + u32(type_id) + value


def array(name: str, type_id: int, count: int, values: bytes) -> bytes:
    """A metadata entry with an array; `count` is the stored number of elements."""
    return key(name, ARR, u32(type_id) + u64(count) + values)


def tensor(
    name: str | bytes = "t",
    dims: Sequence[int] = (8,),
    type_id: int = TYPE_F32,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """A tensor description, dims in the order of ggml; `n_dims` is the stored number of them."""
    count = u32(len(dims) if n_dims is None else n_dims)
    return text(name) + count + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


def header(n_tensors: int, n_keys: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + u32(version) + u64(n_tensors) + u64(n_keys)


def gguf(
    keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", align: int = 32
) -> bytes:
    """A whole file: header, metadata, descriptions, padding, data."""
    head = header(len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data
