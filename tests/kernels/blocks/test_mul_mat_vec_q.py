"""GEMV of quant blocks and q8_1 activations: against float64, and against numpy bit by bit."""

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

from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import BlockMatrix
from ggpy.kernels.blocks.mul_mat_vec_q import mul_mat_vec_q

KERNEL = "mul_mat_vec_q"
Q8_1 = by_name("Q8_1")


def run(device, case, blocks, x, residual=None):
    """float32 y[tokens, rows]; x is bytes of block_q8_1."""
    w = matrix_of(device, case, blocks)
    out = Output(device, case.tokens * case.rows * 4)
    if residual is not None:
        residual = upload(device, residual)
    mul_mat_vec_q(device, w, upload(device, x), out.buffer, case.tokens, residual=residual)
    return out.read(np.float32, (case.tokens, case.rows))


def check(device, case):
    blocks, x = random_matrix(case), random_activations(case)
    quantized = Q8_1.quantize(x)
    y = run(device, case, blocks, quantized)
    assert nmse(y, product(case, blocks, x), energy(case, blocks, x)) <= case.tolerance
    assert nmse(y, product(case, blocks, Q8_1.dequantize(quantized))) <= EXACT


@pytest.mark.parametrize("case", emulator_cases(KERNEL), ids=str)
def test_emulated(emulated, case):
    check(emulated, case)


@pytest.mark.parametrize("case", gpu_cases(KERNEL), ids=str)
def test_gpu(gpu, case):
    check(gpu, case)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_a_token_does_not_depend_on_the_others(device, name):
    case = Case(KERNEL, name, 5, 1088, 11)
    blocks, x = random_matrix(case), Q8_1.quantize(random_activations(case))
    together = run(device, case, blocks, x)
    for count in (1, 2, 8):
        single = run(device, replace(case, tokens=count), blocks, x[:count])
        assert np.array_equal(single, together[:count])


def test_residual(device):
    case = Case(KERNEL, "Q4_1", 9, 64, 11)
    blocks, x = random_matrix(case), Q8_1.quantize(random_activations(case))
    residual = np.random.default_rng(3).standard_normal((11, 9)).astype(np.float32)
    y = run(device, case, blocks, x)
    assert np.array_equal(run(device, case, blocks, x, residual), residual + y)


def test_a_bad_scale_is_not_lost(device):
    case = Case(KERNEL, "Q8_0", 3, 64, 2)
    x = Q8_1.quantize(random_activations(case))
    x[1].view(Q8_1.dtype)["d"][1] = np.nan
    y = run(device, case, random_matrix(case), x)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def test_sizes_are_checked(device):
    w = BlockMatrix(by_name("F16"), 4, 48, device.alloc(384, "w"))
    buffer = device.alloc(128, "x")
    with pytest.raises(ValueError, match="multiples of 32"):
        mul_mat_vec_q(device, w, buffer, buffer, 1)
