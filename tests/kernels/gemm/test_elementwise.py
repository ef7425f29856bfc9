"""The elementwise kernels (GLU, soft cap) against float64."""

import numpy as np
import pytest
from cases import ACTIVATIONS, nmse, silu
from kernel_buffers import Output, upload
from packed_cases import unpacked
from tile_cases import HALF

from ggpy.kernels.gemm.elementwise import Elementwise
from ggpy.kernels.gemm.gemm import INPUT_RANGE
from ggpy.kernels.layout.pack import CODES, F16, packed_bytes


def glu(device, gate, up, activation) -> np.ndarray:
    out, n = Output(device, 2 * len(gate)), len(gate)
    args = upload(device, gate), upload(device, up), out.buffer, n, activation
    Elementwise(device).glu(*args)
    return out.read(np.float16, (n,))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 255, 1000])
def test_glu(machine, activation, n):
    gate, up = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32) * 4
    h = glu(machine, gate, up, activation)
    assert nmse(h, ACTIVATIONS[activation](gate.astype(np.float64)) * up) <= HALF


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_of_large_numbers(machine, activation):
    gate = np.array([-1e30, -200, -89, 0, 89, 200, 1e30], np.float32)
    h = glu(machine, gate, np.full(7, 1000, np.float32), activation)
    assert np.array_equal(h, np.array([0, 0, 0, 0, 65504, 65504, 65504], np.float16))


@pytest.mark.parametrize("n", [1, 256, 1000])
def test_soft_cap(machine, n):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32) * 50
    x[0] = 1e30
    out = Output(machine, x.nbytes)
    machine.upload(out.buffer, x)
    Elementwise(machine).soft_cap(out.buffer, n, 30.0)
    assert nmse(out.read(np.float32, (n,)), 30 * np.tanh(x.astype(np.float64) / 30)) <= 1e-12


def test_gate_of_a_layers_input_and_scale(machine):
    gate, values = np.random.default_rng(3).standard_normal((2, 300)).astype(np.float32)
    out, x, elementwise = Output(machine, 600), Output(machine, 1200), Elementwise(machine)
    args = upload(machine, gate / np.float32(INPUT_RANGE)), upload(machine, values), out.buffer
    elementwise.gate_input(*args, 1, 300, "gelu_tanh")
    expected = ACTIVATIONS["gelu_tanh"](gate.astype(np.float64)) * values
    assert nmse(out.read(np.float16, (300,)), expected) <= HALF
    machine.upload(x.buffer, gate)
    elementwise.scale(x.buffer, 300, 0.3)
    assert np.array_equal(x.read(np.float32, (300,)), gate * np.float32(0.3))


@pytest.mark.parametrize("order", [CODES, F16])
def test_a_packed_input(machine, order):
    n, k = 11, 384
    gate, values = np.random.default_rng(4).standard_normal((2, n, k)).astype(np.float32)
    args = upload(machine, gate), upload(machine, values)
    rows, packed = Output(machine, 2 * n * k), Output(machine, packed_bytes(n, k))
    elementwise = Elementwise(machine)
    elementwise.gate_input(*args, rows.buffer, n, k, "silu")
    elementwise.gate_input(*args, packed.buffer, n, k, "silu", order)
    found = unpacked(packed.read(np.float16, (packed_bytes(n, k) // 2,)), n, k, order)
    assert np.array_equal(found[:n], rows.read(np.float16, (n, k)))


def test_columns_that_would_have_to_be_padded(emulator):
    with pytest.raises(ValueError, match="200 columns cannot be packed: take a multiple of 128"):
        Elementwise(emulator).gate_input(None, None, None, 1, 200, "silu", CODES)


def test_under_sanitizers(emulated):
    gate, up = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    expected = silu(gate.astype(np.float64)) * up
    assert nmse(glu(emulated, gate, up, "silu"), expected) <= HALF
