"""How an attention's queries and keys are rotated, as its kernels want to know it; the frequencies
of each rope are uploaded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...device.base import Buffer
from ...kernels.attention.rope_kv import RopeKv, Rotation, Turning, turns, turns_bytes
from ..interface import Attention, Rope
from .step import Batch


class Ropes:
    """The ropes of a model on a device."""

    def __init__(self, device: Any, room: Callable[[str, int], Buffer]) -> None:
        """room(name, bytes): scratch memory."""
        self.device, self._room = device, room
        self._turns: dict[int, tuple[Rope, Buffer]] = {}
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._found: dict[int, tuple[Buffer, Buffer]] = {}

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

    def turning(self, a: Attention, kernel: RopeKv, batch: Batch) -> Turning:
        """For a product that rotates itself; how far is found once in a step."""
        rotation, n = self.rotation(a), batch.n_tokens
        if id(a.rope) not in self._found:
            i = len(self._found)
            found = self._room(f"turns {i}", turns_bytes(n, rotation.n_pairs))
            rows = self._room("rows of keys", 4 * n)
            kernel.find_turns(rotation, batch.memory, n, found, rows)
            self._found[id(a.rope)] = found, rows
        return Turning(*self._found[id(a.rope)], rotation, kernel.heads)

    def _turns_of(self, rope: Rope) -> Buffer:
        if id(rope) not in self._turns:
            values = turns(rope.inv_freq)
            buffer = self.device.alloc(values.nbytes, "rope")
            self.device.upload(buffer, values)
            self._turns[id(rope)] = rope, buffer
        return self._turns[id(rope)][1]
