"""Links as a chain: their order, which are left out, and which keep the best candidate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling_cases import random_logits

from ggpy.sampling import ADJUSTMENTS, FILTERS, Chain, Filter, SamplingParams
from ggpy.sampling.links import Dry, LogitBias, Penalties, TopNSigma, TypicalP, Xtc

HISTORY = [3, 4, 5, 3, 4]
# A link that is off -> parameters with which it is.
OFF: list[tuple[Any, dict[str, Any]]] = [
    (LogitBias(), {}),
    (Penalties(), {"repeat_last_n": 0, "presence_penalty": 9.0}),
    (Penalties(), {"repeat_last_n": -1}),
    (Dry(), {"dry_penalty_last_n": -1, "dry_multiplier": 0.0}),
    (TopNSigma(), {"top_n_sigma": -2.0}),
    (TypicalP(), {}),
    (Xtc(), {"xtc_probability": 0.0, "xtc_threshold": 0.0}),
    (Xtc(), {"xtc_probability": 1.0, "xtc_threshold": 0.51}),
    *((link, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}) for link in FILTERS[1:5]),
]
FILTER_OPTIONS: list[dict[str, Any]] = [
    {"top_n_sigma": 0.1},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 0.0},
    {"temperature": 5.0},
    {"dynatemp_range": 0.8},
]


def names(links: Any) -> list[str]:
    return [type(link).__name__ for link in links]


def test_the_order_is_llama_cpps() -> None:
    assert names(ADJUSTMENTS) == ["LogitBias", "Penalties", "Dry"]
    assert names(FILTERS) == [
        *("TopNSigma", "TopK", "TypicalP", "TopP", "MinP", "Xtc"),
        *("Temperature", "DynamicTemperature"),
    ]


def test_the_default_chain() -> None:
    chain = Chain(SamplingParams())
    assert names(chain.adjustments) == [] and chain.has_kernels and not chain.greedy
    assert names(chain.filters) == ["TopK", "TopP", "MinP", "Temperature"]


@pytest.mark.parametrize(("link", "options"), OFF, ids=lambda x: type(x).__name__)
def test_a_link_that_is_off_would_change_nothing(link: Any, options: dict[str, Any]) -> None:
    params, logits = SamplingParams(**options), random_logits(50)
    assert not link.active(params)
    if isinstance(link, Filter):
        ids = np.arange(50)
        kept, out = link.apply((ids, logits), params, 0.0)
        assert np.array_equal(kept, ids)
    else:
        n = link.look_back(params)
        out = link.apply(logits, params, HISTORY if n < 0 else HISTORY[len(HISTORY) - n :])
    assert out.tobytes() == logits.tobytes()


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_one_temperature_is_on(spread: float) -> None:
    chain = Chain(SamplingParams(dynatemp_range=spread))
    assert names(chain.filters)[-1] == ("DynamicTemperature" if spread else "Temperature")
    assert len(chain.filters) == 4


@pytest.mark.parametrize("options", FILTER_OPTIONS, ids=str)
def test_filters_keep_the_best_candidate_if_they_say_so(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for seed in range(20):
        logits = np.round(random_logits(40, seed))  # with ties
        for link in FILTERS:
            if link.active(params) and link.keeps_best:
                kept, _ = link.apply((np.arange(40), logits), params, 0.0)
                assert int(np.argmax(logits)) in kept.tolist()
                assert not link.leaves_one(params) or len(kept) == 1


def test_a_greedy_chain_is_the_adjustments_and_the_temperature() -> None:
    options: dict[str, Any] = {"temperature": 0.0, "top_n_sigma": 1.0, "presence_penalty": 1.0}
    chain = Chain(SamplingParams(**options))
    assert chain.greedy and chain.has_kernels
    assert names(chain.adjustments) == ["Penalties"] and names(chain.filters) == ["Temperature"]
    for other in ({"typical_p": 0.9}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}):
        chain = Chain(SamplingParams(**{**options, **other}))
        assert not chain.greedy and "TopNSigma" in names(chain.filters)
