"""Jobs of the pool, and memory for them. A job is a row of numbers: a kernel, items, addresses.

A list of jobs is a program, which the pool runs without returning to Python between jobs. Programs
that are kept wait in a queue until their results are needed. Nothing here knows layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats.base import Format
from . import kernels
from .pool import ThreadPool, address_of, aligned
from .sizes import (
    GROUP_BYTES,
    JOB,
    LANES,
    LARGEST,
    MAX_CHUNKS,
    PITCH,
    WHOLE_PITCH,
    column_bytes,
)

FEW_BYTES = 5  # the most columns that are multiplied one by one, as whole numbers
FEW_FLOATS = 3  # the most in float32
LEAST_BYTES = 1 << 14  # bytes of weights in a chunk, where there are enough
RETAINED = 64  # programs that ran once, and are kept because a late thread may still read them
RETAINED_BYTES = 1 << 24  # of the arrays that they read and wrote
Array = NDArray[Any]


def rounded_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is n or more."""
    return -(-n // unit) * unit


class Buffers:
    """Memory by name, which stays where it is until more is needed under this name.

    before_move: called before a buffer moves.
    """

    def __init__(self, pool: ThreadPool, before_move: Callable[[], None] = lambda: None) -> None:
        self._pool, self._before_move = pool, before_move
        self._arrays: dict[str, Array] = {}
        self._addresses: dict[str, int] = {}  # of the arrays: asking one takes microseconds
        self.generation = 0  # is incremented when a buffer moves
        self._made: dict[int, tuple[Array, Array]] = {}

    def bytes(self, name: str, nbytes: int) -> int:
        """The address of the buffer `name`, which has at least `nbytes` bytes."""
        found = self._arrays.get(name)
        if found is None or len(found) < nbytes + 64:
            self._before_move()
            self._pool.settle()
            self._arrays[name] = found = aligned(nbytes)
            self._addresses[name] = address_of(found)
            self.generation += 1
        return self._addresses[name]

    def floats(self, name: str, *shape: int) -> int:
        """The address of float32 numbers of this shape; the first axis is rounded up to 16."""
        n = rounded_up(shape[0], LANES) * int(np.prod(shape[1:], dtype=np.int64))
        return self.bytes(name, 4 * n)

    def made(self, source: Array, make: Callable[[Array], Array]) -> int:
        """The address of make(source) in float32, computed once; `source` must never change."""
        if id(source) not in self._made:
            self._made[id(source)] = source, np.ascontiguousarray(make(source), np.float32)
        return address_of(self._made[id(source)][1])

    def raw(self, name: str) -> Array:
        """The bytes of a buffer."""
        return self._arrays[name]

    def view(self, name: str, *shape: int) -> Array:
        """The first numbers of a buffer as float32."""
        return self._arrays[name][: 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a token and one of its experts."""

    count: int  # P
    ids: int  # address of i32 [P]: the expert of each pair


class JobList:
    """Jobs in their order; `keep` is what must live as long as they do."""

    def __init__(self, pool: ThreadPool, buffers: Buffers, activations: str) -> None:
        self.pool, self.buffers, self.activations = pool, buffers, activations
        self.rows: list[list[int]] = []
        self.keep: list[Any] = []
        self._packed: tuple[str, int] | None = None  # (form, x) of columns in the buffer of a form
        self._array: Array | None = None
        self._address = 0  # of the array

    def add(
        self,
        name: str,
        n_items: int,
        out: int,
        width: int,
        *arguments: int,
        grain: int = 0,
        private: int = 0,
    ) -> None:
        """Adds a job of a common kernel. width: bytes of an item's results at `out`; 0: the kernel
        writes to other places by itself. grain: items of a chunk. private: bytes of its scratch.
        """
        self.add_kernel(kernels.common(name), n_items, out, width, arguments, grain, private)

    def add_kernel(
        self,
        function: int,
        n_items: int,
        out: int,
        width: int,
        arguments: tuple[int, ...],
        grain: int = 0,
        private: int = 0,
    ) -> None:
        """Adds a job of the kernel at the address `function`; see `add`."""
        if self._packed is not None and self._packed[1] == out:
            self._packed = None  # x changes, so its packed form is stale
        grain = max(grain or self.pool.chunk(n_items), -(-n_items // MAX_CHUNKS))
        self.pool.reserve(private + min(grain, n_items) * width + 4096)
        self.rows.append([function, n_items, grain, width, out, private, *arguments])

    def run(self) -> None:
        """Runs all jobs."""
        array = self.packed()
        self.pool.run(self._address, len(array))

    def packed(self) -> Array:
        """The jobs as int64 [n, JOB]; after this call no job can be added."""
        if self._array is None:
            self._array = self._allocate(len(self.rows))
            for numbers, row in zip(self._array, self.rows, strict=True):
                numbers[: len(row)] = row
            self.rows.clear()
        return self._array

    def join(self, programs: Sequence[JobList]) -> None:
        """Copies the jobs of all `programs`, in order, to this list, which must be empty."""
        arrays = [program.packed() for program in programs]
        self._array = self._allocate(sum(map(len, arrays)))
        np.concatenate(arrays, out=self._array)
        self.keep += programs

    def _allocate(self, n: int) -> Array:
        array = aligned(8 * JOB * n)[: 8 * JOB * n].view(np.int64).reshape(n, JOB)
        self._address = address_of(array)
        return array

    # Products

    def product(self, matrix: BlockRows, x: int, columns: int, out: int) -> None:
        """out[T, N] = x[T, K] w^T, T = columns; x and out have memory for T rounded up to 16."""
        few = FEW_BYTES if self.in_bytes(matrix) else FEW_FLOATS
        if columns > few:
            self._gemm(matrix, x, columns, out)
        else:
            self._few(matrix, x, columns, out)
        if matrix.scale != 1:
            factors = np.full(columns, matrix.scale, np.float32)
            self.keep.append(factors)
            self.add("scale_rows", columns, 0, 0, out, matrix.n, address_of(factors))

    def _few(self, m: BlockRows, x: int, columns: int, out: int) -> None:
        y = out if columns == 1 else self.buffers.bytes("few", 4 * m.n * columns + 64)
        self._rows(m, m.n, x, columns, y, columns, (m.n, 0, 1))
        if columns > 1:
            self.add("unpack_columns", 1, out, 4 * LANES * m.n, y, 4 * columns, m.n)

    def chosen(self, experts: BlockRows, x: int, columns: int, pairs: Pairs, out: int) -> None:
        """out[P, N] = x[columns, K] w[ids[P]]^T, in one job; P / columns pairs share a column."""
        items = experts.n * pairs.count
        self._rows(
            experts, items, x, columns, out, 1, (experts.n, pairs.ids, pairs.count // columns)
        )

    def _rows(
        self,
        m: BlockRows,
        n_items: int,
        x: int,
        columns: int,
        out: int,
        of_item: int,
        of_experts: tuple[int, int, int],
    ) -> None:
        """Rows times columns of x. of_item: columns that an item multiplies by its row.

        of_experts: N, the address of the experts' ids or 0, and pairs that share a column.
        """
        grain = max(self.pool.chunk(n_items), LEAST_BYTES // m.row_bytes)
        if self.in_bytes(m):
            padded = rounded_up(m.k, 256)
            column = column_bytes(padded)
            q = self._quantized(x, columns, m.k, padded, column)
            blocks = m.k // m.format.block_size
            arguments = m.address, m.row_bytes, blocks, of_item, column, padded, q, *of_experts
            function = kernels.dot(m.format, self.activations)
            self.add_kernel(function, n_items, out, 4 * of_item, arguments, grain)
        else:
            expand = kernels.expand(m.format)
            arguments = m.address, m.row_bytes, m.k, of_item, 4 * m.k, x, expand, *of_experts
            private = 4 * rounded_up(m.k, 64) + 256
            few = kernels.common("multiply_few")
            self.add_kernel(few, n_items, out, 4 * of_item, arguments, grain, private)

    def in_bytes(self, m: BlockRows) -> bool:
        """Whether few columns are rounded to whole numbers for this matrix."""
        return self.activations != "f32" and m.has_dot

    def in_whole(self, m: BlockRows) -> bool:
        """Whether many columns are rounded to whole numbers for this matrix."""
        return m.has_dot and kernels.multiplies_whole(self.activations)

    def rounded(self, packed: int, vectors: int, k: int, out: int) -> None:
        """out: packed columns as whole numbers."""
        nbytes = GROUP_BYTES * (k // 32)
        self.add("round_columns", vectors, out, nbytes, packed, k, grain=1)

    def _quantized(self, x: int, columns: int, k: int, padded: int, nbytes: int) -> int:
        """The address of the columns as whole numbers (see sizes.py), which a job makes."""
        q = self.buffers.bytes("bytes", rounded_up(columns, LANES) * nbytes)
        if self._packed != ("bytes", x):
            given = x, 4 * k, k, padded, LARGEST[self.activations], nbytes
            self.add("quantize_columns", columns, q, nbytes, *given, private=128)
            self._packed = "bytes", x
        return q

    def _gemm(self, m: BlockRows, x: int, columns: int, out: int) -> None:
        vectors = -(-columns // LANES)
        packed = self.buffers.bytes("packed", 64 * vectors * m.k)
        if self._packed not in (("packed", x), ("whole", x)):
            given = x, 4 * m.k, columns, m.k
            self.add("pack_columns", vectors, packed, 64 * m.k, *given, grain=1)
            self._packed = "packed", x
        is_whole = self.in_whole(m)
        if is_whole:
            whole = self.buffers.bytes("whole", GROUP_BYTES * vectors * (m.k // 32))
            if self._packed != ("whole", x):
                self.rounded(packed, vectors, m.k, whole)
                self._packed = "whole", x
        wanted = 4 * self.pool.n_threads
        rows = next((r for r in (96, 48) if m.n // r >= wanted), 24)
        items = -(-m.n // rows)
        y = self.buffers.bytes("gemm", items * rows * 64 * vectors + 64)
        if is_whole:
            kernel, pitch, of_x = kernels.whole("rows", m.format), WHOLE_PITCH, [whole]
        else:
            kernel, pitch = kernels.common("multiply_rows"), PITCH
            of_x = [kernels.expand(m.format), packed]
        given = m.address, m.row_bytes, m.n, m.k, *of_x, vectors, rows
        self.add_kernel(kernel, items, y, rows * 64 * vectors, given, 1, rows * pitch + 512)
        self.add("unpack_columns", vectors, out, 64 * m.n, y, 64 * vectors, m.n, grain=1)


class BlockRows:
    """A matrix w[N, K], or w[X, N, K] of experts, in the blocks of a file.

    scale: a factor of every product.
    """

    def __init__(self, format: Format, data: Array, k: int, scale: float = 1.0) -> None:
        self.format, self.data, self.scale = format, data, scale
        self.n, self.row_bytes = data.shape[-2:]
        self.k = k
        self.address = address_of(data)
        self.has_dot = kernels.has_dot(format)


Build = Callable[[JobList], None]


class Programs:
    """Programs by key, each made once, and their buffers.

    Between `begin` and `end`, `run` puts programs into a queue, and `run_queued` runs all of them
    as one list, so that a step returns to Python once. Call it before you read or write a buffer.
    """

    def __init__(self, pool: ThreadPool, activations: str) -> None:
        self.buffers = Buffers(pool, self.run_queued)
        self._pool, self._activations = pool, activations
        self._kept: dict[Hashable, dict[Hashable, JobList]] = {}  # by shape of a step, then by key
        self._of_step: dict[Hashable, JobList] = {}
        self._generation = 0
        self._queues = False
        self._queue: list[JobList] = []
        self._joined: dict[tuple[JobList, ...], JobList] = {}
        self._once: list[JobList] = []
        self._once_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def new(self) -> JobList:
        """An empty list."""
        return JobList(self._pool, self.buffers, self._activations)

    def choose(self, shape: Hashable) -> None:
        """From now on, programs are those of steps of this shape; None: no program is kept."""
        self._of_step = {} if shape is None else self._kept.setdefault(shape, {})

    def begin(self) -> None:
        """From now on, `run` puts programs into the queue."""
        self._queues = True

    def end(self) -> None:
        """Empties the queue, and ends queueing."""
        self._queues = False
        self._queue.clear()

    def find(self, key: Hashable) -> JobList | None:
        """The program that was kept under this key, or None."""
        if self._generation != self.buffers.generation:
            self.forget()
        return self._of_step.get(key)

    def made(self, key: Hashable, build: Build, keep: bool = True) -> JobList | None:
        """The program of this key; `build` adds its jobs if none is kept.

        None if a buffer moved meanwhile: put the data into their buffers and call it again.
        """
        found = self.find(key)
        if found is not None:
            return found
        program = self.new()
        build(program)
        if self._generation != self.buffers.generation:
            self.forget()
            return None
        if keep:
            self._of_step[key] = program
        return program

    def run(self, program: JobList) -> None:
        """Runs a program that is kept, or puts it into the queue."""
        if self._queues:
            self._queue.append(program)
        else:
            program.run()

    def run_queued(self) -> None:
        """Runs all programs in the queue."""
        if not self._queue:
            return
        queue = tuple(self._queue)
        self._queue.clear()
        joined = queue[0] if len(queue) == 1 else self._joined.get(queue)
        if joined is None:
            self._joined[queue] = joined = self.new()
            joined.join(queue)
        joined.run()

    def run_once(self, program: JobList, *arrays: Array) -> None:
        """Runs a program that is not kept. arrays: memory outside of buffers that it reads and
        writes, which must live as long as a late thread may use it.
        """
        self.run_queued()
        program.run()
        program.keep += arrays
        self._once.append(program)
        self._once_bytes += sum(array.nbytes for array in arrays)
        if len(self._once) >= RETAINED or self._once_bytes > RETAINED_BYTES:
            self._pool.settle()
            self._once.clear()
            self._once_bytes = 0

    def forget(self) -> None:
        """Drops all programs: memory has moved, so their addresses are wrong."""
        self._pool.settle()
        self._joined.clear()
        for programs in self._kept.values():
            programs.clear()
        self._of_step.clear()
        self._generation = self.buffers.generation
