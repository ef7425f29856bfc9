"""The parameters of sampling, with llama.cpp's names and defaults, checked when they are given.

Bounds keep every number that a chain computes from them within float32, on a GPU too. Nothing here
knows what the links of the chain do with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf

import numpy as np

from .links import MAX_BREAKER_TAIL

MASK64 = (1 << 64) - 1
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's default

LARGEST = 1e20  # of a parameter: with logits below 1e30, nothing that uses it leaves float32
MOST = 2**31 - 1  # tokens that a parameter may count
MAX_BIASES = 1 << 16
MAX_BREAKERS = 1 << 18  # token sequences: what a few short texts come to in a large vocabulary
MAX_BREAKER_TOKENS = 1 + MAX_BREAKER_TAIL

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
