"""The parameters of `SamplingParams` as keyword arguments, for editors and type checkers.

A function declares `**sampling: Unpack[SamplingKeywords]`; a test compares names and types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class SamplingKeywords(TypedDict, total=False):
    """Each parameter of `SamplingParams`; one that is missing keeps its default."""

    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    min_keep: int
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    samplers: tuple[str, ...]
    dry_breakers: tuple[tuple[int, ...], ...]
    logit_bias: Mapping[int, float]
