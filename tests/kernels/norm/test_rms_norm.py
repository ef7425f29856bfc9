"""RMS norm of rows against float64."""

import numpy as np
import pytest
from cases import nmse
from kernel_buffers import Output, upload
from packed_cases import unpacked

from ggpy.device.compile import compile_cubin
from ggpy.kernels.layout.pack import BOTH, CODES, F16, PLAIN, layout_bytes, packed_bytes
from ggpy.kernels.norm.rms_norm import RmsNorm

COLUMNS = [8, 96, 4096, 4104]  # the last takes two rounds of a CTA's threads


def row_data(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """f32 x[n, k] of several magnitudes, weight[k]."""
    rng = np.random.default_rng([n, k])
    x = rng.standard_normal((n, k)) * np.geomspace(1e-3, 1e3, n)[:, None]
    return x.astype(np.float32), rng.uniform(-2, 2, k).astype(np.float32)


def expected(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight


def to_f16(device, x, weight, eps, rows=None, n=None) -> np.ndarray:
    n, k = n or len(x), x.shape[1]
    out = Output(device, 2 * n * k)
    ids = None if rows is None else upload(device, np.array(rows, np.int32))
    args = upload(device, x), ids, upload(device, weight), out.buffer, n, k, eps
    RmsNorm(device).to_f16(*args)
    return out.read(np.float16, (n, k))


@pytest.mark.parametrize("k", COLUMNS)
def test_to_half(machine, k):
    """The output is the nearest f16, unless float arithmetic lies between two."""
    x, weight = row_data(5, k)
    y, e = to_f16(machine, x, weight, 1e-5), expected(x, weight, 1e-5)
    assert nmse(y, e) <= 1e-7
    assert np.abs(y.astype(np.float64) - e).max() <= 2**-11 * 1.001 * np.abs(e).max()
    assert np.mean(y == e.astype(np.float16)) > 0.99


@pytest.mark.parametrize("order", [CODES, F16])
@pytest.mark.parametrize("k", COLUMNS)
def test_packed(machine, k, order):
    """A packed output has the same f16, zeros past the last column."""
    x, weight = row_data(11, k)
    out = Output(machine, packed_bytes(11, k))
    args = upload(machine, x), None, upload(machine, weight), out.buffer, 11, k, 1e-5, order
    RmsNorm(machine).to_f16(*args)
    rows = unpacked(out.read(np.float16, (packed_bytes(11, k) // 2,)), 11, k, order)
    assert np.array_equal(rows[:11, :k], to_f16(machine, x, weight, 1e-5))
    assert not rows[:11, k:].any()


@pytest.mark.parametrize("n", [0, 2])
def test_packed_in_both_orders(machine, n):
    """One after the other, of few rows and of many."""
    n, k = n * machine.sm_count + 3, 200
    x, weight = row_data(n, k)
    one, out = packed_bytes(n, k), Output(machine, layout_bytes(n, k, BOTH))
    args = upload(machine, x), None, upload(machine, weight), out.buffer, n, k, 1e-5, BOTH
    RmsNorm(machine).to_f16(*args)
    found = out.read(np.float16, (2, one // 2))
    for packed, order in zip(found, (CODES, F16), strict=True):
        rows = unpacked(packed, n, k, order)
        assert np.array_equal(rows[:n, :k], to_f16(machine, x, weight, 1e-5))
        assert not rows[:n, k:].any()


@pytest.mark.parametrize("n", [1, 8])
def test_prescale_of_the_next_norm(machine, n):
    """next_prescale is 1 / 16 of 1 / rms(x), also for numbers of rows that other kernels take
    several per CTA.
    """
    x, weight = row_data(n, 256)
    next_prescale, out = Output(machine, 4 * n), machine.alloc(2 * n * 256, "out")
    args = upload(machine, x), None, upload(machine, weight), out, n, 256, 1e-5
    RmsNorm(machine).to_f16(*args, next_prescale=next_prescale.buffer)
    scale = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1) + 1e-5)
    np.testing.assert_allclose(next_prescale.read(np.float32, (n,)), scale / 16, rtol=1e-5)


@pytest.mark.parametrize("rows", [[3], [4, 0, 2], [1, 1, 1, 1, 0, 2, 3]])
def test_chosen_rows(machine, rows):
    x, weight = row_data(5, 96)
    y = to_f16(machine, x, weight, 1e-5, rows, len(rows))
    assert np.array_equal(y, to_f16(machine, x, weight, 1e-5)[rows])


@pytest.mark.parametrize("k", COLUMNS)
def test_add(machine, k):
    """Added to zeros, which show the norm in f32, and to other numbers."""
    y, weight = row_data(5, k)
    for x in (np.zeros((5, k), np.float32), row_data(5, k)[0] * 7):
        out = Output(machine, x.nbytes)
        machine.upload(out.buffer, x)
        args = out.buffer, upload(machine, y), upload(machine, weight), 5, k, 1e-6
        RmsNorm(machine).add(*args)
        result = out.read(np.float32, (5, k))
        assert nmse(result, x.astype(np.float64) + expected(y, weight, 1e-6)) <= 1e-12


@pytest.mark.parametrize("order", [PLAIN, CODES, BOTH])
@pytest.mark.parametrize("k", [*COLUMNS, 12296])
def test_add_and_the_next_norm(machine, k, order):
    """In one launch: the bits of two."""
    n, norms = 5, RmsNorm(machine)
    x, y = row_data(n + 1, k)[0][:n], row_data(n, k)[0] * 3
    of_y, of_x = row_data(2, k)[1], row_data(3, k)[1]
    weights, added = [upload(machine, w) for w in (of_y, of_x)], upload(machine, y)
    found = []
    for joined in (True, False):
        sums, out = Output(machine, x.nbytes), Output(machine, layout_bytes(n, k, order))
        machine.upload(sums.buffer, x)
        if joined:
            both = (weights[0], 1e-5), (weights[1], 1e-2)
            norms.add_next(sums.buffer, added, *both, out.buffer, n, k, order)
        else:
            norms.add(sums.buffer, added, weights[0], n, k, 1e-5)
            norms.to_f16(sums.buffer, None, weights[1], out.buffer, n, k, 1e-2, order)
        f16 = out.read(np.uint16, (layout_bytes(n, k, order) // 2,))
        found.append((sums.read(np.float32, (n, k)), f16))
    assert np.array_equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])
    assert nmse(found[0][0], x.astype(np.float64) + expected(y, of_y, 1e-5)) <= 1e-12


def test_rows_that_are_too_many_for_the_next_norm(emulator):
    norms, n = RmsNorm(emulator), 2 * emulator.sm_count
    assert norms.takes_next(n - 1) and not norms.takes_next(n)
    assert not RmsNorm(emulator, kind="layer").takes_next(1)
    with pytest.raises(ValueError, match=f"{n} rows are too many for two norms in one launch"):
        norms.add_next(None, None, (None, 0.0), (None, 0.0), None, n, 96)


@pytest.mark.parametrize("kind", ["rms with bias", "layer"])
@pytest.mark.parametrize("k", [96, 4104])
def test_other_norms(machine, kind, k):
    """Of few rows and of many, in f16 and added to x; far from a mean of 0."""
    n = 2 * machine.sm_count + 3
    x, both = row_data(n, k)[0] + np.float32(3), np.stack([row_data(2, k)[1], row_data(3, k)[1]])
    e = x - x.mean(axis=1, keepdims=True, dtype=np.float64) if kind == "layer" else x
    e, norm = expected(e, both[0], 1e-5) + both[1], RmsNorm(machine, kind=kind)
    for rows in (3, n):
        out, sums = Output(machine, 2 * rows * k), Output(machine, 4 * rows * k)
        machine.upload(sums.buffer, x[:rows])
        given = upload(machine, x), upload(machine, both)
        norm.to_f16(given[0], None, given[1], out.buffer, rows, k, 1e-5)
        norm.add(sums.buffer, *given, rows, k, 1e-5)
        assert nmse(out.read(np.float16, (rows, k)), e[:rows]) <= 1e-7
        assert nmse(sums.read(np.float32, (rows, k)), x[:rows] + e[:rows]) <= 1e-9


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_other_norms_compile(nvrtc, arch):
    defines = {"NORM_BIAS": 1, "NORM_CENTRED": 1, "NORM_PIECES": 3}
    for name, r in compile_cubin("norm/rms_norm.cu", arch, defines=defines).resources.items():
        assert (r.spill_loads, r.spill_stores) == (0, 0), name


def test_eps_counts_where_x_is_small(machine):
    x, weight = np.full((2, 96), 1e-6, np.float32), np.ones(96, np.float32)
    x[1] = 0
    y = to_f16(machine, x, weight, 1e-5)
    np.testing.assert_allclose(y[0].astype(float), 1e-6 / np.sqrt(1e-5), rtol=2e-3)
    assert not y[1].any()


def test_what_a_half_cannot_hold_is_the_largest_half(machine):
    x, weight = row_data(1, 96)
    weight[:2] = 1e9, -1e9
    x[0, :2] = 1, 1
    y = to_f16(machine, x, weight, 1e-5)[0]
    assert y[0] == 65504 and y[1] == -65504 and np.isfinite(y).all()


def test_a_row_does_not_depend_on_the_others(machine):
    x, weight = row_data(5, 1056)
    single = [to_f16(machine, x[i : i + 1], weight, 1e-5)[0] for i in range(5)]
    assert np.array_equal(to_f16(machine, x, weight, 1e-5), single)


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("chosen", [False, True])
def test_many_rows_have_the_bits_of_few(machine, k, chosen):
    """Also for CTAs without a second row, and for threads with other than 8 columns."""
    n = 8 * machine.sm_count + 3
    x, weight = row_data(n, k)
    rows = np.random.default_rng(k).permutation(n)[: n - 1] if chosen else np.arange(n)
    y = to_f16(machine, x, weight, 1e-5, rows if chosen else None, len(rows))
    few = [to_f16(machine, x[rows[i : i + 5]], weight, 1e-5) for i in range(0, len(rows), 5)]
    assert np.array_equal(y.view(np.uint16), np.concatenate(few).view(np.uint16))


@pytest.mark.parametrize("k", COLUMNS)
def test_add_of_many_rows(machine, k):
    n = 8 * machine.sm_count + 3
    y, weight = row_data(n, k)
    x = row_data(n + 1, k)[0][:n]
    weights = upload(machine, weight)

    def added(first, last):
        out = Output(machine, x[first:last].nbytes)
        machine.upload(out.buffer, x[first:last])
        RmsNorm(machine).add(
            out.buffer, upload(machine, y[first:last]), weights, last - first, k, 1e-6
        )
        return out.read(np.float32, (last - first, k))

    few = [added(i, min(i + 5, n)) for i in range(0, n, 5)]
    assert np.array_equal(added(0, n), np.concatenate(few))


def test_rows_that_do_not_fit_into_shared_memory(emulated):
    """Each row then has a CTA, as few rows have."""
    n, k = 2 * emulated.sm_count, 8 * 32 * 16 * 8
    assert RmsNorm(emulated).resident_ctas(k) == 0 < RmsNorm(emulated).resident_ctas(k // 2)
    x, weight = row_data(n, k)
    assert nmse(to_f16(emulated, x, weight, 1e-5), expected(x, weight, 1e-5)) <= 1e-7


def test_columns_are_checked(emulator):
    with pytest.raises(ValueError, match="12 columns: the norm kernels need a multiple of 8"):
        RmsNorm(emulator).add(None, None, None, 1, 12, 1e-5)


@pytest.mark.parametrize("n", [3, 17])
def test_under_sanitizers(emulated, n):
    x, weight = row_data(n, 1056)
    assert nmse(to_f16(emulated, x, weight, 1e-5), expected(x, weight, 1e-5)) <= 1e-7
