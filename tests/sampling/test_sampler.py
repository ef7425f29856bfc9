"""Draws, histories, and the whole chain against a slow one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import plain_softmax, random_logits

from ggpy.sampling import LARGEST, NO_TOKEN, Sampler, SamplingParams, uniform

KEEP_ALL = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_penalties_look_at_the_last_n_tokens_only() -> None:
    params = replace(KEEP_ALL, presence_penalty=1.0, repeat_last_n=2)
    logits = np.zeros(4, dtype=np.float32)
    assert Sampler(params, 4, [0, 1, 2]).adjust(logits).tolist() == [0, -1, -1, 0]
    everything = replace(params, repeat_last_n=-1)
    assert Sampler(everything, 4, [0, 1, 2]).adjust(logits).tolist() == [-1, -1, -1, 0]


def test_uniform_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0 are published; the upper 24 bits are ours."""
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [uniform(0, i) for i in range(3)] == [(w >> 40) / 2**24 for w in words]


def test_uniform_is_even_and_exact_in_float32() -> None:
    draws = np.array([uniform(123, i) for i in range(20_000)])
    assert (draws.astype(np.float32) == draws).all()
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-square, 19 degrees of freedom


def test_uniform_takes_every_64_bit_seed() -> None:
    assert len({uniform(seed, 0) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}) == 5


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    sampler = Sampler(KEEP_ALL, 4)
    counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=4)
    assert counts / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.025)


def test_the_draw_inverts_the_cumulative_probability() -> None:
    logits = random_logits(500)
    sampler = Sampler(replace(KEEP_ALL, seed=99), 500)
    for i in range(50):
        ids, p = sampler.probabilities(logits)
        expected = ids[np.searchsorted(np.cumsum(p), uniform(99, 2 * i), side="right")]
        assert sampler.sample(logits) == expected
    assert sampler.n_drawn == 50


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    logits = np.zeros(1000, dtype=np.float32)

    def text(seed: int) -> list[int]:
        sampler = Sampler(replace(KEEP_ALL, seed=seed), 1000)
        return [sampler.sample(logits) for _ in range(8)]

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(-1) != text(-1)


def brute_force(logits: np.ndarray, p: SamplingParams) -> dict[int, float]:
    """top-k, top-p, min-p and temperature over a sorted list, as the papers say."""
    left = sorted(enumerate(logits.tolist()), key=lambda c: (-c[1], c[0]))
    left = left[: p.top_k] if p.top_k > 0 else left
    total, kept = 0.0, []
    for candidate, share in zip(left, plain_softmax([x for _, x in left]), strict=True):
        kept.append(candidate)
        total += share
        if total >= p.top_p:
            break
    best = kept[0][1]
    kept = [c for c in kept if math.exp(c[1] - best) >= p.min_p]
    shares = plain_softmax([x / p.temperature for _, x in kept])
    return {token: share for (token, _), share in zip(kept, shares, strict=True)}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([-1, 0, 1, 5, 40, 900]),
    top_p=st.sampled_from([0.0, 0.4, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
    temperature=st.sampled_from([0.3, 0.8, 1.7]),
)
def test_the_chain_equals_the_slow_one(seed, top_k, top_p, min_p, temperature) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(seed=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(800, seed)
    ids, p = Sampler(params, 800).probabilities(logits)
    assert (np.diff(p) <= 0).all()
    expected = brute_force(logits, params)
    assert dict(zip(ids.tolist(), p, strict=True)) == pytest.approx(expected, rel=1e-5)


def test_defaults_are_those_of_llama_cpp() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.8, 40, 0.95, 0.05)
    assert (p.repeat_last_n, p.repeat_penalty, p.dry_base, p.dry_allowed_length) == (64, 1, 1.75, 2)


def test_greedy_takes_the_best_after_the_adjustments() -> None:
    logits = np.array([1.0, 5.0, 4.0, 5.0], dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    assert Sampler(greedy, 4).sample(logits) == 1  # of two equal ones the lower id
    assert Sampler(replace(greedy, logit_bias={1: -math.inf}), 4).sample(logits) == 3
    assert Sampler(replace(greedy, presence_penalty=2.0), 4, [1, 3]).sample(logits) == 2
    assert Sampler(greedy, 4).chain.greedy
    assert Sampler(greedy, 4).probabilities(logits)[0].tolist() == [1]


def test_greedy_after_a_filter_that_drops_the_best_is_not_argmax() -> None:
    params = SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.2, seed=1)
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32) + np.float32(1e-3)
    sampler = Sampler(params, 3)
    assert not sampler.chain.greedy
    assert sampler.sample(logits) in (1, 2)


def test_xtc_applies_as_often_as_its_probability_says() -> None:
    params = replace(KEEP_ALL, xtc_probability=0.3, xtc_threshold=0.2)
    sampler = Sampler(params, 2)
    logits = np.log(np.array([0.7, 0.3])).astype(np.float32)
    applied = 0
    for _ in range(1000):
        applied += len(sampler.probabilities(logits)[0]) == 1
        sampler.sample(logits)
    assert applied / 1000 == pytest.approx(0.3, abs=0.05)


def test_history_grows_by_what_is_accepted_only() -> None:
    sampler = Sampler(replace(KEEP_ALL, frequency_penalty=0.5), 3, [0])
    sampler.sample(np.zeros(3, dtype=np.float32))
    assert sampler.history == [0]
    sampler.accept(2)
    assert sampler.history == [0, 2]


def test_a_token_of_the_step_under_way_is_expected_settled_and_accepted() -> None:
    sampler = Sampler(replace(KEEP_ALL, frequency_penalty=0.5), 9, [0])
    for _ in range(2):  # a step that was interrupted is handed over again
        sampler.expect(1)
        assert sampler.history == [0, ~1]
    sampler.settle([5, 7])
    sampler.settle([6, 6])
    assert sampler.history == [0, 7]
    sampler.accept(7)
    sampler.accept(3)
    assert sampler.history == [0, 7, 3]
    sampler.settle([5, 5])
    assert sampler.history == [0, 7, 3]


def test_logits_are_not_changed() -> None:
    params = SamplingParams(
        seed=1, repeat_penalty=1.3, dry_multiplier=1.0, logit_bias={3: 1.0}, top_n_sigma=1.0
    )
    logits = random_logits(300)
    before = logits.copy()
    Sampler(params, 300, [1, 2, 1, 2, 1]).sample(logits)
    assert (logits == before).all()


def test_a_suppressed_token_is_never_drawn() -> None:
    """Whatever its bias is."""

    class Tokens:
        end_ids: frozenset[int] = frozenset()
        end_of_turn_id: int | None = None
        suppressed_ids: frozenset[int] = frozenset({2, 4})

        def piece(self, id: int, special: bool = False) -> bytes:
            return b""

    logits = np.array([1, 0, 9, 5, 8], np.float32)
    for params in (SamplingParams(temperature=0), SamplingParams(logit_bias={2: 50.0, 0: 7.0})):
        sampler = Sampler(params, 5, tokens=Tokens())
        ids, _ = sampler.probabilities(logits)
        assert not {2, 4} & {*ids.tolist()}
        assert sampler.sample(logits) == (0 if params.logit_bias else 3)


# Bad input, and extreme parameters


def test_ids_of_biases_are_in_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="ids go from 0 to 9"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), 10)


@settings(deadline=None, max_examples=200)
@given(
    bias=st.sampled_from([-LARGEST, 0.0, LARGEST, -math.inf]),
    repeat=st.sampled_from([1e-6, 1.0, 1e6]),
    presence=st.sampled_from([-LARGEST, 0.0, LARGEST]),
    frequency=st.sampled_from([-LARGEST, 0.0, LARGEST]),
    multiplier=st.sampled_from([0.0, 1e-300, 1.0, LARGEST]),
    base=st.sampled_from([1.0, math.nextafter(1, 2), 1.000001, 1.75, LARGEST]),
    temperature=st.sampled_from([1e-300, 1.0, LARGEST]),
    spread=st.sampled_from([0.0, LARGEST]),
    sigma=st.sampled_from([-1.0, 1.0, LARGEST]),
    logit=st.sampled_from([-1e30, -1.0, 0.0, 1e-30, 1e30]),
)
def test_no_allowed_parameter_leads_out_of_float32(  # type: ignore[no-untyped-def]
    bias, repeat, presence, frequency, multiplier, base, temperature, spread, sigma, logit
) -> None:
    params = SamplingParams(
        seed=1,
        temperature=temperature,
        dynatemp_range=spread,
        top_n_sigma=sigma,
        repeat_last_n=-1,
        repeat_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        dry_multiplier=multiplier,
        dry_base=base,
        dry_allowed_length=1,
        dry_penalty_last_n=-1,
        logit_bias={1: bias, 5: bias},
    )
    sampler = Sampler(params, 6, [1, 2, 3, 3] * 500)
    logits = np.array([logit, logit, -logit, 0, 1, 1e30], np.float32)
    with np.errstate(all="raise", under="ignore"):
        adjusted = sampler.adjust(logits)
    assert not np.isnan(adjusted).any() and adjusted.max() < math.inf
    _, kept = sampler.candidates(logits)
    assert not np.isnan(kept).any() and kept.max() == 0
    assert 0 <= sampler.sample(logits) < 6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_without_a_token_has_its_reason(temperature: float) -> None:
    forbidden = dict.fromkeys(range(5), -math.inf)
    sampler = Sampler(SamplingParams(temperature=temperature, logit_bias=forbidden), 5)
    assert sampler.try_sample(np.zeros(5, np.float32)) == NO_TOKEN
    assert sampler.n_drawn == 0 and "no token can be chosen" in str(sampler.error)
    fine = Sampler(SamplingParams(temperature=temperature, seed=3), 5)
    assert fine.try_sample(np.eye(1, 5, 2, np.float32)[0]) != NO_TOKEN and fine.error is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(bad: float, temperature: float) -> None:
    logits = random_logits(100)
    logits[17] = bad
    with pytest.raises(ValueError, match="no token can be chosen"):
        Sampler(SamplingParams(temperature=temperature), 100).sample(logits)


def test_forbidding_every_token_is_refused() -> None:
    everything = dict.fromkeys(range(5), -math.inf)
    with pytest.raises(ValueError, match="no token can be chosen"):
        Sampler(SamplingParams(logit_bias=everything), 5).sample(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="shape"):
        Sampler(SamplingParams(), 5).sample(np.zeros(6, np.float32))
