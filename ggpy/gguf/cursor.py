"""A position in a mapped GGUF file: bytes -> numbers, strings and arrays of them.

Every length and count is checked against the bytes that are there before it is used, and memory is
counted before it is taken. This module knows how GGUF stores one value, but not what a file
consists of (`header` does).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from sys import getsizeof
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_OVERHEAD = 64 << 20  # bytes of memory that metadata may take beyond the size of the files
MAX_STRINGS = (
    1 << 21
)  # in the arrays of a file; vocabularies with their merges have under a million
DAMAGED = "the file is truncated or damaged, download it again"

_STRING_COST = 66  # an empty string (49), rounded up by the allocator, and its place in a list
_LONG = 256  # bytes: longer strings are not read by the loop for short ones
_FEW = 1024  # short strings are read before their memory is counted
_U64 = struct.Struct("<Q")

INT64_MAX = 2**63 - 1
STRING, ARRAY = 8, 9
SCALARS = {  # value type -> our name, struct's code
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}


class GGUFError(ValueError):
    """A file that cannot be read: one line with the file, the field, the byte, and what to do."""


class Budget:
    """Memory that metadata may take: `limit` bytes, and at most MAX_OVERHEAD beyond the files."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.file_bytes = 0
        self.used = 0

    def refusal(self, nbytes: int) -> str | None:
        """Counts `nbytes` more; returns the reason if that is too much, else None."""
        self.used += nbytes
        limit = min(self.limit, self.file_bytes + MAX_OVERHEAD)
        if self.used <= limit:
            return None
        problem = f"metadata would take {self.used} bytes of memory or more, the limit is {limit}"
        if limit == self.limit:
            return f"{problem}: raise max_metadata if you trust the file"
        return f"{problem}, {MAX_OVERHEAD} beyond the file: this is not how a model looks"


class Cursor:
    """A position in a mapped file. Every read checks what is left, and moves on."""

    def __init__(self, path: Path, buffer: mmap.mmap, budget: Budget) -> None:
        self.path = path
        self.buffer = buffer
        self.budget = budget
        self.size = len(buffer)
        self.pos = 0
        self.n_strings = 0  # in arrays

    def fail(self, field: str, problem: str, at: int | None = None) -> GGUFError:
        """The error to raise about `field`, which starts at byte `at`."""
        return GGUFError(
            f"{self.path}: {field}: {problem} (at byte {self.pos if at is None else at})"
        )

    def spend(self, nbytes: int, field: str) -> None:
        """Counts memory that is about to be taken; GGUFError beyond the budget."""
        if reason := self.budget.refusal(nbytes):
            raise self.fail(field, reason)

    def skip(self, nbytes: int, field: str) -> int:
        """Moves on by `nbytes`, and returns where they start; GGUFError beyond the file's end."""
        start, left = self.pos, self.size - self.pos
        if nbytes > left:
            missing = f"{nbytes - left} bytes or more are missing"
            raise self.fail(field, f"needs {nbytes} bytes, {left} are left: {missing}; {DAMAGED}")
        self.pos = start + nbytes
        return start

    def unpack(self, code: str, field: str) -> tuple[Any, ...]:
        """Little-endian numbers, `code` as in struct."""
        code = "<" + code
        start = self.skip(struct.calcsize(code), field)
        return struct.unpack_from(code, self.buffer, start)

    def u32(self, field: str) -> int:
        return int(self.unpack("I", field)[0])

    def u64(self, field: str) -> int:
        return int(self.unpack("Q", field)[0])

    def count(self, field: str, at_least: int, memory: int, limit: int = INT64_MAX) -> int:
        """Reads a number of entries, each of which has `at_least` bytes in the file.

        memory: bytes that an entry takes. GGUFError if the file is too short for so many, or beyond
        `limit` or the budget.
        """
        at = self.pos
        count = self.u64(field)
        left = self.size - self.pos
        if count * at_least > left:
            needs = f"{count} entries need {count * at_least} bytes or more, {left} are left"
            raise self.fail(field, f"{needs}; {DAMAGED}", at)
        if count > limit:
            raise self.fail(field, f"has {count} entries, at most {limit} are read; {DAMAGED}", at)
        self.spend(count * memory, field)
        return count

    def string(self, field: str, longest: int = INT64_MAX) -> str:
        """A length, and as many bytes of UTF-8."""
        value = self._text(field, longest)
        self.spend(getsizeof(value), field)
        return value

    def _text(self, field: str, longest: int = INT64_MAX) -> str:
        """A string whose memory is counted only while it is decoded; the caller counts the rest."""
        at = self.pos
        length = self.u64(field)
        if length > longest:
            raise self.fail(field, f"is {length} bytes long, {longest} are allowed", at)
        start = self.skip(length, field)
        used = self.budget.used
        self.spend(2 * length, field)
        raw = self.buffer[start : self.pos]
        if not raw.isascii():  # decoding may start again with 2 and with 4 bytes for a character
            self.spend(6 * length, field)
        try:
            value = raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(field, f"is not UTF-8: {error.reason}", start + error.start) from None
        self.budget.used = used
        return value

    def strings(self, field: str) -> list[str]:
        """A count, and as many strings."""
        count = self.count(field, 8, _STRING_COST, MAX_STRINGS - self.n_strings)
        self.n_strings += count
        values: list[str] = []
        while len(values) < count:
            chunk = self._some_strings(field, len(values), min(_FEW, count - len(values)))
            self.spend(sum(map(getsizeof, chunk)) - len(chunk) * getsizeof(""), field)
            values += chunk
        return values

    def _some_strings(self, field: str, first: int, count: int) -> list[str]:
        """`count` strings of an array, from `first` on; `_text` reads those that are not short."""
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        safe = self.size - 8 - _LONG  # a short string that starts before here ends in the file
        values: list[str] = []
        for index in range(first, first + count):
            if pos < safe and (length := unpack(buffer, pos)[0]) < _LONG:
                end = pos + 8 + length
                try:
                    values.append(buffer[pos + 8 : end].decode())
                    pos = end
                    continue
                except UnicodeDecodeError:
                    pass  # `_text` says where
            self.pos = pos
            values.append(self._text(f"{field}[{index}]"))
            pos = self.pos
        self.pos = pos
        return values

    def numbers(self, field: str, type_id: int) -> NDArray[Any]:
        """A count, and as many numbers."""
        name, code = SCALARS[type_id]
        dtype = np.dtype("<" + code)
        count = self.count(field, dtype.itemsize, dtype.itemsize)
        start = self.skip(count * dtype.itemsize, field)
        values = np.frombuffer(self.buffer[start : self.pos], dtype)
        if name != "bool":
            return values
        if (values > 1).any():
            bad = int(np.argmax(values > 1))
            raise self.fail(f"{field}[{bad}]", f"is {values[bad]}, a bool is 0 or 1", start + bad)
        return values.view(np.bool_)

    def scalar(self, field: str, type_id: int) -> int | float | bool:
        """One number."""
        name, code = SCALARS[type_id]
        at = self.pos
        value: int | float = self.unpack(code, field)[0]
        if name != "bool":
            return value
        if value > 1:
            raise self.fail(field, f"is {value}, a bool is 0 or 1", at)
        return bool(value)
