"""dequantize.cu: floats equal the numpy dequantisers bit by bit, for every format."""

import numpy as np
import pytest
from cases import emulator_cases, gpu_cases, random_matrix, repeated
from kernel_buffers import Output, matrix_of, upload

from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.blocks.dequantize import SIZES, dequantize


def as_number(weights, number):
    """float32 weights rounded to the output type of the kernel, as float32."""
    with np.errstate(over="ignore"):
        if number == "bfloat16":
            bits = by_name("BF16").quantize(np.nan_to_num(weights)).view(np.uint16)
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return weights.astype(np.float16 if number == "half" else np.float32).astype(np.float32)


def run(device, case, blocks):
    """float32[rows, columns]."""
    w = matrix_of(device, case, blocks)
    out = Output(device, case.rows * case.columns * SIZES[case.number])
    dequantize(device, w, out.buffer, case.number)
    if case.number == "bfloat16":
        bits = out.read(np.uint16, (case.rows, case.columns))
        return (bits.astype(np.uint32) << 16).view(np.float32)
    dtype = np.float16 if case.number == "half" else np.float32
    return out.read(dtype, (case.rows, case.columns)).astype(np.float32)


def check(device, case):
    blocks = random_matrix(case)
    expected = as_number(case.block.dequantize(blocks), case.number)
    result = run(device, case, blocks)
    assert np.array_equal(result.view(np.uint32), repeated(expected, case.rows).view(np.uint32))


@pytest.mark.parametrize("case", emulator_cases("dequantize"), ids=str)
def test_emulated(emulated, case):
    check(emulated, case)


@pytest.mark.parametrize("case", gpu_cases("dequantize"), ids=str)
def test_gpu(gpu, case):
    check(gpu, case)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_code(device, name):
    """All 256 codes of the 8-bit scales, including subnormal and special codes."""
    f = by_name(name)
    blocks = np.zeros(256, f.dtype)
    blocks[f.dtype.names[0]] = np.arange(256).reshape(
        -1, *[1] * (blocks[f.dtype.names[0]].ndim - 1)
    )
    blocks["qs"] = np.arange(256 * f.dtype["qs"].shape[0]).reshape(256, -1)
    weights = f.dequantize(blocks.view(np.uint8))
    w = BlockMatrix(f, 1, weights.size, upload(device, blocks.view(np.uint8)))
    out = Output(device, weights.nbytes)
    dequantize(device, w, out.buffer)
    assert np.array_equal(out.read(np.uint32, weights.shape), weights.view(np.uint32))


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_special_numbers_survive(device, name):
    f = by_name(name)
    numbers = np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, -65504.0, 1.0], np.float32)
    with np.errstate(over="ignore"):
        data = {"F16": numbers.astype(np.float16), "F32": numbers}.get(name)
    if data is None:
        data = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    expected = f.dequantize(data.view(np.uint8))
    out = Output(device, expected.nbytes)
    dequantize(device, BlockMatrix(f, 1, 7, upload(device, data)), out.buffer)
    assert np.array_equal(out.read(np.uint32, (7,)), expected.view(np.uint32))


def test_sizes_are_checked(device):
    f = by_name("Q4_0")
    buffer = device.alloc(5 * 18, "blocks")
    with pytest.raises(ValueError, match=r"108 bytes are needed"):
        BlockMatrix(f, 3, 64, buffer)
    with pytest.raises(ValueError, match="multiples of 32"):
        BlockMatrix(f, 3, 33, buffer)
    with pytest.raises(ValueError, match="empty"):
        BlockMatrix(f, 0, 32, buffer)
    with pytest.raises(ValueError, match="640 bytes are needed"):
        dequantize(device, BlockMatrix(f, 5, 32, buffer), device.alloc(639, "out"))
