"""What SamplingParams accepts, and what its errors say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggpy.sampling import (
    MAX_BIASES,
    MAX_BREAKER_TOKENS,
    MAX_BREAKERS,
    RANGES,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -2),
        ("seed", 1.5),
        ("temperature", math.nan),
        ("temperature", "warm"),
        ("top_k", -5),
        ("top_k", 3.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("typical_p", -1.0),
        ("xtc_probability", 1.5),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        # Beyond what float32 holds, or a double.
        ("temperature", 1e39),
        ("temperature", -(10**400)),
        ("dynatemp_range", 1e39),
        ("top_n_sigma", 1e300),
        ("presence_penalty", -1e300),
        ("frequency_penalty", -1e308),
        ("dry_multiplier", 1e39),
        ("dry_base", 1e308),
        ("top_k", 10**400),
        ("repeat_last_n", 2**31),
        ("dry_allowed_length", 2**40),
        ("top_p", [0.5]),
        ("seed", "7"),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} is {value!r:.60}: it must be {RANGES[name][2]}"


def test_every_number_has_a_range_and_is_kept_as_a_number_of_python() -> None:
    given = SamplingParams()
    numbers = [name for name, value in vars(given).items() if isinstance(value, (int, float))]
    assert numbers == list(RANGES)
    params = SamplingParams(top_p=np.float16(0.5), top_k=np.int8(7), temperature=1)  # type: ignore[arg-type]
    assert [type(x) for x in (params.top_p, params.top_k, params.temperature)] == [
        float,
        int,
        float,
    ]
    assert (params.top_p, params.top_k) == (0.5, 7)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({3: math.nan}, "logit_bias of token 3 is nan: give -1e20 to 1e20, or -inf"),
        ({3: math.inf}, "logit_bias of token 3 is inf"),
        ({3: 1e39}, "logit_bias of token 3 is 1e+39"),
        ({3: "1"}, "logit_bias of token 3 is '1'"),
        ({3: True}, "logit_bias of token 3 is True"),
        ({"3": 1.0}, "logit_bias names '3': give ids of tokens"),
        ({1.5: 1.0}, "logit_bias names 1.5"),
        ({-1: 1.0}, "logit_bias names -1"),
        ([(3, 1.0)], "logit_bias is [(3, 1.0)]: give a mapping of token ids to numbers"),
        (dict.fromkeys(range(MAX_BIASES + 1), 0.0), f"names 65537 tokens: at most {MAX_BIASES}"),
    ],
)
def test_biases_are_checked(bias, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        SamplingParams(logit_bias=bias)
    assert message in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("breakers", "message"),
    [
        (((),), "empty sequence"),
        (7, "dry_breakers is 7: give sequences of token ids"),
        ((7,), "dry_breakers holds 7: give sequences of token ids"),
        ((("7",),), "dry_breakers holds ('7',)"),
        (((-1,),), "dry_breakers holds (-1,)"),
        (((1,) * (MAX_BREAKER_TOKENS + 1),), "22 tokens in one sequence: at most 21 work"),
        (((1,),) * (MAX_BREAKERS + 1), f"has 262145 sequences: at most {MAX_BREAKERS} work"),
    ],
)
def test_breakers_are_checked(breakers, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        SamplingParams(dry_breakers=breakers)
    assert message in str(caught.value) and len(str(caught.value)) < 200


def test_what_the_caller_changes_afterwards_is_not_seen() -> None:
    bias, breakers = {1: 1.0}, [[2, 3]]
    params = SamplingParams(logit_bias=bias, dry_breakers=breakers)  # type: ignore[arg-type]
    bias[1], breakers[0][0] = math.nan, -5
    assert params.logit_bias == {1: 1.0} and params.dry_breakers == ((2, 3),)
