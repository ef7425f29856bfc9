"""The RoPE epilogue of the prefill GEMM: bitwise equal to a GEMM and rope_kv after it. Only a
Hopper GPU can run it; every machine can compute the angles and rows that it reads.
"""

from dataclasses import replace

import numpy as np
import packed_gemm_cases
import pytest
import w8a8_cases
from attention_cases import PAGE, Pages, Sequences, Turn, frequencies, heads, random, rope_kv
from kernel_buffers import Output
from tile_cases import Weights, tokens
from w8a8_cases import ByteMatrix

from ggpy.kernels.attention.rope_kv import RopeEpilogue, RopeKv, angles_bytes
from ggpy.kernels.gemm.gemm_wgmma import GemmWgmma
from ggpy.kernels.gemm.tile_scheduler import Tiling
from ggpy.kernels.layout.pack import order_of
from ggpy.kernels.w8a8.w8a8_wgmma import W8A8Wgmma

STEP = Sequences(lengths=[70, 1, 300, 90], n_tokens=[7, 1, 255, 12])  # 275 tokens
TILINGS = [Tiling(t, s) for t in (128, 256) for s in (False, True)]
TILINGS += [Tiling(256, False, pairs=True), Tiling(128, True, split_k=2)]


def computed_angles(device, h, s, turn):
    """The RopeEpilogue of a GEMM, and the angles [T, n_pairs, 2] and rows [T] that it points to."""
    n, rotation = len(s.positions), turn.on(device)
    angles = Output(device, angles_bytes(n, rotation.n_pairs))
    rows = Output(device, 4 * n)
    kernel = RopeKv(device, h)
    kernel.compute_angles(rotation, s.batch(device), n, angles.buffer, rows.buffer)
    rope_epilogue = RopeEpilogue(angles.buffer, rows.buffer, rotation, h)
    return (
        rope_epilogue,
        angles.read(np.float32, (n, rotation.n_pairs, 2)),
        rows.read(np.int32, (n,)),
    )


@pytest.mark.parametrize("n_pairs", [2, 6, 64])
def test_angles_and_rows(machine, n_pairs):
    turn, h = Turn(frequencies(n_pairs), neox=False), heads(4, 3, 128)
    _, angles, rows = computed_angles(machine, h, STEP, turn)
    angle = STEP.positions.astype(np.float64)[:, None] * turn.inv_freq
    np.testing.assert_allclose(angles[..., 0], np.cos(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(angles[..., 1], np.sin(angle), rtol=0, atol=3e-7)
    page, slot = STEP.place(STEP.sequences, STEP.positions)
    assert np.array_equal(rows, page * 3 * PAGE + slot)


def counts(h):
    """Heads of q, k and v."""
    return h.n_head, h.n_head_kv, h.n_head_kv


def same(device, h, turn, parts, launch):
    """Whether launch(outs, rope_epilogue) stores what rope_kv makes of parts [T, rows], bitwise,
    and nothing else.
    """
    n = len(STEP.positions)
    parts = [y.reshape(n, m, h.head_size) for y, m in zip(parts, counts(h), strict=True)]
    before = Pages(device, h, STEP, np.nan)
    q = rope_kv(device, h, STEP, turn, parts, before)
    pages, out = Pages(device, h, STEP, np.nan), Output(device, q.nbytes)
    rope_epilogue, *_ = computed_angles(device, h, STEP, turn)
    launch([out.buffer, *pages.send(device)], rope_epilogue)
    both = zip(pages.read(), before.read(), strict=True)
    written = all(np.array_equal(found, expected, equal_nan=True) for found, expected in both)
    return written and np.array_equal(out.read(np.float16, q.shape), q)


def check(device, name, h, turn, tiling, columns=1024, scaled=False):
    """Compares with the GEMM that stores f32, and rope_kv after it."""
    product, n = GemmWgmma(device, device.sm_count), len(STEP.positions)
    weights = [Weights(name, m * h.head_size, columns, s) for s, m in enumerate(counts(h))]
    tiles = [w.scaled(device) if scaled else w.tiled(device) for w in weights]
    x = (tokens(n, columns) / 64).astype(np.float16)
    parts = packed_gemm_cases.multiply(product, tiles, x, tiling=tiling)
    operand = packed_gemm_cases.packed(device, x, order_of(tiles[0].layout))

    def launch(outs, rope_epilogue):
        product.launch(
            tiles, operand, outs, n, epilogue="QKV", rope_epilogue=rope_epilogue, tiling=tiling
        )

    assert same(device, h, turn, parts, launch)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling(hopper, tiling):
    check(hopper, "Q8_0", heads(8, 2, 128), Turn(frequencies(64), False), tiling)


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size, n_pairs", [(32, 16), (64, 32), (96, 48), (128, 20), (256, 128)])
def test_sizes_of_heads(hopper, name, size, n_pairs):
    """Heads of which a part is rotated, and heads that share a CTA's 128 rows."""
    h = heads(8, 4, size)
    check(hopper, name, h, Turn(frequencies(n_pairs), False, 1.3), Tiling(256, False))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_of_neox(hopper, tiling):
    check(hopper, "Q8_0", heads(8, 2, 128), Turn(frequencies(64), neox=True), tiling)


@pytest.mark.parametrize("size, n_pairs", [(32, 16), (64, 32), (64, 10), (128, 64), (128, 20)])
def test_neox_heads(hopper, size, n_pairs):
    """Neox style, for heads that lie within a CTA's 128 rows, with biases."""
    h = heads(8, 4, size)
    bias = [random(m * size, seed=m) * 3 for m in counts(h)]
    turn = Turn(frequencies(n_pairs), True, 1.3, bias)
    check(hopper, "Q4_K", h, turn, Tiling(256, False, pairs=True))


W8A8_CUTS = [("int8", 256, False), ("int8", 128, True), ("e4m3", 128, False), ("e4m3", 64, True)]


@pytest.mark.parametrize("neox", [False, True], ids=["adjacent", "neox"])
@pytest.mark.parametrize("kind, size, split", W8A8_CUTS)
def test_activations_of_8_bits(hopper, kind, size, split, neox):
    h = heads(8, 2, 128)
    bias = [random(m * 128, seed=m) * 3 for m in counts(h)]
    turn, n = Turn(frequencies(64), neox, 1.3, bias), len(STEP.positions)
    product = W8A8Wgmma(hopper, hopper.sm_count)
    weights = [ByteMatrix(kind, m * 128, 1056, s) for s, m in enumerate(counts(h))]
    tiles = [w.tiled(hopper) for w in weights]
    x = w8a8_cases.quantize(hopper, w8a8_cases.activations(n, 1056), kind)
    options = {"tiling": Tiling(size, split, one_cta_per_sm=True)}
    parts = w8a8_cases.multiply(product, tiles, x, **options)

    def launch(outs, rope_epilogue):
        product.launch(tiles, x, outs, epilogue="QKV", rope_epilogue=rope_epilogue, **options)

    assert same(hopper, h, turn, parts, launch)


@pytest.mark.parametrize("name", ["I8", "Q8_0"])
def test_scales_of_rows_and_biases(hopper, name):
    h = heads(4, 2, 64)
    bias = [random(m * 64, seed=m) * 3 for m in (4, 2, 2)]
    turn = Turn(frequencies(32), False, bias=bias)
    check(hopper, name, h, turn, Tiling(128, False), scaled=name == "I8")


def test_supported_heads(emulator):
    rope, turn = RopeKv(emulator, heads(4, 2, 64)), Turn(frequencies(32), False).on(emulator)
    assert rope.supports_rope_epilogue(turn)
    assert not rope.supports_rope_epilogue(replace(turn, n_pairs=31))
    assert not rope.supports_rope_epilogue(replace(turn, norm=(None, emulator.alloc(256))))
    for other in (heads(8, 8, 80), heads(4, 3, 64), heads(3, 2, 64)):
        assert not RopeKv(emulator, other).supports_rope_epilogue(turn)
    for size, fits in ((64, True), (128, True), (96, False), (256, False)):
        one = RopeKv(emulator, heads(8, 4, size))
        assert one.supports_rope_epilogue(turn)
        assert one.supports_rope_epilogue(replace(turn, neox=True)) == fits


def test_operands_that_do_not_match(emulator):
    x = emulator.alloc(16, "x")
    whole, part = (Weights("Q8_0", rows, 128).tiled(emulator) for rows in (128, 64))
    rope_epilogue_ = RopeEpilogue(x, x, Turn(frequencies(32), False).on(emulator), heads(1, 1, 64))
    said = "no other takes one"
    for epilogue, rope_epilogue, w, n, message in (
        ("QKV", None, whole, 3, said),
        ("STORE", rope_epilogue_, whole, 3, said),
        ("QKV", rope_epilogue_, whole, 1, said),
        ("QKV", rope_epilogue_, part, 3, "multiples of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            GemmWgmma(emulator, 132).launch(
                [w] * n, x, [x] * n, 40, epilogue=epilogue, rope_epilogue=rope_epilogue
            )
