"""get_rows.cu: rows are exact and scaled once; an id past the last row gives NaN."""

import numpy as np
import pytest
from cases import emulator_cases, gpu_cases, random_matrix
from kernel_buffers import Output, matrix_of, upload

from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.blocks.get_rows import get_rows

SCALE = 11.313708


def run(device, case, blocks, ids, sampled=None, scale=SCALE):
    """float32[len(ids), columns]."""
    w = matrix_of(device, case, blocks)
    out = Output(device, len(ids) * case.columns * 4)
    if sampled is not None:
        sampled = upload(device, np.asarray(sampled, np.int32))
    buffer = upload(device, np.asarray(ids, np.int32))
    get_rows(device, w, buffer, out.buffer, len(ids), scale=scale, sampled=sampled)
    return out.read(np.float32, (len(ids), case.columns))


def check(device, case):
    blocks = random_matrix(case)
    ids = np.random.default_rng(1).integers(0, case.rows, case.tokens)
    ids[-1] = case.rows - 1
    weights = case.block.dequantize(blocks) * np.float32(SCALE)
    expected = weights[ids % len(weights)]
    assert np.array_equal(run(device, case, blocks, ids).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("case", emulator_cases("get_rows"), ids=str)
def test_emulated(emulated, case):
    check(emulated, case)


@pytest.mark.parametrize("case", gpu_cases("get_rows"), ids=str)
def test_gpu(gpu, case):
    check(gpu, case)


def test_missing_rows_are_nan_and_negative_ids_are_sampled(device):
    case = next(c for c in emulator_cases("get_rows") if c.format == "Q8_0")
    blocks = random_matrix(case)
    weights = case.block.dequantize(blocks)
    rows = run(device, case, blocks, [0, case.rows, -1, 1 << 30, 6], scale=1.0)
    assert np.isnan(rows[1:4]).all() and np.array_equal(rows[[0, 4]], weights[[0, 6]])
    rows = run(device, case, blocks, [~1, 3, ~0, ~2], sampled=[5, 2, case.rows], scale=1.0)
    assert np.array_equal(rows[:3], weights[[2, 3, 5]]) and np.isnan(rows[3]).all()


def test_sizes_are_checked(device):
    w = BlockMatrix(by_name("F32"), 2, 3, device.alloc(24, "w"))
    with pytest.raises(ValueError, match="2 ids"):
        get_rows(device, w, device.alloc(7, "ids"), device.alloc(24, "out"), 2)
    with pytest.raises(ValueError, match="24 bytes are needed"):
        get_rows(device, w, device.alloc(8, "ids"), device.alloc(23, "out"), 2)
