"""The GEMM of many columns in float32: a tile of it in registers, and kernels around the tile.

out[row, column] = sum_k w[row, k] x[column, k]. Columns are the lanes of vectors: `pack_columns`
writes them as [columns / 16][K][16]. A panel of rows is dequantised into the L2 cache, 256 weights
of each row at a time, and multiplied with all columns before the next 256. Every sum runs over k
from the first to the last in blocks of 256, whatever the panel, so its bits never depend on
threads. Nothing here knows formats: a function `expand` is called by its address.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..sizes import BLOCK_K, PITCH, ROWS, VECTORS
from . import simd
from .products import expert_of

I64, PTR = ir.IntType(64), ir.FloatType().as_pointer()
VECTOR = ir.VectorType(ir.FloatType(), 16)


def tile(rows: int, vectors: int, row_step: int) -> Any:
    """tile(a, k_step, b0, b1, n, c, pitch, fresh): c[r, lane] += sum_k a[r, k] b[k, lane], k < n.

    a[r, k] is at a + r * row_step + k * k_step bytes, b0 and b1 are [n][16] f32, c's rows are
    `pitch` bytes apart, its second vector 64 bytes after the first; fresh: c starts from 0.
    """

    @intrinsic
    def multiply(context, a, k_step, b0, b1, n, c, pitch, fresh):  # type: ignore[no-untyped-def]
        signature = types.int64(*[types.int64] * 8)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            _emit_tile(builder, values, rows, vectors, row_step)
            return I64(0)

        return signature, generate

    return multiply


def _emit_tile(builder: Any, values: Any, rows: int, vectors: int, row_step: int) -> None:
    a, k_step, b0, b1, n, c, pitch, fresh = values
    places = [(r, v) for r in range(rows) for v in range(vectors)]
    addresses = [
        builder.add(builder.add(c, builder.mul(pitch, I64(r))), I64(64 * v)) for r, v in places
    ]
    is_fresh = builder.icmp_signed("!=", fresh, I64(0))
    starts = []
    for address in addresses:
        pointer = builder.inttoptr(address, VECTOR.as_pointer())
        # c may be uninitialised if it is fresh: select discards what is loaded then.
        there = builder.load(pointer, align=1)
        starts.append(builder.select(is_fresh, ir.Constant(VECTOR, None), there))
    before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
    builder.cbranch(builder.icmp_signed(">", n, I64(0)), loop, after)
    builder.position_at_end(loop)
    k, sums = builder.phi(I64), [builder.phi(VECTOR) for _ in places]
    row, columns = builder.phi(I64), builder.phi(I64)
    x = [_vector(builder, builder.add(b, columns)) for b in (b0, b1)[:vectors]]
    found = []
    for (r, v), acc in zip(places, sums, strict=True):
        value = builder.load(builder.inttoptr(builder.add(row, I64(r * row_step)), PTR))
        w = simd.broadcast(builder, value, 16)
        found.append(simd.call(builder, "llvm.fma.v16f32", VECTOR, [w, x[v], acc]))
    following = builder.add(k, I64(1)), builder.add(row, k_step), builder.add(columns, I64(64))
    builder.cbranch(builder.icmp_signed("<", following[0], n), loop, after)
    pairs = zip(
        (k, row, columns, *sums), (I64(0), a, I64(0), *starts), (*following, *found), strict=True
    )
    for phi, start, stepped in pairs:
        phi.add_incoming(start, before)
        phi.add_incoming(stepped, loop)
    builder.position_at_end(after)
    for address, start, stepped in zip(addresses, starts, found, strict=True):
        result = builder.phi(VECTOR)
        result.add_incoming(start, before)
        result.add_incoming(stepped, loop)
        # Phis come first in a block, so all of them are made before anything is stored.
        starts[addresses.index(address)] = result
    for address, result in zip(addresses, starts, strict=True):
        builder.store(result, builder.inttoptr(address, VECTOR.as_pointer()), align=1)


def _vector(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=1)


wide_tile, narrow_tile = tile(ROWS, VECTORS, PITCH), tile(ROWS, 1, PITCH)
load_i64, load_f32, store = simd.load_i64, simd.load_f32, simd.store
load16 = simd.load("f32", 16)


@njit
def multiply_rows(arguments, begin, end, out, scratch):
    """Arguments: rows, bytes of one, their number, K, expand, packed columns, vectors of columns,
    rows of an item. An item is so many rows: out[row, 16 * vectors].
    """
    rows, row_bytes = load_i64(arguments), load_i64(arguments + 8)
    n_rows, k = load_i64(arguments + 16), load_i64(arguments + 24)
    expand, x, vectors = (
        load_i64(arguments + 32),
        load_i64(arguments + 40),
        load_i64(arguments + 48),
    )
    item_rows = load_i64(arguments + 56)
    pitch = 64 * vectors
    for item in range(begin, end):
        first = item * item_rows
        present, at = min(item_rows, n_rows - first), rows + first * row_bytes
        multiply_item(at, row_bytes, present, k, expand, x, vectors, out, pitch, scratch)
        out += item_rows * pitch


@njit
def multiply_item(rows, row_bytes, n_rows, k, expand, x, vectors, out, pitch, scratch):
    """n_rows of a panel times the columns."""
    for k0 in range(0, k, BLOCK_K):
        n = min(BLOCK_K, k - k0)
        for r in range(n_rows):
            simd.call_expand(expand, rows + r * row_bytes, k0, n, scratch + r * PITCH)
        multiply_panel(scratch, n_rows, x, k, k0, n, vectors, out, pitch)


@njit
def multiply_panel(panel, n_rows, x, k, k0, n, vectors, out, pitch):
    """out[row, column] += panel's n weights of each row times the columns from k0 on."""
    fresh = 1 if k0 == 0 else 0
    v = 0
    while v < vectors:
        wide = VECTORS == 2 and v + 1 < vectors
        b = x + (v * k + k0) * 64
        for r in range(0, n_rows, ROWS):
            a, c = panel + r * PITCH, out + r * pitch + 64 * v
            if wide:
                wide_tile(a, 4, b, b + 64 * k, n, c, pitch, fresh)
            else:
                narrow_tile(a, 4, b, b, n, c, pitch, fresh)
        v += 2 if wide else 1


@njit
def pack_columns(arguments, begin, end, out, scratch):
    """Arguments: x f32, bytes between its columns, their number, K. An item is 16 columns:
    out[K][16], zeros where there is no column.
    """
    x, pitch = load_i64(arguments), load_i64(arguments + 8)
    columns, k = load_i64(arguments + 16), load_i64(arguments + 24)
    for item in range(begin, end):
        source, present = x + 16 * item * pitch, min(16, columns - 16 * item)
        whole = k // 16 * 16 if present == 16 else 0
        for i in range(0, whole, 16):
            simd.transpose(source + 4 * i, pitch, out + 64 * i, 64)
        for c in range(16):
            for i in range(whole, k):
                value = load_f32(source + c * pitch + 4 * i) if c < present else types.float32(0)
                store(out + 64 * i + 4 * c, value)
        out += 64 * k


@njit
def unpack_columns(arguments, begin, end, out, scratch):
    """Arguments: y[row, column], bytes of a row, rows. An item is 16 columns, used or not:
    out[column, row]; 64 bytes after the last row may be read.
    """
    y, pitch, rows = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    for item in range(begin, end):
        source = y + 64 * item
        for r in range(0, rows - 15, 16):
            simd.transpose(source + r * pitch, pitch, out + 4 * r, 4 * rows)
        for r in range(rows // 16 * 16, rows):
            simd.scatter(load16(source + r * pitch), out + 4 * r, 4 * rows)
        out += 64 * rows


@njit
def multiply_few(arguments, begin, end, out, scratch):
    """Arguments: w's rows, bytes of one, K, columns, bytes of one, their data in f32, expand, N,
    ids or 0, pairs that share a column. Items are those of products.rows_of_bytes.
    """
    row_bytes, k = load_i64(arguments + 8), load_i64(arguments + 16)
    columns, pitch = load_i64(arguments + 24), load_i64(arguments + 32)
    expand, n_rows = load_i64(arguments + 48), load_i64(arguments + 56)
    for item in range(begin, end):
        pair = item // n_rows
        row = expert_of(arguments + 64, pair) * n_rows + item - pair * n_rows
        x = load_i64(arguments + 40) + pair // load_i64(arguments + 72) * pitch
        simd.call_expand(expand, load_i64(arguments) + row * row_bytes, 0, k, scratch)
        for c in range(columns):
            store(out, dot_f32(scratch, x + c * pitch, k))
            out += 4


@njit
def dot_f32(a, b, n):
    """The sum of a[i] b[i]."""
    acc, more = simd.zeros(), simd.zeros()
    whole = n // 32 * 32
    for i in range(0, 4 * whole, 128):
        acc = simd.fma(load16(a + i), load16(b + i), acc)
        more = simd.fma(load16(a + i + 64), load16(b + i + 64), more)
    rest = types.float32(0)
    for i in range(4 * whole, 4 * n, 4):
        rest += load_f32(a + i) * load_f32(b + i)
    return simd.total(simd.add(acc, more)) + rest
