"""Loads, stores and calls by addresses (int64), which cost less than numba's arrays."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector import I32, Vector, op, shuffled

# Memory


def load(kind: str, lanes: int) -> Any:
    """load(address) -> Vector."""
    vector = Vector(kind, lanes)

    def emit(builder: Any, address: Any, _: Any) -> Any:
        return builder.load(builder.inttoptr(address, vector.llvm.as_pointer()), align=1)

    return op(emit, lambda address: vector, 1)


def load_number(type: ir.Type, numba_type: types.Type, signed: bool = True) -> Any:
    """load(address) -> a number; an integer becomes int64."""

    def emit(builder: Any, address: Any, _: Any) -> Any:
        value = builder.load(builder.inttoptr(address, type.as_pointer()), align=1)
        if not isinstance(type, ir.IntType) or type.width == 64:
            return value
        return (builder.sext if signed else builder.zext)(value, ir.IntType(64))

    return op(emit, lambda address: numba_type, 1)


def _store(builder: Any, address: Any, value: Any, *_: Any) -> Any:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return cgutils.get_null_value(ir.IntType(64))


def _store_i32(builder: Any, address: Any, value: Any, *_: Any) -> Any:
    return _store(builder, address, builder.trunc(value, I32))


def prefetch(locality: int) -> Any:
    """prefetch(address) into the L1 cache (3) or L2 (2); the address need not be valid."""

    def body(builder: Any, address: Any, _: Any) -> Any:
        byte = builder.inttoptr(address, ir.IntType(8).as_pointer())
        numbers = [I32(n) for n in (0, locality, 1)]  # a read, its locality, of data
        kind = ir.FunctionType(ir.VoidType(), [byte.type, *[I32] * 3])
        name = "llvm.prefetch.p0"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [byte, *numbers])
        return cgutils.get_null_value(ir.IntType(64))

    return op(body, lambda address: types.int64, 1)


store_i32 = op(_store_i32, lambda address, value: types.int64, 2)  # of an int64
store = op(_store, lambda address, value: types.int64, 2)
load_i64 = load_number(ir.IntType(64), types.int64)
load_i32 = load_number(ir.IntType(32), types.int64)
load_u16 = load_number(ir.IntType(16), types.int64, signed=False)
load_u8 = load_number(ir.IntType(8), types.int64, signed=False)
load_u32 = load_number(I32, types.int64, signed=False)
load_f32 = load_number(ir.FloatType(), types.float32)


def _scatter(builder: Any, value: Any, address: Any, step: Any, type: Vector, *_: Any) -> Any:
    for lane in range(type.lanes):
        one = builder.extract_element(value, I32(lane))
        builder.store(one, builder.inttoptr(address, one.type.as_pointer()), align=1)
        address = builder.add(address, step)
    return cgutils.get_null_value(ir.IntType(64))


scatter = op(_scatter, lambda *_: types.int64, 3)  # lanes of v, `step` bytes apart


def _transpose(builder: Any, source: Any, step: Any, to: Any, to_step: Any, *_: Any) -> Any:
    vector = Vector("f32", 16).llvm

    def place(address: Any, distance: Any, i: int) -> Any:
        at = builder.add(address, builder.mul(distance, ir.Constant(distance.type, i)))
        return builder.inttoptr(at, vector.as_pointer())

    rows = [builder.load(place(source, step, i), align=1) for i in range(16)]
    for s in (8, 4, 2, 1):  # swap the two s x s blocks off the diagonal of each 2s x 2s block
        upper = [lane if not lane & s else 16 + lane - s for lane in range(16)]
        lower = [lane + s if not lane & s else 16 + lane for lane in range(16)]
        for i in range(16):
            if not i & s:
                a, b = rows[i], rows[i + s]
                rows[i], rows[i + s] = (shuffled(builder, a, x, b) for x in (upper, lower))
    for i, row in enumerate(rows):
        builder.store(row, place(to, to_step, i), align=1)
    return cgutils.get_null_value(ir.IntType(64))


# 16 rows of 16 f32, `step` bytes apart, to columns, `to_step` apart: (source, step, to, to_step)
transpose = op(_transpose, lambda *_: types.int64, 4)


def caller(n: int) -> Any:
    """call(function, *n int64): calls the function at this address, which returns nothing."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * n).as_pointer()

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return cgutils.get_null_value(ir.IntType(64))

    signature = types.int64(*[types.int64] * (n + 1))
    if n == 4:
        return intrinsic(lambda context, f, a, b, c, d: (signature, generate))
    return intrinsic(lambda context, f, a, b, c, d, e: (signature, generate))


call_expand, call_kernel = caller(4), caller(5)
