"""q, k and v that the product which makes them rotates and writes to pages: the bits of a product
and a rotation behind it. Only a GPU can run it; what it has to know of tokens, everything can find.
"""

from dataclasses import replace

import numpy as np
import packed_products
import pytest
from attention_cases import PAGE, Pages, Sequences, Turn, frequencies, heads, random, rope_kv
from kernel_buffers import Output
from tile_cases import Weights, tokens

from ggpy.kernels.mul_mat_wgmma import MulMatWgmma
from ggpy.kernels.pack import order_of
from ggpy.kernels.rope_kv import RopeKv, Turning, turns_bytes
from ggpy.kernels.schedule import Cut

STEP = Sequences(lengths=[70, 1, 300, 90], n_tokens=[7, 1, 255, 12])  # 275 tokens
CUTS = [Cut(t, s) for t in (128, 256) for s in (False, True)]
CUTS += [Cut(256, False, pairs=True), Cut(128, True, pieces=2)]


def found_turns(device, h, s, turn):
    """What products are told: Turning, and its numbers [T, n_pairs, 2] and [T] as they are read."""
    n, rotation = len(s.positions), turn.on(device)
    turns = Output(device, turns_bytes(n, rotation.n_pairs))
    rows = Output(device, 4 * n)
    kernel = RopeKv(device, h)
    kernel.find_turns(rotation, s.batch(device), n, turns.buffer, rows.buffer)
    turning = Turning(turns.buffer, rows.buffer, rotation, h)
    return turning, turns.read(np.float32, (n, rotation.n_pairs, 2)), rows.read(np.int32, (n,))


@pytest.mark.parametrize("n_pairs", [2, 6, 64])
def test_turns_are_found(machine, n_pairs):
    turn, h = Turn(frequencies(n_pairs), neox=False), heads(4, 3, 128)
    _, turns, rows = found_turns(machine, h, STEP, turn)
    angle = STEP.positions.astype(np.float64)[:, None] * turn.inv_freq
    np.testing.assert_allclose(turns[..., 0], np.cos(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(turns[..., 1], np.sin(angle), rtol=0, atol=3e-7)
    page = STEP.tables[STEP.sequences, STEP.positions // PAGE]
    assert np.array_equal(rows, page * 3 * PAGE + STEP.positions % PAGE)


def check(device, name, h, turn, cut, columns=1024, scaled=False):
    """Against the product that stores floats and rope_kv, bit by bit; nothing else is written."""
    size, product = h.head_size, MulMatWgmma(device, device.sm_count)
    n, counts = len(STEP.positions), (h.n_head, h.n_head_kv, h.n_head_kv)
    weights = [Weights(name, m * size, columns, seed) for seed, m in enumerate(counts)]
    tiles = [w.scaled(device) if scaled else w.tiled(device) for w in weights]
    x = (tokens(n, columns) / 64).astype(np.float16)
    parts = packed_products.multiply(product, tiles, x, cut=cut)
    parts = [y.reshape(n, m, size) for y, m in zip(parts, counts, strict=True)]
    before = Pages(device, h, STEP, np.nan)
    q = rope_kv(device, h, STEP, turn, parts, before)

    pages, out = Pages(device, h, STEP, np.nan), Output(device, q.nbytes)
    turning, *_ = found_turns(device, h, STEP, turn)
    operand = packed_products.packed(device, x, order_of(tiles[0].layout))
    outs = [out.buffer, *pages.send(device)]
    options = {"epilogue": "QKV", "turning": turning, "cut": cut}
    product.launch(tiles, operand, outs, n, **options)
    assert np.array_equal(out.read(np.float16, q.shape), q)
    for mine, theirs in zip(pages.read(), before.read(), strict=True):
        assert np.array_equal(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut(hopper, cut):
    check(hopper, "Q8_0", heads(8, 2, 128), Turn(frequencies(64), False), cut)


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size, n_pairs", [(32, 16), (64, 32), (96, 48), (128, 20), (256, 128)])
def test_sizes_of_heads(hopper, name, size, n_pairs):
    """Those that turn in part, and that share blocks of 128 rows."""
    h = heads(8, 4, size)
    check(hopper, name, h, Turn(frequencies(n_pairs), False, 1.3), Cut(256, False))


@pytest.mark.parametrize("name", ["I8", "Q8_0"])
def test_scales_of_rows_and_biases(hopper, name):
    h = heads(4, 2, 64)
    bias = [random(m * 64, seed=m) * 3 for m in (4, 2, 2)]
    turn = Turn(frequencies(32), False, bias=bias)
    check(hopper, name, h, turn, Cut(128, False), scaled=name == "I8")


def test_which_heads_a_product_turns(emulator):
    rope, turn = RopeKv(emulator, heads(4, 2, 64)), Turn(frequencies(32), False).on(emulator)
    assert rope.product_turns(turn)
    assert not rope.product_turns(replace(turn, neox=True))
    assert not rope.product_turns(replace(turn, n_pairs=31))
    assert not rope.product_turns(replace(turn, norm=(None, emulator.alloc(256))))
    for other in (heads(8, 8, 80), heads(4, 3, 64), heads(3, 2, 64)):
        assert not RopeKv(emulator, other).product_turns(turn)


def test_what_is_rotated_is_said(emulator):
    w, x = Weights("Q8_0", 128, 128).tiled(emulator), emulator.alloc(16, "x")
    for epilogue, n in (("QKV", 3), ("STORE", 3), ("QKV", 1)):
        turning = None
        if (epilogue, n) != ("QKV", 3):
            turning = Turning(x, x, Turn(frequencies(32), False).on(emulator), heads(1, 1, 64))
        with pytest.raises(ValueError, match="rotated by one product"):
            MulMatWgmma(emulator, 132).launch(
                [w] * n, x, [x] * n, 40, epilogue=epilogue, turning=turning
            )
