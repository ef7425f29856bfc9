"""A KV cache of every type against numpy: the bytes in the pages, and attention over them."""

import numpy as np
import pytest
from attention_cases import PAGE, Attention, Sequences, Turn, expected, placed, random, taken
from cache_cases import PAIRS, WIDE, TypedPages, fill, held, typed
from cases import nmse
from kernel_buffers import Output, upload

from ggpy.cache_types import CACHE_TYPES
from ggpy.device.compile import compile_cubin
from ggpy.formats import by_name
from ggpy.kernels.attention.rope_kv import RopeKv

NMSE = 5e-6
SPILLED = 0  # bytes

STEPS = {
    "decode": Sequences(lengths=[1, 33, 70], n_tokens=[1, 1, 1]),
    "long": Sequences(lengths=[300], n_tokens=[1]),
    "prefill": Sequences(lengths=[7, 140], n_tokens=[7, 3]),
}
STILL = np.zeros(1)  # frequencies: no element rotates, not even elements 0 and 1


def name_of(pair):
    return "{}-{}x{}".format(*pair[:2], pair[4])


def store(device, h, s, parts, pages):
    """Returns the pages after the kernel stored the k and v of a step."""
    n, q = len(s.positions), Output(device, 2 * len(s.positions) * h.n_head * h.row)
    projected = [upload(device, part) for part in parts]
    rotation, memory = Turn(STILL).on(device), pages.send(device)
    RopeKv(device, h).launch(projected, rotation, s.batch(device), n, memory, q.buffer)
    return pages.read()


def difficult(n, g, e):
    """k or v, some of whose quant blocks are at the limits of the formats."""
    x = random(n, g, e, seed=e) * 10.0 ** (np.arange(n) % 9 - 5)[:, None, None].astype(np.float32)
    rows = x.reshape(n, -1)[:, :32]  # the first 32 elements of the first head
    rows[0], rows[1, 3], rows[2, 5], rows[3] = 0, 1e6, -np.inf, 1e-42
    rows[4], rows[5, ::2], rows[6, 2:] = -7, 0, -1e-20
    rows[7], rows[8] = np.arange(32), -1 - np.arange(32)
    return x.astype(np.float32)


@pytest.mark.parametrize("row", [32, 96, 256])
def test_layout_of_values(row):
    """`placed` permutes the values, `taken` is its inverse, and elements lie where
    cuda/attention/kv_types.cuh says.
    """
    values = np.arange(3 * row * PAGE).reshape(3, row, PAGE)
    pages = placed(values)
    assert np.array_equal(taken(pages), values) and not np.array_equal(pages, values)
    for e, position in [(0, 0), (3, 17), (4, 17), (13, 40), (row - 1, PAGE - 1)]:
        in_sixteen = position % 16 ^ (8 if e & 4 else 0)
        offset = position // 16 * 16 * row + e * 16 + in_sixteen
        assert pages[1].ravel()[offset] == values[1, e, position]


@pytest.mark.parametrize("type", CACHE_TYPES)
@pytest.mark.parametrize("e", [32, 96, 128])
def test_bytes_in_pages(machine, type, e):
    """The kernel stores the bytes of numpy's quantisers at their offsets, and no other byte."""
    h, s = typed(type, type, 2, 2, e), Sequences(lengths=[70, 1, 40], n_tokens=[7, 1, 10])
    parts = [random(18, 2, e), difficult(18, 2, e), difficult(18, 2, e)[::-1].copy()]
    pages = TypedPages(machine, h, s, 5.0)
    got = store(machine, h, s, parts, pages)
    for i in range(3):
        tokens = s.sequences == i
        pages.put(i, s.positions[tokens], parts[1][tokens], parts[2][tokens])
    for name, found, wanted in zip("kv", got, pages.bytes(), strict=True):
        np.testing.assert_array_equal(found, wanted, f"{type} as {name}")


@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("type", CACHE_TYPES)
def test_not_a_number_stays_one(machine, type, part):
    """NaN in a value affects only the quant block that contains it."""
    h, s = typed(type, type, 1, 1, 64), Sequences(lengths=[1], n_tokens=[1])
    parts = [random(1, 1, 64, seed=i) for i in range(3)]
    parts[part][..., 40] = np.nan
    pages = TypedPages(machine, h, s, 0.0)
    pages.raw = store(machine, h, s, parts, pages)
    q = parts[0].astype(np.float16)
    broken = np.isnan(Attention(machine, h).run(s, pages, q=q, scale=0.1)[0, 0])
    size = by_name(type).block_size
    assert broken[40 // size * size :][:size].all(), "NaN became a number"
    assert part == 1 or broken.sum() == size


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pair", [*PAIRS, WIDE], ids=name_of)
def test_attention(machine, pair, step):
    h, s = typed(*pair), STEPS[step]
    pages, q, contents = fill(machine, h, s)
    options = {"scale": h.head_size**-0.5, "window": 50 if h.head_size == 96 else 0}
    o = Attention(machine, h).run(s, pages, q=q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE


@pytest.mark.parametrize("step", ["decode", "long"])
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_decode_with_rotation(machine, pair, step):
    """The kernel stores the token's k and v and attends to them as they are stored."""
    h, s = typed(*pair), STEPS[step]
    n, e, scale = len(s.positions), h.head_size, h.head_size**-0.5
    pages, _, contents = fill(machine, h, s)
    parts = [random(n, m, e, seed=i + 20) for i, m in enumerate((h.n_head, *[h.n_head_kv] * 2))]
    options = {"turn": Turn(STILL), "parts": parts}
    o = Attention(machine, h).run(s, pages, scale=scale, **options)
    stored = pages.read()
    for i, (keys, values) in enumerate(contents):
        keys[-1:] = held(h.types.k, pages.heads_as_kept(parts[1][i]))
        values[-1:] = held(h.types.v, parts[2][i])
        pages.put(i, s.positions[i : i + 1], parts[1][i : i + 1], parts[2][i : i + 1])
    q = pages.heads_as_kept(parts[0]).astype(np.float16)
    assert nmse(o, expected(h, s, q, contents, scale=scale)) <= NMSE
    assert all(np.array_equal(a, b) for a, b in zip(stored, pages.bytes(), strict=True))


@pytest.mark.parametrize("k", range(len(CACHE_TYPES)))
@pytest.mark.parametrize("v", [0, 1, 3])
@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 4, 64), (3, 1, 96), (20, 1, 64), (2, 1, 256)])
def test_more_pairs(gpu, k, v, shape):
    """Each type with itself and with two other types, for heads of several shapes."""
    pair = CACHE_TYPES[k], CACHE_TYPES[(k + v) % len(CACHE_TYPES)]
    for step in STEPS:
        test_attention(gpu, (*pair, *shape), step)
    test_decode_with_rotation(gpu, (*pair, *shape), "long")


# Architecture, KV types, head size: no instance spills.
COMPILED = [
    ("75", "q8_0", "q8_0", 64),
    ("80", "q4_0", "q4_1", 128),
    ("89", "q5_0", "q5_0", 96),
    ("80", "bf16", "bf16", 64),
    ("90a", "q8_0", "f16", 128),
    ("100", "q4_1", "q4_0", 64),
    ("120", "q5_1", "q5_1", 64),
]


@pytest.mark.parametrize("arch, k, v, size", COMPILED)
def test_compiles_without_spilling(nvrtc, arch, k, v, size):
    cpp_types = typed(k, v, 1, 1, size).cpp_types
    decode = [
        f"decode_attention<{size}, false, false, {m}, false, {cpp_types}>"
        for m in ("false", "true")
    ]
    names = [*decode, f"paged_attention<{size}, true, {cpp_types}>"]
    found = compile_cubin("attention/paged_attention.cu", f"sm_{arch}", expressions=names)
    for name, r in found.resources.items():
        assert max(r.spill_loads, r.spill_stores) <= SPILLED, f"{name} for sm_{arch} spills: {r}"


def test_under_sanitizers(emulated):
    for pair in (PAIRS[0], PAIRS[2]):
        test_attention(emulated, pair, "prefill")
        test_decode_with_rotation(emulated, pair, "decode")


@pytest.mark.parametrize("k, v, option", [("q8_0", "f16", "-ctk q8_0"), ("f16", "q4_1", "-ctv q4")])
def test_heads_of_no_whole_blocks_are_refused(emulator, k, v, option):
    with pytest.raises(ValueError, match=f"{option}.* 32 elements .* heads have 80: choose f16"):
        RopeKv(emulator, typed(k, v, 2, 1, 80))
