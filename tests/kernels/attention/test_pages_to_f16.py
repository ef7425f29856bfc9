"""Conversion of pages of every type to f16, number by number, and the list of pages that a step's
prefill sees.
"""

import numpy as np
import pytest
from attention_cases import PAGE, Sequences, random, taken
from cache_cases import PAIRS, WIDE, TypedPages, decoded, encoded, typed
from cases import nmse
from kernel_buffers import Output, upload

from ggpy.cache_types import CACHE_TYPES
from ggpy.device.compile import compile_cubin
from ggpy.kernels.attention.pages_to_f16 import PagesToF16, as_f16, plan_f16_pages

LARGEST = 65504.0
LISTED = np.array([[3, -63], [0, 1], [4, 200]], np.int32)  # page, distance


def f16_of(type, blocks):
    """f32 [page, G, PAGE, row] of the stored numbers, rounded to f16."""
    with np.errstate(all="ignore"):
        return np.clip(decoded(type, blocks), -LARGEST, LARGEST).astype(np.float16)


def run(device, h, pages, window=0):
    """f16 k [n, G, PAGE, row] and v [n, G, row, PAGE] of the LISTED pages; NaN for pages not
    written.
    """
    n, made = len(LISTED), as_f16(h)
    outputs = [Output(device, n * size) for size in (made.key_bytes, made.value_bytes)]
    memory, buffers = pages.send(device), [out.buffer for out in outputs]
    PagesToF16(device, h).launch(memory, buffers, upload(device, LISTED), n, window)
    shapes = (n, h.n_head_kv, PAGE, h.row), (n, h.n_head_kv, h.row, PAGE)
    made_k, made_v = (o.read(np.float16, s) for o, s in zip(outputs, shapes, strict=True))
    return made_k, taken(made_v)


def random_pages(device, h):
    """Five full pages of numbers inside and outside the f16 range."""
    pages = TypedPages(device, h, Sequences([4 * PAGE], [1]), 0.0)
    shape = pages.sequences.n_pages, h.n_head_kv, PAGE, h.row
    k, v = random(*shape, seed=1), random(*shape, seed=2)
    for x in (k, v):
        x[3, 0, :5] *= 10.0 ** np.arange(-7, 3, 2)[:, None]
        x[3, 0, 7, :3] = 1e6, -1e9, np.inf
        x[0, 0, 9, 20], x[4, 0, 0] = np.nan, 0
    pages.k, pages.v = encoded(h.types.k, k), encoded(h.types.v, v)
    return pages


def check(device, pair):
    h = typed(*pair)
    pages = random_pages(device, h)
    k, v = run(device, h, pages)
    kept = (h.types.k, k, pages.k), (h.types.v, v.swapaxes(2, 3), pages.v)
    for type, got, blocks in kept:
        wanted = f16_of(type, blocks[LISTED[:, 0]])
        assert (np.isnan(got) == np.isnan(wanted)).all()
        written = ~np.isnan(wanted)
        assert nmse(got[written], wanted[written]) <= 1e-8
        # For formats with a minimum, numpy rounds twice.
        equal = np.mean(got[written] == wanted[written])
        assert equal > 0.999 if type.endswith("_1") else equal == 1, f"{type}: {equal:.2%}"


@pytest.mark.parametrize("pair", [*PAIRS, WIDE], ids=str)
def test_numbers(machine, pair):
    check(machine, pair)


@pytest.mark.parametrize("pair", [PAIRS[0][:2], PAIRS[1][:2]], ids=str)
def test_several_heads(machine, pair):
    check(machine, (*pair, 6, 3, 64))


@pytest.mark.parametrize("e", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("k", range(len(CACHE_TYPES)))
def test_more_pairs(gpu, k, e):
    for v in (0, 3):
        check(gpu, (CACHE_TYPES[k], CACHE_TYPES[(k + v) % len(CACHE_TYPES)], 4, 2, e))


@pytest.mark.parametrize("window, written", [(0, 3), (1, 1), (2, 2), (200, 2), (201, 3)])
def test_windows(machine, window, written):
    """The kernel skips a page whose last position is farther back than the window."""
    h = typed(*PAIRS[1])
    pages = random_pages(machine, h)
    all_of_it, some = run(machine, h, pages), run(machine, h, pages, window)
    for whole, part in zip(all_of_it, some, strict=True):
        assert np.array_equal(whole[:written], part[:written], equal_nan=True)
        assert np.isnan(part[written:]).all(), "written, but outside the window"


def test_under_sanitizers(emulated):
    for pair in (PAIRS[0], PAIRS[2]):
        check(emulated, pair)


@pytest.mark.parametrize("arch", ["75", "80", "90a", "120"])
def test_compiles_without_spilling(nvrtc, arch):
    shapes = [typed(*pair) for pair in (*PAIRS, WIDE)]
    names = [f"pages_to_f16<{h.row}, {h.cpp_types}>" for h in shapes]
    found = compile_cubin("attention/pages_to_f16.cu", f"sm_{arch}", expressions=names).resources
    assert set(found) == set(names)
    for name, r in found.items():
        assert (r.spill_loads, r.spill_stores, r.stack) == (0, 0, 0), f"{name} spills: {r}"
        assert r.registers <= 80, f"{name}: fewer than six CTAs are resident: {r}"


# The list of pages


STEPS = {
    "one": Sequences([70], [70]),
    "continued": Sequences([301], [33]),
    "among others": Sequences([66, 70, 1, 200], [66, 3, 1, 40]),
}


@pytest.mark.parametrize("least", [1, 20, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_listed_pages(step, least):
    """The list has the pages of the long sequences up to the last position; tables of other
    sequences stay zero.
    """
    s = STEPS[step]
    listed, tables = plan_f16_pages(s.positions, s.sequences, s.tables, PAGE, least)
    assert tables.shape == s.tables.shape and tables.dtype == listed.dtype == np.int32
    counts, used = np.bincount(s.sequences), set()
    for row, (length, count) in enumerate(zip(s.lengths, counts, strict=True)):
        n = -(-length // PAGE) if count >= least else 0
        assert not tables[row, n:].any()
        for i, index in enumerate(tables[row, :n]):
            first = length - count
            assert tuple(listed[index]) == (s.tables[row, i], first - (PAGE * i + PAGE - 1))
            used.add(index)
    assert used == set(range(len(listed)))


def test_a_page_that_two_sequences_share_is_listed_once():
    """The shorter of the two distances counts."""
    s = Sequences([150, 230], [10, 100])
    s.tables[1, :2] = s.tables[0, :2]
    listed, tables = plan_f16_pages(s.positions, s.sequences, s.tables, PAGE, 2)
    assert len(listed) == 5 and np.array_equal(tables[0, :2], tables[1, :2])
    assert listed[tables[0, :2]].tolist() == [[s.tables[0, i], 130 - 64 * i - 63] for i in (0, 1)]
    assert len(set(listed[:, 0])) == 5


def test_a_window_sees_what_is_listed_near_enough():
    """Pages with a distance below the window are those with a position that a token sees."""
    s = Sequences([400], [50])
    listed, tables = plan_f16_pages(s.positions, s.sequences, s.tables, PAGE, 2)
    for window in (1, 30, 31, 32, 94, 95, 96, 1000):
        seen = {max(0, p - d) // PAGE for p in s.positions for d in (0, window - 1)}
        near = {i for i, index in enumerate(tables[0]) if listed[index, 1] < window}
        assert near == set(range(min(seen), max(seen) + 1))
