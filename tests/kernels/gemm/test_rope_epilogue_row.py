"""The RoPE epilogue of the decode GEMM, and attention on its output: bitwise equal to separate
kernels.
"""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import (
    Attention,
    Pages,
    Sequences,
    Turn,
    fill,
    frequencies,
    heads,
    random,
    rope_kv,
)
from kernel_buffers import Output, upload
from tile_cases import Weights, limits, multiply

from ggpy.kernels.attention.rope_kv import RopeEpilogueRows
from ggpy.kernels.gemm.gemm_decode import GemmDecode

HEADS = heads(6, 2, 32)
PLAIN = Turn(frequencies(16), neox=False)
PARTIAL = Turn(frequencies(5), neox=False, magnitude=1.2)
BIASED = replace(PLAIN, bias=[random(n * 32, seed=n) for n in (6, 2, 2)])


def projections(names: str, columns: int) -> list[Weights]:
    """Weights of one format, or of one format for each of q, k and v."""
    each = (names.split() * 3)[:3]
    return [
        Weights(name, n * 32, columns, i)
        for i, (name, n) in enumerate(zip(each, (6, 2, 2), strict=True))
    ]


def normed(n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """f32 x[n, columns], and a norm's weight."""
    return random(n, columns, seed=3), random(columns, seed=4) + 2


@pytest.mark.parametrize("turn", [PLAIN, PARTIAL, BIASED], ids=["plain", "partial", "biased"])
@pytest.mark.parametrize("lengths", [[1], [64], [200], [65, 70]], ids=str)
@pytest.mark.parametrize("name", ["Q8_0", "F16", "Q4_K Q4_K Q6_K", "Q8_0 Q4_0 Q4_0"])
def test_rope_epilogue_equals_rope_kernel(machine, name, lengths, turn):
    s, columns = Sequences(lengths, [1] * len(lengths)), 1280
    n, (x, weight) = len(lengths), normed(len(lengths), columns)
    tiles = [w.tiled(machine) for w in projections(name, columns)]
    parts = multiply(machine, tiles, x, norm=weight, eps=1e-6)
    shaped = [part.reshape(n, -1, 32) for part in parts]
    before, inside = (Pages(machine, HEADS, s, 7.0) for _ in range(2))
    expected = rope_kv(machine, HEADS, s, turn, shaped, before)

    q = Output(machine, expected.nbytes)
    memory = inside.send(machine)
    rows = RopeEpilogueRows(q.buffer, memory, s.batch(machine), turn.on(machine), HEADS)
    options = {"norm": upload(machine, weight), "eps": 1e-6, "rope_epilogue": rows}
    product = GemmDecode(machine, limits(machine))
    assert product.holds_all_of_x(tiles[0], n, norm=True)
    outs = [q.buffer, *memory]
    product.launch(tiles, upload(machine, x), outs, n, epilogue="QKV", **options)
    assert np.array_equal(q.read(np.float16, expected.shape), expected)
    for found, wanted in zip(inside.read(), before.read(), strict=True):
        assert np.array_equal(found, wanted)


CONTEXTS = [[1], [16], [17], [130], [300, 65], [2100], [4200]]


@pytest.mark.parametrize("shape", [(4, 2, 64), (4, 1, 128), (2, 1, 256), (3, 3, 32)], ids=str)
@pytest.mark.parametrize("lengths", CONTEXTS, ids=str)
def test_attention_of_rotated_q_equals_attention_that_rotates(machine, lengths, shape):
    h, s, n = heads(*shape), Sequences(lengths, [1] * len(lengths)), len(lengths)
    turn = Turn(frequencies(h.head_size // 2), neox=False)
    pages, _, _ = fill(machine, h, s)
    counts = (h.n_head, h.n_head_kv, h.n_head_kv)
    parts = [random(n, count, h.head_size, seed=i) for i, count in enumerate(counts)]
    inside = Attention(machine, h).run(s, pages, turn=turn, parts=parts, scale=0.125)
    q = rope_kv(machine, h, s, turn, parts, pages)
    pages.k, pages.v = pages.read()
    o = Attention(machine, h).run(s, pages, q=q, rotated=True, scale=0.125)
    assert np.array_equal(o, inside)


def test_attention_under_sanitizers(emulated):
    test_attention_of_rotated_q_equals_attention_that_rotates(emulated, [130], (3, 1, 64))
    test_attention_of_rotated_q_equals_attention_that_rotates(emulated, [2100], (3, 1, 64))


def test_rope_epilogue_under_sanitizers(emulated):
    test_rope_epilogue_equals_rope_kernel(emulated, "Q8_0", [65, 70], BIASED)
