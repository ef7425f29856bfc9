"""The kernels between the products of a layer: norms, RoPE, activations, sums, on float32 rows.

Kernels of the pool (see products.py); a float32 number among the arguments is passed as its bits.
Formulas are those of backends/numpy/functions.py. Nothing here knows pages or formats.
"""

from __future__ import annotations

from numba import njit, types

from ...experts import OAI_ALPHA, OAI_LIMIT
from . import simd

F32 = types.float32
load_i64, load_f32, store, f32_of = simd.load_i64, simd.load_f32, simd.store, simd.f32_of
load16, splat = simd.load("f32", 16), simd.splat
fma, mul, add, sub, div, exp = simd.fma, simd.mul, simd.add, simd.sub, simd.div, simd.exp
ONE, TWO, HALF = (simd.f32_bits(x) for x in (1.0, 2.0, 0.5))
ALPHA, LIMIT = simd.f32_bits(OAI_ALPHA), simd.f32_bits(OAI_LIMIT)
MINUS_LIMIT, LOWEST = simd.f32_bits(-OAI_LIMIT), simd.f32_bits(float("-inf"))
CUBIC, ROOT = simd.f32_bits(0.044715), simd.f32_bits(0.7978845608028654)


@njit
def mean_of(x, n):
    """The mean of n numbers."""
    acc, rest = simd.zeros(), F32(0)
    for i in range(n // 16):
        acc = add(acc, load16(x + 64 * i))
    for i in range(n // 16 * 16, n):
        rest += load_f32(x + 4 * i)
    return (simd.total(acc) + rest) / F32(n)


@njit
def sum_of_squares(x, n, centre):
    """The sum of (x[i] - centre)^2."""
    acc, rest, wide = simd.zeros(), F32(0), splat(centre)
    for i in range(n // 16):
        v = sub(load16(x + 64 * i), wide)
        acc = fma(v, v, acc)
    for i in range(n // 16 * 16, n):
        v = load_f32(x + 4 * i) - centre
        rest += v * v
    return simd.total(acc) + rest


@njit
def normalise(x, n, norm, out):
    """out = norm(x) of n numbers. At norm: its weight or 0, eps, 1 if centred, its bias or 0."""
    weight, eps = load_i64(norm), f32_of(load_i64(norm + 8))
    centre = mean_of(x, n) if load_i64(norm + 16) != 0 else F32(0)
    scale = F32(1) / F32((sum_of_squares(x, n, centre) / F32(n) + eps) ** F32(0.5))
    middle, wide = splat(centre), splat(scale)
    for i in range(n // 16):
        v = mul(sub(load16(x + 64 * i), middle), wide)
        store(out + 64 * i, mul(v, load16(weight + 64 * i)) if weight != 0 else v)
    for i in range(n // 16 * 16, n):
        v = (load_f32(x + 4 * i) - centre) * scale
        store(out + 4 * i, v * load_f32(weight + 4 * i) if weight != 0 else v)
    bias = load_i64(norm + 24)
    if bias != 0:
        for i in range(n):
            store(out + 4 * i, load_f32(out + 4 * i) + load_f32(bias + 4 * i))


@njit
def normalise_rows(arguments, begin, end, out, scratch):
    """Arguments: x, numbers of a row, the norm's four. An item is a row."""
    x, n = load_i64(arguments), load_i64(arguments + 8)
    for row in range(begin, end):
        normalise(x + 4 * n * row, n, arguments + 16, out)
        out += 4 * n


@njit
def add_rows(arguments, begin, end, out, scratch):
    """Arguments: x, y, numbers of a row, scale, 1 and the four of y's norm, or 0. An item is a row:
    out = x + norm(y) * scale.
    """
    x, y, n = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    scale, has_norm = f32_of(load_i64(arguments + 24)), load_i64(arguments + 32) != 0
    wide = splat(scale)
    for row in range(begin, end):
        a, b = x + 4 * n * row, y + 4 * n * row
        if has_norm:
            normalise(b, n, arguments + 40, scratch)
            b = scratch
        for i in range(n // 16):
            store(out + 64 * i, fma(load16(b + 64 * i), wide, load16(a + 64 * i)))
        for i in range(n // 16 * 16, n):
            store(out + 4 * i, load_f32(a + 4 * i) + load_f32(b + 4 * i) * scale)
        out += 4 * n


@njit
def add_bias(arguments, begin, end, out, scratch):
    """Arguments: y, numbers of a row, bias. An item is a row: out = y + bias."""
    y, n, bias = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    for row in range(begin, end):
        for i in range(n):
            store(out + 4 * i, load_f32(y + 4 * (n * row + i)) + load_f32(bias + 4 * i))
        out += 4 * n


@njit
def silu(x):
    """x / (1 + exp(-x))."""
    one = splat(f32_of(ONE))
    return div(x, add(one, exp(sub(simd.zeros(), x))))


@njit
def tanh(x):
    """1 - 2 / (exp(2 x) + 1)."""
    one, two = splat(f32_of(ONE)), splat(f32_of(TWO))
    return sub(one, div(two, add(exp(add(x, x)), one)))


@njit
def gelu_tanh(x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    one, half = splat(f32_of(ONE)), splat(f32_of(HALF))
    inner = fma(mul(splat(f32_of(CUBIC)), mul(x, x)), x, x)
    return mul(mul(half, x), add(one, tanh(mul(splat(f32_of(ROOT)), inner))))


@njit
def swiglu_oai(gate, up):
    """g sigmoid(alpha g) (u + 1), with g = min(gate, limit) and u = up within the limit."""
    one, limit = splat(f32_of(ONE)), splat(f32_of(LIMIT))
    lowest = splat(f32_of(MINUS_LIMIT))
    g = simd.clamped(gate, splat(f32_of(LOWEST)), limit)
    steep = exp(sub(simd.zeros(), mul(splat(f32_of(ALPHA)), g)))
    return mul(div(g, add(one, steep)), add(simd.clamped(up, lowest, limit), one))


@njit
def activated(kind, gate, up):
    """activation(gate) * up, or gpt-oss's swiglu_oai; kind: of sizes.ACTIVATIONS."""
    if kind == 0:
        return mul(silu(gate), up)
    if kind == 1:
        return mul(gelu_tanh(gate), up)
    if kind == 2:
        return swiglu_oai(gate, up)
    one = splat(f32_of(ONE))
    return div(up, add(one, exp(sub(simd.zeros(), gate))))


@njit
def gated(arguments, begin, end, out, scratch):
    """Arguments: gate, up, the id of the activation. An item is 16 numbers; all three arrays have
    memory for whole items.
    """
    gate, up, kind = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    for i in range(begin, end):
        store(out, activated(kind, load16(gate + 64 * i), load16(up + 64 * i)))
        out += 64


@njit
def gate_inputs(arguments, begin, end, out, scratch):
    """Arguments: gate, numbers of a row, inputs, bytes between rows of these, the id of the
    activation. An item is a row.
    """
    gate, n, inputs = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    pitch, kind = load_i64(arguments + 24), load_i64(arguments + 32)
    for row in range(begin, end):
        g, u = gate + 4 * n * row, inputs + pitch * row
        for i in range(n // 16):
            store(out + 64 * i, activated(kind, load16(g + 64 * i), load16(u + 64 * i)))
        for i in range(n // 16 * 16, n):
            one = activated(kind, splat(load_f32(g + 4 * i)), splat(load_f32(u + 4 * i)))
            store(out + 4 * i, simd.first(one))
        out += 4 * n


@njit
def turn(x, pairs, neighbours, cos, sin):
    """Rotate `pairs` pairs of a head at x: neighbours, or elements i and i + pairs."""
    step, other = (8, 4) if neighbours != 0 else (4, 4 * pairs)
    for i in range(pairs):
        at = x + step * i
        a, b = load_f32(at), load_f32(at + other)
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        store(at, a * c - b * s)
        store(at + other, a * s + b * c)


@njit
def normalise_heads(arguments, begin, end, out, scratch):
    """Arguments: x, numbers of a row, the norm's four. An item is a row, changed in place."""
    x, n = load_i64(arguments), load_i64(arguments + 8)
    for row in range(begin, end):
        normalise(x + 4 * n * row, n, arguments + 16, x + 4 * n * row)


@njit
def turn_heads(arguments, begin, end, out, scratch):
    """Arguments: x, heads of a token, size, pairs to rotate, 1 for neighbours, cosines and sines of
    each token. An item is a token, changed in place.
    """
    x, heads, size = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    pairs, neighbours = load_i64(arguments + 24), load_i64(arguments + 32)
    cos, sin = load_i64(arguments + 40), load_i64(arguments + 48)
    for token in range(begin, end):
        for head in range(heads):
            at = x + 4 * size * (token * heads + head)
            turn(at, pairs, neighbours, cos + 4 * pairs * token, sin + 4 * pairs * token)


@njit
def scale_row(x, n, factor):
    """x *= factor for n numbers, rounded up to 16."""
    wide = splat(factor)
    for i in range((n + 15) // 16):
        store(x + 64 * i, mul(load16(x + 64 * i), wide))


@njit
def scale_rows(arguments, begin, end, out, scratch):
    """Arguments: x, numbers of a row, a factor of each row. An item is a row, changed in place."""
    x, n, factors = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    for row in range(begin, end):
        factor = load_f32(factors + 4 * row)
        for i in range(n * row, n * (row + 1)):
            store(x + 4 * i, load_f32(x + 4 * i) * factor)
