"""Vectors of the processor as values in numba functions: loads, integer dot products, sums.

A Vector is a numba type that LLVM keeps in registers, so kernels are written as arithmetic on 16
numbers or 64 bytes at a time; LLVM splits a vector that is wider than the machine's. Only `dot` and
`lookup` name instructions of one processor (VNNI, AVX2, NEON), with a form for every other. Nothing
here knows block formats. Addresses are integers, since a view of an array costs more than its use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model

BITS = {"u8": 8, "i16": 16, "i32": 32, "i64": 64}
I32 = ir.IntType(32)


class Vector(types.Type):
    """`lanes` numbers of one kind: "u8", "i16", "i32", "f16" or "f32"."""

    def __init__(self, kind: str, lanes: int) -> None:
        self.kind, self.lanes = kind, lanes
        super().__init__(f"{kind}x{lanes}")

    @property
    def element(self) -> ir.Type:
        """LLVM's type of one lane."""
        floats = {"f16": ir.HalfType(), "f32": ir.FloatType()}
        return floats.get(self.kind) or ir.IntType(BITS[self.kind])

    @property
    def llvm(self) -> ir.Type:
        """LLVM's type of the vector."""
        return ir.VectorType(self.element, self.lanes)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is one LLVM value."""

    def __init__(self, manager: Any, type: Vector) -> None:
        super().__init__(manager, type, type.llvm)


@cache
def features() -> frozenset[str]:
    """What the processor for which numba compiles can do, in LLVM's names."""
    if config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+"))
    found = dict(llvmlite.binding.get_host_cpu_features())
    return frozenset(name for name, there in found.items() if there)


def dot_level() -> str:
    """The instruction that multiplies bytes: "vnni512", "vnni", "avx2", "neon" or "generic"."""
    has = features()
    if {"avx512vnni", "avx512bw"} <= has:
        return "vnni512"
    if "avxvnni" in has or {"avx512vnni", "avx512vl"} <= has:
        return "vnni"
    return "avx2" if "avx2" in has else "neon" if "dotprod" in has else "generic"


def op(emit: Callable[..., Any], result: Callable[..., types.Type], n: int) -> Any:
    """An intrinsic of n arguments: emit(builder, *values and their types) gives the LLVM value of
    type result(*types).
    """

    def typed(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        signature = result(*arguments)(*arguments)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return emit(builder, *values, *sig.args)

        return signature, generate

    if n == 0:
        return intrinsic(lambda context: typed(()))
    if n == 1:
        return intrinsic(lambda context, a: typed((a,)))
    if n == 2:
        return intrinsic(lambda context, a, b: typed((a, b)))
    if n == 3:
        return intrinsic(lambda context, a, b, c: typed((a, b, c)))
    return intrinsic(lambda context, a, b, c, d: typed((a, b, c, d)))


def call(builder: Any, name: str, result: ir.Type, values: Sequence[Any]) -> Any:
    """A call of the LLVM intrinsic of this name."""
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def shuffled(builder: Any, a: Any, lanes: Sequence[int], b: Any = None) -> Any:
    """The lanes of a, and from len(a) on of b, with these numbers."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, mask)


def constant(type: ir.Type, value: float | Sequence[float]) -> Any:
    """A vector of one number in all lanes, or of a number for each."""
    values = value if isinstance(value, Sequence) else [value] * type.count
    return ir.Constant(type, list(values))


# Memory


def f32_bits(number: float) -> int:
    """The bits of a number as f32: how kernels take one."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def load(kind: str, lanes: int) -> Any:
    """load(address) -> Vector."""
    vector = Vector(kind, lanes)

    def emit(builder: Any, address: Any, _: Any) -> Any:
        return builder.load(builder.inttoptr(address, vector.llvm.as_pointer()), align=1)

    return op(emit, lambda address: vector, 1)


def load_number(type: ir.Type, numba_type: types.Type, signed: bool = True) -> Any:
    """load(address) -> a number; whole ones become int64."""

    def emit(builder: Any, address: Any, _: Any) -> Any:
        value = builder.load(builder.inttoptr(address, type.as_pointer()), align=1)
        if not isinstance(type, ir.IntType) or type.width == 64:
            return value
        return (builder.sext if signed else builder.zext)(value, ir.IntType(64))

    return op(emit, lambda address: numba_type, 1)


def _store(builder: Any, address: Any, value: Any, *_: Any) -> Any:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return cgutils.get_null_value(ir.IntType(64))


def _prefetch(builder: Any, address: Any, _: Any) -> Any:
    byte, numbers = builder.inttoptr(address, ir.IntType(8).as_pointer()), [I32(n) for n in (0, 3, 1)]
    kind = ir.FunctionType(ir.VoidType(), [byte.type, *[I32] * 3])
    name = "llvm.prefetch.p0"
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [byte, *numbers])
    return cgutils.get_null_value(ir.IntType(64))


prefetch = op(_prefetch, lambda address: types.int64, 1)  # an address that need not exist
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


def caller(n: int) -> Any:
    """call(function, *n int64) of what returns nothing, by its address."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * n).as_pointer()

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return cgutils.get_null_value(ir.IntType(64))

    signature = types.int64(*[types.int64] * (n + 1))
    if n == 4:
        return intrinsic(lambda context, f, a, b, c, d: (signature, generate))
    return intrinsic(lambda context, f, a, b, c, d, e: (signature, generate))


call_expand, call_kernel = caller(4), caller(5)


def _f16_to_f32(builder: Any, value: Any) -> Any:
    """halves -> f32, one or a vector: an instruction, or by the bits where there is none."""
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
    return builder.fptrunc(value, ir.VectorType(ir.HalfType(), type.lanes))


narrowed = op(_narrowed, lambda v: Vector("f16", v.lanes), 1)  # f32 -> f16, nearest


def _from_bf16(builder: Any, value: Any, type: Vector) -> Any:
    wide = builder.zext(value, ir.VectorType(I32, type.lanes))
    shifted = builder.shl(wide, constant(wide.type, 16))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), type.lanes))


from_bf16 = op(_from_bf16, lambda v: Vector("f32", v.lanes), 1)  # i16 -> f32

# Arithmetic, lane by lane


def _same(a: Any, *_: Any) -> types.Type:
    return a


def binary(name: str) -> Any:
    """op(a, b), lane by lane, as LLVM's builder calls it."""
    return op(lambda builder, a, b, *_: getattr(builder, name)(a, b), _same, 2)


add, sub, mul, div = (binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
bit_or, add_whole = binary("or_"), binary("add")


def _fma(builder: Any, a: Any, b: Any, c: Any, *types: Any) -> Any:
    return call(builder, f"llvm.fma.v{types[0].lanes}f32", a.type, [a, b, c])


def _larger(builder: Any, a: Any, b: Any, *_: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


fma = op(_fma, _same, 3)  # a * b + c, rounded once
larger = op(_larger, _same, 2)  # b where one is NaN


def with_number(name: str, number: int) -> Any:
    """op(v) of whole numbers with the same number in each lane: "and_", "shl", "lshr", "xor"."""
    return op(
        lambda builder, v, _: getattr(builder, name)(v, constant(v.type, number)), _same, 1
    )


def splat_of(lanes: int) -> Any:
    """splat(f32) -> a Vector with it in all lanes."""

    def emit(builder: Any, value: Any, _: Any) -> Any:
        return broadcast(builder, value, lanes)

    return op(emit, lambda value: Vector("f32", lanes), 1)


def broadcast(builder: Any, value: Any, lanes: int) -> Any:
    """LLVM's vector with a number in all lanes."""
    one = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
    return shuffled(builder, builder.insert_element(one, value, I32(0)), [0] * lanes)


def _splat_pair(builder: Any, low: Any, high: Any, *_: Any) -> Any:
    two = ir.Constant(ir.VectorType(low.type, 2), ir.Undefined)
    two = builder.insert_element(two, low, I32(0))
    return builder.insert_element(two, high, I32(1))


splat = splat_of(16)
pair = op(_splat_pair, lambda low, high: Vector("f32", 2), 2)
zeros = op(
    lambda builder: ir.Constant(Vector("f32", 16).llvm, None), lambda: Vector("f32", 16), 0
)


def zeros_of(lanes: int) -> Any:
    """f32 zeros of so many lanes."""
    vector = Vector("f32", lanes)
    return op(lambda builder: ir.Constant(vector.llvm, None), lambda: vector, 0)


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


def _total(builder: Any, value: Any, type: Vector) -> Any:
    return _halved(builder, value, type.lanes, builder.fadd)


def _halved(builder: Any, value: Any, lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    while lanes > 1:
        lanes //= 2
        low = shuffled(builder, value, range(lanes))
        value = combine(low, shuffled(builder, value, range(lanes, 2 * lanes)))
    return builder.extract_element(value, I32(0))


def _absolute(builder: Any, value: Any, type: Vector) -> Any:
    return call(builder, f"llvm.fabs.v{type.lanes}f32", value.type, [value])


def _rounded(builder: Any, value: Any, type: Vector) -> Any:
    even = call(builder, f"llvm.rint.v{type.lanes}f32", value.type, [value])
    return builder.fptosi(even, ir.VectorType(I32, type.lanes))


def _low_bytes(builder: Any, value: Any, type: Vector) -> Any:
    return builder.trunc(value, ir.VectorType(ir.IntType(8), type.lanes))


def _sums_of_fours(builder: Any, value: Any, type: Vector) -> Any:
    for lanes in (8, 4):
        even, odd = (shuffled(builder, value, range(i, 2 * lanes, 2)) for i in (0, 1))
        value = builder.add(even, odd)
    return builder.mul(value, constant(value.type, -128))


absolute = op(_absolute, _same, 1)
rounded = op(_rounded, lambda v: Vector("i32", v.lanes), 1)  # to nearest, ties to even
low_bytes = op(_low_bytes, lambda v: Vector("u8", v.lanes), 1)
# i32x16 -> i32x4: -128 times the sum of each 4 neighbours
sums_of_fours = op(_sums_of_fours, lambda v: Vector("i32", 4), 1)
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


exp = op(_exp, _same, 1)
within = op(_within, _same, 4)

def _as_byte(builder: Any, value: Any, _: Any) -> Any:
    return builder.bitcast(builder.trunc(value, ir.IntType(8)), ir.VectorType(ir.IntType(8), 1))


def _clamped(builder: Any, value: Any, low: Any, high: Any, *_: Any) -> Any:
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)


as_byte = op(_as_byte, lambda value: Vector("u8", 1), 1)
clamped = op(_clamped, _same, 3)  # NaN as it is
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


def bits_as(factor: int) -> Any:
    """bits(word) -> u8x32 with `factor` where one of the 32 low bits is 1."""

    def emit(builder: Any, word: Any, _: Any) -> Any:
        narrow = builder.trunc(word, I32)
        mask = builder.bitcast(narrow, ir.VectorType(ir.IntType(1), 32))
        wide = ir.VectorType(ir.IntType(8), 32)
        return builder.select(mask, constant(wide, factor), ir.Constant(wide, None))

    return op(emit, lambda word: Vector("u8", 32), 1)


_low, _high = with_number("and_", 15), with_number("lshr", 4)


@njit
def nibbles(v: Any) -> Any:
    """u8 of n lanes -> the low nibbles, then the high ones."""
    return joined(_low(v), _high(v))


# Instructions of one processor


def dot(offset: int) -> Any:
    """dot(codes u8x64, x i8x64 as u8, sums i32x16) -> i32x16: the sum over each 4 neighbours of
    (code - offset) * x. Codes are at most 63, or the offset is 128; x is -127..127; sums are
    -128 times the sum of each 4 neighbours of x; the offset divides 128.
    """
    shift = (128 // offset).bit_length() - 1 if offset else 0

    def emit(builder: Any, codes: Any, x: Any, sums: Any, *_: Any) -> Any:
        start = ir.Constant(sums.type, None)
        if offset:
            start = builder.ashr(sums, constant(sums.type, shift))
        return DOTS[dot_level()](builder, codes, x, start, offset)

    return op(emit, lambda codes, x, sums: sums, 3)


def _vnni512(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    return _by_parts(builder, "llvm.x86.avx512.vpdpbusd.512", 64, codes, x, start)


def _vnni(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    return _by_parts(builder, "llvm.x86.avx512.vpdpbusd.256", 32, codes, x, start)


def _by_parts(builder: Any, name: str, size: int, codes: Any, x: Any, start: Any) -> Any:
    """Dot products of `size` bytes at a time."""
    parts = []
    for at in range(0, 64, size):
        a, b = (shuffled(builder, v, range(at, at + size)) for v in (codes, x))
        acc = shuffled(builder, start, range(at // 4, (at + size) // 4))
        parts.append(_call_dot(builder, name, acc, a, b))
    return parts[0] if len(parts) == 1 else shuffled(builder, parts[0], range(16), parts[1])


def _call_dot(builder: Any, name: str, acc: Any, a: Any, b: Any) -> Any:
    """The intrinsic takes bytes from LLVM 22 on; before, the same bits as int32."""
    if llvmlite.binding.llvm_version_info[0] < 22:
        a, b = builder.bitcast(a, acc.type), builder.bitcast(b, acc.type)
    return call(builder, name, acc.type, [acc, a, b])


def _avx2(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    """Sums of two products must fit in 16 bits, so codes around 128 become magnitudes, and x takes
    their sign.
    """
    halves = ir.VectorType(ir.IntType(16), 16)
    whole = ir.VectorType(I32, 8)
    parts = []
    for at in (0, 32):
        a, b = (shuffled(builder, v, range(at, at + 32)) for v in (codes, x))
        acc = shuffled(builder, start, range(at // 4, at // 4 + 8))
        if offset == 128:
            signed = builder.xor(a, constant(a.type, -128))
            negative = builder.icmp_signed("<", signed, ir.Constant(a.type, None))
            a = builder.select(negative, builder.neg(signed), signed)
            b = builder.select(negative, builder.neg(b), b)
            acc = ir.Constant(whole, None)
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", halves, [a, b])
        ones = constant(halves, 1)
        fours = call(builder, "llvm.x86.avx2.pmadd.wd", whole, [pairs, ones])
        parts.append(builder.add(fours, acc))
    return shuffled(builder, parts[0], range(16), parts[1])


def _neon(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    """Signed bytes times signed bytes."""
    four = ir.VectorType(I32, 4)
    signed = builder.sub(codes, constant(codes.type, offset))
    parts = []
    for at in range(0, 64, 16):
        a, b = (shuffled(builder, v, range(at, at + 16)) for v in (signed, x))
        zero = ir.Constant(four, None)
        parts.append(call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", four, [zero, a, b]))
    low, high = (shuffled(builder, a, range(8), b) for a, b in (parts[:2], parts[2:]))
    return shuffled(builder, low, range(16), high)


def _generic(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    wide = ir.VectorType(I32, 64)
    products = builder.mul(builder.zext(codes, wide), builder.sext(x, wide))
    for lanes in (32, 16):
        even, odd = (shuffled(builder, products, range(i, 2 * lanes, 2)) for i in (0, 1))
        products = builder.add(even, odd)
    return builder.add(products, start)


DOTS = {"vnni512": _vnni512, "vnni": _vnni, "avx2": _avx2, "neon": _neon, "generic": _generic}


def lookup(table: Sequence[int]) -> Any:
    """lookup(codes u8x64 in 0..15) -> table[code], u8x64."""

    def emit(builder: Any, codes: Any, _: Any) -> Any:
        has = features()
        width = 64 if "avx512bw" in has else 32 if "avx2" in has else 16
        name = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}.get(width)
        if name is None and "neon" not in has:
            return _selected(builder, codes, table)
        part = ir.VectorType(ir.IntType(8), width)
        values = constant(part, list(table) * (width // 16))
        found = None
        for at in range(0, 64, width):
            picked = shuffled(builder, codes, range(at, at + width))
            given = [values, picked]
            one = call(builder, name or "llvm.aarch64.neon.tbl1.v16i8", part, given)
            found = one if found is None else _appended(builder, found, one)
        return found

    return op(emit, _same, 1)


def _appended(builder: Any, a: Any, b: Any) -> Any:
    """The lanes of a, then those of b, which may be fewer."""
    n, m = a.type.count, b.type.count
    if m < n:
        b = shuffled(builder, b, [*range(m), *[0] * (n - m)])
    return shuffled(builder, a, [*range(n), *range(n, n + m)], b)


def _selected(builder: Any, codes: Any, table: Sequence[int]) -> Any:
    """A table by comparing with each code: for a processor without byte shuffles."""
    found = constant(codes.type, table[0])
    for code in range(1, 16):
        same = builder.icmp_unsigned("==", codes, constant(codes.type, code))
        found = builder.select(same, constant(codes.type, table[code]), found)
    return found
