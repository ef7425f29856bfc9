"""q, k and v that the product which makes them rotates and writes to pages: the bits of a product
and a rotation behind it. Only a GPU can run it; what it has to know of tokens, everything can find.
"""

from dataclasses import replace

import numpy as np
import packed_products
import pytest
import w8a8_cases
from attention_cases import PAGE, Pages, Sequences, Turn, frequencies, heads, random, rope_kv
from kernel_buffers import Output
from tile_cases import Weights, tokens
from w8a8_cases import ByteMatrix

from ggpy.kernels.attention.rope_kv import RopeKv, Turning, turns_bytes
from ggpy.kernels.gemm.gemm_wgmma import MulMatWgmma
from ggpy.kernels.gemm.tile_scheduler import Cut
from ggpy.kernels.layout.pack import order_of
from ggpy.kernels.w8a8.w8a8_wgmma import MulMatW8A8Wgmma

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
    page, slot = STEP.place(STEP.sequences, STEP.positions)
    assert np.array_equal(rows, page * 3 * PAGE + slot)


def counts(h):
    """Heads of q, k and v."""
    return h.n_head, h.n_head_kv, h.n_head_kv


def same(device, h, turn, parts, launch):
    """Whether launch(outs, turning) leaves what rope_kv makes of parts [T, rows], bit by bit, and
    writes nothing else.
    """
    n = len(STEP.positions)
    parts = [y.reshape(n, m, h.head_size) for y, m in zip(parts, counts(h), strict=True)]
    before = Pages(device, h, STEP, np.nan)
    q = rope_kv(device, h, STEP, turn, parts, before)
    pages, out = Pages(device, h, STEP, np.nan), Output(device, q.nbytes)
    turning, *_ = found_turns(device, h, STEP, turn)
    launch([out.buffer, *pages.send(device)], turning)
    both = zip(pages.read(), before.read(), strict=True)
    written = all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in both)
    return written and np.array_equal(out.read(np.float16, q.shape), q)


def check(device, name, h, turn, cut, columns=1024, scaled=False):
    """Against the product that stores floats, and rope_kv."""
    product, n = MulMatWgmma(device, device.sm_count), len(STEP.positions)
    weights = [Weights(name, m * h.head_size, columns, s) for s, m in enumerate(counts(h))]
    tiles = [w.scaled(device) if scaled else w.tiled(device) for w in weights]
    x = (tokens(n, columns) / 64).astype(np.float16)
    parts = packed_products.multiply(product, tiles, x, cut=cut)
    operand = packed_products.packed(device, x, order_of(tiles[0].layout))

    def launch(outs, turning):
        product.launch(tiles, operand, outs, n, epilogue="QKV", turning=turning, cut=cut)

    assert same(device, h, turn, parts, launch)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut(hopper, cut):
    check(hopper, "Q8_0", heads(8, 2, 128), Turn(frequencies(64), False), cut)


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size, n_pairs", [(32, 16), (64, 32), (96, 48), (128, 20), (256, 128)])
def test_sizes_of_heads(hopper, name, size, n_pairs):
    """Those that turn in part, and that share blocks of 128 rows."""
    h = heads(8, 4, size)
    check(hopper, name, h, Turn(frequencies(n_pairs), False, 1.3), Cut(256, False))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_of_halves(hopper, cut):
    check(hopper, "Q8_0", heads(8, 2, 128), Turn(frequencies(64), neox=True), cut)


@pytest.mark.parametrize("size, n_pairs", [(32, 16), (64, 32), (64, 10), (128, 64), (128, 20)])
def test_halves_that_turn(hopper, size, n_pairs):
    """Of heads that lie in a block of 128 rows in whole, with biases."""
    h = heads(8, 4, size)
    bias = [random(m * size, seed=m) * 3 for m in counts(h)]
    turn = Turn(frequencies(n_pairs), True, 1.3, bias)
    check(hopper, "Q4_K", h, turn, Cut(256, False, pairs=True))


W8A8_CUTS = [("int8", 256, False), ("int8", 128, True), ("e4m3", 128, False), ("e4m3", 64, True)]


@pytest.mark.parametrize("neox", [False, True], ids=["adjacent", "halves"])
@pytest.mark.parametrize("kind, size, split", W8A8_CUTS)
def test_activations_of_8_bits(hopper, kind, size, split, neox):
    h = heads(8, 2, 128)
    bias = [random(m * 128, seed=m) * 3 for m in counts(h)]
    turn, n = Turn(frequencies(64), neox, 1.3, bias), len(STEP.positions)
    product = MulMatW8A8Wgmma(hopper, hopper.sm_count)
    weights = [ByteMatrix(kind, m * 128, 1056, s) for s, m in enumerate(counts(h))]
    tiles = [w.tiled(hopper) for w in weights]
    x = w8a8_cases.quantize(hopper, w8a8_cases.activations(n, 1056), kind)
    options = {"cut": Cut(size, split, alone=True)}
    parts = w8a8_cases.multiply(product, tiles, x, **options)

    def launch(outs, turning):
        product.launch(tiles, x, outs, epilogue="QKV", turning=turning, **options)

    assert same(hopper, h, turn, parts, launch)


@pytest.mark.parametrize("name", ["I8", "Q8_0"])
def test_scales_of_rows_and_biases(hopper, name):
    h = heads(4, 2, 64)
    bias = [random(m * 64, seed=m) * 3 for m in (4, 2, 2)]
    turn = Turn(frequencies(32), False, bias=bias)
    check(hopper, name, h, turn, Cut(128, False), scaled=name == "I8")


def test_which_heads_a_product_turns(emulator):
    rope, turn = RopeKv(emulator, heads(4, 2, 64)), Turn(frequencies(32), False).on(emulator)
    assert rope.product_turns(turn)
    assert not rope.product_turns(replace(turn, n_pairs=31))
    assert not rope.product_turns(replace(turn, norm=(None, emulator.alloc(256))))
    for other in (heads(8, 8, 80), heads(4, 3, 64), heads(3, 2, 64)):
        assert not RopeKv(emulator, other).product_turns(turn)
    for size, fits in ((64, True), (128, True), (96, False), (256, False)):
        one = RopeKv(emulator, heads(8, 4, size))
        assert one.product_turns(turn)
        assert one.product_turns(replace(turn, neox=True)) == fits


def test_what_is_rotated_is_said(emulator):
    x = emulator.alloc(16, "x")
    whole, part = (Weights("Q8_0", rows, 128).tiled(emulator) for rows in (128, 64))
    how = Turning(x, x, Turn(frequencies(32), False).on(emulator), heads(1, 1, 64))
    said = "rotated by one product"
    for epilogue, turning, w, n, message in (
        ("QKV", None, whole, 3, said),
        ("STORE", how, whole, 3, said),
        ("QKV", how, whole, 1, said),
        ("QKV", how, part, 3, "multiples of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            MulMatWgmma(emulator, 132).launch(
                [w] * n, x, [x] * n, 40, epilogue=epilogue, turning=turning
            )
