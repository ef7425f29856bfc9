"""The gated delta net between its products, as kernels of the pool: the convolution and the rule.

Formulas are those of backends/numpy/delta.py, token by token. An item has 32 columns of a head's
state matrix, which stay in the L1 cache for all tokens: each token reads and writes them once, and
this pass also computes the products that the next token needs. A run is the tokens of a sequence;
it reads its state from one page and writes it to another. Nothing here knows sequences, only runs
and pages.
"""

from __future__ import annotations

from numba import njit, types

from ...numpy.delta import UNIT_EPS
from ...states import NO_STATE
from . import simd
from .elementwise import scale_row, silu, sum_of_squares
from .gemm import dot_f32

F32 = types.float32
load_i64, load_f32, store, f32_of = simd.load_i64, simd.load_f32, simd.store, simd.f32_of
load16, splat, zeros = simd.load("f32", 16), simd.splat, simd.zeros
fma, mul, add, sub, div, exp = simd.fma, simd.mul, simd.add, simd.sub, simd.div, simd.exp
ONE, TWO, EPS = (simd.f32_bits(x) for x in (1.0, 2.0, float(UNIT_EPS)))
# Terms of log(1 + y) = 2 artanh(z), z = y / (2 + y), by powers of z^2: enough for y up to 1
LOG_TERMS = [simd.f32_bits(2 / n) for n in (13, 11, 9, 7, 5, 3, 1)]
L13, L11, L9, L7, L5, L3, L1 = LOG_TERMS
NO_PAGE, prefetch = NO_STATE, simd.prefetch(3)
AHEAD = 3  # tokens: q, k and v are prefetched so far ahead


# The convolution


@njit
def copy_row(source, to, n):
    """Copies n numbers, a multiple of 16."""
    for i in range(0, 4 * n, 64):
        store(to + i, load16(source + i))


@njit
def ask_for(row, n):
    """Prefetches n numbers; the processor's own prefetcher is too late, as tokens are far apart."""
    for i in range(0, 4 * n, 64):
        prefetch(row + i)


@njit
def seen_row(history, before, at, pitch, size, i):
    """The address of row i of the convolution's input: `before` rows of the state, then tokens."""
    return history + 4 * size * i if i < before else at + (i - before) * pitch


@njit
def convolve_row(history, at, pitch, size, taps, weights, t):
    """silu of token t's row with those before it, in place; weights[taps] are `pitch` apart."""
    before = taps - 1
    own = at + t * pitch
    for i in range(0, 4 * size, 64):
        acc = mul(load16(own + i), load16(weights + before * pitch + i))
        for tap in range(before):
            row = seen_row(history, before, at, pitch, size, t + tap)
            acc = fma(load16(row + i), load16(weights + tap * pitch + i), acc)
        store(own + i, silu(acc))


@njit
def make_unit(row, size, is_query):
    """Scales a head to length 1, or to 1 / sqrt(S) if it is a query."""
    length = (sum_of_squares(row, size, F32(0)) + f32_of(EPS)) ** F32(0.5)
    factor = F32(1) / F32(length)
    if is_query:
        factor = factor / F32(F32(size) ** F32(0.5))
    scale_row(row, size, F32(factor))


@njit
def convolve(arguments, begin, end, out, scratch):
    """Arguments: x f32 [T, C], C, S, Hk, taps, weights [taps, C], runs, pages, the layer's first
    state, bytes of one. An item is a run and S channels, a head of q, k or v: changed in place,
    from the last token on, because a token sees those before it.
    """
    x, channels, size = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    n_k_head, taps, weights = (
        load_i64(arguments + 24),
        load_i64(arguments + 32),
        load_i64(arguments + 40),
    )
    runs, pages = load_i64(arguments + 48), load_i64(arguments + 56)
    states, state_bytes = load_i64(arguments + 64), load_i64(arguments + 72)
    heads, pitch, before = channels // size, 4 * channels, taps - 1
    for item in range(begin, end):
        run, head = item // heads, item % heads
        first, count = load_i64(runs + 16 * run), load_i64(runs + 16 * run + 8)
        old, new = load_i64(pages + 16 * run), load_i64(pages + 16 * run + 8)
        of_head = 4 * size * head
        at = x + first * pitch + of_head
        for i in range(before):
            if old == NO_PAGE:
                for j in range(0, 4 * size, 64):
                    store(scratch + 4 * size * i + j, zeros())
            else:
                kept = states + old * state_bytes + i * pitch + of_head
                copy_row(kept, scratch + 4 * size * i, size)
        for i in range(before):
            last = seen_row(scratch, before, at, pitch, size, count + i)
            copy_row(last, states + new * state_bytes + i * pitch + of_head, size)
        for t in range(count - 1, -1, -1):
            ask_for(at + (t - taps - AHEAD) * pitch, size)
            convolve_row(scratch, at, pitch, size, taps, weights + of_head, t)
            if head < 2 * n_k_head:
                make_unit(at + t * pitch, size, head < n_k_head)


# The rule


@njit
def log_of_1_plus(y):
    """ln(1 + y) of 16 numbers from 0 to 1."""
    z = div(y, add(splat(f32_of(TWO)), y))
    w = mul(z, z)
    acc = fma(splat(f32_of(L13)), w, splat(f32_of(L11)))
    acc = fma(acc, w, splat(f32_of(L9)))
    acc = fma(acc, w, splat(f32_of(L7)))
    acc = fma(acc, w, splat(f32_of(L5)))
    acc = fma(acc, w, splat(f32_of(L3)))
    return mul(fma(acc, w, splat(f32_of(L1))), z)


@njit
def softplus(x):
    """ln(1 + exp(x)) of 16 numbers."""
    small = log_of_1_plus(exp(sub(zeros(), simd.absolute(x))))
    return add(simd.larger(x, zeros()), small)


@njit
def load_gates(arguments, token, head, n, to):
    """to[2, 16]: sigmoid(beta) and exp(a softplus(alpha + dt)) of a head and up to 16 tokens."""
    n_v, a = load_i64(arguments + 32), load_f32(load_i64(arguments + 64) + 4 * head)
    dt = load_f32(load_i64(arguments + 72) + 4 * head)
    for i in range(16):
        at = 4 * ((token + min(i, n - 1)) * n_v + head)
        store(to + 4 * i, load_f32(load_i64(arguments + 48) + at))
        store(to + 64 + 4 * i, load_f32(load_i64(arguments + 56) + at) + dt)
    one = splat(f32_of(ONE))
    store(to, div(one, add(one, exp(sub(zeros(), load16(to))))))
    store(to + 64, exp(mul(splat(a), softplus(load16(to + 64)))))


@njit
def pass_32(source, source_step, to, to_step, n, decay, k, change, next_k, next_q, sums):
    """32 columns of n rows: M = decay M + k change^T, from `source` to `to`; sums[2, 32]: M^T
    next_k and M^T next_q.
    """
    wide = splat(decay)
    c0, c1 = load16(change), load16(change + 64)
    r0, r1, p0, p1 = zeros(), zeros(), zeros(), zeros()
    for i in range(n):
        of_k = splat(load_f32(k + 4 * i))
        r, p = splat(load_f32(next_k + 4 * i)), splat(load_f32(next_q + 4 * i))
        m0, m1 = mul(load16(source), wide), mul(load16(source + 64), wide)
        m0, m1 = fma(of_k, c0, m0), fma(of_k, c1, m1)
        store(to, m0)
        store(to + 64, m1)
        r0, r1, p0, p1 = fma(r, m0, r0), fma(r, m1, r1), fma(p, m0, p0), fma(p, m1, p1)
        source, to = source + source_step, to + to_step
    store(sums, r0)
    store(sums + 64, r1)
    store(sums + 128, p0)
    store(sums + 192, p1)


@njit
def pass_16(source, source_step, to, to_step, n, decay, k, change, next_k, next_q, sums):
    """`pass_32` for 16 columns; the second sums are 128 bytes after the first."""
    wide, c = splat(decay), load16(change)
    r0, p0 = zeros(), zeros()
    for i in range(n):
        m = fma(splat(load_f32(k + 4 * i)), c, mul(load16(source), wide))
        store(to, m)
        r0 = fma(splat(load_f32(next_k + 4 * i)), m, r0)
        p0 = fma(splat(load_f32(next_q + 4 * i)), m, p0)
        source, to = source + source_step, to + to_step
    store(sums, r0)
    store(sums + 128, p0)


@njit
def take_token(v, sums, beta, decay, product, width, change, out):
    """change = beta (v - decay M^T k), out = decay M^T q + (q k) change, of up to 32 columns."""
    wide_beta, wide_decay, of_q = splat(beta), splat(decay), splat(product)
    for i in range(0, 4 * width, 64):
        read = mul(wide_decay, load16(sums + i))
        c = mul(wide_beta, sub(load16(v + i), read))
        store(change + i, c)
        store(out + i, fma(of_q, c, mul(wide_decay, load16(sums + 128 + i))))


@njit
def recur(arguments, begin, end, out, scratch):
    """Arguments: u f32 [T, C], C, S, Hk, Hv, 1 if key heads take turns, beta and alpha [T, Hv], a
    and dt [Hv], runs, pages, the layer's first state, bytes of one, o [T, Hv, S]. An item is a run,
    a value head and 32 columns of its matrix, or 16 where S is no multiple of 32. Of scratch: gates
    [2, 16], change [32], sums [2, 32], columns [S, 32].
    """
    size, n_k, n_v = (
        load_i64(arguments + 16),
        load_i64(arguments + 24),
        load_i64(arguments + 32),
    )
    width = 32 if size % 32 == 0 else 16
    blocks = size // width
    for item in range(begin, end):
        run, head, block = item // blocks // n_v, item // blocks % n_v, item % blocks
        key = head % n_k if load_i64(arguments + 40) != 0 else head // (n_v // n_k)
        of_run(arguments, run, head, key, 4 * width * block, width, scratch)


@njit
def of_run(arguments, run, head, key, column, width, scratch):
    """All tokens of a run for some columns of a head's matrix. column: bytes before the first."""
    pitch, size = 4 * load_i64(arguments + 8), load_i64(arguments + 16)
    n_k, n_v = load_i64(arguments + 24), load_i64(arguments + 32)
    runs, pages = load_i64(arguments + 80) + 16 * run, load_i64(arguments + 88) + 16 * run
    first, count = load_i64(runs), load_i64(runs + 8)
    q = load_i64(arguments) + first * pitch + 4 * size * key
    k, v = q + 4 * size * n_k, q + 4 * size * (2 * n_k + head - key) + column
    o = load_i64(arguments + 112) + 4 * size * (first * n_v + head) + column
    gates, change, sums, columns = scratch, scratch + 128, scratch + 256, scratch + 512
    last = load_i64(arguments + 96) + 4 * size * size * head + column
    source, step = last + load_i64(pages) * load_i64(arguments + 104), 4 * size
    last += load_i64(pages + 8) * load_i64(arguments + 104)
    if load_i64(pages) == NO_PAGE:
        source, step = columns, 128
        for i in range(0, 128 * size, 64):
            store(columns + i, zeros())
    store(change, zeros())
    store(change + 64, zeros())
    decay = F32(1)
    for t in range(-1, count):  # t = -1 only computes the products for token 0
        if t >= 0:
            if t % 16 == 0:
                load_gates(arguments, first + t, head, count - t, gates)
            beta, decay = load_f32(gates + t % 16 * 4), load_f32(gates + 64 + t % 16 * 4)
            take_token(v, sums, beta, decay, dot_f32(q, k, size), width, change, o)
            ask_for(q + AHEAD * pitch, size)
            ask_for(k + AHEAD * pitch, size)
            ask_for(v + AHEAD * pitch, width)
            v, o = v + pitch, o + 4 * size * n_v
        following = pitch if 0 <= t < count - 1 else 0
        to, to_step = (columns, 128) if t + 1 < count else (last, 4 * size)
        next_k, next_q = k + following, q + following
        if width == 32:
            pass_32(source, step, to, to_step, size, decay, k, change, next_k, next_q, sums)
        else:
            pass_16(source, step, to, to_step, size, decay, k, change, next_k, next_q, sums)
        q, k, source, step = next_q, next_k, columns, 128
