"""Launches cuda/moe/pack_pairs.cu: the rows of x that sorted pairs multiply, packed for
expert_wgmma.
"""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from ..layout.pack import steps_of
from .sort import SortedPairs

THREADS, ROWS = 256, 4  # of a CTA; rows of a thread


class PackPairs:
    """The kernel that gathers and packs."""

    def __init__(self, device: Device) -> None:
        self._pack = device.kernel("moe/pack_pairs.cu", "pack_pairs")

    def launch(
        self, x: Address, pairs: SortedPairs, out: Address, k: int, order: int, n_used: int
    ) -> None:
        """Enqueue out = the row of x, f16 [tokens, k], of each sorted pair, packed in `order`.

        out has packed_bytes(pairs.n_rows, k). n_used: pairs of a token. ValueError if k is not a
        multiple of 8.
        """
        if k % 8:
            raise ValueError(f"rows of {k} columns cannot be packed: take a multiple of 8")
        steps, n = steps_of(k), pairs.n_rows
        args = x, pairs.pair_of, out, n, k, steps, order, n_used
        self._pack.launch(-(-8 * steps * n // (ROWS * THREADS)), THREADS, args, pdl=True)
