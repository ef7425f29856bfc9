"""The token sequences of DRY's sequence breakers, in a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..sampling import breaker_sequences
from . import Tokenizer


def dry_breakers(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of DRY's sequence breakers, for `SamplingParams.dry_breakers`.

    The last eight results are cached: finding one takes a pass over the whole vocabulary.
    """
    return _dry_breakers(tuple(texts), tokenizer)


@lru_cache(maxsize=8)
def _dry_breakers(texts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    pieces = [tokenizer.piece(id, special=True) for id in range(tokenizer.n_vocab)]
    return breaker_sequences(texts, pieces, lambda text: tokenizer.encode(text, add_special=False))
