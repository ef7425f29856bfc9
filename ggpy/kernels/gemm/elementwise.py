"""Launches cuda/gemm/elementwise.cu: what products of blocks leave to be done."""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from .gemm import ACTIVATIONS

THREADS = 256


class Elementwise:
    """Functions of single elements."""

    def __init__(self, device: Device) -> None:
        self._glu, self._soft_cap = device.kernels("gemm/elementwise.cu", ["glu", "soft_cap"])

    def glu(self, gate: Address, up: Address, h: Address, n: int, activation: str) -> None:
        """Enqueue half h[n] = activation(gate[n]) * up[n]."""
        self._glu.launch(
            -(-n // THREADS), THREADS, (gate, up, h, n, ACTIVATIONS[activation]), pdl=True
        )

    def soft_cap(self, x: Address, n: int, cap: float) -> None:
        """Enqueue x[n] = cap * tanh(x / cap), in place."""
        self._soft_cap.launch(-(-n // THREADS), THREADS, (x, n, float(cap)), pdl=True)
