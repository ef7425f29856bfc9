"""Sampling on a GPU: which chain runs where, and whole answers of mixed ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_buffers import upload
from sampling_cases import AllowedTokens, FailingMask, random_mask

from ggpy import arch
from ggpy.backends.cuda import backend as cuda
from ggpy.backends.cuda import sampling
from ggpy.backends.cuda.arrays import Array
from ggpy.backends.cuda.sampling import (
    MAX_RECENT,
    MAX_ROWS,
    Sampling,
    SamplingPlan,
    n_candidates,
)
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.kernels.sampling.sample import MAX_TOP_K
from ggpy.runtime.engine import Engine
from ggpy.sampling import (
    FILTERS,
    NO_TOKEN,
    Filter,
    ReasoningBudget,
    ReasoningMarkers,
    Sampler,
    SamplingParams,
)

V = 50000
DEFAULTS = SamplingParams(seed=1)
PENALTY = {"repeat_penalty": 1.2}
ON_DEVICE = [
    ({}, 40),
    ({"temperature": 0.0}, 1),
    ({"temperature": 0.0, "top_k": 0, "top_n_sigma": 1.0}, 1),
    ({"top_k": MAX_TOP_K, "logit_bias": {1: -math.inf}}, MAX_TOP_K),
    ({**PENALTY, "repeat_last_n": MAX_RECENT}, 40),
    ({"xtc_probability": 0.5, "temperature": 0.0}, 40),
    ({"mirostat": 2, "temperature": 0.0, "top_k": 7}, 1),
    ({"samplers": ("top_k", "dry", "temperature"), "top_k": 7, "dry_multiplier": 0.0}, 7),
    ({"min_keep": 1}, 40),
]
IN_NUMPY = [
    {"top_k": 0},
    {"top_k": MAX_TOP_K + 1},
    {"typical_p": 0.9},
    {"top_n_sigma": 1.0},
    {"dynatemp_range": 0.1},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.8, "temperature": 0.0},
    {**PENALTY, "repeat_last_n": -1},
    {**PENALTY, "repeat_last_n": MAX_RECENT + 1},
    {"mirostat": 1},
    {"mirostat": 2},
    {"adaptive_target": 0.5},
    {"min_keep": 2},
    {"samplers": ("temperature", "top_k")},
    {"samplers": ("top_k", "top_k", "temperature")},
]


@pytest.mark.parametrize(("options", "k"), ON_DEVICE)
def test_chains_that_have_kernels(options, k):
    assert n_candidates(Sampler(SamplingParams(seed=1, **options), V)) == k


@pytest.mark.parametrize("options", IN_NUMPY)
def test_chains_that_have_none(options):
    assert n_candidates(Sampler(SamplingParams(seed=1, **options), V)) == 0


# Of each parameter: a value with which other tokens are drawn, and what else makes it count.
DRY = {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_base": 9.0}
CHANGES = {
    "seed": (2, {}),
    "temperature": (3.0, {}),
    "top_k": (2, {}),
    "top_p": (0.2, {}),
    "min_p": (0.9, {}),
    "xtc_probability": (1.0, {"xtc_threshold": 0.01}),
    "xtc_threshold": (0.02, {"xtc_probability": 1.0}),
    "repeat_last_n": (2, {"presence_penalty": 9.0}),
    "repeat_penalty": (9.0, {"presence_penalty": 0.1}),
    "presence_penalty": (9.0, {"repeat_penalty": 1.1}),
    "frequency_penalty": (9.0, {"repeat_penalty": 1.1}),
    "logit_bias": ({11: 30.0}, {}),
    "typical_p": (0.1, {}),
    "top_n_sigma": (0.1, {}),
    "dynatemp_range": (0.7, {}),
    "dynatemp_exponent": (9.0, {"dynatemp_range": 0.7}),
    "dry_multiplier": (9.0, {}),
    "dry_base": (9.0, DRY),
    "dry_allowed_length": (1, DRY),
    "dry_penalty_last_n": (2, DRY),
    "dry_breakers": (((3,),), DRY),
    "min_keep": (20, {"top_p": 0.2}),
    "mirostat": (2, {"mirostat_tau": 1.0}),
    "mirostat_tau": (1.0, {"mirostat": 1}),
    "mirostat_eta": (5.0, {"mirostat": 2}),
    "adaptive_target": (0.1, {}),
    "adaptive_decay": (0.1, {"adaptive_target": 0.1}),
    "samplers": (("min_p", "top_k"), {}),
}


def image(sampler: Sampler) -> list[int]:
    """What a sampler's row uploads to the kernels."""
    plan = SamplingPlan([sampler])
    dst = np.zeros(plan.n_ints, np.int32)
    return dst[: plan.write(dst)].tolist()


def test_every_parameter_is_carried_to_the_kernels_or_sends_the_row_to_the_host():
    assert {f.name for f in fields(SamplingParams)} == CHANGES.keys(), "say how the new one acts"
    sent = set()
    for name, (value, others) in CHANGES.items():
        history = [3, 4, 5, 3, 4]
        options = {"seed": 1, **others}
        changed = Sampler(SamplingParams(**{**options, name: value}), V, history)
        if n_candidates(changed) == 0:
            sent.add(name)
        else:
            assert image(changed) != image(Sampler(SamplingParams(**options), V, history)), name
    assert sent == {
        *("typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_breakers"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay"),
        *("min_keep", "samplers"),
    }


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_every_parameter_is_obeyed(emulator, name, greedy):
    """Where a row is drawn: numpy's tokens, some of which are others without the parameter, if not
    in the first draw then in the next ones.
    """
    n, n_vocab, history = 24, 300, [3, 4, 5, 3, 4]
    values = np.random.default_rng(0).standard_normal((n, n_vocab)).astype(np.float32)
    values[:, 3:6] += [3, 3, 5]
    logits = Array(upload(emulator, values), np.float32, (n, n_vocab), n_vocab)
    value, others = CHANGES[name]
    options = {"seed": 1, **others, **({"temperature": 0.0} if greedy else {})}
    without = {**options, name: {"seed": 1}.get(name, getattr(SamplingParams(), name))}

    def samplers(options):
        return [Sampler(SamplingParams(**options), n_vocab, history) for _ in range(n)]

    def in_numpy(options):
        pairs = list(zip(samplers(options), values, strict=True))
        return [[s.sample(row) for s, row in pairs] for _ in range(3)]

    expected = in_numpy({**options, name: value})
    sampling, ours = Sampling(emulator), samplers({**options, name: value})
    assert [sampling.draw(logits, ours).read().tolist() for _ in expected] == expected
    assert greedy or expected != in_numpy(without), "nothing would be noticed"


@dataclass(frozen=True)
class WithFloor(SamplingParams):
    """The parameters with one for a new link."""

    floor: float = -math.inf


class Floor(Filter):
    """A new link, which drops candidates below a logit. It says no more than a link must."""

    def active(self, params):
        return params.floor > -math.inf

    def apply(self, candidates, params, chance):
        ids, logits = candidates
        return ids[logits >= params.floor], logits[logits >= params.floor]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_new_link_is_one_class_and_runs_on_the_host(emulator, temperature, monkeypatch):
    monkeypatch.setattr("ggpy.sampling.sampler.FILTERS", (*FILTERS[:-2], Floor(), *FILTERS[-2:]))
    options = {"seed": 1, "temperature": temperature}
    assert n_candidates(Sampler(WithFloor(**options), V)) == (1 if temperature == 0 else 40)
    params = WithFloor(**options, floor=1.5, min_p=0.0, top_p=1.0)
    plan = SamplingPlan([Sampler(params, V)])
    assert plan.host_rows == [0] and not plan.argmax_only
    values, logits = rows_on(emulator, 1, 300)
    ids = Sampling(emulator).draw(logits, [Sampler(params, 300)]).read().tolist()
    assert ids == [Sampler(params, 300).sample(values[0])] and values[0][ids[0]] >= 1.5


def test_a_small_vocabulary_is_kept_whole():
    assert n_candidates(Sampler(SamplingParams(seed=1, top_k=0), 300)) == 300


def rows_on(device, n: int, n_vocab: int, seed: int = 0) -> tuple[np.ndarray, Array]:
    values = np.random.default_rng(seed).standard_normal((n, n_vocab)).astype(np.float32)
    return values, Array(upload(device, values), np.float32, (n, n_vocab), n_vocab)


def test_draws_equal_numpys_whoever_shares_the_step(machine):
    """Steps of other samplers in turn: parameters are those of the step, and buffers grow."""
    sampling, n_vocab = Sampling(machine), 3000
    chains = [*[options for options, _ in ON_DEVICE], *IN_NUMPY[1:4], *IN_NUMPY[5:]]
    ours = [
        Sampler(SamplingParams(seed=i, **c), n_vocab, [3, 4, 5, 3, 4]) for i, c in enumerate(chains)
    ]
    theirs = [Sampler(s.params, n_vocab, s.history) for s in ours]
    for i, chosen in enumerate(([0], [0, 7], [3, 0, 4], range(len(ours)), [8], [1], [0, 1, 2])):
        values, logits = rows_on(machine, len(chosen), n_vocab, i)
        sampled = sampling.draw(logits, [ours[j] for j in chosen])
        expected = [theirs[j].sample(row) for j, row in zip(chosen, values, strict=True)]
        assert sampled.read().tolist() == expected
        on_device = machine.download(sampling.ids, np.int32, len(chosen))
        assert on_device.tolist() == expected, "where the next step looks for them"
    assert [s.n_drawn for s in ours] == [s.n_drawn for s in theirs]


def test_rows_for_the_host_come_in_groups(machine, monkeypatch):
    """Of two rows, and of one where not even that fits; others stand between them."""
    n_vocab = 300
    for staged in (2 * 4 * 300 + 4, 4):
        monkeypatch.setattr(sampling, "STAGED", staged)
        drawing = Sampling(machine)
        for seed in range(2):
            values, logits = rows_on(machine, 8, n_vocab, seed)
            params = [
                SamplingParams(seed=i, **({"typical_p": 0.9} if i % 4 else {})) for i in range(8)
            ]
            ids = drawing.draw(logits, [Sampler(p, n_vocab) for p in params]).read().tolist()
            assert ids == [
                Sampler(p, n_vocab).sample(row) for p, row in zip(params, values, strict=True)
            ]


def test_a_row_of_logits_is_read_alone(machine):
    """Of an array whose rows are padded, too."""
    values, logits = rows_on(machine, 3, 64)
    padded = Array(logits.data, np.float32, (3, 60), 64, scale=2.0)
    ops = cuda.Cuda(machine)
    for array, expected in ((logits, values), (padded, 2 * values[:, :60])):
        assert all(np.array_equal(ops.read(array, row), expected[row]) for row in range(3))
        assert np.array_equal(ops.read(array), expected)


def test_nobody_waits_for_the_default_chain(machine, monkeypatch):
    """Two steps are enqueued before an id is read, and the second one penalises the first's."""
    sampling, n_vocab = Sampling(machine), 300
    params = SamplingParams(seed=1, presence_penalty=100.0)
    s = Sampler(params, n_vocab)
    values, logits = rows_on(machine, 1, n_vocab)
    monkeypatch.setattr(machine, "download", None)
    steps = []
    for _ in range(2):
        steps.append(sampling.draw(logits, [s]))
        s.expect(0)
    first, second = (step.read()[0] for step in steps)
    s.accept(first)
    check = Sampler(params, n_vocab)
    for token in (first, second):
        assert check.sample(values[0]) == token
        check.accept(token)
    assert first != second


def test_masks_change_every_step(machine):
    """The same samplers, step after step, some of which numpy draws: plans are kept, masks not."""
    sampling, n_vocab = Sampling(machine), 3000
    chains = [{}, {"temperature": 0.0}, {"typical_p": 0.9}, {"temperature": 1.5, "top_k": 300}]
    params = [SamplingParams(seed=i, **c) for i, c in enumerate([*chains, *chains])]
    masks = [random_mask(n_vocab, 5) if i != 5 else None for i in range(8)]
    ours = [Sampler(p, n_vocab, (), m) for p, m in zip(params, masks, strict=True)]
    theirs = [Sampler(p, n_vocab, (), m) for p, m in zip(params, masks, strict=True)]
    for step in range(6):
        for i, mask in enumerate(masks):
            if mask:
                mask.allowed = random_mask(n_vocab, [3, 1, 2000][(step + i) % 3], i).allowed
        values, logits = rows_on(machine, 8, n_vocab, step)
        drawn = sampling.draw(logits, ours).read().tolist()
        assert drawn == [s.sample(row) for s, row in zip(theirs, values, strict=True)]
        assert all(
            mask is None or id in mask.allowed for id, mask in zip(drawn, masks, strict=True)
        )
    assert {i for i, mask in enumerate(masks) if mask} >= sampling._plan.masked.keys()


def test_greedy_rows_with_a_mask_are_not_the_end_of_a_step():
    """They take the argmax kernel, but with a mask, which a recorded step does not have."""
    greedy = SamplingParams(temperature=0)
    plan = SamplingPlan([Sampler(greedy, V), Sampler(greedy, V, (), AllowedTokens(1))])
    assert plan.argmax and not plan.argmax_only and plan.host_rows == []
    assert SamplingPlan([Sampler(greedy, V)]).argmax_only
    others = SamplingPlan([Sampler(greedy, V, (), AllowedTokens(1)), Sampler(DEFAULTS, V)])
    assert not others.argmax


def test_a_mask_that_forbids_nothing_leaves_the_argmax_kernel_alone(machine):
    """Until it is in force, for one step of each sampler, and not together."""
    sampling, n_vocab = Sampling(machine), 300
    masks = [AllowedTokens(7), AllowedTokens(9), None]
    greedy = SamplingParams(temperature=0)
    ours, theirs = ([Sampler(greedy, n_vocab, (), mask) for mask in masks] for _ in range(2))
    drawn, alone = [], []
    for step in range(6):
        masks[0].active, masks[1].active = step == 2, step in (3, 4)
        values, logits = rows_on(machine, 3, n_vocab, step)
        drawn.append(sampling.draw(logits, ours).read().tolist())
        alone.append(sampling._plan.argmax_only)
        assert drawn[-1] == [s.sample(row) for s, row in zip(theirs, values, strict=True)]
    assert alone == [True, True, False, False, False, True]
    assert drawn[2][0] == 7 and drawn[3][1] == drawn[4][1] == 9


@pytest.mark.parametrize("params", [DEFAULTS, SamplingParams(seed=1, typical_p=0.9)])
def test_a_mask_without_a_token_leaves_the_others_alone(machine, params):
    values, logits = rows_on(machine, 4, 200)
    masks = [AllowedTokens(3), AllowedTokens(), FailingMask(), None]
    ours = [Sampler(params, 200, (), mask) for mask in masks]
    ids = Sampling(machine).draw(logits, ours).read().tolist()
    assert ids == [3, NO_TOKEN, NO_TOKEN, Sampler(params, 200).sample(values[3])]
    assert "allows no token" in str(ours[1].error) and str(ours[2].error) == "too complex"


IN_NUMPY_ALONE = SamplingParams(seed=1, typical_p=0.9)


@pytest.mark.parametrize("params", [DEFAULTS, SamplingParams(temperature=0), IN_NUMPY_ALONE])
def test_a_row_without_a_token_leaves_the_others_alone(machine, params):
    """And has some id on the device, which the next step may look up."""
    values, _ = rows_on(machine, 4, 200)
    values[1, 7], values[2, 7] = np.nan, np.inf
    logits = Array(upload(machine, values), np.float32, (4, 200), 200)
    sampling = Sampling(machine)
    ours = [Sampler(params, 200) for _ in range(4)]
    ids = sampling.draw(logits, ours).read().tolist()
    expected = [Sampler(params, 200).try_sample(row) for row in values]
    assert ids == expected and ids[1:3] == [NO_TOKEN] * 2 and min(ids[0], ids[3]) >= 0
    on_device = machine.download(sampling.ids, np.int32, 4)
    assert on_device.min() >= 0 and on_device.max() < 200
    assert [s.n_drawn for s in ours][::3] == [1, 1]


def test_extreme_parameters_give_numpys_tokens(machine):
    """No infinity and no NaN on either side, and the same rounding."""
    n_vocab, history = 300, [3, 4, 5, 3, 4]
    extremes = [
        {"logit_bias": {3: 1e20, 4: -1e20, 5: -math.inf}},
        {"logit_bias": dict.fromkeys(range(300), -math.inf)},
        {"presence_penalty": -1e20, "frequency_penalty": -1e20},
        {"presence_penalty": 1e20, "frequency_penalty": 1e20, "repeat_penalty": 1e-6},
        {"logit_bias": {3: 1e20}, "repeat_penalty": 1e6},
        {"logit_bias": {3: 1e20, 4: -math.inf}, "repeat_penalty": 1e-6},
        {"temperature": 1e20},
        {"temperature": 1e-300},
        {"temperature": 1e-40, "logit_bias": {3: 50.0, 4: 50.0}},
        {"temperature": 1e-50, "logit_bias": {3: 1e20, 4: 1e20}},
        {"min_p": 5e-324, "top_p": 0.0},
        {"top_k": 2**31 - 1, "min_p": 0.0},
    ]
    values, logits = rows_on(machine, len(extremes), n_vocab)
    pairs = [
        [Sampler(SamplingParams(seed=i, **c), n_vocab, history) for _ in range(2)]
        for i, c in enumerate(extremes)
    ]
    ids = Sampling(machine).draw(logits, [ours for ours, _ in pairs]).read().tolist()
    expected = [theirs.try_sample(row) for (_, theirs), row in zip(pairs, values, strict=True)]
    assert ids == expected
    assert [i for i, id in enumerate(ids) if id == NO_TOKEN] == [1]


def test_too_many_rows_are_refused(emulator):
    samplers = [Sampler(DEFAULTS, 10)] * (MAX_ROWS + 1)
    with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} sequences at once: at most {MAX_ROWS}"):
        Sampling(emulator).draw(Array(None, np.float32, (MAX_ROWS + 1, 10), 10), samplers)


class Letters:
    """A tokenizer that makes a letter of each id."""

    end_ids = frozenset({17, 99})
    suppressed_ids = frozenset()

    def stream(self):
        return SimpleNamespace(add=lambda id: chr(97 + id % 26), finish=lambda: "")


MIXED = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.5, **PENALTY),
    SamplingParams(seed=6, dry_multiplier=0.8, frequency_penalty=0.3),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logit_bias={17: -math.inf}, presence_penalty=0.5),
    SamplingParams(seed=4, xtc_probability=0.5),
    SamplingParams(seed=8, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5),
]


def budget(limit: int) -> ReasoningBudget:
    """Ends an answer's reasoning with the ids 7 and 8."""
    markers = ReasoningMarkers(re.compile(b"<"), b">", start=b"<")
    return ReasoningBudget(limit, markers, (7, 8), (8,), lambda id: b"x", 453, opened=True)


def answers(ops, path, **options) -> list[tuple[str | None, list[int]]]:
    """How each of the mixed sequences ends, and its ids; half have a budget of reasoning."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64)
    engine = Engine(decoder, ops, Letters(), 64, n_batch=16, n_seq=4, **options)
    prompts = [np.random.default_rng(i).integers(5, 350, 3 + 7 * i).tolist() for i in range(7)]
    masks = [budget(2 + i) if i % 2 else None for i in range(7)]
    sequences = [
        engine.add(p, params, max_tokens=6 + len(p) % 5, grammar=mask)
        for p, params, mask in zip(prompts, MIXED, masks, strict=True)
    ]
    while engine.busy:
        engine.step()
    return [(s.finish, [p.id for p in s.pieces]) for s in sequences]


def test_mixed_answers_equal_those_of_chains_in_numpy(request, machine, tiny_path, monkeypatch):
    """Of the same logits. The reference's logits differ: f16 activations may change a draw, but do
    not change any of the emulator's.
    """
    path = tiny_path("llama")
    found = [answers(cuda.Cuda(machine), path, run_ahead=ahead) for ahead in (True, False)]
    assert [ids[n : n + 2] for n, (_, ids) in enumerate(found[0], 2) if n % 2] == [[7, 8]] * 3
    monkeypatch.setattr(sampling, "n_candidates", lambda sampler: int(sampler.chain.greedy))
    assert found == [answers(cuda.Cuda(machine), path)] * 2
    if request.node.callspec.params["machine"] == "emulator":
        assert found[0] == answers(Reference(1), path)
