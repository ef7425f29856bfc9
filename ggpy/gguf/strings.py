"""Many strings as their bytes in UTF-8: a list would take 60 bytes more for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class PackedStrings(Sequence[str]):
    """A sequence of strings that decodes an item when it is asked for, and equals the same list.

    >>> PackedStrings(["a", "", "bc"])[2]
    'bc'
    """

    def __init__(self, strings: Sequence[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
        self._bytes = b"".join(encoded)
        self._borders = np.cumsum([0, *map(len, encoded)], dtype=np.int64).astype(np.uint32)

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedStrings):
            return self._bytes == other._bytes and np.array_equal(self._borders, other._borders)
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __len__(self) -> int:
        return len(self._borders) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first = index + len(self) if index < 0 else index
        if not 0 <= first < len(self):
            raise IndexError(f"{index} of {len(self)} strings")
        begin, end = self._borders[first : first + 2].tolist()
        return self._bytes[begin:end].decode("utf-8", "surrogatepass")
