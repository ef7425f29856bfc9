"""Packed activations: a permutation, its inverse, and the kernel that makes it."""

import numpy as np
import pytest
from kernel_buffers import Output, upload
from packed_cases import column_places, unpacked
from tile_cases import TILED, Weights, halves

from ggpy.kernels.layout.pack import CODES, HALVES, STEP, Pack, order_of, packed_bytes, steps_of

ORDERS = {"codes": CODES, "halves": HALVES}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_places_are_a_permutation(order):
    assert sorted(column_places(order)) == list(range(STEP))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_lane_finds_its_columns(order):
    """Lane t of a product of 16 columns takes places 2t, 2t + 1, 8 + 2t and 9 + 2t: those columns
    must be the four in a row that the tile's codes of this lane and step are of.
    """
    column_at = np.argsort(column_places(order))
    for first in range(0, STEP, 16):
        for t in range(4):
            taken = column_at[
                [first + 2 * t, first + 2 * t + 1, first + 8 + 2 * t, first + 9 + 2 * t]
            ]
            s = first // 16 % 2
            in_group = 8 * t + 4 * s if order == CODES else 16 * s + 4 * t
            assert list(taken) == [first // 32 * 32 + in_group + e for e in range(4)]


def test_every_layout_has_an_order():
    orders = {name: order_of(Weights(name, 16, 512).layout) for name in TILED}
    assert orders["Q8_0"] == orders["Q4_K"] == CODES
    assert orders["Q6_K"] == orders["F16"] == HALVES


@pytest.mark.parametrize("n_tokens", [1, 8, 19])
@pytest.mark.parametrize("columns", [8, 96, 264, 512])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pack(machine, order, columns, n_tokens):
    """Columns and tokens that fill no unit; what is behind them is 0."""
    x = np.resize(halves(16, columns), (n_tokens, columns))
    x += np.arange(n_tokens)[:, None].astype(np.float16)
    out = Output(machine, packed_bytes(n_tokens, columns))
    Pack(machine).launch(upload(machine, x), out.buffer, n_tokens, columns, order)
    packed = out.read(np.float16, (packed_bytes(n_tokens, columns) // 2,))
    rows = unpacked(packed, n_tokens, columns, order)
    assert np.array_equal(rows[:n_tokens, :columns], x)
    assert not rows[n_tokens:].any() and not rows[:, columns:].any()
    assert rows.shape == (-(-n_tokens // 8) * 8, steps_of(columns) * STEP)


def test_ragged_columns(emulator):
    x = emulator.alloc(64, "x")
    with pytest.raises(ValueError, match="12 columns"):
        Pack(emulator).launch(x, x, 1, 12, CODES)
