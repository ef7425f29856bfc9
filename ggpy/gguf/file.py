"""A memory-mapped reader of GGUF files that trusts nothing in them: file -> metadata, tensors.

Opening reads the metadata (`header` does, and checks all of it) and maps the rest: a tensor's
data, a view of its blocks, is read from disk when it is first touched. Nothing here knows what an
architecture wants to find in a file, how blocks are decoded (`formats` does), or any device. One
thing cannot be defended against: when another program shortens a file that is mapped, touching the
lost bytes ends the process (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import Format
from ..util.messages import escaped
from .cursor import Budget, GGUFError
from .header import Header, read_header
from .strings import PackedStrings

__all__ = ["MAX_METADATA", "File", "GGUFError", "NoSuchFile", "Tensor"]

MAX_METADATA = 256 << 20  # bytes of memory that metadata may take
_MANY_STRINGS = 1000  # of an array that is worth packing
_CHUNK = 1 << 20  # bytes of blocks whose scales are checked at a time
# Pieces of a file, cut anywhere: they are no GGUF files, unlike the parts of a split model
_CUT_NAME = re.compile(r"(.*\.gguf)(\.part|-split-|-part-)\w+", re.DOTALL | re.IGNORECASE)
_PART_NAME = re.compile(r"(.*)-[0-9]{5,}-of-([0-9]{5,})(\.gguf)", re.DOTALL | re.IGNORECASE)


class NoSuchFile(GGUFError, FileNotFoundError):
    """There is no file of this name."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A named array, still in its blocks: `data` is a read-only view of the mapped file."""

    name: str
    shape: tuple[int, ...]  # weights, in numpy's order: the last axis is contiguous (ggml's ne[0])
    format: Format
    data: NDArray[np.uint8]  # [*shape[:-1], bytes of a row]
    path: str = ""  # the file and the byte where `data` starts, for messages
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> Tensor:
        """start:stop of the first axis; ValueError beyond it, or inside a block of a 1-d tensor."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"{self.name} has {self.shape[0]} rows, not {start}:{stop}")
        first, last = start, stop
        if len(self.shape) == 1:
            first, last = self.format.row_bytes(start), self.format.row_bytes(stop)
        offset = self.offset + first * self.data.strides[0]
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, data=self.data[first:last], offset=offset)

    def dequantize(self) -> NDArray[np.float32]:
        """The weights in float32, of `shape`."""
        return self.format.dequantize(self.data).reshape(self.shape)

    def check_scales(self) -> None:
        """GGUFError names the first row with a scale (in F32, F16: a weight) of NaN or infinity."""
        blocks = self.format.blocks(self.data)
        step = max(1, _CHUNK // self.format.nbytes)
        for first in range(0, len(blocks), step):
            with np.errstate(all="ignore"):
                finite = np.isfinite(self.format.scales(blocks[first : first + step]))
            if not finite.all():
                raise self._bad_scale(first + int(np.argmin(finite.all(axis=-1))))

    def _bad_scale(self, block: int) -> GGUFError:
        row, column = divmod(block * self.format.block_size, self.shape[-1])
        at = self.offset + block * self.format.nbytes
        return GGUFError(
            f"{self.path}: tensor {self.name!r}: row {row}: the scale at weight {column} is NaN or "
            f"infinite: the file is damaged, download it again (at byte {at})"
        )


class File:
    """An open GGUF file, or all parts of a split one, named by the first; GGUFError if it is unfit.

    `metadata`: numbers and strings as Python's, arrays of numbers as numpy's, of strings as lists.
    `types`: the type of each, "u32", "arr[str]". `tensors`: by name, in the order of the file.
    `nbytes`: of all parts. `max_metadata`: bytes of memory that the metadata may take. The error
    for a file that does not exist is a FileNotFoundError, too.

    >>> import ggpy
    >>> with ggpy.File("models/tiny/llama.gguf") as file:
    ...     print(file)
    ...     print(file.metadata["llama.block_count"])
    ...     print(file.tensors["token_embd.weight"].dequantize().shape)
    <File llama.gguf: llama, 21 tensors, 0.1 MB>
    2
    (453, 64)
    """

    def __init__(self, path: str | os.PathLike[str], max_metadata: int = MAX_METADATA) -> None:
        self.path = Path(path)
        budget = Budget(max_metadata)
        first = _open_part(self.path, budget)
        parts = [first, *_other_parts(first, budget)]
        self.version: int = first.header.version
        self.metadata: dict[str, Any] = first.header.metadata
        self.types: dict[str, str] = first.header.types
        self.tensors: dict[str, Tensor] = _merge(parts)
        self.nbytes = sum(len(part.buffer) for part in parts)
        self._buffers = [part.buffer for part in parts]

    def __repr__(self) -> str:
        kind = escaped(self.metadata.get("general.architecture", "no architecture"), 40)
        size = f"{len(self.tensors)} tensors, {self.nbytes / 1e6:.1f} MB"
        return f"<File {self.path.name}: {kind}, {size}>"

    @property
    def architecture(self) -> str:
        """general.architecture; GGUFError without it."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise GGUFError(
                f"{self.path}: general.architecture: is missing, so this is not a model"
            )
        return value

    def pack_strings(self, tokens: Sequence[str] = ()) -> None:
        """Turns the long arrays of strings in `metadata` (tokens, merges) into `PackedStrings`.

        tokens: strings that are packed already; an array that equals them becomes this object.
        """
        for key, value in self.metadata.items():
            if isinstance(value, list) and len(value) > _MANY_STRINGS:
                packed = PackedStrings(value)
                self.metadata[key] = tokens if packed == tokens else packed

    def close(self) -> None:
        """Releases the tensors; a part of the file stays mapped as long as a caller has a view."""
        self.tensors = {}
        for buffer in self._buffers:
            with suppress(BufferError):
                buffer.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Part:
    """One of the files of a model; most models have one."""

    path: Path
    buffer: mmap.mmap
    header: Header

    def fail(self, field: str, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: {field}: {problem}")

    def integer(self, key: str) -> int:
        """The metadata's integer `key`; GGUFError if it is missing or something else."""
        kind = self.header.types.get(key, "missing")
        if kind[0] not in "iu":
            raise self.fail(key, f"is {kind}, the parts of a split model need an integer here")
        return int(self.header.metadata[key])


def _open_part(path: Path, budget: Budget) -> _Part:
    buffer = _map(path)
    try:
        return _Part(path, buffer, read_header(path, buffer, budget))
    except GGUFError:
        if cut := _CUT_NAME.fullmatch(path.name):
            whole, end = cut.groups()
            problem = f"is a piece of a file that was cut: join them first: cat {whole}{end}* >"
            raise GGUFError(f"{path}: {problem} {whole}") from None
        raise


def _map(path: Path) -> mmap.mmap:
    """The file in memory, read-only; GGUFError says why not."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NoSuchFile(f"{path}: there is no such file: check the path") from None
    except (OSError, ValueError) as error:
        raise GGUFError(f"{path}: cannot be read: {error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise GGUFError(f"{path}: is a directory: name one of the .gguf files in it")
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError(f"{path}: is a pipe or a device and cannot be mapped: save it as a file")
    if status.st_size == 0:
        raise GGUFError(f"{path}: is empty (0 bytes): download it again")
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except PermissionError:
        raise GGUFError(f"{path}: permission denied: you need the right to read it") from None
    except (OSError, ValueError, OverflowError) as error:
        raise GGUFError(f"{path}: cannot be mapped into memory: {error}") from None


def _other_parts(first: _Part, budget: Budget) -> list[_Part]:
    """Parts 2.. of a split model, [] of any other; GGUFError unless all are there."""
    if "split.count" not in first.header.types or (count := first.integer("split.count")) <= 1:
        return []
    first_path = _part_path(first, 0, count)
    if (number := first.integer("split.no")) != 0:
        problem = f"this is part {number + 1} of {count}: open the first, {first_path}"
        raise first.fail("split.no", problem)
    parts: list[_Part] = []
    for index in range(1, count):
        path = _part_path(first, index, count)
        if not os.path.exists(path):
            problem = f"part {index + 1} of {count} is missing: put {path.name} beside the first"
            raise first.fail("split.count", problem)
        parts.append(_open_part(path, budget))
        _check_part(parts[-1], index, count)
    _check_total([first, *parts])
    return parts


def _part_path(first: _Part, index: int, count: int) -> Path:
    """The path of part `index` (from 0) of `count`, from the name of one part."""
    name = _PART_NAME.fullmatch(first.path.name)
    if not name or int(name[2]) != count:
        problem = f"is {count}, so parts are named NAME-00001-of-{count:05}.gguf: rename the file"
        raise first.fail("split.count", problem)
    return first.path.with_name(f"{name[1]}-{index + 1:05}-of-{count:05}{name[3]}")


def _check_part(part: _Part, index: int, count: int) -> None:
    for key, wanted in (("split.no", index), ("split.count", count)):
        if (value := part.integer(key)) != wanted:
            raise part.fail(key, f"is {value}, the file's place among the parts says {wanted}")


def _check_total(parts: list[_Part]) -> None:
    key = "split.tensors.count"
    wanted = parts[0].integer(key)
    total = sum(len(part.header.tensors) for part in parts)
    if total != wanted:
        problem = f"is {wanted}, the parts hold {total} tensors: they are not of the same model"
        raise parts[0].fail(key, problem)


def _merge(parts: list[_Part]) -> dict[str, Tensor]:
    """The tensors of all parts, as views."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        mapped = np.frombuffer(part.buffer, np.uint8)
        for name, shape, format, nbytes, offset, _ in part.header.tensors:
            if name in tensors:
                raise part.fail(f"tensor {name!r}", "is in an earlier part too")
            start = part.header.data_start + offset
            row_bytes = format.row_bytes(shape[-1])
            data = mapped[start : start + nbytes].reshape(*shape[:-1], row_bytes)
            tensors[name] = Tensor(name, shape, format, data, str(part.path), start)
    return tensors
