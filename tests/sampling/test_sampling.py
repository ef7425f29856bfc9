"""The sampler chain: each link against its formula written out the slow way, then the chain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.sampling import (
    DRY_SEQUENCE_BREAKERS,
    LARGEST,
    MAX_BIASES,
    MAX_BREAKER_TOKENS,
    MAX_BREAKERS,
    NO_TOKEN,
    RANGES,
    Sampler,
    SamplingParams,
    uniform,
)
from ggpy.sampling import links as chain

KEEP_ALL = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def candidates(*probabilities: float) -> tuple[np.ndarray, np.ndarray]:
    """Candidates 10, 11, ... of these probabilities."""
    logits = np.log(np.array(probabilities)).astype(np.float32)
    return np.arange(10, 10 + len(probabilities)), logits


def random_logits(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


def plain_softmax(logits: np.ndarray) -> list[float]:
    weights = [math.exp(float(x) - float(max(logits))) for x in logits]
    return [w / sum(weights) for w in weights]


# Weights


def test_weights_are_the_exponential_rounded_down() -> None:
    below = -np.concatenate([np.linspace(0, 30, 5000), [1e3, 3e38, math.inf]]).astype(np.float32)
    exact = [math.floor(math.exp(x) * 2**40) for x in below.tolist()]
    found = chain.weights(below + np.float32(0))
    assert found[0] == 2**40 and (np.diff(found) <= 0).all() and not found[-3:].any()
    assert np.abs(found - exact).max() <= 1


def test_weights_do_not_depend_on_a_library() -> None:
    """The same bits from single operations of Python, whose doubles are IEEE's everywhere."""
    logits = random_logits(200, 4)
    for x, weight in zip(logits, chain.weights(logits), strict=True):
        turns = float(x - logits.max()) * chain.LOG2_E
        part, power = turns - round(turns), chain.EXP2[-1]
        for coefficient in chain.EXP2[-2::-1]:
            power = power * part + coefficient
        assert weight == math.floor(math.ldexp(power, round(turns) + 40))


# Ordering


@pytest.mark.parametrize("n", [1, 5, 64, 700, 5000])
@pytest.mark.parametrize("k", [1, 3, 40, 999])
@pytest.mark.parametrize("levels", [3, 10**6])  # 3: nearly all are ties
def test_largest_equals_a_full_sort(n: int, k: int, levels: int) -> None:
    scores = np.random.default_rng(n + k).integers(0, levels, n).astype(np.float32)
    expected = sorted(range(n), key=lambda i: (-scores[i], i))[:k]
    assert chain.largest(scores, min(k, n)).tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mass", [0.0, 0.25, 0.5, 0.9, 0.9999])
def test_prefix_is_the_shortest_that_reaches_the_mass(side: str, mass: float) -> None:
    logits = random_logits(3000)
    p = chain.softmax(logits)
    kept = chain.prefix(logits, p, mass, side)  # type: ignore[arg-type]
    total, short = p[kept].sum(), p[kept[:-1]].sum()
    assert total > mass if side == "right" else total >= mass
    assert short <= mass if side == "right" else len(kept) == 1 or short < mass
    assert logits[kept[-1]] >= np.delete(logits, kept).max()


def test_prefix_keeps_everything_when_the_mass_is_out_of_reach() -> None:
    logits = random_logits(100)
    assert len(chain.prefix(logits, chain.softmax(logits), 2.0)) == 100


def test_softmax_of_extreme_logits() -> None:
    p = chain.softmax(np.array([1e30, -np.inf, 1e30, -1e30], dtype=np.float32))
    assert p.tolist() == [0.5, 0.0, 0.5, 0.0]


# Adjustments


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = np.array([1, 2, 3], dtype=np.float32)
    out = chain.add_bias(logits, {0: 2.5, 2: -math.inf})
    assert out.tolist() == [3.5, 2.0, -math.inf]
    assert logits.tolist() == [1, 2, 3]


def test_penalties_follow_the_formula() -> None:
    logits = np.array([2.0, -2.0, 0.0, 4.0], dtype=np.float32)
    out = chain.penalize(logits, [0, 1, 1, 2], repeat=2.0, presence=0.5, frequency=0.25)
    assert out.tolist() == [1 - 0.75, -4 - 1.0, -0.75, 4.0]


def test_penalties_look_at_the_last_n_tokens_only() -> None:
    params = replace(KEEP_ALL, presence_penalty=1.0, repeat_last_n=2)
    logits = np.zeros(4, dtype=np.float32)
    assert Sampler(params, 4, [0, 1, 2]).adjust(logits).tolist() == [0, -1, -1, 0]
    everything = replace(params, repeat_last_n=-1)
    assert Sampler(everything, 4, [0, 1, 2]).adjust(logits).tolist() == [-1, -1, -1, 0]


@given(st.lists(st.integers(0, 2), max_size=40))
def test_suffix_matches_equal_comparing_every_suffix(tokens: list[int]) -> None:
    def common(a: list[int], b: list[int]) -> int:
        pairs = zip(reversed(a), reversed(b), strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

    expected = [common(tokens[: len(tokens) - i], tokens) for i in range(len(tokens))]
    assert chain.suffix_matches(tokens) == expected


# Histories, settings and results that llama.cpp's own test of DRY states as well.
@pytest.mark.parametrize(
    ("n_vocab", "history", "multiplier", "allowed", "breakers", "expected"),
    [
        (4, [0, 1], 1.0, 2, [], [0.25] * 4),
        (4, [0, 1, 2, 0, 1], 1.0, 2, [], [0.296923, 0.296923, 0.109232, 0.296923]),
        (5, [0, 1, 3, 4, 0, 1], 1.0, 2, [(3,)], [0.2] * 5),
        (5, [0, 1, 2, 0, 1], 2.0, 2, [], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        (5, [0, 1, 2, 3, 4, 0, 1], 1.0, 4, [], [0.2] * 5),
    ],
)
def test_dry(n_vocab, history, multiplier, allowed, breakers, expected) -> None:  # type: ignore[no-untyped-def]
    out = chain.dry(np.zeros(n_vocab, np.float32), history, multiplier, 1.1, allowed, breakers)
    assert chain.softmax(out) == pytest.approx(expected, abs=1e-5)


def test_dry_grows_with_the_repetition_and_stays_finite() -> None:
    logits = np.zeros(8, dtype=np.float32)
    history = [1, 2, 3, 4, 0, 1, 2, 3]
    assert chain.dry(logits, history, 1.0, 2.0, 2)[4] == -2.0  # three repeated, two allowed
    assert np.isfinite(chain.dry(logits, [1] * 3000, 1e-6, 1.75, 2)).all()


def test_a_breaker_of_several_tokens_ends_a_repetition() -> None:
    history = [1, 2, 3, 1, 2]
    assert chain.repetitions(history, 2, []) == {3: 2}
    assert chain.tokens_since_breaker([5, 6, 1], [(5, 6)]) == 1
    assert chain.tokens_since_breaker([5, 7, 1], [(5, 6)]) == 3
    assert chain.repetitions([1, 2, 3, 9, 1, 2], 3, [(9,)]) == {}


def test_a_single_breaker_is_not_penalised_itself() -> None:
    history = [1, 2, 7, 1, 2]
    logits = np.zeros(8, dtype=np.float32)
    assert chain.dry(logits, history, 1.0, 1.75, 2)[7] == -1.0
    assert chain.dry(logits, history, 1.0, 1.75, 2, [(7,)])[7] == 0.0


def test_breaker_sequences_find_text_inside_and_across_tokens() -> None:
    pieces = [b"a", b"x\n", b":", b"<|", b"|>", b"a<"]
    ids = {">": [4], "|>": [4], "end": [9]}
    found = chain.breaker_sequences(["\n", "<|>"], pieces, lambda text: ids[text])
    assert found == ((1,), (3, 4), (5, 4))
    assert chain.breaker_sequences(DRY_SEQUENCE_BREAKERS, pieces, lambda text: []) == ((1,), (2,))


# Filters


def test_top_n_sigma_cuts_below_the_best_by_standard_deviations() -> None:
    ids, logits = np.arange(5), np.array([4, 3, 0, -np.inf, 1], dtype=np.float32)
    finite = [4.0, 3.0, 0.0, 1.0]
    mean = sum(finite) / 4
    sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / 4)
    for n in (0.5, 1.0, 2.0):
        kept, _ = chain.top_n_sigma(ids, logits, n)
        assert kept.tolist() == [i for i in range(5) if logits[i] >= 4 - n * sigma]
    assert len(chain.top_n_sigma(ids, logits, -1.0)[0]) == 5


@pytest.mark.parametrize(("k", "left"), [(1, [13]), (2, [12, 13]), (0, [10, 11, 12, 13]), (9, 4)])
def test_top_k(k: int, left: list[int] | int) -> None:
    kept, logits = chain.top_k(*candidates(0.1, 0.2, 0.3, 0.4), k)
    assert kept.tolist() == (left if isinstance(left, list) else [10, 11, 12, 13])
    assert len(logits) == len(kept)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    assert chain.top_k(np.arange(6), np.zeros(6, np.float32), 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("p", "left"), [(0.0, [13]), (0.39, [13]), (0.65, [12, 13]), (0.85, [11, 12, 13]), (1.0, 4)]
)
def test_top_p(p: float, left: list[int] | int) -> None:
    kept, _ = chain.top_p(*candidates(0.1, 0.2, 0.3, 0.4), p)
    assert kept.tolist() == (left if isinstance(left, list) else [10, 11, 12, 13])


@pytest.mark.parametrize(("p", "left"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.74, 2), (1.0, 1)])
def test_min_p(p: float, left: int) -> None:
    kept, _ = chain.min_p(*candidates(0.1, 0.2, 0.3, 0.4), p)
    assert kept.tolist() == [10, 11, 12, 13][4 - left :]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.97])
def test_typical_p_against_its_definition(p: float) -> None:
    ids, logits = np.arange(30), random_logits(30, seed=3)
    probabilities = plain_softmax(logits)
    entropy = -sum(x * math.log(x) for x in probabilities)
    order = sorted(ids, key=lambda i: abs(-math.log(probabilities[i]) - entropy))
    expected, total = [], 0.0
    for i in order:
        expected.append(int(i))
        total += probabilities[i]
        if total > p:
            break
    assert chain.typical_p(ids, logits, p)[0].tolist() == sorted(expected)


def test_typical_p_may_drop_the_most_probable_one() -> None:
    kept, _ = chain.typical_p(*candidates(0.5, 0.07, 0.07, 0.07, 0.07, 0.07, 0.15), 0.1)
    assert kept.tolist() == [16]


@pytest.mark.parametrize(
    ("threshold", "left"), [(0.15, [10, 11]), (0.25, [10, 11, 12]), (0.35, [10, 11, 12, 13])]
)
def test_xtc_leaves_the_least_probable_of_the_top_choices(threshold: float, left: list) -> None:
    kept, _ = chain.xtc(*candidates(0.1, 0.2, 0.3, 0.4), threshold)
    assert kept.tolist() == left


def test_scale_divides_and_goes_greedy_at_zero() -> None:
    ids, logits = candidates(0.1, 0.2, 0.3, 0.4)
    kept, scaled = chain.scale(ids, logits, 0.5)
    squares = np.array([0.1, 0.2, 0.3, 0.4]) ** 2
    assert chain.softmax(scaled) == pytest.approx(squares / squares.sum(), rel=1e-5)
    assert len(kept) == 4
    assert chain.scale(ids, logits, 0.0)[0].tolist() == [13]
    assert chain.softmax(chain.scale(ids, logits, 1e-38)[1])[3] == 1.0


def test_dynamic_temperature_follows_the_entropy() -> None:
    flat = np.zeros(8, dtype=np.float32)
    sure = np.array([100.0] + [0.0] * 7, dtype=np.float32)
    assert chain.dynamic_temperature(flat, 0.8, 0.3, 1.0) == pytest.approx(1.1)
    assert chain.dynamic_temperature(sure, 0.8, 0.3, 1.0) == pytest.approx(0.5)
    assert chain.dynamic_temperature(sure, 0.8, 0.0, 1.0) == 0.8
    half = np.array([0.0, 0.0] + [-1e9] * 2, dtype=np.float32)  # one bit of two
    assert chain.dynamic_temperature(half, 0.8, 0.4, 2.0) == pytest.approx(0.4 + 0.8 * 0.25)


# Draws


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


# The chain


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
    assert not (p.penalizes or p.uses_dry or p.uses_xtc or p.greedy)


def test_greedy_takes_the_best_after_the_adjustments() -> None:
    logits = np.array([1.0, 5.0, 4.0, 5.0], dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    assert Sampler(greedy, 4).sample(logits) == 1  # of two equal ones the lower id
    assert Sampler(replace(greedy, logit_bias={1: -math.inf}), 4).sample(logits) == 3
    assert Sampler(replace(greedy, presence_penalty=2.0), 4, [1, 3]).sample(logits) == 2
    assert Sampler(greedy, 4).greedy
    assert Sampler(greedy, 4).probabilities(logits)[0].tolist() == [1]


def test_greedy_after_a_filter_that_drops_the_best_is_not_argmax() -> None:
    params = SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.2, seed=1)
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32) + np.float32(1e-3)
    sampler = Sampler(params, 3)
    assert not sampler.greedy
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


# Bad input


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


def test_too_many_texts_of_breakers_are_refused() -> None:
    with pytest.raises(ValueError, match="65 sequence breakers: at most 64 are possible"):
        chain.breaker_sequences(["x"] * 65, [], lambda text: [])


def test_ids_of_biases_are_in_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="ids go from 0 to 9"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), 10)


def test_what_the_caller_changes_afterwards_is_not_seen() -> None:
    bias, breakers = {1: 1.0}, [[2, 3]]
    params = SamplingParams(logit_bias=bias, dry_breakers=breakers)  # type: ignore[arg-type]
    bias[1], breakers[0][0] = math.nan, -5
    assert params.logit_bias == {1: 1.0} and params.dry_breakers == ((2, 3),)


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


def test_dry_takes_off_what_float32_holds() -> None:
    logits = np.zeros(8, np.float32)
    for base, multiplier in ((1e20, 1.0), (1e20, 1e20), (3.4e38, 3.4e38), (1.0, 2.0)):
        out = chain.dry(logits, [1] * 3000, multiplier, base, 1)
        assert -chain.FLOAT32_MAX <= out[1] < -1 and not out[2:].any()


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
