"""Attention over the pages of a KV cache, as kernels of the pool.

The softmax is computed page by page (flash attention), so memory does not grow with the context. A
single token reads keys once for all query heads that share them. In prefill, 16 tokens are the
lanes of vectors, and scores and values are GEMMs with the tile of gemm.py. `expand` of the cache's
type turns a head of a position into float32. Nothing here knows sequences, only pages of tokens.
"""

from __future__ import annotations

from numba import njit, types

from ..sizes import HEAD_PITCH, PAGE, PANEL_ROWS, ROWS
from . import simd
from .elementwise import scale_row, tanh
from .gemm import dot_f32, tile

F32 = types.float32
load_i64, load_i32, load_f32, store = simd.load_i64, simd.load_i32, simd.load_f32, simd.store
f32_of, load16, splat = simd.f32_of, simd.load("f32", 16), simd.splat
mul, add, sub, div, fma, exp = simd.mul, simd.add, simd.sub, simd.div, simd.fma, simd.exp
LOWEST = simd.f32_bits(-3.0e38)  # where a running maximum starts: unlike -inf, LOWEST - LOWEST is 0

score_tile, value_tile = tile(ROWS, 1, HEAD_PITCH), tile(ROWS, 1, 4)

# Arguments of `attend_token` and `attend_block`, in this order
(
    Q,  # f32 [T, H, E]
    SINCE,  # int64 [T]: the first position that a token sees
    UNTIL,  # int64 [T]: the last position that a token sees
    TABLES,  # int64 [T]: the address of the token's page table, int32
    H,
    G,
    E,
    EV,
    SCALE,
    CAP,
    SINKS,  # f32 [H], or 0
    K_PAGES,  # address of the layer's first page; bytes of a page, a position, a head; expand
    K_PAGE,
    K_POSITION,
    K_HEAD,
    K_EXPAND,
    V_PAGES,
    V_PAGE,
    V_POSITION,
    V_HEAD,
    V_EXPAND,
    BLOCKS,  # int64 [n, 2]: the first token of a block and how many it has
) = range(22)


@njit
def argument(arguments, i):
    return load_i64(arguments + 8 * i)


@njit
def fetch(arguments, first, page, head, n, size, to):
    """n positions of a head of a page in float32, HEAD_PITCH apart; first: K_PAGES or V_PAGES."""
    at = argument(arguments, first) + page * argument(arguments, first + 1)
    at += head * argument(arguments, first + 3)
    step, expand = argument(arguments, first + 2), argument(arguments, first + 4)
    for i in range(n):
        simd.call_expand(expand, at + i * step, 0, size, to + i * HEAD_PITCH)


@njit
def capped(x, cap):
    """cap * tanh(x / cap), in all lanes."""
    wide = splat(cap)
    return mul(wide, tanh(div(x, wide)))


@njit
def add_row(acc, x, n, factor):
    """acc += x * factor for n numbers, rounded up to 16."""
    wide = splat(factor)
    for i in range((n + 15) // 16):
        store(acc + 64 * i, fma(load16(x + 64 * i), wide, load16(acc + 64 * i)))


@njit
def attend_token(arguments, begin, end, out, scratch):
    """An item is a token and a KV head: out[share, Ev], share = H / G."""
    h, g = argument(arguments, H), argument(arguments, G)
    e, ev = argument(arguments, E), argument(arguments, EV)
    share = h // g
    keys, values = scratch, scratch + PANEL_ROWS * HEAD_PITCH
    scores = values + PANEL_ROWS * HEAD_PITCH  # [share, 64]
    state = scores + share * 4 * PAGE  # [share, 2]: the largest score, the sum of weights
    acc = state + (8 * share + 63) // 64 * 64  # [share, HEAD_PITCH]
    for item in range(begin, end):
        token, head = item // g, item % g
        q = argument(arguments, Q) + 4 * e * (token * h + head * share)
        for s in range(share):
            start_state(arguments, head * share + s, state + 8 * s)
            for i in range((ev + 15) // 16):
                store(acc + s * HEAD_PITCH + 64 * i, simd.zeros())
        first = load_i64(argument(arguments, SINCE) + 8 * token)
        last = load_i64(argument(arguments, UNTIL) + 8 * token)
        table = load_i64(argument(arguments, TABLES) + 8 * token)
        for p in range(first // PAGE, last // PAGE + 1):
            page = load_i32(table + 4 * p)
            n = min(PAGE, last + 1 - p * PAGE)
            skipped = max(0, first - p * PAGE)
            fetch(arguments, K_PAGES, page, head, n, e, keys)
            fetch(arguments, V_PAGES, page, head, n, ev, values)
            for s in range(share):
                row = scores + s * 4 * PAGE
                score_page(arguments, q + 4 * e * s, keys, skipped, n, row)
                take_page(row, values, skipped, n, ev, state + 8 * s, acc + s * HEAD_PITCH)
        for s in range(share):
            scale_row(acc + s * HEAD_PITCH, ev, F32(1) / load_f32(state + 8 * s + 4))
            for i in range(ev):
                store(out + 4 * i, load_f32(acc + s * HEAD_PITCH + 4 * i))
            out += 4 * ev


@njit
def start_state(arguments, head, state):
    """The state (largest score, sum of weights) before the first page: of a sink, or empty."""
    sinks = argument(arguments, SINKS)
    if sinks != 0:
        store(state, load_f32(sinks + 4 * head))
        store(state + 4, F32(1))
    else:
        store(state, f32_of(LOWEST))
        store(state + 4, F32(0))


@njit
def score_page(arguments, q, keys, skipped, n, scores):
    """scores[64] of one query with positions skipped..n of a page; minus infinity elsewhere."""
    e, scale = argument(arguments, E), f32_of(argument(arguments, SCALE))
    cap = f32_of(argument(arguments, CAP))
    for j in range(n):
        store(scores + 4 * j, dot_f32(q, keys + j * HEAD_PITCH, e) * scale)
    if cap != F32(0):
        for i in range((n + 15) // 16):
            store(scores + 64 * i, capped(load16(scores + 64 * i), cap))
    for j in range(skipped):
        store(scores + 4 * j, F32(-3.4e38) * F32(10))
    for j in range(n, PAGE):
        store(scores + 4 * j, F32(-3.4e38) * F32(10))


@njit
def take_page(scores, values, skipped, n, ev, state, acc):
    """Adds a page's values to acc, weighted by the softmax of its scores, and updates the state."""
    a, b = load16(scores), load16(scores + 64)
    c, d = load16(scores + 128), load16(scores + 192)
    top = simd.greatest(simd.larger(simd.larger(a, b), simd.larger(c, d)))
    before = load_f32(state)
    top = max(top, before)
    wide = splat(top)
    a, b, c, d = exp(sub(a, wide)), exp(sub(b, wide)), exp(sub(c, wide)), exp(sub(d, wide))
    store(scores, a)
    store(scores + 64, b)
    store(scores + 128, c)
    store(scores + 192, d)
    factor = first_lane(exp(splat(before - top)))
    total = simd.total(add(add(a, b), add(c, d)))
    store(state, top)
    store(state + 4, load_f32(state + 4) * factor + total)
    if factor != F32(1):
        scale_row(acc, ev, factor)
    for j in range(skipped, n):
        add_row(acc, values + j * HEAD_PITCH, ev, load_f32(scores + 4 * j))


first_lane = simd.first


@njit
def attend_block(arguments, begin, end, out, scratch):
    """An item is a block of up to 16 tokens of a sequence and a KV head. It writes to [T, H, Ev],
    whose address is the argument after BLOCKS.
    """
    h, g = argument(arguments, H), argument(arguments, G)
    e, ev = argument(arguments, E), argument(arguments, EV)
    share = h // g
    keys, values = scratch, scratch + PANEL_ROWS * HEAD_PITCH
    scores = values + PANEL_ROWS * HEAD_PITCH  # [PANEL_ROWS, 16]
    queries = scores + PANEL_ROWS * 64  # [share, E, 16]
    state = queries + share * e * 64  # [share, 2, 16]
    acc = state + share * 128  # [share, Ev rounded up, 16]
    acc_bytes = (ev + ROWS - 1) // ROWS * ROWS * 64
    for item in range(begin, end):
        block, head = argument(arguments, BLOCKS) + 16 * (item // g), item % g
        first, count = load_i64(block), load_i64(block + 8)
        low = acc + share * acc_bytes  # first position that each token sees, then the last
        start_block(arguments, first, count, low)
        for s in range(share):
            at = head * share + s
            load_queries(arguments, first, count, at, queries + s * e * 64)
            start_state(arguments, at, state + s * 128)
            top, weight = load_f32(state + s * 128), load_f32(state + s * 128 + 4)
            store(state + s * 128, splat(top))
            store(state + s * 128 + 64, splat(weight))
            for i in range(0, acc_bytes, 64):
                store(acc + s * acc_bytes + i, simd.zeros())
        table = load_i64(argument(arguments, TABLES) + 8 * first)
        begin_at = load_i64(argument(arguments, SINCE) + 8 * first)
        last = load_i64(argument(arguments, UNTIL) + 8 * (first + count - 1))
        for p in range(begin_at // PAGE, last // PAGE + 1):
            page, n = load_i32(table + 4 * p), min(PAGE, last + 1 - p * PAGE)
            skipped = max(0, begin_at - p * PAGE)
            fetch(arguments, K_PAGES, page, head, n, e, keys)
            fetch(arguments, V_PAGES, page, head, n, ev, values)
            for s in range(share):
                lane_scores(arguments, keys, queries + s * e * 64, p * PAGE, n, low, scores)
                to = acc + s * acc_bytes
                take_lanes(scores, values, skipped, n, ev, state + s * 128, to)
        for s in range(share):
            to = argument(arguments, BLOCKS + 1) + 4 * ev * (first * h + head * share + s)
            write_lanes(acc + s * acc_bytes, state + s * 128, count, ev, 4 * ev * h, to)


@njit
def start_block(arguments, first, count, low):
    """low[2, 16]: the first and the last position that each token sees, in float32."""
    for lane in range(16):
        token = first + min(lane, count - 1)
        store(low + 4 * lane, F32(load_i64(argument(arguments, SINCE) + 8 * token)))
        store(low + 64 + 4 * lane, F32(load_i64(argument(arguments, UNTIL) + 8 * token)))


@njit
def load_queries(arguments, first, count, head, to):
    """Transposes a head of up to 16 tokens to to[E, 16]."""
    h, e = argument(arguments, H), argument(arguments, E)
    for lane in range(16):
        q = argument(arguments, Q) + 4 * e * ((first + min(lane, count - 1)) * h + head)
        for i in range(e):
            store(to + 64 * i + 4 * lane, load_f32(q + 4 * i))


@njit
def lane_scores(arguments, keys, queries, start, n, low, scores):
    """scores[n, 16] of positions start..start + n for 16 tokens; minus infinity where a token does
    not see a position.
    """
    e, scale = argument(arguments, E), splat(f32_of(argument(arguments, SCALE)))
    cap = f32_of(argument(arguments, CAP))
    since, until = load16(low), load16(low + 64)
    for r in range(0, n, ROWS):
        score_tile(keys + r * HEAD_PITCH, 4, queries, queries, e, scores + 64 * r, 64, 1)
    for j in range(n):
        value = mul(load16(scores + 64 * j), scale)
        if cap != F32(0):
            value = capped(value, cap)
        store(scores + 64 * j, simd.within(value, splat(F32(start + j)), since, until))


@njit
def take_lanes(scores, values, skipped, n, ev, state, acc):
    """`take_page` for 16 tokens."""
    before = load16(state)
    top = before
    for j in range(skipped, n):
        top = simd.larger(top, load16(scores + 64 * j))
    total = simd.zeros()
    for j in range(skipped, n):
        weight = exp(sub(load16(scores + 64 * j), top))
        store(scores + 64 * j, weight)
        total = add(total, weight)
    factor = exp(sub(before, top))
    store(state, top)
    store(state + 64, fma(load16(state + 64), factor, total))
    for i in range(ev):
        store(acc + 64 * i, mul(load16(acc + 64 * i), factor))
    for r in range(0, ev, ROWS):
        a, b = values + 4 * r + skipped * HEAD_PITCH, scores + 64 * skipped
        value_tile(a, HEAD_PITCH, b, b, n - skipped, acc + 64 * r, 64, 0)


@njit
def write_lanes(acc, state, count, ev, pitch, out):
    """out[token, Ev] = acc[Ev, token] / total."""
    total = load16(state + 64)
    for i in range(ev):
        store(acc + 64 * i, div(load16(acc + 64 * i), total))
    for lane in range(count):
        for i in range(ev):
            store(out + lane * pitch + 4 * i, load_f32(acc + 64 * i + 4 * lane))
