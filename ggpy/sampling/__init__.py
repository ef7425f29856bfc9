"""Logits -> token id: llama.cpp's sampler chain, with draws that a seed repeats."""

from .dry import MAX_BREAKERS, breaker_sequences
from .infill import TokenTexts
from .links import (
    ADJUSTMENTS,
    FEEDBACKS,
    FILTERS,
    TOKEN_FILTERS,
    Adjustment,
    Feedback,
    Filter,
    Link,
    TokenFilter,
)
from .mask import TokenMask, allowed_tokens, n_words
from .order import SAMPLERS
from .params import (
    DRY_SEQUENCE_BREAKERS,
    LARGEST,
    MAX_BIASES,
    MAX_BREAKER_TOKENS,
    RANGES,
    SamplingParams,
    in_effect,
)
from .reasoning import ReasoningBudget, ReasoningMarkers, Split
from .sampler import NO_TOKEN, Chain, NothingAllowed, Sampler, uniform

__all__ = [
    "ADJUSTMENTS",
    "DRY_SEQUENCE_BREAKERS",
    "FEEDBACKS",
    "FILTERS",
    "LARGEST",
    "MAX_BIASES",
    "MAX_BREAKERS",
    "MAX_BREAKER_TOKENS",
    "NO_TOKEN",
    "RANGES",
    "SAMPLERS",
    "TOKEN_FILTERS",
    "Adjustment",
    "Chain",
    "Feedback",
    "Filter",
    "Link",
    "NothingAllowed",
    "ReasoningBudget",
    "ReasoningMarkers",
    "Sampler",
    "SamplingParams",
    "Split",
    "TokenFilter",
    "TokenMask",
    "TokenTexts",
    "allowed_tokens",
    "breaker_sequences",
    "in_effect",
    "n_words",
    "uniform",
]
