"""Scales of rows, against plain loops."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from ggpy.formats import by_name
from ggpy.formats.rows import blocks_of_codes, by_row, encode_rows, row_scales, stored_as


def weights() -> np.ndarray:
    rng = np.random.default_rng(0)
    found = rng.standard_normal((12, 96)).astype(np.float32) * np.exp2(rng.uniform(-20, 9, (12, 1)))
    found[3] = 0
    found[4, 5:] = 0
    return found.astype(np.float32)


@pytest.mark.parametrize("name", ["I8", "F8_E4M3", "Q4_0"])
def test_values_are_the_nearest_there_are(name: str) -> None:
    format, w = by_row(name), weights()
    scales = row_scales(w, format)
    values = format.dequantize(encode_rows(w, scales, format))
    assert scales.dtype == np.float32 and scales[3] == 0 and not values[3].any()
    every = {"I8": np.arange(-127, 128), "Q4_0": np.arange(-8, 8)}.get(name)
    if every is None:
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        every = np.unique(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
    for row, scale, got in zip(w, scales, values, strict=True):
        if scale:
            exact = (row / scale).astype(np.float64)
            assert math.isclose(np.abs(got).max(), np.abs(every).max())
            nearest = np.abs(exact[:, None] - every).min(axis=1)
            assert (np.abs(exact - got) == nearest).all()


@pytest.mark.parametrize(("value", "code"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-3.5, -4)])
def test_ties_go_to_even(value: float, code: int) -> None:
    w = np.array([[127, value]], np.float32)
    assert encode_rows(w, row_scales(w, by_row("I8")), by_row("I8")).view(np.int8)[0, 1] == code


def test_the_largest_weight_of_four_bits_is_minus_eight() -> None:
    w = np.array([[4.0] + [1.0] * 31, [-4.0] + [1.0] * 31], np.float32)
    assert row_scales(w, by_row("Q4_0")).tolist() == [-0.5, 0.5]


def test_codes_become_blocks_with_a_scale_of_one() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (3, 64), np.uint8)
    data = blocks_of_codes(codes)
    assert np.array_equal(by_name("Q4_0").dequantize(data), codes.astype(np.float32) - 8)


def test_formats_without_scales_of_rows() -> None:
    with pytest.raises(ValueError, match="Q8_0 has no scales for rows: I8, F8_E4M3, Q4_0 have"):
        by_row("q8_0")


def test_what_a_file_has() -> None:
    assert stored_as(by_name("F8_E4M3")) is by_name("I8")
    assert stored_as(by_name("Q4_0")) is by_name("Q4_0")
