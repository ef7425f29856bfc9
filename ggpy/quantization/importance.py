"""Importance matrices: how large the activations are that each column of a matrix multiplies.

A quantiser weighs the error of a column by the mean square of these activations. Importance
matrices are collected from a running model, and read and written in llama-imatrix's formats, GGUF
and the older one without a header. Nothing here prints or knows a command line.

Letters: K columns of a tensor, X experts in it (1 of most).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..formats import by_name
from ..gguf import File
from ..gguf.header import MAGIC
from ..gguf.writer import Metadata, Slot, Writer
from ..util.messages import escaped
from ..util.output_file import write_whole

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

SUMS, COUNTS = ".in_sum2", ".counts"  # names of tensors, after the name of the matrix
DATASETS, CHUNK_COUNT, CHUNK_SIZE = (
    f"imatrix.{name}" for name in ("datasets", "chunk_count", "chunk_size")
)


@dataclass
class Entry:
    """The activations that one tensor has multiplied so far, in sums."""

    sums: F32  # [X, K], of squares
    counts: I64  # [X], of tokens

    def weights(self) -> F32:
        """The mean squares [X, K]; 1 for an expert that no token has used."""
        counts = self.counts.astype(np.float32)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(counts > 0, self.sums / counts, np.float32(1))


@dataclass
class ImportanceMatrix:
    """Entries by the name of the tensor, and the texts that they come from."""

    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    n_chunks: int = 0
    chunk_size: int = 0  # tokens of a chunk; 0 in the older format, which does not say

    def weights(self) -> dict[str, F32]:
        """The importance of the columns of each tensor, [X * K]; ValueError for NaN or infinity."""
        found = {name: entry.weights().reshape(-1) for name, entry in self.entries.items()}
        for name, values in found.items():
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(
                    f"the importance matrix has NaN, infinity or a negative number for {name}: "
                    "make it again"
                )
        return found

    def add(self, other: ImportanceMatrix) -> None:
        """Adds the sums and counts of another one; ValueError if it is of another model."""
        for name, entry in other.entries.items():
            mine = self.entries.get(name)
            if mine is None:
                self.entries[name] = Entry(entry.sums.copy(), entry.counts.copy())
            elif mine.sums.shape != entry.sums.shape:
                raise ValueError(
                    f"{name} has {mine.sums.size} columns here and {entry.sums.size} there: "
                    "these matrices are of different models"
                )
            else:
                mine.sums = mine.sums + entry.sums
                mine.counts = mine.counts + entry.counts
        self.datasets += other.datasets
        self.chunk_size = self.chunk_size or other.chunk_size
        self.n_chunks = self._chunks_seen()

    def _chunks_seen(self) -> int:
        most = max((int(e.counts.max(initial=0)) for e in self.entries.values()), default=0)
        return most // max(1, self.chunk_size)


class Collector:
    """Sums the squares of the input of each matrix: hand `see` and `see_experts` to
    `backends.observe.ObservedOps`.

    Counts matrices of the layers; with_output: and output.weight.
    """

    def __init__(self, with_output: bool = False) -> None:
        self._with_output = with_output
        self._sums: dict[str, NDArray[np.float64]] = {}  # [X, K]
        self._counts: dict[str, I64] = {}  # [X]

    def see(self, name: str, x: F32) -> None:
        """Adds x[T, K], the input of the tensor `name`; ArithmeticError for NaN or infinity."""
        if not (name.startswith("blk.") or (self._with_output and name == "output.weight")):
            return
        self._add(name, 1, 0, x)

    def see_experts(self, name: str, n_expert: int, x: F32, ids: NDArray[np.int32]) -> None:
        """Adds x[T, J, K], the input of a tensor's experts ids[T, J]; ArithmeticError as above."""
        for expert in np.unique(ids):
            self._add(name, n_expert, int(expert), x[ids == expert])

    def _add(self, name: str, n_expert: int, expert: int, x: F32) -> None:
        squares = np.square(x, dtype=np.float64).sum(axis=0)
        if not np.isfinite(squares).all():
            raise ArithmeticError(
                f"what meets {escaped(name)} is NaN or infinite: `ggpy run --check` finds where"
                " that begins"
            )
        if name not in self._sums:
            self._sums[name] = np.zeros((n_expert, len(squares)))
            self._counts[name] = np.zeros(n_expert, np.int64)
        self._sums[name][expert] += squares
        self._counts[name][expert] += len(x)

    def matrix(self, datasets: Sequence[str], chunk_size: int) -> ImportanceMatrix:
        """The importance matrix of all inputs so far. datasets: names of the texts."""
        entries = {
            name: Entry(sums.astype(np.float32), self._counts[name].copy())
            for name, sums in self._sums.items()
        }
        found = ImportanceMatrix(entries, list(datasets), chunk_size=chunk_size)
        found.n_chunks = found._chunks_seen()
        return found


# Files


def read(path: str | os.PathLike[str], chunk_size: int = 512) -> ImportanceMatrix:
    """Reads a file of either format; ValueError (GGUFError) says what is wrong with it.

    chunk_size: tokens of a call, which the older format counts instead of tokens.
    """
    try:
        with open(path, "rb") as stream:
            head = stream.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    found = _read_gguf(path) if head == MAGIC else _read_dat(Path(path), chunk_size)
    if not found.entries:
        raise ValueError(f"{path}: holds no importance matrix: make one with `ggpy imatrix`")
    return found


def _read_gguf(path: str | os.PathLike[str]) -> ImportanceMatrix:
    with File(path) as file:
        missing = [key for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE) if key not in file.metadata]
        if missing:
            raise ValueError(
                f"{path}: has no {missing[0]}, so this is no importance matrix: "
                "make one with `ggpy imatrix`"
            )
        names = [n.removesuffix(SUMS) for n in file.tensors if n.endswith(SUMS)]
        entries = {name: _entry(file, name) for name in names}
        datasets, n_chunks, size = (file.metadata[k] for k in (DATASETS, CHUNK_COUNT, CHUNK_SIZE))
        if not (isinstance(datasets, list) and isinstance(n_chunks, int) and isinstance(size, int)):
            raise ValueError(f"{path}: its {DATASETS}, {CHUNK_COUNT} or {CHUNK_SIZE} is no such")
        return ImportanceMatrix(entries, list(map(str, datasets)), n_chunks, size)


def _entry(file: File, name: str) -> Entry:
    sums, counts = file.tensors[name + SUMS], file.tensors.get(name + COUNTS)
    if counts is None or {sums.format.name, counts.format.name} != {"F32"}:
        raise ValueError(f"{file.path}: {escaped(name)} has no {COUNTS[1:]}, or they are not F32")
    numbers = counts.dequantize().reshape(-1)
    values = np.array(sums.dequantize())
    if not len(numbers) or values.size % len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(
            f"{file.path}: {escaped(name)} has {values.size} sums and {len(numbers)} counts that do"
            " not fit"
        )
    rounded = np.rint(numbers.astype(np.float64)).astype(np.int64)
    return Entry(values.reshape(len(numbers), -1), rounded)


def _read_dat(path: Path, chunk_size: int) -> ImportanceMatrix:
    """The older format: for each tensor its name, its number of calls and the mean squares times
    calls; then the number of chunks and the name of the text.
    """
    data = path.read_bytes()
    at = 0

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or at + n > len(data):
            raise ValueError(
                f"{path}: ends at byte {len(data)}, {n} bytes are needed from {at} on: this is no "
                "importance matrix, or it is truncated"
            )
        at += n
        return data[at - n : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    found = ImportanceMatrix(chunk_size=chunk_size)
    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        calls, n = number(), number()
        means = np.frombuffer(take(4 * n), "<f4")[None]
        counts = np.array([max(calls, 1) * chunk_size], np.int64)
        found.entries[name] = Entry(means * np.float32(chunk_size), counts)
    if at < len(data):
        found.n_chunks = number()
        found.datasets = [take(number()).decode(errors="replace")] if at < len(data) else []
    return found


def write_gguf(path: str | os.PathLike[str], matrix: ImportanceMatrix) -> None:
    """Writes the GGUF file that llama-imatrix would write, with entries sorted by name."""
    metadata: Metadata = {
        "general.type": ("str", "imatrix"),
        DATASETS: ("arr[str]", matrix.datasets),
        CHUNK_COUNT: ("u32", matrix.n_chunks),
        CHUNK_SIZE: ("u32", matrix.chunk_size),
    }
    arrays: dict[str, F32] = {}
    for name, entry in _sorted(matrix):
        arrays[name + SUMS] = entry.sums
        arrays[name + COUNTS] = entry.counts.astype(np.float32)[:, None]
    slots = [Slot(name, array.shape, by_name("F32")) for name, array in arrays.items()]
    with Writer(path, metadata, slots) as out:
        for array in arrays.values():
            out.write(array.astype("<f4"))


def write_dat(path: str | os.PathLike[str], matrix: ImportanceMatrix) -> None:
    """Writes the older format of llama-imatrix, for older quantisers."""
    entries = [(name, entry) for name, entry in _sorted(matrix) if entry.counts.any()]
    parts = [struct.pack("<i", len(entries))]
    for name, entry in entries:
        calls = -(-int(entry.counts.max()) // max(1, matrix.chunk_size))  # never 0
        values = (entry.weights() * np.float32(calls)).astype("<f4")
        parts += [_text(name), struct.pack("<ii", calls, values.size), values.tobytes()]
    parts += [struct.pack("<i", matrix.n_chunks), _text(matrix.datasets[-1:])]
    write_whole(path, b"".join(parts))


def _sorted(matrix: ImportanceMatrix) -> Iterable[tuple[str, Entry]]:
    return sorted(matrix.entries.items(), key=lambda item: item[0].encode())


def _text(value: str | Sequence[str]) -> bytes:
    raw = "".join(value).encode()
    return struct.pack("<i", len(raw)) + raw
