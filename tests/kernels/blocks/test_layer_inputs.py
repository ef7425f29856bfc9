"""layer_inputs.cu against float64: rows of a table beside projections that it normalises."""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse, random_rows
from kernel_buffers import Output, upload

from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.blocks.layer_inputs import EmbeddedTokens, layer_inputs

ROWS, EPS = 7, 0.3


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K", "BF16", "F32"])
@pytest.mark.parametrize(("n_layer", "size"), [(8, 32), (2, 384), (3, 256)], ids=str)
def test_values(device, name, n_layer, size) -> None:
    """Ids of rows and of what was sampled; one that is no row gives something finite."""
    columns, rng = n_layer * size, np.random.default_rng(size)
    table, ids = random_rows(by_name(name), ROWS, columns, rng, rms=0.5), [6, ~1, 0, ROWS]
    y = rng.standard_normal((4, columns)).astype(np.float32)
    weight = 1 + rng.standard_normal(size).astype(np.float32)
    sampled = upload(device, np.array([1, 5], np.int32))
    at = upload(device, np.array(ids, np.int32))
    out = Output(device, 4 * y.size)
    matrix = BlockMatrix(by_name(name), ROWS, columns, upload(device, table))
    tokens = EmbeddedTokens(at, sampled, upload(device, y), 4)
    layer_inputs(device, matrix, tokens, (upload(device, weight), EPS), out.buffer, size)
    found = out.read(np.float32, (n_layer, 4, size))
    rows = by_name(name).dequantize(table).reshape(ROWS, n_layer, size).astype(np.float64)
    n = y.reshape(4, n_layer, size).astype(np.float64)
    n = n / np.sqrt(np.mean(n * n, axis=-1, keepdims=True) + EPS) * weight
    expected = (n + rows[[6, 5, 0, 0]] * np.sqrt(size)) / np.sqrt(2)
    assert nmse(found, expected.transpose(1, 0, 2)) <= 1e-12


def test_sizes_that_no_lane_takes_are_refused(device) -> None:
    matrix = BlockMatrix(by_name("F32"), 1, 12, device.alloc(48, "w"))
    tokens = EmbeddedTokens(device.alloc(4, "ids"), None, device.alloc(48, "y"), 1)
    with pytest.raises(ValueError, match="inputs of 12 elements: a multiple of 8"):
        layer_inputs(device, matrix, tokens, (device.alloc(48, "w"), EPS), tokens.y, 12)
