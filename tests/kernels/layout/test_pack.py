"""Packed activations: the permutation, its inverse, and the kernel pack.cu."""

import numpy as np
import pytest
from kernel_buffers import Output, upload
from packed_cases import column_indices, unpacked
from tile_cases import TILED, Weights, f16_activations

from ggpy.kernels.layout.pack import CODES, F16, STEP, Pack, order_of, packed_bytes, steps_of

ORDERS = {"codes": CODES, "f16_activations": F16}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_places_are_a_permutation(order):
    assert sorted(column_indices(order)) == list(range(STEP))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_lane_finds_its_columns(order):
    """Lane t of an f16 mma reads elements 2t, 2t + 1, 8 + 2t and 9 + 2t of 16.

    These must be the four consecutive columns of the tile's codes of this lane and step.
    """
    column_at = np.argsort(column_indices(order))
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
    assert orders["Q6_K"] == orders["F16"] == F16


@pytest.mark.parametrize("n_tokens", [1, 8, 19])
@pytest.mark.parametrize("columns", [8, 96, 264, 512])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pack(machine, order, columns, n_tokens):
    """Columns and tokens that are not multiples of the padding units; the padding is 0."""
    x = np.resize(f16_activations(16, columns), (n_tokens, columns))
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
