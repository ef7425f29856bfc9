"""Masks in numpy: which tokens can be drawn, and what a sampler tells of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_cases import (
    AllowedTokens,
    FailingMask,
    plain_softmax,
    random_logits,
    random_mask,
)

from ggpy.sampling import NO_TOKEN, Sampler, SamplingParams, allowed_tokens, n_words
from ggpy.sampling.mask import fill_together

V = 453
CHAINS = [
    {},
    {"temperature": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 2.0},
    {"typical_p": 0.5, "top_n_sigma": 2.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 0.5, "dry_multiplier": 1.0},
    {"repeat_penalty": 1.3, "presence_penalty": -2.0, "logit_bias": {7: -math.inf, 9: 5.0}},
]


@pytest.mark.parametrize("n_vocab", [1, 31, 32, 33, 453])
def test_words_and_bits(n_vocab):
    ids = sorted({0, n_vocab // 2, n_vocab - 1})
    row = np.zeros(n_words(n_vocab), np.int32)
    AllowedTokens(*ids).fill(row)
    assert [t for t in range(n_vocab) if int(row[t // 32]) >> t % 32 & 1] == ids
    assert np.flatnonzero(allowed_tokens(row, n_vocab)).tolist() == ids


@pytest.mark.parametrize("options", CHAINS)
@pytest.mark.parametrize("n_allowed", [1, 5, 200])
def test_only_allowed_tokens_are_drawn(options, n_allowed):
    params, mask = SamplingParams(seed=1, **options), random_mask(V, n_allowed)
    sampler = Sampler(params, V, [9, 7, 9], mask)
    for i in range(20):
        sampler.accept(sampler.sample(random_logits(V, i)))
    assert len(mask.accepted) == 20 and set(mask.accepted) <= mask.allowed


def test_the_others_are_as_if_they_were_not_there():
    """The same draws as from a vocabulary of the allowed tokens alone."""
    ids = sorted(random_mask(V, 50).allowed)
    params = SamplingParams(seed=5, xtc_probability=0.5, top_k=20, typical_p=0.8)
    masked, alone = Sampler(params, V, (), AllowedTokens(*ids)), Sampler(params, len(ids))
    for i in range(30):
        logits = random_logits(V, i)
        assert masked.sample(logits) == ids[alone.sample(logits[ids])]


def test_probabilities_are_those_of_allowed_tokens():
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = random_logits(V)
    ids, p = Sampler(params, V, (), AllowedTokens(3, 30, 300)).probabilities(logits)
    best = sorted([3, 30, 300], key=lambda t: -logits[t])
    assert ids.tolist() == best and np.allclose(p, plain_softmax(logits[best]), atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_of_tokens_that_are_not_allowed_do_not_matter(temperature):
    logits = random_logits(V)
    logits[[1, 2]] = np.nan, np.inf
    params = SamplingParams(seed=1, temperature=temperature)
    assert Sampler(params, V, (), AllowedTokens(40, 41)).sample(logits) in (40, 41)
    with pytest.raises(ValueError, match="highest logit is nan"):
        Sampler(params, V, (), AllowedTokens(1, 41)).sample(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_allowed_token_is_an_error_of_the_sequence(temperature):
    params = SamplingParams(seed=1, temperature=temperature)
    for mask, words in ((AllowedTokens(), "allows no token here"), (FailingMask(), "too complex")):
        sampler = Sampler(params, V, (), mask)
        assert sampler.try_sample(random_logits(V)) == NO_TOKEN
        assert words in str(sampler.error) and sampler.n_drawn == 0


def test_masks_together_are_zeros_where_something_is_wrong():
    rows = np.full((4, n_words(V)), -1, np.int32)
    masks = [AllowedTokens(40), FailingMask(), AllowedTokens(), AllowedTokens(3)]
    errors = fill_together(masks, rows)
    assert errors[0] is errors[3] is None
    assert str(errors[1]) == "too complex" and "allows no token" in str(errors[2])
    assert not rows[1:3].any() and allowed_tokens(rows[0], V).nonzero()[0].tolist() == [40]


class FilledTogether(AllowedTokens):
    """A kind of mask that fills many at a time."""

    calls = 0

    @staticmethod
    def fill_many(masks, rows):
        FilledTogether.calls += 1
        for mask, row in zip(masks, rows, strict=True):
            mask.fill(row)
        return [None] * len(masks)


def test_a_kind_of_mask_may_fill_many_at_a_time():
    rows = np.full((2, n_words(V)), -1, np.int32)
    assert fill_together([FilledTogether(40), FilledTogether()], rows)[0] is None
    assert FilledTogether.calls == 1 and rows[0].any() and not rows[1].any()
    assert fill_together([FilledTogether(40), AllowedTokens(41)], rows) == [None, None]
    assert FilledTogether.calls == 1


def test_a_token_that_is_not_allowed_is_not_accepted():
    sampler = Sampler(SamplingParams(), V, [1, 2], AllowedTokens(3))
    with pytest.raises(ValueError, match="token 4 is not allowed"):
        sampler.accept(4)
    sampler.accept(3)
    assert sampler.history == [1, 2, 3]
