"""Log probabilities of the tokens that a model could choose, from its logits.

They are the model's own, before the sampler chain, as OpenAI's and llama.cpp's are: bias, penalties
and temperature change none of them. Computed only for sequences that ask for them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..sampling.ranking import largest


class TokenLogprob(NamedTuple):
    """A token that the model could have chosen, and ln of its probability."""

    text: str  # the whole token; U+FFFD for bytes that are not UTF-8
    id: int
    logprob: float


class TokenBytes(Protocol):
    """The part of a tokenizer that gives the bytes of a token."""

    def piece(self, id: int, special: bool = False) -> bytes: ...


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """logits[V] -> ln of probabilities[V]."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


def scores(
    logits: NDArray[np.float32], token: int, n: int, tokenizer: TokenBytes
) -> tuple[float, tuple[TokenLogprob, ...]]:
    """The log probability of a token, and the n most probable tokens, the best first, ties by id.

    logits[V]; n is 0 or more, and all tokens are returned where it is more than V.
    """
    logprobs = log_softmax(logits)
    ids = largest(logprobs, min(n, len(logprobs))).tolist() if n else []
    texts = [tokenizer.piece(id, special=True).decode("utf-8", "replace") for id in ids]
    best = (TokenLogprob(t, id, float(logprobs[id])) for t, id in zip(texts, ids, strict=True))
    return float(logprobs[token]), tuple(best)
