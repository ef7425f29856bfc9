"""Attention over a paged KV cache against float64, and its guarantees of equal bits."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from attention_cases import (
    GARBAGE,
    Attention,
    Pages,
    Sequences,
    Turn,
    expected,
    fill,
    frequencies,
    heads,
    random,
    rope_kv,
)
from cases import nmse

from ggpy.device.compile import compile_cubin
from ggpy.kernels.attention import paged_attention as attend
from ggpy.kernels.attention.paged_attention import (
    DECODE_WARPS,
    MAX_SPLIT,
    PagedAttention,
    Strips,
    plan_tiles,
)
from ggpy.kernels.layout.pack import CODES, F16, PLAIN

NMSE = 5e-6
MMA_ROWS = 16  # maximum (token, head) pairs of a tile

DECODE = Sequences(lengths=[1, 33, 64, 300], n_tokens=[1, 1, 1, 1])
PROMPT = Sequences(lengths=[7, 70], n_tokens=[7, 25])
MIXED = Sequences(lengths=[300, 70, 1], n_tokens=[1, 5, 1])
LONG = Sequences(lengths=[2100, 129], n_tokens=[1, 1])
STEPS = {"decode": DECODE, "prefill": PROMPT, "mixed": MIXED, "long": LONG}


def check(device, h, s, scale=None, **options):
    options["scale"] = scale or h.head_size**-0.5
    pages, q, contents = fill(device, h, s)
    o = Attention(device, h).run(s, pages, q=q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE


HEADS = [(4, 2, 64), (3, 1, 80), (8, 1, 96), (7, 1, 128), (2, 2, 256), (20, 1, 64), (32, 2, 32)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_shapes(machine, shape, step):
    """Groups of 1 to 20 query heads, heads of 32 to 256 elements, in steps of every kind."""
    check(machine, heads(*shape), STEPS[step])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 71])
@pytest.mark.parametrize("e", [64, 80, 96, 128, 256])
def test_gpu(gpu, e, group, step):
    for options in ({}, {"window": 40, "soft_cap": 2.0, "sinks": random(2 * group)}):
        check(gpu, heads(2 * group, 2, e), STEPS[step], **options)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [1, 5, 32, 40, 100, 5000])
def test_windows(machine, window, step):
    check(machine, heads(4, 2, 64), STEPS[step], window=window)


@pytest.mark.parametrize("step", ["decode", "prefill", "long"])
@pytest.mark.parametrize("options", ["soft cap", "sinks", "all"])
def test_caps_and_sinks(machine, options, step):
    cap, sinks = {"soft_cap": 1.5}, {"sinks": random(4, seed=4) * 3}
    made = {"soft cap": cap, "sinks": sinks, "all": {**cap, **sinks, "window": 50}}
    check(machine, heads(4, 2, 64), STEPS[step], **made[options])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 80), (8, 1, 512)], ids=str)
def test_gates(machine, shape, step):
    """The sigmoid of a gate multiplies the output, whether a context is split or not."""
    h, s = heads(*shape), STEPS[step]
    gate = random(len(s.positions), h.n_head, h.head_size, seed=5) * 20
    check(machine, h, s, gate=gate)
    check(machine, h, s, gate=gate, sinks=random(h.n_head, seed=4))


@pytest.mark.parametrize("scale", [1e-4, 3.0])
def test_flat_and_sharp(machine, scale):
    """Softmax over equal scores, and over scores of which one dominates."""
    check(machine, heads(4, 2, 64), MIXED, scale=scale)


def test_scores_of_any_size(machine):
    """Scores of 60000 and -60000 give neither infinity nor NaN."""
    h, s = heads(2, 1, 32), Sequences([40], [1])
    pages, q, contents = fill(machine, h, s)
    q[..., :32] = 60
    k, v = contents[0]
    k[:] = np.where(np.arange(40) % 2, 31, -31)[:, None, None]
    pages.put(0, np.arange(40), k, v)
    o = Attention(machine, h).run(s, pages, q=q, scale=1.0)
    assert nmse(o, expected(h, s, q, contents, scale=1.0)) <= NMSE
    k[:] = -31
    pages.put(0, np.arange(40), k, v)
    o = Attention(machine, h).run(s, pages, q=q, scale=1.0)
    assert nmse(o, expected(h, s, q, contents, scale=1.0)) <= NMSE


# Rotation in the attention kernel


@pytest.mark.parametrize("step", ["decode", "long"])
@pytest.mark.parametrize(
    "shape",
    [
        *((4, 2, 64), (3, 1, 80), (20, 1, 64), (7, 1, 128), (2, 1, 192), (4, 2, 256)),
        *((8, 1, 512), (16, 1, 512)),
    ],
    ids=str,
)
@pytest.mark.parametrize("value_eps", [None, 0.5])
def test_rotation_inside_equals_rotation_before(machine, shape, step, value_eps):
    """The pages have equal bits; so do the outputs, unless decode attention uses another kernel."""
    h, s = heads(*shape), STEPS[step]
    e, n = h.head_size, len(s.positions)
    bias = [random(m * e, seed=m) for m in (h.n_head, h.n_head_kv, h.n_head_kv)]
    norm = [random(e, seed=6) + 2, random(e, seed=7) + 2]
    turn = Turn(frequencies(e // 2), e == 64, 1.1, bias, norm, value_eps=value_eps)
    parts = [random(n, m, e, seed=i) for i, m in enumerate((h.n_head, *[h.n_head_kv] * 2))]
    pages = fill(machine, h, s)[0]
    before, inside = Attention(machine, h), Attention(machine, h)
    fused = inside.run(s, pages, turn=turn, parts=parts, scale=e**-0.5)
    fused_pages = pages.read()
    q = rope_kv(machine, h, s, turn, parts, pages)
    pages.k, pages.v = (array.copy() for array in pages.read())
    assert all(np.array_equal(a, b) for a, b in zip(fused_pages, (pages.k, pages.v), strict=True))
    o = before.run(s, pages, q=q, scale=e**-0.5)
    assert nmse(fused, o) <= NMSE
    assert inside.kernel.has_decode_kernel or np.array_equal(fused, o)


def test_rotated_queries_of_wide_heads(machine):
    """decode_attention has no shared memory for these, and does not take them."""
    h, s = heads(8, 1, 512), Sequences([70], [1])
    pages, q, contents = fill(machine, h, s)
    o = Attention(machine, h).run(s, pages, q=q, scale=0.04, rotated=True)
    assert nmse(o, expected(h, s, q, contents, scale=0.04)) <= NMSE


@pytest.mark.parametrize("shape", [(4, 2, 64), (4, 2, 512), (16, 1, 512)], ids=str)
def test_keys_and_values_of_another_layer(machine, shape):
    """The kernel rotates queries, and reads the newest position from its page."""
    h, s = heads(*shape), Sequences([300, 65, 64], [1, 1, 1])
    pages, _, contents = fill(machine, h, s)
    q, turn = random(3, h.n_head, h.head_size), Turn(frequencies(h.head_size // 2), shared=True)
    parts, scale = [q, None, None], h.head_size**-0.5
    o = Attention(machine, h).run(s, pages, turn=turn, parts=parts, scale=scale)
    rotated = turn.apply(0, q, s.positions).astype(np.float16)
    assert nmse(o, expected(h, s, rotated, contents, scale=scale)) <= NMSE


WIDE = {  # how heads of 512 are compiled: two warps share one, where a single token takes no kernel
    "sm_75": ("paged_attention<512, false>", "paged_attention<512, true>"),
    "sm_90a": ("paged_attention<512, false>", "decode_attention<512, true, false, true, false>"),
}


@pytest.mark.parametrize("arch", WIDE)
def test_wide_heads_hardly_spill(nvrtc, arch):
    defines = {**heads(8, 1, 512).defines, "VALUE_NORM": 1, "ATTENTION_WARPS": 2, "DECODE_WARPS": 4}
    options = {"expressions": WIDE[arch], "defines": defines, "extra_source": attend.ASSERTS}
    found = compile_cubin("attention/paged_attention.cu", arch, **options)
    for name, r in found.resources.items():
        few = 0 if name.startswith("decode") else 300  # bytes, as with heads of 256
        assert max(r.spill_loads, r.spill_stores) <= few, f"{name} for {arch} spills: {r}"


def check_rotation_inside(machine, h, lengths, turn, **options):
    """Decode tokens at the ends of sequences of these lengths."""
    s, n = Sequences(lengths, [1] * len(lengths)), len(lengths)
    pages, _, contents = fill(machine, h, s)
    parts = [random(n, m, 64, seed=i) for i, m in enumerate((h.n_head, *[h.n_head_kv] * 2))]
    o = Attention(machine, h).run(s, pages, turn=turn, parts=parts, scale=0.125, **options)
    q, k, v = (turn.apply(i, x, s.positions).astype(np.float16) for i, x in enumerate(parts))
    for i, (keys, values) in enumerate(contents):
        keys[-1], values[-1] = k[i], v[i]
    assert nmse(o, expected(h, s, q, contents, scale=0.125, **options)) <= NMSE


TURN = Turn(100.0 ** (-np.arange(32) / 32))


@pytest.mark.parametrize("lengths", [[70], [300, 33]], ids=str)
@pytest.mark.parametrize("shape", [(7, 1, 128), (16, 2, 128), (12, 1, 256)], ids=str)
def test_ctas_that_share_a_kv_head_change_no_bits(machine, monkeypatch, shape, lengths):
    """Nor the pages: all of them store the newest key and value."""
    h, s, n = heads(*shape), Sequences(lengths, [1] * len(lengths)), len(lengths)
    e, found = h.head_size, []
    turn = Turn(frequencies(e // 2), True, norm=[random(e, seed=6) + 2, random(e, seed=7) + 2])
    parts = [random(n, m, e, seed=i) for i, m in enumerate((h.n_head, *[h.n_head_kv] * 2))]
    for times in (1, 2, 4):
        monkeypatch.setattr(PagedAttention, "_times_as_many", lambda *_, times=times: times)
        pages = fill(machine, h, s)[0]
        o = Attention(machine, h).run(s, pages, turn=turn, parts=parts, scale=e**-0.5)
        found.append((o, *pages.read()))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_few_numbers_of_splits_are_launched(emulator):
    """2 KV heads, and 8 CTAs run at once; only the longest contexts have MAX_SPLIT."""
    paged = PagedAttention(emulator, heads(4, 2, 64), 8, 227 << 10)
    alone = {1: 4, 4: 4, 5: 8, 9: 15, 15: 15, MAX_SPLIT: MAX_SPLIT}
    assert {n: paged.launched_splits(1, n) for n in alone} == alone
    assert [paged.launched_splits(n, 1) for n in (2, 3, 4, 5)] == [2, 1, 1, 1]


def test_ctas_share_a_kv_head_while_sms_are_idle(emulator):
    """8 query heads of 128 elements have work for 512 threads; the emulator has 4 SMs."""
    paged = PagedAttention(emulator, heads(8, 1, 128), 8, 227 << 10)
    cases = {(1, 1): 2, (2, 1): 2, (1, 2): 2, (3, 1): 1, (1, 4): 1}
    assert {case: paged._times_as_many(*case, 8) for case in cases} == cases
    assert PagedAttention(emulator, heads(8, 1, 64), 8, 227 << 10)._times_as_many(1, 1, 8) == 1


@pytest.mark.parametrize("warps", DECODE_WARPS)
@pytest.mark.parametrize("window", [1, 40, 0])
def test_rotation_inside_with_a_window(machine, monkeypatch, window, warps):
    monkeypatch.setattr(attend, "DECODE_WARPS", {warps: inf})
    check_rotation_inside(machine, heads(4, 2, 64), [300, 65, 64, 33, 1], TURN, window=window)


ODD = {  # length, window, warps
    "1": (2100, 0, 8),
    "7": (3840, 0, 8),
    "none": (3841, 0, 8),
    "1 after two rounds": (4200, 0, 8),
    "3 of four warps": (3840, 0, 4),
    "1 of two warps": (3700, 0, 2),
    "1 of a window": (5000, 2100, 8),
}


@pytest.mark.parametrize("length, window, warps", ODD.values(), ids=ODD)
def test_odd_strips(machine, monkeypatch, length, window, warps):
    """Splits with more strips than a CTA has warps."""
    monkeypatch.setattr(attend, "DECODE_WARPS", {warps: inf})
    check_rotation_inside(machine, heads(4, 2, 64), [length], TURN, window=window)
    check_rotation_inside(machine, heads(4, 2, 64), [length, 300], NORMED, window=window)


NORMED = replace(TURN, norm=[random(64, seed=6) + 2, random(64, seed=7) + 2])


@pytest.mark.parametrize("n", [1, 3], ids=["one", "some"])
@pytest.mark.parametrize(
    ("turn", "options"),
    [(TURN, {"soft_cap": 0.5}), (TURN, {"sinks": random(4, seed=4) * 3}), (NORMED, {})],
    ids=["soft cap", "sinks", "norms"],
)
def test_rotation_inside_with_more(machine, turn, options, n):
    """Each option of few models (soft cap, sinks, head norms), which has its instance of the
    kernel.
    """
    check_rotation_inside(machine, heads(4, 2, 64), [300, 65, 33][:n], turn, **options)


@pytest.mark.parametrize("n", [1, 3], ids=["one", "some"])
@pytest.mark.parametrize("turn", [TURN, NORMED], ids=["plain", "norms"])
def test_rotation_inside_with_a_gate(machine, turn, n):
    lengths, gate = [300, 65, 33][:n], random(n, 4, 64, seed=5) * 3
    check_rotation_inside(machine, heads(4, 2, 64), lengths, turn, gate=gate)


# Equal bits


@pytest.mark.parametrize("window", [0, 40])
def test_a_sequence_does_not_depend_on_the_others(machine, window):
    h, options = heads(4, 2, 64), {"scale": 0.125, "window": window}
    lengths = [300, 1, 140, 33]
    s = Sequences(lengths, [1, 1, 1, 1])
    pages, q, contents = fill(machine, h, s)
    together = Attention(machine, h).run(s, pages, q=q, **options)
    for i, n in enumerate(lengths):
        one = Sequences([n], [1])
        pages = Pages(machine, h, one, GARBAGE)
        pages.put(0, np.arange(n), *contents[i])
        single = Attention(machine, h).run(one, pages, q=q[i : i + 1], **options)
        assert np.array_equal(single[0], together[i])


def test_a_cta_has_many_warps_unless_ctas_are_many(emulator):
    """4 SMs and two KV heads."""
    h = heads(4, 2, 64)
    always, chosen = (
        PagedAttention(emulator, h, 8, 227 << 10, invariant) for invariant in (True, False)
    )
    assert [chosen.decode_warps(n) for n in (1, 2, 3, 64)] == [8, 8, 4, 4]
    assert {always.decode_warps(n) for n in (1, 2, 3, 64)} == {8}
    assert [chosen.resident_splits(n) for n in (2, 3, 64)] == [4, 8, 8], "16 warps per SM"
    assert {always.resident_splits(n) for n in (2, 3, 64)} == {None}
    little = PagedAttention(emulator, heads(8, 1, 128), 8, 32 << 10)
    assert little.decode_warps(1) == 4, "shared memory holds K and V strips of 4 warps"
    assert not any(any(little.strips(*case)) for case in ((64,), (1, 16)))
    assert (chosen.strips(2, 8), chosen.strips(1, 8)) == (Strips(True, False), Strips(False, False))
    assert (chosen.strips(2, 16), chosen.strips(1, 16)) == (Strips(True, True), Strips(False, True))
    large = PagedAttention(emulator, heads(4, 2, 192), 8, 227 << 10)
    assert large.strips(1, 16) == Strips(True, False), "large heads take most registers"


@pytest.mark.parametrize("n", [300, 2100])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 128), (2, 1, 256)], ids=str)
def test_where_batches_must_not_matter_they_do_not(machine, shape, n):
    h = heads(*shape)
    turn = Turn(100.0 ** (-np.arange(h.head_size // 2) / h.head_size))
    found = []
    for count in (1, 8):
        s = Sequences([n] * count, [1] * count)
        parts = [random(1, m, h.head_size, seed=m) for m in (h.n_head, *[h.n_head_kv] * 2)]
        pages = fill(machine, h, s)[0]
        contents = [random(n, h.n_head_kv, h.head_size, seed=i).astype(np.float16) for i in (8, 9)]
        for i in range(count):
            pages.put(i, np.arange(n), *contents)
        parts = [np.repeat(part, count, axis=0) for part in parts]
        attention = Attention(machine, h, batch_invariant=True)
        found += list(attention.run(s, pages, turn=turn, parts=parts, scale=0.1))
    assert all(np.array_equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("order", [CODES, F16])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_packed(machine, step, order):
    """A packed output has the bits of the plain output, also with rotation in the kernel."""
    h, s = heads(4, 2, 64), STEPS[step]
    pages, q, _ = fill(machine, h, s)
    rows, packed = (
        Attention(machine, h).run(s, pages, q=q, order=o, scale=1) for o in (PLAIN, order)
    )
    assert np.array_equal(rows, packed)
    if step == "mixed":
        return
    parts = [random(4, m, 64, seed=m) for m in (4, 2, 2)]
    inside = {"turn": TURN, "parts": parts, "scale": 1}
    rows, packed = (Attention(machine, h).run(s, pages, order=o, **inside) for o in (PLAIN, order))
    assert np.array_equal(rows, packed)


@pytest.mark.parametrize("shape", [(8, 2, 80), (9, 3, 64)], ids=str)
def test_what_is_not_packed(emulator, shape):
    """Heads that share 32-element pieces, and heads that leave padding columns."""
    h, s = heads(*shape), STEPS["prefill"]
    pages, q, _ = fill(emulator, h, s)
    with pytest.raises(ValueError, match="cannot be packed"):
        Attention(emulator, h).run(s, pages, q=q, order=CODES, scale=1.0)


def test_again_and_again(machine):
    """The counters are zero after a step, whatever its tiles."""
    h = heads(20, 1, 64)
    kernel = Attention(machine, h)
    for step in ("long", "mixed", "long", "decode"):
        s = STEPS[step]
        pages, q, contents = fill(machine, h, s)
        o = kernel.run(s, pages, q=q, scale=0.125)
        assert nmse(o, expected(h, s, q, contents, scale=0.125)) <= NMSE


@pytest.mark.parametrize("step", ["long", "prefill"])
def test_order_of_blocks_and_warps(emulator, monkeypatch, step):
    h, s = heads(20, 1, 64), STEPS[step]
    pages, q, _ = fill(emulator, h, s)
    usual = Attention(emulator, h).run(s, pages, q=q, scale=0.125)
    for order in (1, 2, 3):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        again = Attention(emulator, h).run(s, pages, q=q, scale=0.125)
        assert np.array_equal(again, usual), f"order {order}"


def test_order_with_rotation_inside(emulator, monkeypatch):
    h, s, outs = heads(20, 1, 64), LONG, []
    parts = [random(2, m, 64, seed=i) for i, m in enumerate((20, 1, 1))]
    for order in (0, 1, 2):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        pages = fill(emulator, h, s)[0]
        outs.append(Attention(emulator, h).run(s, pages, turn=TURN, parts=parts, scale=0.125))
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lengths", [[150, 65], [2100]], ids=["some", "odd strips"])
def test_under_sanitizers(emulated, lengths, fused):
    h, n = heads(3, 1, 80), len(lengths)
    s = Sequences(lengths, [1] * n)
    pages, q, contents = fill(emulated, h, s)
    if not fused:
        o = Attention(emulated, h).run(s, pages, q=q, scale=0.125)
        assert nmse(o, expected(h, s, q, contents, scale=0.125)) <= NMSE
        return
    parts = [random(n, m, 80, seed=i) for i, m in enumerate((3, 1, 1))]
    turn = Turn(100.0 ** (-np.arange(16) / 16))
    o = Attention(emulated, h).run(s, pages, turn=turn, parts=parts, scale=0.125)
    assert np.isfinite(o).all()


# Plans


@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_tiles_cover_each_token_once(step, shape):
    h, s = heads(*shape), STEPS[step]
    tiles = plan_tiles(s.positions, s.sequences, h)
    covered = [i for first, n, *_ in tiles for i in range(first, first + n)]
    assert covered == list(range(len(s.positions)))
    for first, n, n_split, workspace in tiles:
        assert len(set(s.sequences[first : first + n])) == 1
        assert n == 1 or n * (h.n_head // h.n_head_kv) <= MMA_ROWS
        assert 1 <= n_split <= MAX_SPLIT and (n_split == 1 or n == 1)
        assert (workspace >= 0) == (n_split > 1)
    used = [t[3] for t in tiles if t[3] >= 0]
    assert used == list(range(len(used)))


def test_splits_depend_on_the_position_only():
    h = heads(4, 2, 64)
    splits = {n: plan_tiles(*_lone([n]), h)[0, 2] for n in (1, 128, 129, 1000, 5000)}
    assert splits == {1: 1, 128: 1, 129: 2, 1000: 8, 5000: MAX_SPLIT}
    assert plan_tiles(*_lone(list(splits)), h)[:, 2].tolist() == list(splits.values())


def test_resident_splits_are_divided_in_proportion_to_contexts():
    h = heads(4, 2, 64)
    assert _shared([4000], 33) == [MAX_SPLIT], "as without the limit"
    assert _shared([1000] * 8, 33) == [4] * 8
    assert _shared([1000] * 64, 33) == [1] * 64, "at least one split each"
    assert _shared([4000, 100, 600], 33) == [MAX_SPLIT, 1, 4], "no more than the position gives"
    assert _shared([4000, 4000, 100, 1], 33) == [16, 16, 1, 1]
    assert plan_tiles(*_lone([1, 500]), h, resident_splits=33)[:, 3].tolist() == [-1, 0]


def test_tokens_without_workspace_have_one_split():
    tiles = plan_tiles(*_lone([500, 100, 600, 700]), heads(4, 2, 64), max_split_tokens=2)
    assert tiles[:, 2:].tolist() == [[4, 0], [1, -1], [5, 1], [1, -1]]


def _shared(lengths, resident_splits):
    return plan_tiles(*_lone(lengths), heads(4, 2, 64), resident_splits=resident_splits)[
        :, 2
    ].tolist()


def _lone(lengths):
    s = Sequences(lengths, [1] * len(lengths))
    return s.positions, s.sequences
