"""What a grammar allows next: a mask over the vocabulary, which follows the tokens of one text.

Nothing here knows grammars, logits or backends.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMask(Protocol):
    """The tokens that may come next in one text."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete, so that nothing but its end may follow."""

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write a bitmask: bit t % 32 of word t // 32 is set where token t is allowed."""

    def accept(self, token: int) -> None:
        """The text goes on with this token."""
