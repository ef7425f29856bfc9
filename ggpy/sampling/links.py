"""The links of the sampler chain, one class each, in llama.cpp's default order.

Adjustments change the logits of the whole vocabulary; filters drop candidates or scale their
logits; a feedback comes last and follows from the draws before. A link that says `has_kernel` is
also implemented by cuda/sampling/sample.cu, with the same bits; `row` gives the kernel its
parameters. Adding a sampler is adding a class here, and its parameters to `SamplingParams`. Links
hold no state: one instance serves every sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf, log
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .adjustments import add_bias, penalize
from .dry import dry
from .feedback import adapt, mirostat, mirostat_2, probability, surprise
from .filters import (
    Candidates,
    dynamic_temperature,
    min_p,
    scale,
    top_k,
    top_n_sigma,
    top_p,
    typical_p,
    xtc,
)
from .infill import TokenTexts, infill
from .order import SAMPLERS, adjusts_scaled
from .params import SamplingParams
from .ranking import Logits

Row = dict[str, float | NDArray[np.int32]]
State = tuple[float, ...]


class Link(ABC):
    """What adjustments, filters and feedbacks have in common."""

    name: ClassVar[str] = ""  # of SamplingParams.samplers; none: it is on whatever they are
    has_kernel: ClassVar[bool] = False  # a row in which a link without one is active runs in numpy
    obeys_min_keep: ClassVar[bool] = False  # which kernels do not know

    @abstractmethod
    def active(self, params: SamplingParams) -> bool:
        """Whether the link does anything with these parameters; else the chain leaves it out."""

    def fits_kernel(self, params: SamplingParams) -> bool:
        """Whether the kernel does what the link does with these parameters."""
        return self.has_kernel and not (self.obeys_min_keep and params.min_keep > 1)

    def row(self, params: SamplingParams) -> Row:
        """Returns fields of the kernel's SampleRow, for a link that has a kernel, active or not.

        An array is stored beside the row; the field is its offset there, and n_<field> its length.
        """
        return {}


class Adjustment(Link):
    """A link that changes logits[V]."""

    def look_back(self, params: SamplingParams) -> int:
        """Returns how many last tokens of the history the link reads; -1 is all."""
        return 0

    @abstractmethod
    def apply(self, logits: Logits, params: SamplingParams, recent: Sequence[int]) -> Logits:
        """Returns adjusted logits[V]; recent: the last `look_back` tokens of the history."""


class Filter(Link):
    """A link that drops or scales candidates."""

    keeps_best: ClassVar[bool] = False  # whether the highest logit's candidate always remains

    def leaves_one(self, params: SamplingParams) -> bool:
        """Whether the best candidate that reaches the link is the only one that remains."""
        return False

    @abstractmethod
    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        """Returns what remains of (ids[k], logits[k]); chance: a random number in [0, 1)."""


class TokenFilter(Link):
    """A link that drops candidates by what the tokens are."""

    @abstractmethod
    def apply(self, candidates: Candidates, tokens: TokenTexts) -> Candidates:
        """Returns what remains of (ids[k], logits[k]), or an end token instead."""


class Feedback(Link):
    """A link that comes last and follows from the draws before it; the sampler keeps its state."""

    @abstractmethod
    def start(self, params: SamplingParams) -> State:
        """Returns the state of the first draw."""

    @abstractmethod
    def apply(
        self, candidates: Candidates, params: SamplingParams, state: State, n_vocab: int
    ) -> Candidates:
        """Returns what remains of (ids[k], logits[k]), with the logits that are drawn from."""

    @abstractmethod
    def after(
        self, before: Candidates, kept: Candidates, token: int, params: SamplingParams, state: State
    ) -> State:
        """Returns the state of the next draw. before, kept: what `apply` took and returned."""


class LogitBias(Adjustment):
    has_kernel = True

    def active(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def apply(self, logits: Logits, params: SamplingParams, recent: Sequence[int]) -> Logits:
        return add_bias(logits, params.logit_bias)

    def row(self, params: SamplingParams) -> Row:
        # Pairs of an id and the bits of a float32.
        pairs = np.empty((len(params.logit_bias), 2), np.int32)
        pairs[:, 0] = list(params.logit_bias)
        pairs[:, 1] = np.array(list(params.logit_bias.values()), np.float32).view(np.int32)
        return {"bias": pairs}


class Penalties(Adjustment):
    """Repeat, presence and frequency penalties, all by how often a token occurs."""

    has_kernel = True
    name = "penalties"

    def active(self, params: SamplingParams) -> bool:
        penalties = params.repeat_penalty, params.presence_penalty, params.frequency_penalty
        return params.repeat_last_n != 0 and penalties != (1, 0, 0)

    def look_back(self, params: SamplingParams) -> int:
        return params.repeat_last_n

    def apply(self, logits: Logits, params: SamplingParams, recent: Sequence[int]) -> Logits:
        penalties = params.repeat_penalty, params.presence_penalty, params.frequency_penalty
        return penalize(logits, recent, *penalties)

    def row(self, params: SamplingParams) -> Row:
        return {
            "repeat": params.repeat_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }


class Dry(Adjustment):
    name = "dry"

    def active(self, params: SamplingParams) -> bool:
        return params.uses_dry

    def look_back(self, params: SamplingParams) -> int:
        return params.dry_penalty_last_n

    def apply(self, logits: Logits, params: SamplingParams, recent: Sequence[int]) -> Logits:
        strength = params.dry_multiplier, params.dry_base, params.dry_allowed_length
        return dry(logits, recent, *strength, params.dry_breakers)


class TopNSigma(Filter):
    keeps_best = True
    name = "top_n_sigma"

    def active(self, params: SamplingParams) -> bool:
        return params.top_n_sigma > 0

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        return top_n_sigma(*candidates, params.top_n_sigma)


class TopK(Filter):
    """Without `row`: the kernel's top_k is how many candidates the backend lets it keep."""

    has_kernel = keeps_best = True
    name = "top_k"

    def active(self, params: SamplingParams) -> bool:
        return params.top_k > 0

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        return top_k(*candidates, params.top_k)


class TypicalP(Filter):
    name = "typ_p"
    obeys_min_keep = True

    def active(self, params: SamplingParams) -> bool:
        return params.typical_p < 1

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        return typical_p(*candidates, params.typical_p, params.min_keep)


class TopP(Filter):
    has_kernel = keeps_best = obeys_min_keep = True
    name = "top_p"

    def active(self, params: SamplingParams) -> bool:
        return params.top_p < 1

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        if params.samplers == SAMPLERS and params.min_keep <= 1:
            return top_p(*candidates, params.top_p, params.min_p)  # `MinP` follows
        return top_p(*candidates, params.top_p, min_keep=params.min_keep)

    def row(self, params: SamplingParams) -> Row:
        return {"top_p": params.top_p}


class MinP(Filter):
    has_kernel = keeps_best = obeys_min_keep = True
    name = "min_p"

    def active(self, params: SamplingParams) -> bool:
        return params.min_p > 0

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        return min_p(*candidates, params.min_p, params.min_keep)

    def row(self, params: SamplingParams) -> Row:
        return {"min_p": log(params.min_p) if params.min_p > 0 else -inf}


class Xtc(Filter):
    """Exclude Top Choices: of two candidates, at most one reaches a threshold above 0.5."""

    has_kernel = obeys_min_keep = True
    name = "xtc"

    def active(self, params: SamplingParams) -> bool:
        return params.xtc_probability > 0 and params.xtc_threshold <= 0.5

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        if chance < params.xtc_probability:
            return xtc(*candidates, params.xtc_threshold, params.min_keep)
        return candidates

    def row(self, params: SamplingParams) -> Row:
        probability = params.xtc_probability if self.active(params) else 0.0
        return {"xtc_probability": probability, "xtc_threshold": params.xtc_threshold}


class Temperature(Filter):
    has_kernel = keeps_best = True
    name = "temperature"

    def active(self, params: SamplingParams) -> bool:
        return params.dynatemp_range == 0

    def leaves_one(self, params: SamplingParams) -> bool:
        return params.temperature <= 0

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        return scale(*candidates, params.temperature, adjusts_scaled(params.samplers))

    def row(self, params: SamplingParams) -> Row:
        # A temperature above 0 stays above 0 as a float32.
        t = params.temperature
        return {"temperature": max(t, 1e-30) if t > 0 else t}


class DynamicTemperature(Filter):
    """Instead of `Temperature`; its temperature can be 0, which leaves the best candidate alone."""

    keeps_best = True
    name = "temperature"

    def active(self, params: SamplingParams) -> bool:
        return params.dynatemp_range > 0

    def apply(self, candidates: Candidates, params: SamplingParams, chance: float) -> Candidates:
        spread = params.dynatemp_range, params.dynatemp_exponent
        temperature = dynamic_temperature(candidates[1], params.temperature, *spread)
        return scale(*candidates, temperature, adjusts_scaled(params.samplers))


class InfillFilter(TokenFilter):
    name = "infill"

    def active(self, params: SamplingParams) -> bool:
        return self.name in params.samplers

    def apply(self, candidates: Candidates, tokens: TokenTexts) -> Candidates:
        return infill(candidates, tokens)


class Mirostat(Feedback):
    """Mirostat 1 and 2. The state is mu, the surprise in bits above which no candidate is kept."""

    def active(self, params: SamplingParams) -> bool:
        return params.mirostat > 0

    def start(self, params: SamplingParams) -> State:
        return (2 * params.mirostat_tau,)

    def apply(
        self, candidates: Candidates, params: SamplingParams, state: State, n_vocab: int
    ) -> Candidates:
        (mu,) = state
        if params.mirostat == 1:
            return mirostat(*candidates, mu, n_vocab)
        return mirostat_2(*candidates, mu)

    def after(
        self, before: Candidates, kept: Candidates, token: int, params: SamplingParams, state: State
    ) -> State:
        error = surprise(kept, token) - params.mirostat_tau
        return (state[0] - params.mirostat_eta * error,)


class AdaptiveP(Feedback):
    """Prefers tokens near a probability. The state is two sums, of which the quotient is the mean
    probability of the tokens before, the last one counting most.
    """

    name = "adaptive_p"

    def active(self, params: SamplingParams) -> bool:
        return params.adaptive_target >= 0

    def start(self, params: SamplingParams) -> State:
        total = 1 / (1 - params.adaptive_decay)
        return (params.adaptive_target * total, total)

    def apply(
        self, candidates: Candidates, params: SamplingParams, state: State, n_vocab: int
    ) -> Candidates:
        wanted = 2 * params.adaptive_target - state[0] / state[1]
        return adapt(*candidates, min(max(wanted, 0.0), 1.0))

    def after(
        self, before: Candidates, kept: Candidates, token: int, params: SamplingParams, state: State
    ) -> State:
        decay = params.adaptive_decay
        return (probability(before, token) + decay * state[0], 1 + decay * state[1])


# Subclasses are listed in the order in which they are defined.
ADJUSTMENTS: tuple[Adjustment, ...] = tuple(link() for link in Adjustment.__subclasses__())
FILTERS: tuple[Filter, ...] = tuple(link() for link in Filter.__subclasses__())
TOKEN_FILTERS: tuple[TokenFilter, ...] = tuple(link() for link in TokenFilter.__subclasses__())
FEEDBACKS: tuple[Feedback, ...] = tuple(link() for link in Feedback.__subclasses__())
