"""Launches cuda/layout/pack.cu: permutes f16 activations to the layout of cuda/layout/packed.cuh.

This module knows the packed orders and their sizes, but not the GEMMs that read them.
"""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from .tile import Layout

PLAIN, CODES, F16 = range(3)  # enum Order
BOTH = 3  # packed twice: in the order CODES, then in the order F16
STEP = 64  # columns of a packed row of 128 bytes
UNIT = 128  # packed activations are padded with zeros to a multiple of so many columns


def order_of(layout: Layout) -> int:
    """The packed order of activations that GEMMs with tiles of this layout read."""
    return F16 if layout.is_float or layout.group == 16 else CODES


def steps_of(k: int) -> int:
    """The number of 64-column steps of packed activations with k columns."""
    return -(-k // UNIT) * (UNIT // STEP)


def packed_bytes(n_tokens: int, k: int) -> int:
    """Bytes of packed activations [n_tokens, k]."""
    return steps_of(k) * 2 * STEP * (-(-n_tokens // 8) * 8)


def layout_bytes(n_tokens: int, k: int, layout: int) -> int:
    """Bytes of f16 activations [n_tokens, k] in a layout."""
    if layout == PLAIN:
        return 2 * n_tokens * k
    return packed_bytes(n_tokens, k) * (2 if layout == BOTH else 1)


class Pack:
    """Packs f16 activations."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernel: Kernel | None = None

    def launch(self, x: Address, out: Address, n_tokens: int, k: int, order: int) -> None:
        """Enqueue out = f16 x[n_tokens, k], packed in `order`. out has packed_bytes(n_tokens, k).

        Raises ValueError if k is not a multiple of 8.
        """
        if k % 8:
            raise ValueError(f"rows of {k} columns cannot be packed: take a multiple of 8")
        if self._kernel is None:
            self._kernel = self.device.kernel("layout/pack.cu", "pack")
        steps = steps_of(k)
        pieces = 8 * steps * (-(-n_tokens // 8) * 8)
        arguments = (x, out, n_tokens, k, steps, order)
        self._kernel.launch(-(-pieces // 256), 256, arguments, pdl=True)
