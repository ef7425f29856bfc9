"""Routing, pairs and sums of a mixture of experts, as kernels of the pool (see products.py).

A pair is a token and one of its J experts; pair t * J + j is the j-th choice of token t. With many
pairs, they are the columns of an expert's GEMM: blocks of up to V vectors of 16 lanes, in which
each lane is a pair or empty. Formulas are those of backends/numpy/moe.py. Nothing here knows
formats.
"""

from __future__ import annotations

from numba import njit, types

from . import simd
from .elementwise import activated
from .gemm import dot_f32, multiply_item

F32 = types.float32
load_i64, load_i32, load_f32, store = simd.load_i64, simd.load_i32, simd.load_f32, simd.store
load16, splat, f32_of = simd.load("f32", 16), simd.splat, simd.f32_of
fma, mul, add, sub, div, exp = simd.fma, simd.mul, simd.add, simd.sub, simd.div, simd.exp
LOWEST, ONE = simd.f32_bits(float("-inf")), simd.f32_bits(1.0)
LEAST_SUM = simd.f32_bits(2.0**-14)  # as experts.LEAST_SUM


@njit
def softmax(x, n):
    """The softmax of n numbers, in place; -infinity must follow them up to a multiple of 16."""
    largest = f32_of(LOWEST)
    for i in range(n):
        largest = max(largest, load_f32(x + 4 * i))
    acc, wide = simd.zeros(), splat(largest)
    for i in range((n + 15) // 16):
        found = exp(sub(load16(x + 64 * i), wide))
        store(x + 64 * i, found)
        acc = add(acc, found)
    whole = splat(simd.total(acc))
    for i in range((n + 15) // 16):
        store(x + 64 * i, div(load16(x + 64 * i), whole))


@njit
def sigmoids(x, n):
    """1 / (1 + exp(-x)) of n numbers, rounded up to 16, in place."""
    one = splat(f32_of(ONE))
    for i in range((n + 15) // 16):
        store(x + 64 * i, div(one, add(one, exp(sub(simd.zeros(), load16(x + 64 * i))))))


@njit
def scored(x, n, score):
    """n numbers as scores, in place: 0 a softmax, 1 sigmoids."""
    if score == 0:
        softmax(x, n)
    else:
        sigmoids(x, n)


@njit
def best_of(x, begin, end, fallback):
    """The index of the largest of x[begin..end], the first of equal ones; `fallback` if all are
    -infinity or NaN.
    """
    best, largest = fallback, f32_of(LOWEST)
    for i in range(begin, end):
        if load_f32(x + 4 * i) > largest:
            best, largest = i, load_f32(x + 4 * i)
    return best


@njit
def leave_groups(choice, n, n_group, n_used, sums):
    """Writes -infinity to choice[n], except in the n_used groups with the largest sums of their two
    best.
    """
    size = n // n_group
    for g in range(n_group):
        first = best_of(choice, g * size, g * size + size, g * size)
        value = load_f32(choice + 4 * first)
        store(choice + 4 * first, f32_of(LOWEST))
        second = best_of(choice, g * size, g * size + size, g * size)
        store(sums + 4 * g, value + load_f32(choice + 4 * second))
        store(choice + 4 * first, value)
    for _ in range(n_used):
        store(sums + 4 * best_of(sums, 0, n_group, 0), f32_of(LOWEST))
    for g in range(n_group):
        if load_f32(sums + 4 * g) != f32_of(LOWEST):
            for i in range(g * size, g * size + size):
                store(choice + 4 * i, f32_of(LOWEST))


@njit
def copied(source, n, out):
    """Copies n numbers, and writes -infinity up to a multiple of 16."""
    for i in range(n):
        store(out + 4 * i, load_f32(source + 4 * i))
    for i in range(n, (n + 15) // 16 * 16):
        store(out + 4 * i, f32_of(LOWEST))


@njit
def route(arguments, begin, end, out, scratch):
    """Arguments: logits, X, J, an id of sizes.SCORES, biases of the choice or 0, 1 to normalise,
    the scale, groups, groups that are used, ids i32, weights f32. An item is a token.
    """
    logits, n, used = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    score, bias = load_i64(arguments + 24), load_i64(arguments + 32)
    n_group, n_used = load_i64(arguments + 56), load_i64(arguments + 64)
    ids, weights = load_i64(arguments + 72), load_i64(arguments + 80)
    padded = 4 * ((n + 15) // 16 * 16)
    choice, chosen = scratch + padded, scratch + 2 * padded
    for token in range(begin, end):
        copied(logits + 4 * n * token, n, scratch)
        if score < 2:
            scored(scratch, n, score)
        copied(scratch, n, choice)
        if bias != 0:
            for i in range(n):
                store(choice + 4 * i, load_f32(choice + 4 * i) + load_f32(bias + 4 * i))
        if n_group > 1:
            leave_groups(choice, n, n_group, n_used, chosen)
        choose(scratch, choice, n, used, ids + 4 * used * token, chosen)
        if score >= 2:
            scored(chosen, used, score - 2)
        weigh(chosen, used, arguments, weights + 4 * used * token)


@njit
def choose(scores, choice, n, used, ids, chosen):
    """Writes the ids of the `used` largest of choice[n], and their scores."""
    copied(scores, 0, chosen)
    for j in range(used):
        best = best_of(choice, 0, n, j)
        store(choice + 4 * best, f32_of(LOWEST))
        simd.store_i32(ids + 4 * j, best)
        store(chosen + 4 * j, load_f32(scores + 4 * best))
    for j in range(used, (used + 15) // 16 * 16):
        store(chosen + 4 * j, f32_of(LOWEST))


@njit
def weigh(chosen, used, arguments, weights):
    """Writes the weights of the chosen experts, from their scores. arguments: of `route`."""
    factor, whole = f32_of(load_i64(arguments + 48)), F32(0)
    for j in range(used):
        whole += load_f32(chosen + 4 * j)
    whole = max(whole, f32_of(LEAST_SUM))
    for j in range(used):
        weight = load_f32(chosen + 4 * j)
        if load_i64(arguments + 40) != 0:
            weight = weight / whole
        store(weights + 4 * j, weight * factor)


@njit
def weigh_rows(arguments, begin, end, out, scratch):
    """Arguments: x, numbers of a row, J, weights. An item is a pair: its token's row times the
    weight.
    """
    x, n, used = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    for pair in range(begin, end):
        weight = load_f32(load_i64(arguments + 24) + 4 * pair)
        for i in range(n):
            store(out + 4 * i, load_f32(x + 4 * (n * (pair // used) + i)) * weight)
        out += 4 * n


@njit
def add_chosen(arguments, begin, end, out, scratch):
    """Arguments: y, numbers of a row, biases[X, n], ids. An item is a pair: y plus the bias of its
    expert.
    """
    y, n = load_i64(arguments), load_i64(arguments + 8)
    for pair in range(begin, end):
        bias = load_i64(arguments + 16) + 4 * n * load_i32(load_i64(arguments + 24) + 4 * pair)
        for i in range(n):
            store(out + 4 * i, load_f32(y + 4 * (n * pair + i)) + load_f32(bias + 4 * i))
        out += 4 * n


@njit
def gate_rows(arguments, begin, end, out, scratch):
    """Arguments: y, numbers of a row of y, n, numbers of a row of n, gate. An item is a row of y,
    times the sigmoid of n's product with the gate.
    """
    y, size, n = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    k, gate = load_i64(arguments + 24), load_i64(arguments + 32)
    one = splat(f32_of(ONE))
    for row in range(begin, end):
        product = splat(F32(0) - dot_f32(n + 4 * k * row, gate, k))
        factor = simd.first(div(one, add(one, exp(product))))
        for i in range(size):
            store(out + 4 * i, load_f32(y + 4 * (size * row + i)) * factor)
        out += 4 * size


@njit
def combine(arguments, begin, end, out, scratch):
    """Arguments: x, numbers of a row, outputs of pairs, J, weights or 0, outputs of the shared
    expert or 0. An item is a token: x and the sum of its outputs, in the order of the choice.
    """
    x, n, y = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    used, weights, shared = (
        load_i64(arguments + 24),
        load_i64(arguments + 32),
        load_i64(arguments + 40),
    )
    for token in range(begin, end):
        for i in range(n):
            store(scratch + 4 * i, F32(0))
        for j in range(used):
            pair = used * token + j
            weight = load_f32(weights + 4 * pair) if weights != 0 else F32(1)
            add_scaled(scratch, y + 4 * n * pair, weight, n)
        if shared != 0:
            add_scaled(scratch, shared + 4 * n * token, F32(1), n)
        for i in range(n):  # out may be x
            store(out + 4 * i, load_f32(x + 4 * (n * token + i)) + load_f32(scratch + 4 * i))
        out += 4 * n


@njit
def add_scaled(out, y, factor, n):
    """out += y * factor for n numbers; the product is rounded before it is added."""
    wide = splat(factor)
    for i in range(n // 16):
        store(out + 64 * i, add(load16(out + 64 * i), mul(load16(y + 64 * i), wide)))
    for i in range(n // 16 * 16, n):
        store(out + 4 * i, load_f32(out + 4 * i) + load_f32(y + 4 * i) * factor)


# Many pairs: GEMMs of blocks of columns. A row of `blocks` is an expert and its columns, i32.


@njit
def pack_pairs(arguments, begin, end, out, scratch):
    """Arguments: x f32, bytes between its columns, K, lanes, pairs of a column. An item is a
    vector: out[K][16], zeros where a lane has no pair.
    """
    x, pitch, k = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    lanes, share = load_i64(arguments + 24), load_i64(arguments + 32)
    for item in range(begin, end):
        for lane in range(16):
            pair = load_i32(lanes + 4 * (16 * item + lane))
            source = x + pair // share * pitch
            for i in range(k):
                value = load_f32(source + 4 * i) if pair >= 0 else F32(0)
                store(out + 64 * i + 4 * lane, value)
        out += 64 * k


@njit
def multiply_blocks(arguments, begin, end, out, scratch):
    """Arguments: rows, bytes of one, rows of an expert, K, expand, packed columns, V, rows of an
    item, items of a block, blocks. An item is so many rows of a block: out[row, 16 * V].
    """
    rows, row_bytes = load_i64(arguments), load_i64(arguments + 8)
    n_rows, k, expand = (
        load_i64(arguments + 16),
        load_i64(arguments + 24),
        load_i64(arguments + 32),
    )
    x, width, item_rows = (
        load_i64(arguments + 40),
        load_i64(arguments + 48),
        load_i64(arguments + 56),
    )
    panels, blocks = load_i64(arguments + 64), load_i64(arguments + 72)
    for item in range(begin, end):
        block = item // panels
        first = (item - block * panels) * item_rows
        present = min(item_rows, n_rows - first)
        vectors = (load_i32(blocks + 8 * block + 4) + 15) // 16
        at = rows + (load_i32(blocks + 8 * block) * n_rows + first) * row_bytes
        columns = x + block * width * k * 64
        multiply_item(at, row_bytes, present, k, expand, columns, vectors, out, 64 * width, scratch)
        out += item_rows * 64 * width


@njit
def gated_blocks(arguments, begin, end, out, scratch):
    """Arguments: gate, up, rows of a block in both, V, F, the id of the activation, biases of gate
    and up or 0, blocks. An item is a vector: out[F][16].
    """
    gate, up, rows = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    width, n, kind = load_i64(arguments + 24), load_i64(arguments + 32), load_i64(arguments + 40)
    of_gate, of_up = load_i64(arguments + 48), load_i64(arguments + 56)
    blocks = load_i64(arguments + 64)
    for item in range(begin, end):
        block, v = item // width, item % width
        expert, columns = load_i32(blocks + 8 * block), load_i32(blocks + 8 * block + 4)
        if 16 * v < columns:
            at = 64 * (block * rows * width + v)
            for i in range(n):
                g, u = load16(gate + at), load16(up + at)
                if of_gate != 0:
                    g = add(g, splat(load_f32(of_gate + 4 * (expert * n + i))))
                    u = add(u, splat(load_f32(of_up + 4 * (expert * n + i))))
                store(out + 64 * i, activated(kind, g, u))
                at += 64 * width
        out += 64 * n


@njit
def unpack_pairs(arguments, begin, end, out, scratch):
    """Arguments: y of multiply_blocks, rows of a block, V, N, lanes, out[pair, N]. An item is a
    vector.
    """
    y, rows, width = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    n, lanes, to = load_i64(arguments + 24), load_i64(arguments + 32), load_i64(arguments + 40)
    for item in range(begin, end):
        source = y + 64 * (item // width * rows * width + item % width)
        for lane in range(16):
            pair = load_i32(lanes + 4 * (16 * item + lane))
            if pair >= 0:
                for i in range(n):
                    value = load_f32(source + 64 * width * i + 4 * lane)
                    store(to + 4 * (n * pair + i), value)
