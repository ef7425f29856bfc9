"""Tables of constants that are read by index: the points of codebooks, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vector import I32, Vector, op

I64 = ir.IntType(64)


def _address(builder: Any, element: ir.Type, numbers: Sequence[float], index: Any) -> Any:
    """The address of numbers[index], in the constants of the compiled code."""
    values = ir.Constant(ir.ArrayType(element, len(numbers)), list(numbers))
    table = cgutils.global_constant(builder, "table", values)
    return builder.gep(table, [I64(0), index])


def number_of(make: Callable[[], Sequence[float]]) -> Any:
    """number(index) -> make()[index], f32; make is called only to compile."""

    def emit(builder: Any, index: Any, _: Any) -> Any:
        return builder.load(_address(builder, ir.FloatType(), make(), index))

    return op(emit, lambda index: types.float32, 1)


def points(make: Callable[[], Sequence[Sequence[int]]]) -> Any:
    """pick(u, v) -> u8x64 or u8x32: eight points of make(), of 8 or 4 bytes each. Their indices are
    the four fields of 16 bits of u, then those of v, the lowest first.
    """

    def emit(builder: Any, u: Any, v: Any, *_: Any) -> Any:
        rows = make()
        size = len(rows[0])
        word = ir.IntType(8 * size)
        table = [int.from_bytes(bytes(row), "little") for row in rows]
        found = ir.Constant(ir.VectorType(word, 8), ir.Undefined)
        for i in range(8):
            field = builder.lshr((u, v)[i // 4], I64(16 * (i % 4)))
            index = builder.and_(field, I64(0xFFFF))
            point = builder.load(_address(builder, word, table, index), align=size)
            found = builder.insert_element(found, point, I32(i))
        return builder.bitcast(found, ir.VectorType(ir.IntType(8), 8 * size))

    return op(emit, lambda u, v: Vector("u8", 8 * len(make()[0])), 2)
