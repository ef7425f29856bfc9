"""The token sequences of DRY's sequence breakers, in a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling import breaker_sequences
from . import Tokenizer


def dry_breakers(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of DRY's sequence breakers, for `SamplingParams.dry_breakers`."""
    pieces = [tokenizer.piece(id, special=True) for id in range(tokenizer.n_vocab)]
    return breaker_sequences(texts, pieces, lambda text: tokenizer.encode(text, add_special=False))
