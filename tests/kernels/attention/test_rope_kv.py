"""Bias, head norms and RoPE against float64, and the pages that k and v go to."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import PAGE, Pages, Sequences, Turn, frequencies, heads, random, rope_kv
from cases import nmse

from ggpy.device.compile import compile_cubin
from ggpy.kernels.attention.rope_kv import (
    ASSERTS,
    MANY_TOKENS,
    WHOLE_HEAD_SIZES,
    RopeKv,
    Rotation,
    UnusualHeads,
    angles,
)

NMSE = 1e-7  # f16

STEP = Sequences(lengths=[70, 1, 40], n_tokens=[7, 1, 2])


def check(device, h, turn, s=STEP, seed=0):
    n, e = len(s.positions), h.head_size
    parts = [random(n, m, e, seed=seed + i) for i, m in enumerate((h.n_head, *[h.n_head_kv] * 2))]
    pages = Pages(device, h, s, np.nan)
    q = rope_kv(device, h, s, turn, parts, pages)
    expected = [turn.apply(i, part, s.positions) for i, part in enumerate(parts)]
    assert nmse(q[..., :e], expected[0]) <= NMSE
    assert np.mean(q[..., :e] == expected[0].astype(np.float16)) > 0.98, "not the nearest f16"
    assert not q[..., e:].any(), "padding of a head is not zero"
    k, v = pages.read()
    for i, token in enumerate(zip(s.sequences, s.positions, strict=True)):
        page, slot = s.place(*token)
        for got, want in ((k[page, :, slot], expected[1]), (v[page, :, :, slot], expected[2])):
            assert nmse(got[:, :e], want[i]) <= 4 * NMSE and not got[:, e:].any()
        k[page, :, slot] = v[page, :, :, slot] = np.nan
    assert np.isnan(k).all() and np.isnan(v).all(), "other positions were written"


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("e, n_pairs", [(64, 32), (80, 16), (96, 48), (16, 6), (256, 128)])
def test_styles_and_sizes(machine, e, n_pairs, neox):
    check(machine, heads(4, 2, e), Turn(frequencies(n_pairs), neox))


@pytest.mark.parametrize("n_head, n_head_kv", [(1, 1), (9, 3), (20, 1), (8, 8)])
def test_numbers_of_heads(machine, n_head, n_head_kv):
    check(machine, heads(n_head, n_head_kv, 32), Turn(frequencies(16)))


@pytest.mark.parametrize("tokens", [MANY_TOKENS - 1, MANY_TOKENS, MANY_TOKENS + 70])
def test_warps_that_rotate_several_heads(machine, tokens):
    """11 heads: with many tokens, warps have two or three of them."""
    check(machine, heads(7, 2, 32), Turn(frequencies(16)), Sequences([tokens + 9], [tokens]))


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("e", WHOLE_HEAD_SIZES)
@pytest.mark.parametrize(
    "lengths, tokens", [([MANY_TOKENS + 83], [MANY_TOKENS + 70]), ([72, 99, 1], [64, 70, 1])]
)
def test_whole_heads_of_many_tokens(machine, lengths, tokens, e, neox):
    """Seven query heads and two KV heads; values that are stored eight tokens at a time, and
    others.
    """
    bias = [random(n * e, seed=5 + n) * 3 for n in (7, 2, 2)]
    turn = Turn(frequencies(e // 2), neox, 1.3, bias)
    check(machine, heads(7, 2, e), turn, Sequences(lengths, tokens))


def test_which_heads_are_whole(emulator):
    rope, turn = RopeKv(emulator, heads(2, 1, 64)), Rotation(None, 32, True)
    assert rope.rotates_whole_heads(turn)
    assert not rope.rotates_whole_heads(replace(turn, n_pairs=16))
    assert not rope.rotates_whole_heads(replace(turn, norm=(None, emulator.alloc(256))))
    assert not RopeKv(emulator, heads(2, 1, 80)).rotates_whole_heads(replace(turn, n_pairs=40))


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("sm_count", [4, 20, 100], ids="{} SMs".format)
def test_whole_heads_have_the_bits_of_others(emulator, neox, sm_count, monkeypatch):
    """The bits do not depend on the number of CTAs that share the heads of eight tokens."""
    monkeypatch.setattr(emulator, "sm_count", sm_count)
    h, s = heads(5, 2, 128), Sequences([MANY_TOKENS + 5], [MANY_TOKENS + 3])
    n, turn, found = len(s.positions), Turn(frequencies(64), neox, 1.3), []
    parts = [random(n, m, 128, seed=m) for m in (5, 2, 2)]
    for sizes in (WHOLE_HEAD_SIZES, ()):
        monkeypatch.setattr("ggpy.kernels.attention.rope_kv.WHOLE_HEAD_SIZES", sizes)
        pages = Pages(emulator, h, s, 0.0)
        found.append((rope_kv(emulator, h, s, turn, parts, pages), *pages.read()))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("e", [32, 80, 256])
@pytest.mark.parametrize(
    "lengths, tokens",
    [([24, 17], [16, 9]), ([72], [72]), ([70, 66], [12, 12]), ([8] * 3, [7, 1, 8])],
    ids=["two", "pages", "beside eight", "less than eight"],
)
def test_values_of_eight_tokens(machine, lengths, tokens, e):
    """Values are stored together if the eight tokens belong to one sequence and begin at a multiple
    of eight.
    """
    bias = [None, None, random(2 * e, seed=5) * 3]
    turn = Turn(frequencies(16), bias=bias)
    check(machine, heads(4, 2, e), turn, Sequences(lengths, tokens))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_bias(machine, part):
    bias = [None, None, None]
    bias[part] = random((4, 2, 2)[part] * 80, seed=5) * 3
    check(machine, heads(4, 2, 80), Turn(frequencies(40), bias=bias))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("e", [16, 80, 256])
def test_head_norms(machine, e, part):
    norm = [None, None]
    norm[part] = random(e, seed=6) + 2
    bias = [random(4 * e, seed=7), random(2 * e, seed=8), random(2 * e, seed=9)]
    check(machine, heads(4, 2, e), Turn(frequencies(e // 2), True, 1.3, bias, norm, (0.3, 0.7)))


@pytest.mark.parametrize("e", [16, 80, 512])
def test_norms_of_values(machine, e):
    """Eight tokens whose values would be stored together, and others."""
    norm = [random(e, seed=6) + 2, random(e, seed=7) + 2]
    turn = Turn(frequencies(e // 2), norm=norm, value_eps=0.5)
    check(machine, heads(4, 2, e), turn, Sequences([24, 17], [16, 9]))


@pytest.mark.parametrize("e", [80, 512])
def test_a_value_has_the_same_bits_alone_and_beside_seven_others(machine, e):
    h, turn = heads(2, 1, e), Turn(frequencies(e // 2), value_eps=0.5)
    parts, found = [random(16, n, e, seed=i) for i, n in enumerate((2, 1, 1))], []
    for s, rows in ((Sequences([16], [16]), slice(None)), (Sequences([12], [1]), slice(11, 12))):
        pages = Pages(machine, h, s, 0.0)
        rope_kv(machine, h, s, turn, [part[rows] for part in parts], pages)
        page, slot = s.place(0, np.array([11]))
        found.append(pages.read()[1][page, :, :, slot])
    assert np.array_equal(*found)


def test_queries_alone(machine):
    """Keys and values of another layer stay as they are."""
    h, s, turn = heads(4, 2, 64), Sequences([24, 17], [16, 9]), Turn(frequencies(32), shared=True)
    q, pages = random(25, 4, 64), Pages(machine, h, s, 7.0)
    got = rope_kv(machine, h, s, turn, [q, None, None], pages)
    assert nmse(got, turn.apply(0, q, s.positions)) <= NMSE
    assert all((array == 7.0).all() for array in pages.read())


@pytest.mark.parametrize("neox, e", [(True, 80), (False, 256)])
@pytest.mark.parametrize(
    "u",
    [
        UnusualHeads(norm_last=1, length=1),
        UnusualHeads(centred=1, by_head=1, length=1),
        UnusualHeads(norm_last=1, centred=1, length=7, offset=1, growth=0.5),
    ],
    ids=["after RoPE", "layer norms", "all"],
)
def test_unusual_heads(machine, u, neox, e):
    """Norms of q [H, E] and k [G, E] after RoPE, layer norms, queries that grow."""
    norm = [random(*((n, e) if u.by_head else (e,)), seed=6) + 2 for n in (4, 2)]
    bias = [random(n * e, seed=7) + 1 for n in (4, 2, 2)]
    turn = Turn(frequencies(16), neox, 1.3, bias, norm, unusual=u)
    check(machine, heads(4, 2, e), turn, Sequences([24, 70], [16, 3]))  # eight values at a time


@pytest.mark.parametrize("types", ["CacheF16, CacheF16", "CacheQ8_0, CacheQ4_0"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_unusual_heads_compile(nvrtc, arch, types):
    names = [f"rope_kv_unusual<{types}>"]
    cubin = compile_cubin("attention/rope_kv.cu", arch, expressions=names, extra_source=ASSERTS)
    r = cubin.resources[names[0]]
    assert (r.spill_loads, r.spill_stores) == (0, 0)


@pytest.mark.parametrize("inv_freq", ["linear", "yarn", "long", "fast"])
def test_scalings(machine, inv_freq):
    """Every RoPE scaling is a set of frequencies and a magnitude."""
    plain = frequencies(32, 1e6)
    ramp = np.clip((np.arange(32) - 8) / 12, 0, 1)
    made = {
        "linear": plain / 4,
        "yarn": plain / 8 * ramp + plain * (1 - ramp),
        "long": plain / np.geomspace(1, 64, 32),
        "fast": plain * 20,  # more than a full turn per position
    }
    check(machine, heads(4, 2, 64), Turn(made[inv_freq], True, 1 + 0.1 * np.log(8)))


@pytest.mark.parametrize("position", [63, 64, 65535, 999_999, 1_000_000])
def test_far_positions(machine, position):
    """Position one million is as accurate as position one."""
    s = Sequences(lengths=[1], n_tokens=[1])
    s.positions[:] = position
    s.tables = np.full((1, position // PAGE + 1), 1, np.int32)  # only one page exists
    check(machine, heads(4, 2, 64), Turn(frequencies(32), False), s)


def test_angles_are_exact_fractions_of_a_circle():
    """At position one million the error of an angle is below 1e-9."""
    inv_freq = np.array([1.0, 1 / 3, 1e-6, 2 * np.pi, 7.0])
    turn = np.array([float(int(t) * 1_000_000 % 2**64) for t in angles(inv_freq)]) / 2**64
    angle = inv_freq * 1e6
    np.testing.assert_allclose(np.cos(2 * np.pi * turn), np.cos(angle), atol=1e-9)
    np.testing.assert_allclose(np.sin(2 * np.pi * turn), np.sin(angle), atol=1e-9)


def test_what_a_half_cannot_hold(machine):
    h, s = heads(1, 1, 32), Sequences([1], [1])
    parts = [np.full((1, 1, 32), x, np.float32) for x in (1e6, -1e6, 7e4)]
    pages = Pages(machine, h, s, 0.0)
    q = rope_kv(machine, h, s, Turn(frequencies(16)), parts, pages)
    k, v = pages.read()
    page = s.tables[0, 0]
    assert (
        (q == 65504).all() and (k[page, 0, 0] == -65504).all() and (v[page, 0, :, 0] == 65504).all()
    )


def test_large_heads_are_refused(emulator):
    with pytest.raises(ValueError, match=r"attention.key_length is 576: .*at most 512"):
        RopeKv(emulator, heads(1, 1, 576))


def test_under_sanitizers(emulated):
    check(emulated, heads(5, 1, 80), Turn(frequencies(16), True, norm=[random(80), random(80)]))


def test_whole_heads_under_sanitizers(emulated):
    h, s = heads(3, 1, 64), Sequences([MANY_TOKENS + 5], [MANY_TOKENS + 3])
    check(emulated, h, Turn(frequencies(32), True), s)
