"""Operands in device memory for benchmarks of single kernels: valid random values, never zeros, and
in no cache.

What a step reads from memory (weights, KV cache, rows) is a window into a large pool of random
numbers or blocks. Each launch takes the next window, so a window comes back only after gigabytes of
other reads. Reading other memory in between does not evict an operand from L2, which keeps what was
used before. Activations stay at their address, as in a step.

numpy makes a small part, which is repeated on the device, because speed does not depend on the
values of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.cuda.arrays import Array, Matrix
from ...device.base import Buffer, Ptr
from ...formats import Format
from ...formats.random_blocks import random_blocks
from ...kernels.blocks.block_kernel import BlockMatrix
from ...kernels.layout.tile import Layout, TiledMatrix, layout_of, repack

POOL_BYTES = 2 << 30  # far more than L2 holds
SHARE = 16  # a pool takes at most this fraction (1/16) of the free memory
WEIGHTS = 1 << 20  # approximate number of weights of a format that numpy makes
UNIQUE_ROWS, UNIQUE_CHUNKS = 512, 8  # of the matrix whose tiles are repeated
ALIGNMENT = 4096  # bytes between windows, at least


class Pool:
    """Memory whose windows are each used once before any is used again."""

    def __init__(self, buffer: Buffer, unit: int) -> None:
        """Windows begin at multiples of `unit` bytes, where blocks or tiles begin."""
        self.buffer, self._unit, self._next = buffer, lcm(unit, ALIGNMENT), 0

    def window(self, nbytes: int) -> Ptr:
        """The next window of nbytes, which must not exceed the pool."""
        if self._next + nbytes > self.buffer.nbytes:
            self._next = 0
        at = self.buffer.at(self._next)
        self._next += -(-nbytes // self._unit) * self._unit
        return at


class Operands:
    """Named memory and cached objects on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._pool_bytes = min(POOL_BYTES, int(device.free_bytes) // SHARE)
        self._buffers: dict[str, Buffer] = {}
        self._made: dict[Any, Any] = {}
        self._format = ""
        self._blocks: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._pools: dict[Any, Pool] = {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), called once per key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # Operands at fixed addresses

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """An output buffer of at least nbytes."""
        return self._scratch(name, nbytes)[0]

    def floats(self, name: str, rows: int, columns: int) -> Array:
        """f32 [rows, columns], normally distributed."""
        data = self._normal(name, np.float32, rows * columns)
        return Array(data, np.float32, (rows, columns), columns)

    def f16(self, name: str, rows: int, columns: int) -> Array:
        """f16 [rows, columns], normally distributed."""
        data = self._normal(name, np.float16, rows * columns)
        return Array(data, np.float16, (rows, columns), columns)

    def positive(self, name: str, n: int) -> Buffer:
        """f32 [n], positive, like an importance matrix."""
        values = np.random.default_rng(2).chisquare(1, n).astype(np.float32)
        return self.integers(name, values.view(np.int32))

    def integers(self, name: str, values: NDArray[np.int32]) -> Buffer:
        """int32 values."""
        buffer = self.scratch(name, values.nbytes)
        self.device.upload(buffer, np.ascontiguousarray(values, np.int32))
        return buffer

    def q8_1(self, format: Format, nbytes: int) -> Buffer:
        """Activations as block_q8_1."""
        buffer, fresh = self._scratch("q8_1", nbytes)
        if fresh:
            n = WEIGHTS // format.block_size
            pool = random_blocks(format, n, np.random.default_rng(1))
            self._fill(buffer, pool.view(np.uint8))
        return buffer

    # Operands at a new address in each launch

    def numbers(self, dtype: Any, n: int) -> Callable[[], Ptr]:
        """Windows of n normally distributed numbers."""
        nbytes = n * np.dtype(dtype).itemsize

        def fill(buffer: Buffer) -> None:
            values = np.random.default_rng(0).standard_normal(WEIGHTS)
            self._fill(buffer, values.astype(dtype).view(np.uint8))

        pool = self._pool(np.dtype(dtype), nbytes, 1, fill)
        return lambda: pool.window(nbytes)

    def blocks(self, format: Format, rows: int, columns: int) -> Callable[[], BlockMatrix]:
        """Matrices in blocks, as in a file."""
        nbytes = rows * format.row_bytes(columns)
        blocks = self._blocks_of(format)
        pool = self._pool("blocks", nbytes, format.nbytes, lambda b: self._fill(b, blocks))
        return lambda: BlockMatrix(format, rows, columns, pool.window(nbytes))

    def matrix(self, format: Format, rows: int, columns: int) -> Callable[[], Matrix]:
        """Weights as the backend keeps them: in tiles, or in blocks if the format has no tiles."""
        layout = layout_of(format, columns)
        if layout is None:
            blocks = self.blocks(format, rows, columns)
            return lambda: Matrix(rows, columns, None, blocks())
        found, nbytes = layout, layout.nbytes(rows, columns)
        self._blocks_of(format)
        pool = self._pool(
            layout, nbytes, layout.chunk_bytes, lambda b: self._fill_tiles(b, format, found)
        )
        return lambda: Matrix(
            rows, columns, TiledMatrix(found, rows, columns, pool.window(nbytes)), None
        )

    # Filling

    def _blocks_of(self, format: Format) -> NDArray[np.uint8]:
        """Random blocks of a format; frees the pools of the previous format."""
        if format.name != self._format:
            self.device.synchronize()
            for key in [key for key in self._pools if not isinstance(key, np.dtype)]:
                del self._pools[key]
            self._format = format.name
            n = WEIGHTS // format.block_size
            rng = np.random.default_rng(format.type_id)
            self._blocks = random_blocks(format, n, rng).view(np.uint8).reshape(-1)
        return self._blocks

    def _fill_tiles(self, buffer: Buffer, format: Format, layout: Layout) -> None:
        """Fills a pool with whole chunks of tiles, each valid at any position of a matrix."""
        columns = layout.chunk_k * (UNIQUE_CHUNKS if layout.chunk_k != 128 else UNIQUE_CHUNKS + 1)
        if layout_of(format, columns) != layout:
            raise ValueError(f"{format.name}: {columns} columns are not in {layout.type_name}")
        rows = min(UNIQUE_ROWS, buffer.nbytes // layout.nbytes(16, columns) * 16)
        raw = self.device.alloc(rows * format.row_bytes(columns), "blocks to repack")
        self._fill(raw, self._blocks)
        repack(self.device, format, raw, rows, columns, buffer)
        self._repeat(buffer, layout.nbytes(rows, columns))
        self.device.synchronize()

    def _pool(self, key: Any, nbytes: int, unit: int, fill: Callable[[Buffer], None]) -> Pool:
        """The pool, large enough for nbytes."""
        pool = self._pools.get(key)
        if pool is None or pool.buffer.nbytes < nbytes:
            self._pools.pop(key, None)
            buffer = self.device.alloc(max(nbytes, self._pool_bytes), f"pool of {key}")
            fill(buffer)
            pool = self._pools[key] = Pool(buffer, unit)
        return pool

    def _normal(self, name: str, dtype: Any, n: int) -> Buffer:
        buffer, fresh = self._scratch(f"{name} {np.dtype(dtype)}", n * np.dtype(dtype).itemsize)
        if fresh:
            values = np.random.default_rng(0).standard_normal(min(n, WEIGHTS))
            self._fill(buffer, values.astype(dtype).view(np.uint8))
        return buffer

    def _scratch(self, name: str, nbytes: int) -> tuple[Buffer, bool]:
        """The buffer, and whether it is new."""
        known = self._buffers.get(name)
        if known is not None and known.nbytes >= nbytes:
            return known, False
        self._buffers.pop(name, None)
        buffer = self._buffers[name] = self.device.alloc(nbytes, name)
        return buffer, True

    def _fill(self, buffer: Buffer, unit: NDArray[np.uint8]) -> None:
        part = unit.reshape(-1)[: buffer.nbytes]
        self.device.upload(buffer, part)
        self._repeat(buffer, part.size)

    def _repeat(self, buffer: Buffer, done: int) -> None:
        """Fill the buffer with copies of its first `done` bytes."""
        while done < buffer.nbytes:
            more = min(done, buffer.nbytes - done)
            self.device.copy(buffer.at(done), buffer, more)
            done += more


def random_ids(n: int, below: int) -> NDArray[np.int32]:
    """ids[n] of rows, at random."""
    return np.random.default_rng(n).integers(0, below, n).astype(np.int32)
