"""Log probabilities of the tokens that a model could choose, from its logits.

`scores` gives the model's own, before the sampler chain, as OpenAI and llama.cpp do: bias,
penalties and temperature do not change them. `drawn_scores` gives those of the draw, after the
chain. They are computed only for sequences that ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..sampling import Sampler
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

    logits[V]. n is 0 or more; if it is more than V, all tokens are returned.
    """
    logprobs = log_softmax(logits)
    ids = largest(logprobs, min(n, len(logprobs))).tolist() if n else []
    return float(logprobs[token]), _named(ids, logprobs[ids].tolist() if n else [], tokenizer)


def drawn_scores(
    logits: NDArray[np.float32], token: int, n: int, tokenizer: TokenBytes, sampler: Sampler
) -> tuple[float, tuple[TokenLogprob, ...]]:
    """The same after the sampler chain of the last draw: at most n of the tokens that it left."""
    ids, p = sampler.probabilities(logits, sampler.n_drawn - 1)
    with np.errstate(divide="ignore"):
        logprobs = np.log(p)
    own = logprobs[ids == token]
    best = _named(ids[:n].tolist(), logprobs[:n].tolist(), tokenizer)
    return float(own[0]) if len(own) else -inf, best


def _named(
    ids: Sequence[int], logprobs: Sequence[float], tokenizer: TokenBytes
) -> tuple[TokenLogprob, ...]:
    texts = [tokenizer.piece(id, special=True).decode("utf-8", "replace") for id in ids]
    return tuple(map(TokenLogprob, texts, ids, logprobs))
