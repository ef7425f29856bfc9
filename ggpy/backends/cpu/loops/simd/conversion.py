"""Numbers of one type as another: f16, bytes, bits, whole numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ...processor import features
from .vector import I32, Vector, call, constant, op


def _f16_to_f32(builder: Any, value: Any) -> Any:
    """f16 -> f32, one or a vector: the CPU's instruction, or arithmetic on the bits."""
    lanes = getattr(value.type, "count", 0)
    wide: Any = ir.VectorType(ir.FloatType(), lanes) if lanes else ir.FloatType()
    if features() & {"f16c", "neon", "fullfp16"}:
        return builder.fpext(value, wide)
    whole: Any = ir.VectorType(I32, lanes) if lanes else I32
    short: Any = ir.VectorType(ir.IntType(16), lanes) if lanes else ir.IntType(16)

    def number(n: Any, type: Any) -> Any:
        return ir.Constant(type, [n] * lanes if lanes else n)

    bits = builder.zext(builder.bitcast(value, short), whole)
    magnitude = builder.shl(builder.and_(bits, number(0x7FFF, whole)), number(13, whole))
    sign = builder.shl(builder.and_(bits, number(0x8000, whole)), number(16, whole))
    scaled = builder.fmul(builder.bitcast(magnitude, wide), number(2.0**112, wide))
    special = builder.or_(magnitude, number(0x70000000 | 0x0F800000, whole))
    is_special = builder.icmp_unsigned(">=", magnitude, number(0x0F800000, whole))
    found = builder.select(is_special, special, builder.bitcast(scaled, whole))
    return builder.bitcast(builder.or_(found, sign), wide)


def _load_f16(builder: Any, address: Any, _: Any) -> Any:
    half = builder.load(builder.inttoptr(address, ir.HalfType().as_pointer()), align=1)
    return _f16_to_f32(builder, half)


load_f16 = op(_load_f16, lambda address: types.float32, 1)
widened = op(
    lambda builder, v, _: _f16_to_f32(builder, v), lambda v: Vector("f32", v.lanes), 1
)  # f16 -> f32


def _narrowed(builder: Any, value: Any, type: Vector) -> Any:
    """f32 -> f16, to nearest, ties to even: an instruction, or by the bits where there is none."""
    half = ir.VectorType(ir.HalfType(), type.lanes)
    if features() & {"f16c", "neon", "fullfp16"}:
        return builder.fptrunc(value, half)
    whole = ir.VectorType(I32, type.lanes)

    def number(n: int) -> Any:
        return constant(whole, n)

    bits = builder.bitcast(value, whole)
    sign = builder.lshr(builder.and_(bits, number(-(1 << 31))), number(16))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    normal = builder.add(builder.add(magnitude, odd), number(0xFFF - (112 << 23)))
    normal = builder.lshr(normal, number(13))
    aligned = builder.fadd(builder.bitcast(magnitude, value.type), constant(value.type, 0.5))
    small = builder.sub(builder.bitcast(aligned, whole), number(0x3F000000))
    is_small = builder.icmp_unsigned("<", magnitude, number(113 << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, number(255 << 23))
    too_large = builder.select(is_nan, number(0x7E00), number(0x7C00))
    found = builder.select(is_small, small, normal)
    is_large = builder.icmp_unsigned(">=", normal, number(0x7C00))
    is_large = builder.and_(is_large, builder.not_(is_small))
    found = builder.or_(builder.select(is_large, too_large, found), sign)
    return builder.bitcast(builder.trunc(found, ir.VectorType(ir.IntType(16), type.lanes)), half)


narrowed = op(_narrowed, lambda v: Vector("f16", v.lanes), 1)  # f32 -> f16, nearest


def _from_bf16(builder: Any, value: Any, type: Vector) -> Any:
    wide = builder.zext(value, ir.VectorType(I32, type.lanes))
    shifted = builder.shl(wide, constant(wide.type, 16))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), type.lanes))


from_bf16 = op(_from_bf16, lambda v: Vector("f32", v.lanes), 1)  # i16 -> f32


def _to_f32(builder: Any, value: Any, type: Vector) -> Any:
    return builder.sitofp(value, ir.VectorType(ir.FloatType(), type.lanes))


def _u8_to_f32(builder: Any, value: Any, type: Vector) -> Any:
    wide = builder.zext(value, ir.VectorType(I32, type.lanes))
    return builder.sitofp(wide, ir.VectorType(ir.FloatType(), type.lanes))


def _bytes_of(builder: Any, value: Any, _: Any) -> Any:
    return builder.bitcast(value, ir.VectorType(ir.IntType(8), 8))


def _f32_of(builder: Any, value: Any, _: Any) -> Any:
    return builder.bitcast(builder.trunc(value, I32), ir.FloatType())


def _i8_to_f32(builder: Any, value: Any, type: Vector) -> Any:
    wide = builder.sext(value, ir.VectorType(I32, type.lanes))
    return builder.sitofp(wide, ir.VectorType(ir.FloatType(), type.lanes))


to_f32 = op(_to_f32, lambda v: Vector("f32", v.lanes), 1)  # of signed whole numbers
bytes_of = op(_bytes_of, lambda value: Vector("u8", 8), 1)  # int64 -> u8x8, the lowest first
bits_of = op(
    lambda builder, value, _: builder.zext(builder.bitcast(value, I32), ir.IntType(64)),
    lambda value: types.int64,
    1,
)  # an f32's bits as int64
f32_of = op(_f32_of, lambda value: types.float32, 1)  # the f32 with the low 32 bits
i8_to_f32 = op(_i8_to_f32, lambda v: Vector("f32", v.lanes), 1)  # bytes taken as signed
u8_to_f32 = op(_u8_to_f32, lambda v: Vector("f32", v.lanes), 1)


def _rounded(builder: Any, value: Any, type: Vector) -> Any:
    even = call(builder, f"llvm.rint.v{type.lanes}f32", value.type, [value])
    return builder.fptosi(even, ir.VectorType(I32, type.lanes))


def _low_bytes(builder: Any, value: Any, type: Vector) -> Any:
    return builder.trunc(value, ir.VectorType(ir.IntType(8), type.lanes))


rounded = op(_rounded, lambda v: Vector("i32", v.lanes), 1)  # to nearest, ties to even
low_bytes = op(_low_bytes, lambda v: Vector("u8", v.lanes), 1)


def _as_byte(builder: Any, value: Any, _: Any) -> Any:
    return builder.bitcast(builder.trunc(value, ir.IntType(8)), ir.VectorType(ir.IntType(8), 1))


as_byte = op(_as_byte, lambda value: Vector("u8", 1), 1)


def _f16_of(builder: Any, value: Any, _: Any) -> Any:
    half = builder.bitcast(builder.trunc(value, ir.IntType(16)), ir.HalfType())
    return _f16_to_f32(builder, half)


f16_of = op(_f16_of, lambda value: types.float32, 1)  # the half with the low 16 bits, as f32


def bits_as(factor: int) -> Any:
    """bits(word) -> u8x32 with `factor` where one of the 32 low bits is 1."""

    def emit(builder: Any, word: Any, _: Any) -> Any:
        narrow = builder.trunc(word, I32)
        mask = builder.bitcast(narrow, ir.VectorType(ir.IntType(1), 32))
        wide = ir.VectorType(ir.IntType(8), 32)
        return builder.select(mask, constant(wide, factor), ir.Constant(wide, None))

    return op(emit, lambda word: Vector("u8", 32), 1)


def words(offset: int) -> Any:
    """words(u8x64) -> i16x64, the offset subtracted."""

    def emit(builder: Any, value: Any, type: Vector) -> Any:
        wide = ir.VectorType(ir.IntType(16), type.lanes)
        return builder.sub(builder.zext(value, wide), constant(wide, offset))

    return op(emit, lambda v: Vector("i16", v.lanes), 1)


def _pairs(builder: Any, a: Any, b: Any, *_: Any) -> Any:
    low = builder.and_(a, constant(a.type, 0xFFFF))
    return builder.or_(low, builder.shl(b, constant(b.type, 16)))


# two i32 vectors -> i32: the low 16 bits of both, those of the first below
pairs = op(_pairs, lambda a, b: a, 2)
