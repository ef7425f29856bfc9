"""Launches cuda/layout/pack.cu: rows of halves to the packed order that cuda/layout/packed.cuh describes.

Knows the orders and their sizes, nothing of the product that takes them.
"""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from .tile import Layout

PLAIN, CODES, HALVES = range(3)  # enum Order
STEP = 64  # columns of a packed row of 128 bytes
UNIT = 128  # columns up to a multiple of which packed rows are padded with zeros


def order_of(layout: Layout) -> int:
    """The order of activations that tiles of this layout are multiplied with."""
    return HALVES if layout.is_float or layout.group == 16 else CODES


def steps_of(k: int) -> int:
    """Steps of 64 columns of packed rows of k columns."""
    return -(-k // UNIT) * (UNIT // STEP)


def packed_bytes(n_tokens: int, k: int) -> int:
    """Bytes of packed activations [n_tokens, k]."""
    return steps_of(k) * 2 * STEP * (-(-n_tokens // 8) * 8)


class Pack:
    """Packs activations; k is a multiple of 8."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernel: Kernel | None = None

    def launch(self, x: Address, out: Address, n_tokens: int, k: int, order: int) -> None:
        """Enqueue out = half x[n_tokens, k], packed in `order`; out has packed_bytes."""
        if k % 8:
            raise ValueError(f"rows of {k} columns cannot be packed: take a multiple of 8")
        if self._kernel is None:
            self._kernel = self.device.kernel("layout/pack.cu", "pack")
        steps = steps_of(k)
        pieces = 8 * steps * (-(-n_tokens // 8) * 8)
        arguments = (x, out, n_tokens, k, steps, order)
        self._kernel.launch(-(-pieces // 256), 256, arguments, pdl=True)
