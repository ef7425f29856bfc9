"""The GEMM of many columns as whole numbers, for processors with VNNI.

It has the tile, the panels and the columns of gemm.py, but a panel's rows are codes, and columns
are rounded to 15 bits with a scale for each 32 numbers (sizes.py). An instruction multiplies two
neighbours of 16 columns, twice as many as in float32; the sums of a group become float32. Every sum
runs over groups from the first to the last. Kernels are made of a format's declaration.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..sizes import (
    BLOCK_K,
    GROUP_BYTES,
    LARGEST_WORD,
    OF_COLUMN_SCALES,
    OF_COLUMN_SUMS,
    OF_MINIMUMS,
    OF_SCALES,
    ROWS,
    VECTORS,
    WHOLE_PITCH,
)
from . import simd

I64, WHOLE = ir.IntType(64), ir.VectorType(ir.IntType(32), 16)
FLOATS = ir.VectorType(ir.FloatType(), 16)
load_i64, load_i32, load16, store = simd.load_i64, simd.load_i32, simd.load("f32", 16), simd.store
F32 = types.float32
ALL, FIRST, LAST = 2, 0, 1  # which numbers of a group are multiplied: the index of their sum


def group_tile(vectors: int, which: int, has_minimum: bool) -> Any:
    """tile(a, scales, b0, b1, c, pitch, fresh): c[r, lane] += the products of a group of ROWS rows
    and 16 or 32 columns.

    a: the codes of the first row. scales: its scale of the group. b0, b1: groups of columns. c's
    rows are `pitch` bytes apart, its second vector 64 bytes after the first; fresh: c starts at 0.
    """

    @intrinsic
    def multiply(context, a, scales, b0, b1, c, pitch, fresh):  # type: ignore[no-untyped-def]
        signature = types.int64(*[types.int64] * 7)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            _emit(builder, values, vectors, which, has_minimum)
            return I64(0)

        return signature, generate

    return multiply


def _at(builder: Any, address: Any, offset: int, type: ir.Type) -> Any:
    place = builder.inttoptr(builder.add(address, I64(offset)), type.as_pointer())
    return builder.load(place, align=1)


def _emit(builder: Any, values: Any, vectors: int, which: int, has_minimum: bool) -> None:
    """A loop over pairs in 24 registers, then the sums times their scales."""
    a, scales, *columns, c, pitch, fresh = values
    columns = columns[:vectors]
    n, begin = (16, 0) if which == ALL else (8, 8 * which)  # pairs
    places = [(r, v) for r in range(ROWS) for v in range(vectors)]
    before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(I64), [builder.phi(WHOLE) for _ in places]
    at = builder.mul(k, I64(64))
    x = [_at(builder, builder.add(b, at), 64 * begin, WHOLE) for b in columns]
    row = builder.add(a, builder.mul(k, I64(4)))
    found = []
    for (r, v), acc in zip(places, sums, strict=True):
        w = simd.broadcast(builder, _at(builder, row, r * WHOLE_PITCH, ir.IntType(32)), 16)
        found.append(simd.dot_of_words(builder, acc, x[v], w))
    following = builder.add(k, I64(1))
    builder.cbranch(builder.icmp_signed("<", following, I64(n)), loop, after)
    starts = I64(0), *[ir.Constant(WHOLE, None)] * len(sums)
    for phi, start, stepped in zip((k, *sums), starts, (following, *found), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(stepped, loop)
    builder.position_at_end(after)
    is_fresh = builder.icmp_signed("!=", fresh, I64(0))
    units = [_at(builder, b, OF_COLUMN_SCALES, FLOATS) for b in columns]
    totals = [_at(builder, b, OF_COLUMN_SUMS + 64 * which, FLOATS) for b in columns]
    for (r, v), acc in zip(places, found, strict=True):
        address = builder.add(builder.add(c, builder.mul(pitch, I64(r))), I64(64 * v))
        there = _at(builder, address, 0, FLOATS)
        old = builder.select(is_fresh, ir.Constant(FLOATS, None), there)
        scale = _spread(builder, scales, r * WHOLE_PITCH)
        product = builder.fmul(builder.sitofp(acc, FLOATS), units[v])
        new = simd.call(builder, "llvm.fma.v16f32", FLOATS, [product, scale, old])
        if has_minimum:
            minimum = _spread(builder, scales, r * WHOLE_PITCH + OF_MINIMUMS - OF_SCALES)
            new = simd.call(builder, "llvm.fma.v16f32", FLOATS, [totals[v], minimum, new])
        builder.store(new, builder.inttoptr(address, FLOATS.as_pointer()), align=1)


def _spread(builder: Any, address: Any, offset: int) -> Any:
    return simd.broadcast(builder, _at(builder, address, offset, ir.FloatType()), 16)


def tile_of(which: int, has_minimum: bool) -> Any:
    """add(codes, scales, b, following, c, pitch, fresh, is_wide): group_tile of one vector of
    columns, or of two, the second `following` bytes after the first.
    """
    wide, narrow = (group_tile(vectors, which, has_minimum) for vectors in (VECTORS, 1))

    @njit
    def add(codes, scales, b, following, c, pitch, fresh, is_wide):
        if is_wide:
            wide(codes, scales, b, b + following, c, pitch, fresh)
        else:
            narrow(codes, scales, b, b, c, pitch, fresh)

    return add


def panel_of(group: int, has_minimum: bool) -> Any:
    """multiply(panel, n_rows, x, groups, g0, n, vectors, out, pitch): out[row, column] += n groups
    of each row times those of the columns from g0 on. groups: of a column.
    """
    add_all, add_first, add_last = (tile_of(which, has_minimum) for which in (ALL, FIRST, LAST))

    @njit
    def group_of_32(a, g, b, following, c, pitch, fresh, is_wide):
        add_all(a + 64 * g, a + OF_SCALES + 4 * g, b, following, c, pitch, fresh, is_wide)

    @njit
    def groups_of_16(a, g, b, following, c, pitch, fresh, is_wide):
        codes, scales = a + 64 * g, a + OF_SCALES + 8 * g
        add_first(codes, scales, b, following, c, pitch, fresh, is_wide)
        add_last(codes + 32, scales + 4, b, following, c, pitch, 0, is_wide)

    add_group = group_of_32 if group == 32 else groups_of_16

    @njit
    def multiply(panel, n_rows, x, groups, g0, n, vectors, out, pitch):
        v = 0
        while v < vectors:
            is_wide = VECTORS == 2 and v + 1 < vectors
            b = x + (v * groups + g0) * GROUP_BYTES
            for r in range(0, n_rows, ROWS):
                a, c = panel + r * WHOLE_PITCH, out + r * pitch + 64 * v
                for g in range(n):
                    fresh = 1 if g0 + g == 0 else 0
                    at = b + g * GROUP_BYTES
                    add_group(a, g, at, groups * GROUP_BYTES, c, pitch, fresh, is_wide)
            v += 2 if is_wide else 1

    return multiply


def rows_of(expand: Any, panel: Any) -> Any:
    """multiply(rows, row_bytes, n_rows, k, x, vectors, out, pitch, scratch): n_rows, which become a
    panel in `scratch`, times the columns.
    """

    @njit
    def multiply(rows, row_bytes, n_rows, k, x, vectors, out, pitch, scratch):
        for k0 in range(0, k, BLOCK_K):
            n = min(BLOCK_K, k - k0)
            for r in range(n_rows):
                expand(rows + r * row_bytes, k0, n, scratch + r * WHOLE_PITCH)
            panel(scratch, n_rows, x, k // 32, k0 // 32, n // 32, vectors, out, pitch)

    return multiply


def rows(expand: Any, panel: Any) -> Any:
    """Arguments: rows, bytes of one, their number, K, columns, vectors of columns, rows of an item.
    An item is so many rows: out[row, 16 * vectors].
    """
    multiply = rows_of(expand, panel)

    @njit
    def kernel(arguments, begin, end, out, scratch):
        first_row, row_bytes = load_i64(arguments), load_i64(arguments + 8)
        n_rows, k = load_i64(arguments + 16), load_i64(arguments + 24)
        x, vectors = load_i64(arguments + 32), load_i64(arguments + 40)
        item_rows = load_i64(arguments + 48)
        pitch = 64 * vectors
        for item in range(begin, end):
            first = item * item_rows
            present, at = min(item_rows, n_rows - first), first_row + first * row_bytes
            multiply(at, row_bytes, present, k, x, vectors, out, pitch, scratch)
            out += item_rows * pitch

    return kernel


def blocks(expand: Any, panel: Any) -> Any:
    """Arguments: rows, bytes of one, rows of an expert, K, columns, V, rows of an item, items of a
    block, blocks. An item is so many rows of a block: out[row, 16 * V]; see experts.py.
    """
    multiply = rows_of(expand, panel)

    @njit
    def kernel(arguments, begin, end, out, scratch):
        first_row, row_bytes = load_i64(arguments), load_i64(arguments + 8)
        n_rows, k = load_i64(arguments + 16), load_i64(arguments + 24)
        x, width = load_i64(arguments + 32), load_i64(arguments + 40)
        item_rows, panels = load_i64(arguments + 48), load_i64(arguments + 56)
        of_blocks, pitch = load_i64(arguments + 64), 64 * width
        for item in range(begin, end):
            block = item // panels
            first = (item - block * panels) * item_rows
            expert, used = load_i32(of_blocks + 8 * block), load_i32(of_blocks + 8 * block + 4)
            present = min(item_rows, n_rows - first)
            at = first_row + (expert * n_rows + first) * row_bytes
            columns = x + block * width * (k // 32) * GROUP_BYTES
            vectors = (used + 15) // 16
            multiply(at, row_bytes, present, k, columns, vectors, out, pitch, scratch)
            out += item_rows * pitch

    return kernel


limit = simd.f32_bits(float(LARGEST_WORD))


@njit
def round_columns(arguments, begin, end, out, scratch):
    """Arguments: columns packed in float32 (gemm.pack_columns), K. An item is 16 columns."""
    source, k = load_i64(arguments), load_i64(arguments + 8)
    for item in range(begin, end):
        for group in range(k // 32):
            round_group(source + 64 * (item * k + 32 * group), out)
            out += GROUP_BYTES


@njit
def round_group(x, out):
    """32 numbers of 16 columns."""
    largest, none = simd.zeros(), simd.zeros()  # 0 * x makes the scale NaN for NaN and infinity
    for i in range(32):
        v = load16(x + 64 * i)
        largest = simd.larger(simd.absolute(v), largest)
        none = simd.fma(v, simd.zeros(), none)
    scale = simd.add(simd.mul(largest, simd.splat(F32(1) / simd.f32_of(limit))), none)
    inverse = simd.inverse_or_zero(scale)
    store(out + OF_COLUMN_SCALES, scale)
    total = simd.zeros()
    for half in range(2):
        part = simd.zeros()
        for i in range(16 * half, 16 * half + 16, 2):
            a = simd.rounded(simd.mul(load16(x + 64 * i), inverse))
            b = simd.rounded(simd.mul(load16(x + 64 * i + 64), inverse))
            store(out + 32 * i, simd.pairs(a, b))
            part = simd.add(part, simd.to_f32(simd.add_whole(a, b)))
        store(out + OF_COLUMN_SUMS + 64 * half, simd.mul(part, scale))
        total = simd.add(total, part)
    store(out + OF_COLUMN_SUMS + 64 * ALL, simd.mul(total, scale))
