"""Masks of tokens that may follow: what a sampler asks of a grammar, and how bits become tokens.

A row is a bitmask of 32-bit words: bit t % 32 of word t / 32 stands for token t, and is set if the
token is allowed. This module knows no grammar.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32

NOTHING_ALLOWED = (
    "the grammar allows no token here: no text that matches it can be written with the tokens of "
    "this model"
)


class TokenMask(Protocol):
    """Which tokens may follow in one sequence; its state is the tokens accepted so far."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        ...

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes row[n_words(V)] for the next token; bits past V are 0. Raises what is wrong."""
        ...

    def accept(self, token: int) -> None:
        """Takes the sampled token; ValueError if it is not allowed."""
        ...


def in_force(mask: TokenMask) -> bool:
    """Whether a mask may forbid a token now. A kind of mask that often forbids none has a property
    `active`.
    """
    return bool(getattr(mask, "active", True))


def waits(mask: TokenMask) -> bool:
    """Whether the token after the next one may be forbidden, depending on the next one: then it
    is drawn when that is accepted. A kind of mask that knows in advance has a property `waits`.
    """
    return bool(getattr(mask, "waits", True))


def forced_ids(mask: TokenMask) -> tuple[int, ...]:
    """Tokens each of which may be the only one that a mask allows, so that no bias may forbid them.
    A kind of mask that makes a model say something has a property `forced_ids`.
    """
    return tuple(getattr(mask, "forced_ids", ()))


def n_words(n_vocab: int) -> int:
    """Words of a row."""
    return -(-n_vocab // WORD_BITS)


def fill_checked(mask: TokenMask, row: NDArray[np.int32]) -> None:
    """`fill`; ValueError where no token is allowed."""
    mask.fill(row)
    if not row.any():
        raise ValueError(NOTHING_ALLOWED)


def fill_together(masks: Sequence[TokenMask], rows: NDArray[np.int32]) -> list[Exception | None]:
    """Writes rows[k, n_words(V)] of k masks, zeros where something is wrong; what it is, of each.

    A kind of mask that fills many faster than one by one has a static method `fill_many(masks,
    rows)`, which returns the errors. One that asks another mask has a property `current`, which is
    that one where nothing else matters.
    """
    masks = [getattr(mask, "current", mask) for mask in masks]
    fill_many = getattr(type(masks[0]), "fill_many", None)
    if fill_many is not None and len({type(mask) for mask in masks}) == 1:
        errors: list[Exception | None] = fill_many(masks, rows)
    else:
        errors = [_error_of(mask, row) for mask, row in zip(masks, rows, strict=True)]
    for i in np.flatnonzero(~rows.any(axis=1)).tolist():
        errors[i] = errors[i] or ValueError(NOTHING_ALLOWED)
    for i, error in enumerate(errors):
        if error is not None:
            rows[i] = 0
    return errors


def _error_of(mask: TokenMask, row: NDArray[np.int32]) -> Exception | None:
    try:
        mask.fill(row)
    except Exception as error:
        return error
    return None


def allowed_tokens(row: NDArray[np.int32], n_vocab: int) -> NDArray[np.bool_]:
    """Returns allowed[V] of row[n_words(V)]."""
    words = np.ascontiguousarray(row, "<u4").view(np.uint8)
    return np.unpackbits(words, count=n_vocab, bitorder="little").view(np.bool_)
