"""The parameters of sampling, with llama.cpp's names and defaults, checked when they are given.

The ranges keep every number that a chain computes within float32, on a GPU too. Which link of the
chain reads which parameter is in `links`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

import numpy as np

from .dry import MAX_BREAKER_TAIL, MAX_BREAKERS, Breakers
from .order import LETTERS, MAX_SAMPLERS, OFF, SAMPLERS, sampler_of

MASK64 = (1 << 64) - 1
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's default

LARGEST = 1e20  # of a parameter: with logits below 1e30, no result leaves float32
MOST = 2**31 - 1  # tokens that a parameter may count
UNWANTED = -1e6  # the bias of a token that is chosen only if there is no other
MAX_BIASES = 1 << 16
MAX_BREAKER_TOKENS = 1 + MAX_BREAKER_TAIL


def number(default: float, lowest: float, highest: float, meaning: str) -> Any:
    """A numeric parameter; `meaning` is what an error says that it must be."""
    return field(default=default, metadata={"range": (lowest, highest, meaning)})


def last_n(default: int) -> Any:
    """How many tokens a link looks back."""
    return number(default, -1, MOST, "a number of tokens; 0 is off, -1 is all of the context")


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """Names and defaults of llama.cpp's server; ValueError gives a parameter, its value and range.

    >>> import ggpy
    >>> ggpy.SamplingParams(temperature=0, seed=1)
    SamplingParams(seed=1, temperature=0.0)

    `logit_bias` maps at most MAX_BIASES ids to what is added to their logits; -inf forbids one.
    `dry_breakers` are token sequences across which DRY sees no repetition, at most MAX_BREAKERS of
    at most MAX_BREAKER_TOKENS: `breaker_sequences` makes them. `samplers` are the links that are
    wanted, in order, by llama.cpp's names (`order.LETTERS`); others are off, and infill is off
    unless it is named. adaptive_p always is the last. `mirostat` takes the place of all of them but
    for the temperature. Numbers and collections are copied: what the caller changes afterwards is
    not seen.
    """

    seed: int = number(-1, -1, MASK64, "an integer of 64 bits, or -1 for a random one")
    temperature: float = number(
        0.8, -LARGEST, LARGEST, "up to 1e20; 0 or less always takes the most probable one"
    )
    dynatemp_range: float = number(0.0, 0, LARGEST, "from 0 (off) to 1e20")
    dynatemp_exponent: float = number(1.0, 0, LARGEST, "from 0 to 1e20")
    top_k: int = number(40, -1, MOST, "a number of tokens; 0 or -1 keeps all")
    top_p: float = number(0.95, 0, 1, "from 0 to 1 (off)")
    min_p: float = number(0.05, 0, 1, "from 0 (off) to 1")
    typical_p: float = number(1.0, 0, 1, "from 0 to 1 (off)")
    top_n_sigma: float = number(
        -1.0, -LARGEST, LARGEST, "standard deviations, up to 1e20; 0 or less is off"
    )
    xtc_probability: float = number(0.0, 0, 1, "from 0 (off) to 1")
    xtc_threshold: float = number(0.1, 0, 1, "from 0 to 1; above 0.5 is off")
    repeat_last_n: int = last_n(64)
    repeat_penalty: float = number(1.0, 1e-6, 1e6, "from 1e-6 to 1e6; 1 is off")
    presence_penalty: float = number(0.0, -LARGEST, LARGEST, "from -1e20 to 1e20; 0 is off")
    frequency_penalty: float = number(0.0, -LARGEST, LARGEST, "from -1e20 to 1e20; 0 is off")
    dry_multiplier: float = number(0.0, 0, LARGEST, "from 0 (off) to 1e20")
    dry_base: float = number(1.75, 1, LARGEST, "from 1 to 1e20")
    dry_allowed_length: int = number(2, 1, MOST, "1 or more tokens")
    dry_penalty_last_n: int = last_n(64)
    min_keep: int = number(0, 0, MOST, "a number of tokens that filters leave at least")
    mirostat: int = number(0, 0, 2, "0 (off), 1 or 2")
    mirostat_tau: float = number(5.0, 0, LARGEST, "bits of surprise, up to 1e20")
    mirostat_eta: float = number(0.1, 0, LARGEST, "from 0 to 1e20")
    adaptive_target: float = number(-1.0, -LARGEST, 1, "a probability; less than 0 is off")
    adaptive_decay: float = number(0.9, 0, 0.99, "from 0 to 0.99")
    samplers: tuple[str, ...] = SAMPLERS
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        default = SamplingParams()
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        changed = [f"{name}={value!r}" for name, value in values if value != getattr(default, name)]
        return f"SamplingParams({', '.join(changed)})"

    def __post_init__(self) -> None:
        for name in RANGES:
            value = _in_range(name, getattr(self, name), integer=name in INTEGERS)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "dry_breakers", _breakers(self.dry_breakers))
        object.__setattr__(self, "samplers", _samplers(self.samplers))

    @property
    def uses_dry(self) -> bool:
        """Whether DRY is on, and `dry_breakers` matter."""
        in_chain = "dry" in self.samplers and not self.mirostat
        return in_chain and self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


# name -> lowest value, highest value, what an error says
RANGES: dict[str, tuple[float, float, str]] = {
    f.name: f.metadata["range"] for f in fields(SamplingParams) if f.metadata
}
INTEGERS = {f.name for f in fields(SamplingParams) if f.type == "int"}


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


def _breakers(given: object) -> Breakers:
    """dry_breakers, checked."""
    if not isinstance(given, (tuple, list)):
        raise ValueError(f"dry_breakers is {given!r:.60}: give sequences of token ids")
    if len(given) > MAX_BREAKERS:
        raise ValueError(f"dry_breakers has {len(given)} sequences: at most {MAX_BREAKERS} work")
    if isinstance(given, Breakers):
        return given
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
    return Breakers(tuple(int(id) for id in tokens) for tokens in given)


def _samplers(given: object) -> tuple[str, ...]:
    """samplers, checked, by the names of LETTERS."""
    if given is SAMPLERS:
        return SAMPLERS
    if not isinstance(given, (tuple, list)) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"samplers is {given!r:.60}: give names of {', '.join(LETTERS)}")
    if len(given) > MAX_SAMPLERS:
        raise ValueError(f"samplers has {len(given)} names: give at most {MAX_SAMPLERS}")
    names = []
    for name in given:
        found = sampler_of(name)
        if found is None:
            raise ValueError(f"samplers has {name!r:.60}: give some of {', '.join(LETTERS)}")
        names.append(found)
    return tuple(names)


def in_effect(params: SamplingParams) -> SamplingParams:
    """The parameters without those of links that are not wanted.

    With Mirostat these are all but the plain temperature and biases, as in llama.cpp.
    """
    if params.mirostat:
        params = replace(params, samplers=("temperature",), dynatemp_range=0.0)
    if params.samplers == SAMPLERS:
        return params
    off: dict[str, Any] = {}
    for name in OFF:
        off |= {} if name in params.samplers else OFF[name]
    return replace(params, **off)


def with_bans(params: SamplingParams, ids: Iterable[int]) -> SamplingParams:
    """Parameters under which these tokens are not drawn, whatever their bias was."""
    banned = dict.fromkeys(ids, -inf)
    return replace(params, logit_bias={**params.logit_bias, **banned}) if banned else params


def without_bans(params: SamplingParams, ids: Iterable[int]) -> SamplingParams:
    """Parameters under which these tokens can be drawn where a mask allows nothing else."""
    banned = [id for id in ids if params.logit_bias.get(id) == -inf]
    if not banned:
        return params
    biases = {**params.logit_bias, **dict.fromkeys(banned, UNWANTED)}
    return replace(params, logit_bias=biases)
