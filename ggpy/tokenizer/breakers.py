"""The token sequences of DRY's sequence breakers, in a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..sampling.dry import Pieces, breaker_sequences
from . import Tokenizer


def dry_breakers(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of DRY's sequence breakers, for `SamplingParams.dry_breakers`.

    The last eight results are cached, and the bytes of the last vocabulary.
    """
    return _dry_breakers(tuple(texts), tokenizer)


@lru_cache(maxsize=8)
def _dry_breakers(texts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    encode = lambda text: tokenizer.encode(text, add_special=False)  # noqa: E731
    return breaker_sequences(texts, _pieces(tokenizer), encode)


@lru_cache(maxsize=1)
def _pieces(tokenizer: Tokenizer) -> Pieces:
    return Pieces(tokenizer.piece(id, special=True) for id in range(tokenizer.n_vocab))
