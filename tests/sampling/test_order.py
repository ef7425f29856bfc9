"""The order of samplers: their names, and chains in other orders than the default one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling_cases import random_logits

from ggpy.sampling import (
    ADJUSTMENTS,
    FEEDBACKS,
    FILTERS,
    RANGES,
    SAMPLERS,
    TOKEN_FILTERS,
    Sampler,
    SamplingParams,
    in_effect,
)
from ggpy.sampling.order import LETTERS, OFF, sampler_of, samplers_of_letters

ON: dict[str, Any] = {
    **{"seed": 1, "repeat_penalty": 1.5, "dry_multiplier": 0.5, "top_n_sigma": 2.0},
    **{"top_k": 5, "typical_p": 0.9, "top_p": 0.7, "min_p": 0.2, "xtc_probability": 0.5},
    **{"temperature": 0.5, "dynatemp_range": 0.1, "adaptive_target": 0.5},
}
OTHERS = {"seed", "xtc_threshold", "repeat_last_n", "dynatemp_exponent", "dry_base", "min_keep"}
OTHERS |= {"dry_allowed_length", "dry_penalty_last_n", "adaptive_decay"}
OTHERS |= {"mirostat", "mirostat_tau", "mirostat_eta"}


def names(params: SamplingParams) -> list[str]:
    """Of the links that act, in order."""
    chain = Sampler(params, 50).chain
    found = [*chain.adjustments, *chain.filters, *filter(None, [chain.feedback])]
    return [link.name for link in found]


def test_the_names_are_those_of_links_in_their_order() -> None:
    found = [link.name for link in (*ADJUSTMENTS, *FILTERS, *FEEDBACKS) if link.name]
    assert list(dict.fromkeys(found)) == list(SAMPLERS)
    assert [link.name for link in TOKEN_FILTERS] == [n for n in LETTERS if n not in SAMPLERS]
    assert names(SamplingParams(**ON)) == list(SAMPLERS)


def test_every_parameter_is_turned_off_or_does_nothing_alone() -> None:
    assert {name for values in OFF.values() for name in values} | OTHERS == RANGES.keys()
    assert names(SamplingParams(**ON, samplers=())) == ["temperature"], "which is 1"
    off = in_effect(SamplingParams(**ON, samplers=()))
    assert all(getattr(off, n) == value for values in OFF.values() for n, value in values.items())


@pytest.mark.parametrize(
    "samplers",
    [
        ("temperature", "top_k"),
        ("top_k", "penalties", "min_p", "dry"),
        ("xtc", "penalties", "xtc"),
        ("min_p", "top_p", "temperature", "top_n_sigma"),
    ],
)
def test_links_act_in_the_order_of_samplers(samplers: tuple[str, ...]) -> None:
    params = SamplingParams(**ON, samplers=samplers)
    assert names(params) == list(samplers)
    logits, history = random_logits(50), [1, 2, 1, 2]
    found, steps = (np.arange(50), logits), {}
    for link in (*ADJUSTMENTS, *FILTERS):
        steps[link.name] = link  # of two temperatures the dynamic one
    for name in samplers:
        link = steps[name]
        if link in FILTERS:
            found = link.apply(found, params, 0.0)
        else:
            whole = np.full(50, -np.inf, np.float32)
            whole[found[0]] = found[1]
            found = found[0], link.apply(whole, params, history)[found[0]]
    sampler = Sampler(replace(params, xtc_probability=1.0), 50, history)
    ids, kept = sampler.candidates(logits)
    assert ids.tolist() == found[0].tolist() and kept.tobytes() == found[1].tobytes()


def test_mirostat_leaves_the_temperature_and_biases() -> None:
    params = SamplingParams(**ON, mirostat=2, logit_bias={3: 1.0}, samplers=("top_k",))
    chain = Sampler(params, 50).chain
    links = [*chain.adjustments, *chain.filters, chain.feedback]
    assert [type(x).__name__ for x in links] == ["LogitBias", "Temperature", "Mirostat"]
    assert not params.uses_dry and not SamplingParams(**ON, samplers=("top_k",)).uses_dry


def test_the_temperature_keeps_signs_for_penalties_after_it() -> None:
    params = SamplingParams(temperature=0.5, repeat_penalty=2.0, samplers=("temp", "penalties"))
    _, kept = Sampler(params, 4, [0, 3]).candidates(np.array([4, 3, 1, -1], np.float32))
    assert (kept - kept[1]).tolist() == [4 - 6, 0, 2 - 6, -4 - 6]


def test_spellings() -> None:
    assert SamplingParams(samplers=["Top-K", "nucleus", "temp", "typ", "minp"]).samplers == (  # type: ignore[arg-type]
        *("top_k", "top_p", "temperature", "typ_p", "min_p"),
    )
    assert samplers_of_letters("edskypmxta") == SAMPLERS and samplers_of_letters("i") == ("infill",)
    assert sampler_of("Infill") == "infill" and sampler_of("fill") is sampler_of("") is None


@pytest.mark.parametrize(
    ("samplers", "message"),
    [
        ("top_k", "samplers is 'top_k': give names of penalties, dry"),
        ([3], "samplers is [3]"),
        (["top_q"], "samplers has 'top_q': give some of penalties"),
        (["top_k"] * 65, "samplers has 65 names: give at most 64"),
    ],
)
def test_wrong_samplers(samplers: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(samplers=samplers)
    assert message in str(caught.value) and len(str(caught.value)) < 200
