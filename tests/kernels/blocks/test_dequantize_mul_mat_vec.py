"""GEMV of quant blocks and float or half activations, against float64."""

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    EXACT,
    Case,
    emulator_cases,
    energy,
    gpu_cases,
    nmse,
    product,
    random_activations,
    random_matrix,
)
from kernel_buffers import Output, matrix_of, upload

from ggpy.device import Buffer
from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.blocks.dequantize_mul_mat_vec import dequantize_mul_mat_vec

KERNEL = "dequantize_mul_mat_vec"
X_TYPES = {"half": np.float16, "float": np.float32}


def run(device, case, blocks, x, residual=None):
    """float32 y[tokens, rows]."""
    w = matrix_of(device, case, blocks)
    out = Output(device, case.tokens * case.rows * 4)
    x = upload(device, x.astype(X_TYPES[case.number]))
    if residual is not None:
        residual = upload(device, residual)
    dequantize_mul_mat_vec(
        device, w, x, out.buffer, case.tokens, x_type=case.number, residual=residual
    )
    return out.read(np.float32, (case.tokens, case.rows))


def check(device, case):
    blocks, x = random_matrix(case), random_activations(case)
    y = run(device, case, blocks, x)
    assert nmse(y, product(case, blocks, x), energy(case, blocks, x)) <= case.tolerance
    assert nmse(y, product(case, blocks, x.astype(X_TYPES[case.number]))) <= EXACT


@pytest.mark.parametrize("case", emulator_cases(KERNEL), ids=str)
def test_emulated(emulated, case):
    check(emulated, case)


@pytest.mark.parametrize("case", gpu_cases(KERNEL), ids=str)
def test_gpu(gpu, case):
    check(gpu, case)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_a_token_does_not_depend_on_the_others(device, name):
    case = Case(KERNEL, name, 5, 1088, 11, "half")
    blocks, x = random_matrix(case), random_activations(case)
    together = run(device, case, blocks, x)
    for count in (1, 2, 8):
        single = run(device, replace(case, tokens=count), blocks, x[:count])
        assert np.array_equal(single, together[:count])


def test_residual(device):
    case = Case(KERNEL, "Q4_1", 9, 64, 11, "half")
    blocks, x = random_matrix(case), random_activations(case)
    residual = np.random.default_rng(3).standard_normal((11, 9)).astype(np.float32)
    y = run(device, case, blocks, x)
    assert np.array_equal(run(device, case, blocks, x, residual), residual + y)


def test_residual_may_be_the_output(device):
    case = Case(KERNEL, "Q8_0", 9, 64, 3, "half")
    blocks, x = random_matrix(case), random_activations(case).astype(np.float16)
    residual = np.random.default_rng(3).standard_normal((3, 9)).astype(np.float32)
    w = BlockMatrix(case.block, 9, 64, upload(device, blocks))
    y: Buffer = upload(device, residual)
    for _ in range(2):
        dequantize_mul_mat_vec(device, w, upload(device, x), y, 3, residual=y)
    once = run(device, case, blocks, x)
    assert np.array_equal(device.download(y, np.float32, (3, 9)), residual + once + once)


def test_nan_is_not_lost(device):
    case = Case(KERNEL, "Q8_0", 3, 64, 2, "half")
    x = random_activations(case)
    x[1, 7] = np.nan
    y = run(device, case, random_matrix(case), x)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def test_large_activations_do_not_overflow(device):
    """Sums are float: 127 times the largest f16 does not become infinite."""
    case = Case(KERNEL, "Q8_0", 3, 64, 2, "half")
    blocks, x = random_matrix(case), np.full((2, 64), 65504, np.float32)
    assert nmse(run(device, case, blocks, x), product(case, blocks, x)) <= EXACT


def test_sizes_are_checked(device):
    w = BlockMatrix(by_name("F16"), 4, 2, device.alloc(16, "w"))
    x, y = device.alloc(8, "x"), device.alloc(32, "y")
    with pytest.raises(ValueError, match="12 bytes are needed"):
        dequantize_mul_mat_vec(device, w, x, y, 3)
    with pytest.raises(ValueError, match="x "):
        dequantize_mul_mat_vec(device, w, x, y, 2, x_type="float")
    with pytest.raises(ValueError, match="32 bytes are needed"):
        dequantize_mul_mat_vec(device, w, x, y.at(4), 2)
    with pytest.raises(ValueError, match="32 bytes are needed"):
        dequantize_mul_mat_vec(device, w, x, y, 2, residual=x)
