"""Mirostat and adaptive-p against their formulas written out, draw after draw; and their state."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import AllowedTokens, plain_softmax, random_logits

from ggpy.sampling import LARGEST, Sampler, SamplingParams
from ggpy.sampling.feedback import n_of_surprise

V = 300
ADAPTIVE = {"adaptive_target": 0.2, "adaptive_decay": 0.5, "top_k": 60}


def plain_mirostat(version: int, logits: list[float], mu: float) -> dict[int, float]:
    """Probabilities of what the published algorithm keeps of a vocabulary."""
    ids = sorted(range(len(logits)), key=lambda i: -logits[i])
    p = plain_softmax([logits[i] for i in ids])
    if version == 1:
        t = [math.log((i + 2) / (i + 1)) for i in range(99)]
        b = [math.log(x / y) for x, y in pairwise(p[:100])]
        s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
        k = ((s - 1) * 2**mu / (1 - len(logits) ** (1 - s))) ** (1 / s)
        n = max(1, int(k))
    else:
        n = max(1, sum(-math.log2(x) <= mu for x in p))
    total = sum(p[:n])
    return {id: x / total for id, x in zip(ids[:n], p[:n], strict=False)}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_against_its_formula(version: int) -> None:
    given = SamplingParams(
        seed=1, temperature=0.7, mirostat=version, mirostat_tau=2.5, mirostat_eta=0.3, top_k=1
    )
    sampler, mu, sizes = Sampler(given, V), 5.0, set()
    for draw in range(30):
        row = random_logits(V, draw)
        expected = plain_mirostat(version, [x / 0.7 for x in row.tolist()], mu)
        ids, p = sampler.probabilities(row)
        assert dict(zip(ids.tolist(), p, strict=True)) == pytest.approx(expected, rel=1e-4)
        sizes.add(len(ids))
        mu -= 0.3 * (-math.log2(expected[sampler.sample(row)]) - 2.5)
    assert len(sizes) > 5


def test_mirostat_keeps_the_surprise_near_its_target() -> None:
    for version in (1, 2):
        for tau in (1.0, 4.0):
            params = SamplingParams(seed=3, temperature=1, mirostat=version, mirostat_tau=tau)
            sampler, found = Sampler(params, 2000), []
            for draw in range(400):
                row = random_logits(2000, draw) / 2
                ids, p = sampler.probabilities(row)
                found.append(-math.log2(p[ids == sampler.sample(row)][0]))
            assert np.mean(found[50:]) == pytest.approx(tau, abs=0.2)


def test_adaptive_p_against_its_formula() -> None:
    sampler = Sampler(SamplingParams(seed=1, temperature=1, min_p=0, top_p=1, **ADAPTIVE), V)
    weighted, total = 0.2 / 0.5, 1 / 0.5
    for draw in range(30):
        row = random_logits(V, draw)
        best = sorted(range(V), key=lambda i: -row[i])[:60]
        p = plain_softmax([row[i] for i in best])
        target = min(max(0.4 - weighted / total, 0.0), 1.0)
        distances = [abs(x - target) / 0.3 for x in p]
        shaped = plain_softmax([5 - 10 * d * d / (1 + d) for d in distances])
        ids, found = sampler.probabilities(row)
        expected = dict(zip(best, shaped, strict=True))
        assert dict(zip(ids.tolist(), found, strict=True)) == pytest.approx(expected, rel=1e-4)
        weighted = p[best.index(sampler.sample(row))] + 0.5 * weighted
        total = 1 + 0.5 * total


@pytest.mark.parametrize("options", [{"mirostat": 1}, {"mirostat": 2}, ADAPTIVE], ids=str)
def test_draws_that_are_repeated_give_the_same_tokens(options: dict) -> None:
    """Whatever was drawn after them meanwhile, of whatever logits."""
    params = SamplingParams(seed=2, mirostat_tau=1.5, mirostat_eta=3.0, **options)
    rows = [random_logits(V, draw) for draw in range(12)]
    plain = Sampler(params, V)
    expected = [plain.sample(row) for row in rows]
    sampler, tokens = Sampler(params, V), []
    for draw, row in enumerate(rows):
        tokens.append(sampler.sample(row))
        sampler.sample(rows[(draw + 5) % 12])
        sampler.n_drawn = draw
        assert sampler.sample(row) == tokens[-1]
        last = sampler.probabilities(row, draw)  # of the draw that was made, not of the next one
        assert last[1].tobytes() == plain.probabilities(row, draw)[1].tobytes()
    assert tokens == expected


@pytest.mark.parametrize("options", [{"mirostat": 1}, {"mirostat": 2}, ADAPTIVE], ids=str)
def test_what_a_mask_forbids_is_no_candidate(options: dict) -> None:
    sampler = Sampler(SamplingParams(seed=2, **options), V, (), AllowedTokens(5))
    assert [sampler.sample(random_logits(V, draw)) for draw in range(3)] == [5] * 3


def test_temperature_0_is_greedy_though_there_is_a_feedback() -> None:
    for options in ({"mirostat": 1}, {"mirostat": 2}, ADAPTIVE):
        sampler = Sampler(SamplingParams(temperature=0, **options), V)
        row = random_logits(V)
        assert sampler.chain.greedy and sampler.sample(row) == int(row.argmax())


@pytest.mark.parametrize(
    ("logits", "n"),
    [([1.0], 1), ([1.0, -np.inf], 1), ([2.0] * 7, 7), ([0.0, -1e30, -2e30], 1), ([1e30, 0], 1)],
)
def test_how_many_mirostat_keeps_of_odd_logits(logits: list[float], n: int) -> None:
    assert n_of_surprise(np.array(logits, np.float32), 10.0, 1000) == n


@settings(deadline=None, max_examples=100)
@given(
    version=st.sampled_from([0, 1, 2]),
    tau=st.sampled_from([0.0, 1e-300, 5.0, LARGEST]),
    eta=st.sampled_from([0.0, 1.0, LARGEST]),
    target=st.sampled_from([0.0, 0.5, 1.0]),
    decay=st.sampled_from([0.0, 0.99]),
    temperature=st.sampled_from([1e-300, 1.0, LARGEST]),
    logit=st.sampled_from([-1e30, -1.0, 0.0, 1e-30, 1e30]),
    size=st.sampled_from([1, 2, 150]),
)
def test_extreme_parameters_draw_tokens(  # type: ignore[no-untyped-def]
    version, tau, eta, target, decay, temperature, logit, size
) -> None:
    params = SamplingParams(
        seed=1,
        mirostat=version,
        mirostat_tau=tau,
        mirostat_eta=eta,
        adaptive_target=target,
        adaptive_decay=decay,
        temperature=temperature,
        repeat_penalty=1e6,
        samplers=("temperature", "penalties", "adaptive_p"),
    )
    sampler, logits = Sampler(params, size, [0]), np.zeros(size, np.float32)
    logits[0] = logit
    with np.errstate(all="raise", under="ignore"):
        assert all(0 <= sampler.sample(logits) < size for _ in range(5))
