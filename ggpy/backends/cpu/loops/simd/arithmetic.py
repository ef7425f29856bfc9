"""Arithmetic lane by lane, sums over lanes, and lanes in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from .vector import I32, Vector, broadcast, call, constant, op, shuffled

# Arithmetic, lane by lane


def _same(a: Any, *_: Any) -> types.Type:
    return a


def binary(name: str) -> Any:
    """op(a, b), lane by lane; name: of a method of llvmlite's IRBuilder."""
    return op(lambda builder, a, b, *_: getattr(builder, name)(a, b), _same, 2)


add, sub, mul, div = (binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
bit_or, add_whole = binary("or_"), binary("add")


def _fma(builder: Any, a: Any, b: Any, c: Any, *types: Any) -> Any:
    return call(builder, f"llvm.fma.v{types[0].lanes}f32", a.type, [a, b, c])


def _larger(builder: Any, a: Any, b: Any, *_: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


fma = op(_fma, _same, 3)  # a * b + c, rounded once
larger = op(_larger, _same, 2)  # b if one of them is NaN


def with_number(name: str, number: int) -> Any:
    """op(v) of integers and the same `number` in each lane; name: "and_", "shl", "lshr", "xor"."""
    return op(lambda builder, v, _: getattr(builder, name)(v, constant(v.type, number)), _same, 1)


def splat_of(lanes: int) -> Any:
    """splat(f32) -> a Vector with it in all lanes."""

    def emit(builder: Any, value: Any, _: Any) -> Any:
        return broadcast(builder, value, lanes)

    return op(emit, lambda value: Vector("f32", lanes), 1)


def _splat_pair(builder: Any, low: Any, high: Any, *_: Any) -> Any:
    two = ir.Constant(ir.VectorType(low.type, 2), ir.Undefined)
    two = builder.insert_element(two, low, I32(0))
    return builder.insert_element(two, high, I32(1))


splat = splat_of(16)
pair = op(_splat_pair, lambda low, high: Vector("f32", 2), 2)
zeros = op(lambda builder: ir.Constant(Vector("f32", 16).llvm, None), lambda: Vector("f32", 16), 0)


def zeros_of(lanes: int) -> Any:
    """zeros() -> f32 zeros of so many lanes."""
    vector = Vector("f32", lanes)
    return op(lambda builder: ir.Constant(vector.llvm, None), lambda: vector, 0)


def _total(builder: Any, value: Any, type: Vector) -> Any:
    return _halved(builder, value, type.lanes, builder.fadd)


def _inverse_or_zero(builder: Any, value: Any, _: Any) -> Any:
    inverse = builder.fdiv(constant(value.type, 1.0), value)
    inside = builder.fcmp_ordered("<=", inverse, constant(value.type, 3e38))  # not of 0 or NaN
    return builder.select(inside, inverse, ir.Constant(value.type, None))


def _halved(builder: Any, value: Any, lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    while lanes > 1:
        lanes //= 2
        low = shuffled(builder, value, range(lanes))
        value = combine(low, shuffled(builder, value, range(lanes, 2 * lanes)))
    return builder.extract_element(value, I32(0))


def _absolute(builder: Any, value: Any, type: Vector) -> Any:
    return call(builder, f"llvm.fabs.v{type.lanes}f32", value.type, [value])


def _sums_of_fours(builder: Any, value: Any, type: Vector) -> Any:
    for lanes in (8, 4):
        even, odd = (shuffled(builder, value, range(i, 2 * lanes, 2)) for i in (0, 1))
        value = builder.add(even, odd)
    return builder.mul(value, constant(value.type, -128))


absolute = op(_absolute, _same, 1)
# i32x16 -> i32x4: -128 times the sum of each 4 neighbours
sums_of_fours = op(_sums_of_fours, lambda v: Vector("i32", 4), 1)
inverse_or_zero = op(_inverse_or_zero, _same, 1)  # 1 / v; 0 where that is infinite or NaN
total = op(_total, lambda v: types.float32, 1)  # the sum of all lanes, always in one order
greatest = op(
    lambda builder, v, t: _halved(builder, v, t.lanes, lambda a, b: _larger(builder, a, b)),
    lambda v: types.float32,
    1,
)


def _exp(builder: Any, x: Any, type: Vector) -> Any:
    """2^n times a polynomial of the rest (Cephes' expf); 0 below -87, as for minus infinity."""
    v, n_lanes = x.type, type.lanes
    whole_type = ir.VectorType(I32, n_lanes)

    def f(value: float) -> Any:
        return constant(v, value)

    def fused(a: Any, b: Any, c: Any) -> Any:
        return call(builder, f"llvm.fma.v{n_lanes}f32", v, [a, b, c])

    clipped = builder.select(builder.fcmp_ordered("<", x, f(88.0)), x, f(88.0))
    clipped = builder.select(builder.fcmp_ordered(">", clipped, f(-87.0)), clipped, f(-87.0))
    n = call(builder, f"llvm.rint.v{n_lanes}f32", v, [builder.fmul(clipped, f(1.4426950408889634))])
    rest = fused(n, f(-0.693359375), clipped)
    rest = fused(n, f(2.12194440e-4), rest)
    found = f(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        found = fused(found, rest, f(factor))
    found = fused(found, builder.fmul(rest, rest), builder.fadd(rest, f(1.0)))
    exponent = builder.add(builder.fptosi(n, whole_type), constant(whole_type, 127))
    power = builder.bitcast(builder.shl(exponent, constant(whole_type, 23)), v)
    found = builder.fmul(found, power)
    found = builder.select(builder.fcmp_ordered("<=", x, f(-87.0)), f(0.0), found)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, found)


def _within(builder: Any, value: Any, number: Any, low: Any, high: Any, *_: Any) -> Any:
    """value where low <= number <= high, else minus infinity."""
    after = builder.fcmp_ordered(">=", number, low)
    inside = builder.and_(after, builder.fcmp_ordered("<=", number, high))
    return builder.select(inside, value, constant(value.type, float("-inf")))


def at_least(number: int) -> Any:
    """op(v u8) -> 1 where v >= number, else 0."""

    def emit(builder: Any, value: Any, _: Any) -> Any:
        found = builder.icmp_unsigned(">=", value, constant(value.type, number))
        return builder.zext(found, value.type)

    return op(emit, _same, 1)


def _chosen(builder: Any, bits: Any, a: Any, b: Any, *_: Any) -> Any:
    """a where a bit of the int64 is set, b elsewhere; u8x64."""
    mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
    return builder.select(mask, a, b)


chosen = op(_chosen, lambda bits, a, b: a, 3)
exp = op(_exp, _same, 1)
within = op(_within, _same, 4)


def _clamped(builder: Any, value: Any, low: Any, high: Any, *_: Any) -> Any:
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)


clamped = op(_clamped, _same, 3)  # NaN stays NaN
one_lane = splat_of(1)
first = op(
    lambda builder, v, _: builder.extract_element(v, I32(0)), lambda v: types.float32, 1
)  # lane 0

# Lanes


def lanes(*numbers: int) -> Any:
    """pick(v) -> the lanes of v with these numbers."""

    def emit(builder: Any, value: Any, _: Any) -> Any:
        return shuffled(builder, value, numbers)

    return op(emit, lambda v: Vector(v.kind, len(numbers)), 1)


def _joined(builder: Any, a: Any, b: Any, type: Vector, _: Any) -> Any:
    return shuffled(builder, a, range(2 * type.lanes), b)


joined = op(_joined, lambda a, b: Vector(a.kind, 2 * a.lanes), 2)  # a, then b


_low, _high = with_number("and_", 15), with_number("lshr", 4)


@njit
def nibbles(v: Any) -> Any:
    """u8 of n lanes -> the low nibbles, then the high ones."""
    return joined(_low(v), _high(v))
