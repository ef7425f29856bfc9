"""quantize_q8_1.cu: the bytes of the numpy quantiser; NaN and infinity reach the result."""

import numpy as np
import pytest
from format_cases import kinds_of_weights
from kernel_buffers import Output, upload

from ggpy.formats import by_name
from ggpy.kernels.blocks.quantize_q8_1 import q8_1_bytes, quantize_q8_1

Q8_1 = by_name("Q8_1")


def run(device, x):
    """uint8[tokens, row_bytes]; the kernel reads x in the dtype of x."""
    tokens, columns = x.shape
    out = Output(device, q8_1_bytes(tokens, columns))
    x_type = "half" if x.dtype == np.float16 else "float"
    quantize_q8_1(device, upload(device, x), out.buffer, tokens, columns, x_type=x_type)
    return out.read(np.uint8, (tokens, Q8_1.row_bytes(columns)))


KINDS = kinds_of_weights(3, 288, seed=7)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy(device, kind):
    x = KINDS[kind]
    assert np.array_equal(run(device, x), Q8_1.quantize(x))


@pytest.mark.parametrize("shape", [(1, 32), (9, 32), (1, 4096), (3, 1056)])
def test_shapes(device, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert np.array_equal(run(device, x), Q8_1.quantize(x))


def test_halves(device):
    x = (np.random.default_rng(0).standard_normal((9, 1056)) * 100).astype(np.float16)
    assert np.array_equal(run(device, x), Q8_1.quantize(x.astype(np.float32)))


@pytest.mark.parametrize("shape", [(64, 14336), (1, 32768), (4097, 96)])
def test_large_shapes(gpu, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert np.array_equal(run(gpu, x), Q8_1.quantize(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_makes_a_bad_block(device, bad):
    x = np.ones((1, 96), np.float32)
    x[0, 40] = bad
    d = run(device, x).reshape(-1).view(Q8_1.dtype)["d"].astype(np.float32)
    assert np.isfinite(d[[0, 2]]).all() and not np.isfinite(d[1])


def test_columns_are_checked(device):
    x = device.alloc(4 * 48, "x")
    with pytest.raises(ValueError, match="multiples of 32"):
        quantize_q8_1(device, x, x, 1, 48)
