"""Launches cuda/gemm/elementwise.cu: the elementwise epilogues of GEMMs on quant blocks."""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from ..layout.pack import PLAIN, UNIT
from .gemm import ACTIVATIONS

THREADS = 256


class Elementwise:
    """Elementwise kernels."""

    def __init__(self, device: Device) -> None:
        names = ["glu", "soft_cap", "add_bias", "gate_input", "scale"]
        found = device.kernels("gemm/elementwise.cu", names)
        self._glu, self._soft_cap, self._add_bias, self._gate_input, self._scale = found

    def glu(self, gate: Address, up: Address, h: Address, n: int, activation: str) -> None:
        """Enqueue f16 h[n] = activation(gate[n]) * up[n]; gate and up are f32."""
        self._glu.launch(
            -(-n // THREADS), THREADS, (gate, up, h, n, ACTIVATIONS[activation]), pdl=True
        )

    def gate_input(
        self,
        gate: Address,
        values: Address,
        h: Address,
        n_rows: int,
        columns: int,
        activation: str,
        order: int = PLAIN,
    ) -> None:
        """Enqueue f16 h[n_rows, columns] = activation(INPUT_RANGE * gate) * values; both are f32.

        order: layout of h (pack.py). Raises ValueError if h is packed and its columns would have to
        be padded.
        """
        if order != PLAIN and columns % UNIT:
            raise ValueError(f"{columns} columns cannot be packed: take a multiple of {UNIT}")
        args = gate, values, h, columns, ACTIVATIONS[activation], order
        self._gate_input.launch((-(-columns // THREADS), n_rows), THREADS, args, pdl=True)

    def scale(self, x: Address, n: int, factor: float) -> None:
        """Enqueue f32 x[n] *= factor, in place."""
        self._scale.launch(-(-n // THREADS), THREADS, (x, n, float(factor)), pdl=True)

    def soft_cap(self, x: Address, n: int, cap: float) -> None:
        """Enqueue f32 x[n] = cap * tanh(x / cap), in place."""
        self._soft_cap.launch(-(-n // (4 * THREADS)), THREADS, (x, n, float(cap)), pdl=True)

    def add_bias(self, x: Address, bias: Address, n_rows: int, columns: int) -> None:
        """Enqueue f32 x[n_rows, columns] += bias[columns]."""
        grid = -(-columns // THREADS), n_rows
        self._add_bias.launch(grid, THREADS, (x, bias, columns), pdl=True)
