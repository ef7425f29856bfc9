"""Logits -> token id: llama.cpp's sampler chain, with draws that a seed repeats."""

from .params import (
    DRY_SEQUENCE_BREAKERS,
    LARGEST,
    MAX_BIASES,
    MAX_BREAKER_TOKENS,
    MAX_BREAKERS,
    RANGES,
    SamplingParams,
)
from .sampler import NO_TOKEN, Sampler, uniform

__all__ = [
    "DRY_SEQUENCE_BREAKERS",
    "LARGEST",
    "MAX_BIASES",
    "MAX_BREAKERS",
    "MAX_BREAKER_TOKENS",
    "NO_TOKEN",
    "RANGES",
    "Sampler",
    "SamplingParams",
    "uniform",
]
