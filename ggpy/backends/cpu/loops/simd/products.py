"""Instructions that not all processors have: dot products of bytes (VNNI, AVX2, NEON), and lookups
in tables of 16 bytes.

Each has a generic form for the other processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir

from ...processor import dot_level, features
from .vector import I32, call, constant, op, shuffled


def dot(offset: int) -> Any:
    """dot(codes u8x64, x i8x64 as u8, sums i32x16) -> i32x16: the sum over each 4 neighbours of
    (code - offset) * x. Codes are at most 127 unless the offset is 128; x is -127..127; sums are
    -128 times the sum of each 4 neighbours of x; the offset is 0 or divides 128.
    """

    def emit(builder: Any, codes: Any, x: Any, sums: Any, *_: Any) -> Any:
        return DOTS[dot_level()](builder, codes, x, _start(builder, sums, offset), offset)

    return op(emit, lambda codes, x, sums: sums, 3)


def wide_dot(offset: int) -> Any:
    """dot(codes, high, low, sums): `dot` with x = 128 * high + low, both -127..127."""

    def emit(builder: Any, codes: Any, high: Any, low: Any, sums: Any, *_: Any) -> Any:
        product = DOTS[dot_level()]
        above = product(builder, codes, high, ir.Constant(sums.type, None), offset)
        above = builder.shl(above, constant(sums.type, 7))
        above = builder.add(above, _start(builder, sums, offset))
        return product(builder, codes, low, above, offset)

    return op(emit, lambda codes, high, low, sums: sums, 4)


def _start(builder: Any, sums: Any, offset: int) -> Any:
    """The start of a sum of products: -offset times the sum of x, or 0 if DOTS subtract the offset
    themselves.
    """
    if not offset or dot_level() == "neon" or (dot_level() == "avx2" and offset == 128):
        return ir.Constant(sums.type, None)
    return builder.ashr(sums, constant(sums.type, (128 // offset).bit_length() - 1))


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
    their signs: the offset is subtracted here.
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
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", halves, [a, b])
        ones = constant(halves, 1)
        fours = call(builder, "llvm.x86.avx2.pmadd.wd", whole, [pairs, ones])
        parts.append(builder.add(fours, acc))
    return shuffled(builder, parts[0], range(16), parts[1])


def _neon(builder: Any, codes: Any, x: Any, start: Any, offset: int) -> Any:
    """Signed bytes times signed bytes: the offset is subtracted here."""
    four = ir.VectorType(I32, 4)
    signed = builder.sub(codes, constant(codes.type, offset))
    parts = []
    for at in range(0, 64, 16):
        a, b = (shuffled(builder, v, range(at, at + 16)) for v in (signed, x))
        acc = shuffled(builder, start, range(at // 4, at // 4 + 4))
        parts.append(call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", four, [acc, a, b]))
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


def dot_of_words(builder: Any, acc: Any, a: Any, b: Any) -> Any:
    """acc i32x16 plus the products of neighbouring pairs of int16, which are a and b as i32x16."""
    if llvmlite.binding.llvm_version_info[0] >= 22:
        words = ir.VectorType(ir.IntType(16), 32)
        a, b = builder.bitcast(a, words), builder.bitcast(b, words)
    return call(builder, "llvm.x86.avx512.vpdpwssd.512", acc.type, [acc, a, b])


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

    return op(emit, lambda codes: codes, 1)


def _appended(builder: Any, a: Any, b: Any) -> Any:
    """The lanes of a, then those of b, which may be fewer."""
    n, m = a.type.count, b.type.count
    if m < n:
        b = shuffled(builder, b, [*range(m), *[0] * (n - m)])
    return shuffled(builder, a, [*range(n), *range(n, n + m)], b)


def _selected(builder: Any, codes: Any, table: Sequence[int]) -> Any:
    """The lookup by comparing with each code, for a processor without byte shuffles."""
    found = constant(codes.type, table[0])
    for code in range(1, 16):
        same = builder.icmp_unsigned("==", codes, constant(codes.type, code))
        found = builder.select(same, constant(codes.type, table[code]), found)
    return found
