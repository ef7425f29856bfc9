"""The sampler chain on the GPU samples the tokens of ggpy/sampling, for rows and settings of many
kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from kernel_buffers import Output, upload
from sampling_cases import AllowedTokens, FailingMask, random_mask

from ggpy.backends.cuda.sampling import SamplingPlan
from ggpy.kernels.sampling.sample import MAX_TOP_K, ROW, SEGMENT, Sample, best_bytes
from ggpy.sampling import Sampler, SamplingParams


def draw(device, logits: np.ndarray, samplers: Sequence[Sampler], before: Sequence[int] = ()):
    """Returns (ids, results) of a launch; `before`: ids of the previous step."""
    plan, (n, n_vocab) = SamplingPlan(samplers), logits.shape
    image = np.zeros(plan.n_ints, np.int32)
    parameters = upload(device, image[: plan.write(image)])
    best = Output(device, best_bytes(n, n_vocab, plan.width))
    ids, results = Output(device, 4 * n), Output(device, 4 * n)
    device.upload(ids.buffer, np.resize(np.array([*before, 0], np.int32), n))
    edits = parameters.at(n * ROW.itemsize)
    rows = upload(device, logits.astype(np.float32))
    Sample(device).launch(
        rows, n, n_vocab, parameters, edits, plan.width, best.buffer, ids.buffer, results.buffer
    )
    best.read(np.uint64, (-1,))
    return ids.read(np.int32, (n,)), results.read(np.int32, (n,))


def check(
    device, logits: np.ndarray, params: Sequence[SamplingParams], history=(), masks=None
) -> None:
    """One row per SamplingParams: the kernel's ids equal numpy's, draw after draw."""
    n_vocab = logits.shape[1]
    masks = masks or [None] * len(params)
    samplers = [Sampler(p, n_vocab, history, m) for p, m in zip(params, masks, strict=True)]
    for first in range(0, 30, 10):
        for s in samplers:
            s.n_drawn = first
        ids, results = draw(device, logits, samplers)
        expected = [s.sample(row) for s, row in zip(samplers, logits, strict=True)]
        assert ids.tolist() == results.tolist() == expected


def random_rows(n: int, n_vocab: int, seed: int = 0) -> np.ndarray:
    """Rows of several spreads."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, n_vocab)) * rng.uniform(0.3, 6, (n, 1))).astype(np.float32)


SETTINGS = [
    {},
    {"temperature": 2.0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.99, "min_p": 0.0},
    {"temperature": 0.01, "top_k": 7},
    {"temperature": 1e20, "min_p": 0.2},
    {"temperature": 1e-38},
    {"temperature": 5.0, "top_p": 0.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 1.0, "top_k": MAX_TOP_K, "top_p": 0.9999, "min_p": 1e-7},
    {"temperature": 0.8, "top_k": 33, "top_p": 0.5},
    {"temperature": 1.5, "xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "min_p": 0.0},
    {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.01, "top_k": 700},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0, "top_p": 1.0},
]


@pytest.mark.parametrize("n_vocab", [1, 2, 31, 453, SEGMENT, 3 * SEGMENT - 7, 32003, 262144])
def test_equals_numpy(machine, n_vocab):
    settings = SETTINGS if n_vocab < 10000 else SETTINGS[:2]
    params = [SamplingParams(seed=i, **options) for i, options in enumerate(settings)]
    check(machine, random_rows(len(params), n_vocab, n_vocab), params)


@pytest.mark.parametrize("seed", range(3))
def test_many_seeds(machine, seed):
    """Nearly flat rows, so that every bit of the sums and of the draw counts."""
    params = [SamplingParams(seed=2**seed * 12345 + i, temperature=1.5) for i in range(50)]
    check(machine, random_rows(50, 200, seed) * 0.3, params)


def test_large_seeds_and_counts(machine):
    params = [SamplingParams(seed=seed, top_k=100) for seed in (0, 2**32, 2**63, 2**64 - 1)]
    logits, samplers = random_rows(4, 500), [Sampler(p, 500) for p in params]
    for s, n in zip(samplers, (2**31, 2**33 + 1, 7, 2**62), strict=True):
        s.n_drawn = n
    ids, _ = draw(machine, logits, samplers)
    assert ids.tolist() == [s.sample(row) for s, row in zip(samplers, logits, strict=True)]


def hard_rows(n_vocab: int) -> np.ndarray:
    """Rows: all equal, few levels, rising, falling, the best in one segment, mostly -inf, huge."""
    rng = np.random.default_rng(n_vocab)
    x = np.zeros((8, n_vocab), np.float32)
    x[0, ::2] = -0.0
    x[1] = rng.integers(0, 3, n_vocab)
    x[2], x[3] = np.arange(n_vocab) / 1000, -np.arange(n_vocab) / 1000
    x[4, -SEGMENT:] = 10 + rng.standard_normal(min(n_vocab, SEGMENT))
    x[5] = -np.inf
    x[5, rng.integers(0, n_vocab, 9)] = rng.standard_normal(9)
    x[6] = rng.choice([-3e38, 3e38, 2.9e38], n_vocab)
    x[7] = rng.standard_normal(n_vocab).astype(np.float32) * np.float32(1e-40)
    return x


@pytest.mark.parametrize("top_k", [1, 40, 600, MAX_TOP_K])
def test_ties_infinities_and_extremes(machine, top_k):
    params = [SamplingParams(seed=i, temperature=1.2, top_k=top_k, top_p=0.9) for i in range(8)]
    check(machine, hard_rows(2 * SEGMENT + 77), params)


def test_more_candidates_than_fit_at_once(machine):
    """Many segments; the last one holds all of the best logits, and the kernel reads the others
    first.
    """
    logits = np.zeros((2, 6 * SEGMENT), np.float32)
    logits[:, 5 * SEGMENT :] = np.linspace(3, 4, SEGMENT)
    logits[1] *= -1
    params = [SamplingParams(seed=i, temperature=3.0, top_k=MAX_TOP_K, top_p=1.0) for i in range(2)]
    check(machine, logits, params)


PENALTIES = [
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.7, "frequency_penalty": 0.31, "repeat_last_n": 7},
    {"presence_penalty": 1.5, "frequency_penalty": -0.2, "repeat_last_n": 4096},
    {"repeat_penalty": 1.1, "logit_bias": {5: 3.25, 17: -np.inf, 2100: 2.0}},
    {"logit_bias": {0: -np.inf, 2: 1.0 / 3}, "temperature": 0.0},
    {"repeat_penalty": 2.0, "presence_penalty": 0.1, "temperature": 0.0},
    {},
]


def test_penalties_and_biases(machine):
    params = [SamplingParams(seed=3, **{"temperature": 1.1, **p}) for p in PENALTIES]
    history = [*np.random.default_rng(1).integers(0, 2200, 150).tolist(), 5, 5, 2100, 9, 5]
    check(machine, random_rows(len(params), 2300) * 0.5, params, history)


def test_tokens_that_nobody_has_read_count(machine):
    """The penalised history may end with a token that the previous step sampled and the host has
    not read.
    """
    params = SamplingParams(seed=1, temperature=0.0, presence_penalty=100.0)
    logits = np.tile(np.arange(10, 0, -1), (3, 1)).astype(np.float32)
    samplers = [Sampler(params, 10, [1]) for _ in range(3)]
    for s, row in zip(samplers[:2], (2, 1), strict=True):
        s.expect(row)
    ids, _ = draw(machine, logits, samplers, before=[9, 2, 0])
    assert ids.tolist() == [2, 0, 0]


@pytest.mark.parametrize("n_vocab", [31, 32, 453, SEGMENT + 33, 3 * SEGMENT - 7, 32003])
def test_masks(machine, n_vocab):
    """Of many and of few tokens, fewer than top_k and fewer than a segment, beside rows without."""
    settings = SETTINGS if n_vocab < 10000 else SETTINGS[:4]
    params = [SamplingParams(seed=i, **options) for i, options in enumerate(settings)]
    counts = [n_vocab, n_vocab - 1, n_vocab // 2, 20, 3, 2, 1]
    logits = random_rows(len(params), n_vocab, n_vocab)
    for first in range(3):
        ours = [counts[(i + first) % len(counts)] for i in range(len(params))]
        masks = [random_mask(n_vocab, n, i) if i % 4 else None for i, n in enumerate(ours)]
        check(machine, logits, params, masks=masks)


def test_one_token_is_allowed_wherever_it_is(machine):
    """The last of a word, of a segment, of the vocabulary; the worst of all; a greedy row too."""
    n_vocab = 2 * SEGMENT + 33
    tokens = [0, 31, 32, SEGMENT - 1, SEGMENT, n_vocab - 2, n_vocab - 1]
    logits = random_rows(len(tokens), n_vocab)
    logits[range(len(tokens)), tokens] = -50
    for temperature in (0.0, 1.0):
        params = [SamplingParams(seed=3, temperature=temperature)] * len(tokens)
        samplers = [
            Sampler(p, n_vocab, (), AllowedTokens(t)) for p, t in zip(params, tokens, strict=True)
        ]
        ids, results = draw(machine, logits, samplers)
        assert ids.tolist() == results.tolist() == tokens


def test_masks_with_penalties_and_biases(machine):
    params = [SamplingParams(seed=3, **{"temperature": 1.1, **p}) for p in PENALTIES]
    history = [*np.random.default_rng(1).integers(0, 2200, 150).tolist(), 5, 5, 2100, 9, 5]
    masks = [random_mask(2300, 2 + 40 * i, i) for i in range(len(params))]
    for mask in masks[1::2]:
        mask.allowed |= {5, 9, 17, 2100}
    check(machine, random_rows(len(params), 2300) * 0.5, params, history, masks)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_allowed_may_be_broken(machine, bad):
    logits = random_rows(2, 300)
    logits[:, 7] = bad
    params = [SamplingParams(seed=1), SamplingParams(temperature=0)]
    check(machine, logits, params, masks=[AllowedTokens(1, 2, 299), AllowedTokens(3, 100)])
    samplers = [Sampler(p, 300, (), AllowedTokens(1, 7)) for p in params]
    assert draw(machine, logits, samplers)[1].tolist() == [-1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_without_a_token_draws_none(machine, temperature):
    """The next step can use the id all the same, and the sampler says why there is none."""
    masks = [None, AllowedTokens(), FailingMask()]
    params = SamplingParams(seed=1, temperature=temperature)
    samplers = [Sampler(params, 300, (), mask) for mask in masks]
    logits = random_rows(3, 300)
    ids, results = draw(machine, logits, samplers)
    assert results.tolist() == [samplers[0].sample(logits[0]), -1, -1]
    assert ids.min() >= 0 and ids.max() < 300
    assert "allows no token" in str(samplers[1].error) and str(samplers[2].error) == "too complex"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_rows_are_told(machine, bad):
    logits = random_rows(4, 300)
    logits[1, 7] = bad
    logits[2] = -np.inf
    params = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=3)]
    samplers = [Sampler(p, 300) for p in [*params, SamplingParams(temperature=0)]]
    ids, results = draw(machine, logits, samplers)
    assert (results < 0).tolist() == [False, True, True, False]
    assert ids.min() >= 0 and ids.max() < 300, "the next step can use them all the same"


def test_rows_of_other_chains_are_skipped(machine):
    samplers = [Sampler(SamplingParams(seed=1), 300) for _ in range(3)]
    samplers[1] = Sampler(SamplingParams(seed=1, typical_p=0.5), 300)
    logits = random_rows(3, 300)
    ids, _ = draw(machine, logits, samplers, before=[1, 222, 3])
    assert ids.tolist() == [samplers[0].sample(logits[0]), 222, samplers[2].sample(logits[2])]


def test_order_of_blocks(emulator, monkeypatch):
    for order in (1, 2, 3):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        check(emulator, random_rows(3, 5000), [SamplingParams(seed=i) for i in range(3)])


def test_widths_are_checked(emulator):
    for width in (0, MAX_TOP_K + 1):
        with pytest.raises(ValueError, match=f"top_k is {width}: it must be from 1 to {MAX_TOP_K}"):
            Sample(emulator).launch(None, 1, 5000, None, None, width, None, None, None)


def test_under_sanitizers(emulated):
    check(emulated, hard_rows(3000), [SamplingParams(seed=i, top_k=50) for i in range(8)])
    params = [SamplingParams(seed=3, top_k=800, **p) for p in PENALTIES[:3]]
    check(emulated, random_rows(3, 2300), params, [1, 2, 3, 2, 2299])
    masks = [random_mask(2300, n, n) for n in (1, 30, 2000)]
    check(emulated, random_rows(3, 2300), params, [1, 2, 3, 2, 2299], masks)
