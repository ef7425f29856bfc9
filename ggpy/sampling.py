"""Logits -> token id: llama.cpp's sampler parameters and the chain that they set up.

The chain has llama.cpp's default order: logit bias, penalties, DRY, top-n-sigma, top-k, typical-p,
top-p, min-p, XTC, temperature, and a draw that depends on the seed and the number of the draw
alone. The links are in `logits`. This module knows no tokenizer, no model and no backend.

Letters: V vocabulary, k candidates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from . import logits as chain
from .logits import Candidates, Ids, Logits, Probabilities

MASK64 = (1 << 64) - 1
NO_TOKEN = -1  # the id of a row from which none can be chosen
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's default

LARGEST = 1e20  # of a parameter: with logits below 1e30, nothing that uses it leaves float32
MOST = 2**31 - 1  # tokens that a parameter may count
MAX_BIASES = 1 << 16
MAX_BREAKERS = 1 << 18  # token sequences: what a few short texts come to in a large vocabulary
MAX_BREAKER_TOKENS = 1 + chain.MAX_BREAKER_TAIL

# Lowest and highest value, and what a message says.
RANGES: dict[str, tuple[float, float, str]] = {
    "seed": (-1, MASK64, "an integer of 64 bits, or -1 for a random one"),
    "temperature": (-LARGEST, LARGEST, "up to 1e20; 0 or less always takes the most probable one"),
    "dynatemp_range": (0, LARGEST, "from 0 (off) to 1e20"),
    "dynatemp_exponent": (0, LARGEST, "from 0 to 1e20"),
    "top_k": (-1, MOST, "a number of tokens; 0 or -1 keeps all"),
    "top_p": (0, 1, "from 0 to 1 (off)"),
    "min_p": (0, 1, "from 0 (off) to 1"),
    "typical_p": (0, 1, "from 0 to 1 (off)"),
    "top_n_sigma": (-LARGEST, LARGEST, "standard deviations, up to 1e20; 0 or less is off"),
    "xtc_probability": (0, 1, "from 0 (off) to 1"),
    "xtc_threshold": (0, 1, "from 0 to 1; above 0.5 is off"),
    "repeat_last_n": (-1, MOST, "a number of tokens; 0 is off, -1 is all of the context"),
    "repeat_penalty": (1e-6, 1e6, "from 1e-6 to 1e6; 1 is off"),
    "presence_penalty": (-LARGEST, LARGEST, "from -1e20 to 1e20; 0 is off"),
    "frequency_penalty": (-LARGEST, LARGEST, "from -1e20 to 1e20; 0 is off"),
    "dry_multiplier": (0, LARGEST, "from 0 (off) to 1e20"),
    "dry_base": (1, LARGEST, "from 1 to 1e20"),
    "dry_allowed_length": (1, MOST, "1 or more tokens"),
    "dry_penalty_last_n": (-1, MOST, "a number of tokens; 0 is off, -1 is all of the context"),
}


@dataclass(frozen=True)
class SamplingParams:
    """Names and defaults of llama.cpp's server; ValueError gives a parameter, its value and range.

    `logit_bias` maps at most MAX_BIASES ids to what is added to their logits; -inf forbids one.
    `dry_breakers` are token sequences across which DRY sees no repetition, at most MAX_BREAKERS of
    at most MAX_BREAKER_TOKENS: `logits.breaker_sequences` makes them. Numbers and collections are
    copied: what the caller changes afterwards is not seen.
    """

    seed: int = -1
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name in RANGES:
                value = _in_range(f.name, getattr(self, f.name), integer=f.type == "int")
                object.__setattr__(self, f.name, value)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "dry_breakers", _breakers(self.dry_breakers))

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the history lose logits by how often they occur."""
        neutral = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return self.repeat_last_n != 0 and not neutral

    @property
    def uses_dry(self) -> bool:
        """Whether tokens that would continue a repetition lose logits."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def uses_xtc(self) -> bool:
        """Whether the most probable candidates are sometimes left out."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def greedy(self) -> bool:
        """Whether the chain comes down to the highest logit, after bias, penalties and DRY."""
        cold = self.temperature <= 0 and self.dynatemp_range == 0
        return cold and self.typical_p >= 1 and not self.uses_xtc


def _in_range(name: str, value: object, integer: bool) -> int | float:
    """The value as an int or a float, if it is a number in the parameter's range."""
    low, high, meaning = RANGES[name]
    numbers = (int, np.integer) if integer else (int, float, np.integer, np.floating)
    number = isinstance(value, numbers) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # NaN is in no range
        raise ValueError(f"{name} is {value!r:.60}: it must be {meaning}")
    return int(value) if integer else float(value)  # type: ignore[call-overload, arg-type]


def _is_id(value: object) -> bool:
    """Whether a value can be a token's id."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return number and 0 <= value <= MOST  # type: ignore[operator]


def _biases(given: object) -> dict[int, float]:
    """logit_bias, checked."""
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias is {given!r:.60}: give a mapping of token ids to numbers")
    if len(given) > MAX_BIASES:
        raise ValueError(f"logit_bias names {len(given)} tokens: at most {MAX_BIASES} are possible")
    biases = {}
    for token, bias in given.items():
        if not _is_id(token):
            raise ValueError(f"logit_bias names {token!r:.60}: give ids of tokens")
        number = isinstance(bias, (int, float, np.integer, np.floating))
        if not number or isinstance(bias, bool) or not (abs(bias) <= LARGEST or bias == -inf):
            raise ValueError(
                f"logit_bias of token {token} is {bias!r:.60}: give -1e20 to 1e20, or -inf"
            )
        biases[int(token)] = float(bias)
    return biases


def _breakers(given: object) -> tuple[tuple[int, ...], ...]:
    """dry_breakers, checked."""
    if not isinstance(given, (tuple, list)):
        raise ValueError(f"dry_breakers is {given!r:.60}: give sequences of token ids")
    if len(given) > MAX_BREAKERS:
        raise ValueError(f"dry_breakers has {len(given)} sequences: at most {MAX_BREAKERS} work")
    for tokens in given:
        if not isinstance(tokens, (tuple, list)) or not all(map(_is_id, tokens)):
            raise ValueError(f"dry_breakers holds {tokens!r:.60}: give sequences of token ids")
        if not tokens:
            raise ValueError("dry_breakers holds an empty sequence: give each at least one token")
        if len(tokens) > MAX_BREAKER_TOKENS:
            raise ValueError(
                f"dry_breakers holds {len(tokens)} tokens in one sequence: "
                f"at most {MAX_BREAKER_TOKENS} work"
            )
    return tuple(tuple(int(id) for id in tokens) for tokens in given)


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
