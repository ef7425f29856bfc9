"""Norms of few tokens that a product hands on to the next: none has a kernel between the two.

Of a step it knows what is handed on now, and what the norm before multiplied by; what is in these
memories is described in cuda/norm/deferred_norm.cuh, and who hands on is not its business.
"""

from __future__ import annotations

from collections.abc import Callable

from ...device.base import Buffer
from ...kernels.norm.deferred_norm import MOST_TOKENS, Handed, squares_bytes
from ..interface import Norm
from .arrays import Array


class Handing:
    """One step at a time: begin, then the norms in the order of the network."""

    def __init__(self, hands_on: Callable[[int], bool], room: Callable[[str, int], Buffer]) -> None:
        """hands_on(n_tokens): whether products hand on norms of so many, MOST_TOKENS at most.
        room(name, bytes): scratch memory.
        """
        self._hands_on, self._room = hands_on, room
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._norms = 0  # that left a factor
        self._given: tuple[Norm, Array, int] | None = None

    def after(self, n_tokens: int) -> Buffer | None:
        """Where a norm's own kernel leaves what x is multiplied by before the next one is known."""
        self._norms = self._norms + 1 if self._hands_on(n_tokens) else 0
        return self._factors() if self._norms else None

    def give(self, norm: Norm, normed: Array, part: int) -> Handed | None:
        """For a product that adds to what has this norm next, and adds up squares of `part`
        columns; `normed` is in the order that is wanted then. None: the norm needs a kernel of its
        own.
        """
        if not self._norms:
            return None
        parts = normed.shape[1] // part
        self._given = norm, normed, parts
        squares = self._squares(normed)
        data, order = normed.data, normed.order
        return Handed(squares, parts, self._factors(), None, norm.weight, data, order)

    def take(self, norm: Norm) -> tuple[Array, Handed] | None:
        """What was given for this norm, and how its products come to know it."""
        given, self._given = self._given, None
        if given is None or given[0] is not norm:
            return None
        before, self._norms = self._factors(), self._norms + 1
        squares = self._squares(given[1])
        return given[1], Handed(squares, given[2], before, self._factors(), eps=norm.eps)

    def _squares(self, normed: Array) -> Buffer:
        return self._room("squares", squares_bytes(normed.shape[1]))

    def _factors(self) -> Buffer:
        """The last norm's; those of the one before are still there."""
        return self._room(f"factors {self._norms % 2}", 4 * MOST_TOKENS)
