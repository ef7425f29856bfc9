"""How an attention's queries and keys are rotated, as its kernels want to know it; the frequencies
of each rope are uploaded once.
"""

from __future__ import annotations

from typing import Any

from ..device.base import Buffer
from ..kernels.rope_kv import Rotation, turns
from .interface import Attention, Rope


class Ropes:
    """The ropes of a model on a device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._turns: dict[int, tuple[Rope, Buffer]] = {}

    def rotation(self, a: Attention) -> Rotation:
        """With the biases and norms that come before it."""
        norms = (a.q_norm, a.k_norm)
        return Rotation(
            turns=self._turns_of(a.rope),
            n_pairs=len(a.rope.inv_freq),
            neox=a.rope.style == "neox",
            magnitude=a.rope.magnitude,
            bias=(a.bq, a.bk, a.bv),
            norm=[n.weight if n else None for n in norms],
            eps=[n.eps if n else 0.0 for n in norms],
        )

    def _turns_of(self, rope: Rope) -> Buffer:
        if id(rope) not in self._turns:
            values = turns(rope.inv_freq)
            buffer = self.device.alloc(values.nbytes, "rope")
            self.device.upload(buffer, values)
            self._turns[id(rope)] = rope, buffer
        return self._turns[id(rope)][1]
