"""Logits -> token id: the chain that a sequence's parameters set up, and its draws.

The chain has llama.cpp's default order: logit bias, penalties, DRY, top-n-sigma, top-k, typical-p,
top-p, min-p, XTC, temperature, and a draw that depends on the seed and the number of the draw
alone. The links are in `links`. This module knows no tokenizer, no model and no backend.

Letters: V vocabulary, k candidates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from . import links as chain
from .links import Candidates, Ids, Logits, Probabilities
from .params import MASK64, SamplingParams

NO_TOKEN = -1  # the id of a row from which none can be chosen


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) of (seed, counter) alone: the draws of a sequence need no other state.

    SplitMix64 (Steele, Lea, Flood 2014) of seed + (counter + 1) * 0x9E3779B97F4A7C15, all modulo
    2^64; then its upper 24 bits times 2^-24, so that a float32 holds the number exactly.
    """
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
    z ^= z >> 31
    return (z >> 40) * 2.0**-24


class Sampler:
    """One sequence's chain: its parameters, what it has seen, and how many draws it has made.

    Draw i uses uniform(seed, 2 i) for the token and uniform(seed, 2 i + 1) for XTC, so a backend
    that samples by itself needs `seed` and `n_drawn` and adds to the latter. `history` is the
    prompt and every accepted token; a last one ~r is what the step under way samples at its row r.
    `greedy`: the token is the highest of the adjusted logits, and no draw matters. ValueError where
    a biased id is not in the vocabulary.
    """

    def __init__(self, params: SamplingParams, n_vocab: int, history: Iterable[int] = ()):
        beyond = [token for token in params.logit_bias if not 0 <= token < n_vocab]
        if beyond:
            raise ValueError(f"logit_bias names token {beyond[0]}: ids go from 0 to {n_vocab - 1}")
        self.params = params
        self.n_vocab = n_vocab
        self.history = [int(token) for token in history]
        self.n_drawn = 0
        self.seed = params.seed if params.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        self.greedy = params.greedy
        self.error: Exception | None = None  # why `try_sample` chose no token
        self._expects = False  # whether the last of the history is not accepted yet

    def accept(self, token: int) -> None:
        """Append a token to the history, or put it where one is expected."""
        if self._expects:
            self.history[-1] = int(token)
            self._expects = False
        else:
            self.history.append(int(token))

    def expect(self, row: int) -> None:
        """The next token to be accepted is the one that the step under way samples at `row`."""
        if not self._expects:
            self.history.append(~row)
            self._expects = True

    def settle(self, sampled: Sequence[int] | NDArray[np.integer]) -> None:
        """Look the expected token up in the ids of the step that samples it."""
        if self._expects and self.history[-1] < 0:
            self.history[-1] = int(sampled[~self.history[-1]])

    def adjust(self, logits: Logits) -> Logits:
        """logits[V] after bias, penalties and DRY; the same array when none is on."""
        p = self.params
        if p.logit_bias:
            logits = chain.add_bias(logits, p.logit_bias)
        if p.penalizes:
            recent = self._recent(p.repeat_last_n)
            penalties = (p.repeat_penalty, p.presence_penalty, p.frequency_penalty)
            logits = chain.penalize(logits, recent, *penalties)
        if p.uses_dry:
            recent = self._recent(p.dry_penalty_last_n)
            strength = (p.dry_multiplier, p.dry_base, p.dry_allowed_length)
            logits = chain.dry(logits, recent, *strength, p.dry_breakers)
        return logits

    def candidates(self, logits: Logits) -> Candidates:
        """What the chain leaves of logits[V]: ids[k] in rising order and their scaled logits[k]."""
        p = self.params
        kept = chain.top_n_sigma(_all_ids(self.n_vocab), self._adjusted(logits), p.top_n_sigma)
        kept = chain.top_k(*kept, p.top_k)
        kept = chain.typical_p(*kept, p.typical_p)
        kept = chain.top_p(*kept, p.top_p)
        kept = chain.min_p(*kept, p.min_p)
        if p.uses_xtc and uniform(self.seed, 2 * self.n_drawn + 1) < p.xtc_probability:
            kept = chain.xtc(*kept, p.xtc_threshold)
        heat = (p.temperature, p.dynatemp_range, p.dynatemp_exponent)
        return chain.scale(*kept, chain.dynamic_temperature(kept[1], *heat))

    def probabilities(self, logits: Logits) -> tuple[Ids, Probabilities]:
        """(ids[k], p[k]) that the next draw chooses from, in falling probability, ties by id."""
        ids, kept = self.candidates(logits)
        order = np.argsort(-kept, kind="stable")
        weights = chain.weights(kept[order])
        return ids[order], weights / weights.sum()

    def sample(self, logits: Logits) -> int:
        """Draw an id from logits[V] and count the draw; the id is not accepted.

        The first candidate in falling probability, ties by id, at which the sum of weights exceeds
        `uniform` times their total. ValueError where logits are NaN or all -inf.
        """
        token = int(np.argmax(self._adjusted(logits))) if self.greedy else self._draw(logits)
        self.n_drawn += 1
        return token

    def try_sample(self, logits: Logits) -> int:
        """`sample`, or NO_TOKEN where that raises: then `error` is why, and nothing is counted."""
        try:
            return self.sample(logits)
        except Exception as error:
            self.error = error
            return NO_TOKEN

    def _draw(self, logits: Logits) -> int:
        ids, kept = self.candidates(logits)
        weights = chain.weights(kept)
        mass = uniform(self.seed, 2 * self.n_drawn) * float(weights.sum())
        return int(ids[chain.prefix(kept, weights, mass, side="right")[-1]])

    def _recent(self, last_n: int) -> list[int]:
        return self.history if last_n < 0 else self.history[-last_n:]

    def _adjusted(self, logits: Logits) -> Logits:
        if logits.shape != (self.n_vocab,):
            raise ValueError(f"logits have shape {logits.shape}, the vocabulary {self.n_vocab} ids")
        logits = self.adjust(logits)
        if not isfinite(best := logits.max()):
            raise ValueError(f"the highest logit is {best}: no token can be chosen")
        return logits


@cache
def _all_ids(n_vocab: int) -> Ids:
    ids = np.arange(n_vocab)
    ids.flags.writeable = False  # of all samplers
    return ids
