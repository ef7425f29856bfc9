"""Answers of the engine whose reasoning is cut short, alone and among others, ahead and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ggpy
from ggpy.chat_formats import by_name, reasoning_budget
from ggpy.runtime.sequence import Sequence
from ggpy.sampling import ReasoningBudget, SamplingParams

PROMPT = [40, 50, 60]
CHAINS = [SamplingParams(temperature=0), SamplingParams(seed=3, repeat_penalty=1.1)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A model with a cache that is too small for all its sequences at once."""
    with ggpy.load(
        "models/tiny/qwen3.gguf", "cpu", n_ctx=192, n_seq=4, n_positions=256, prefix_cache=True
    ) as found:
        yield found


def budget(model: Any, limit: int, message: str = " stop.") -> ReasoningBudget:
    found = reasoning_budget(by_name("hermes"), model.tokenizer, limit, message, opened=True)
    assert found is not None
    return found


def add(model: Any, params: SamplingParams, mask: Any = None, n: int = 60, **more: Any) -> Sequence:
    more |= {"max_tokens": n, "grammar": mask}
    found: Sequence = model.engine.add(PROMPT, params, **more)
    return found


def finish(model: Any, *sequences: Sequence) -> list[list[int]]:
    while model.engine.busy:
        model.engine.step()
    assert [s.error for s in sequences] == [None] * len(sequences)
    return [s.ids[s.n_prompt :] for s in sequences]


@pytest.mark.parametrize("params", CHAINS)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_answer_is_the_same_up_to_the_limit(
    model: Any, run_ahead: bool, params: SamplingParams
) -> None:
    model.engine.run_ahead = run_ahead
    (free,) = finish(model, add(model, params))
    ending = model.tokenizer.encode(" stop.</think>", add_special=False)
    for limit in (0, 1, 2, 7, 20):
        s = add(model, params, budget(model, limit))
        (ids,) = finish(model, s)
        assert ids[: limit + len(ending)] == free[:limit] + ending
        assert len(ids) > limit + len(ending), "and it goes on"
        assert s.sampler.n_drawn == s.n_generated == len(s.pieces)
        assert " stop.</think>" in "".join(p.text for p in s.pieces)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_answers_among_others(model: Any, run_ahead: bool) -> None:
    """They are those of each alone, though some are preempted."""
    model.engine.run_ahead = False
    limits = [5, -1, 40, 17, 0, 90]
    chains = [SamplingParams(seed=i, temperature=1.5) if i % 2 else CHAINS[0] for i in range(6)]

    def begun() -> Iterator[Sequence]:
        for limit, params in zip(limits, chains, strict=True):
            mask = None if limit < 0 else budget(model, limit)
            yield add(model, params, mask, 130, context_shift=limit == 90)

    alone = [finish(model, s)[0] for s in begun()]
    model.engine.run_ahead = run_ahead
    before = model.engine.stats().preemptions_total
    assert finish(model, *list(begun())) == alone
    assert model.engine.stats().preemptions_total > before


def test_a_step_is_drawn_ahead_unless_the_limit_is_near(model: Any) -> None:
    engine, ahead = model.engine, list[bool]()
    engine.run_ahead, sample = True, engine.ops.sample

    def watched(*args: Any) -> Any:
        ahead.append(engine._flight is not None and engine._flight.ids is not None)
        return sample(*args)

    engine.ops.sample = watched
    try:
        s = add(model, CHAINS[1], budget(model, 10, ""), n=40)
        (ids,) = finish(model, s)
    finally:
        engine.ops.sample = sample
    closer = model.tokenizer.encode("</think>", add_special=False)
    assert ids[10 : 10 + len(closer)] == closer
    n = len(closer)
    # The first token has no step before it. Those at the limit wait, and the one after them.
    assert ahead[: len(ids)] == [False] + [True] * 9 + [False] * (n + 1) + [True] * (29 - n)


def test_log_probabilities_of_forced_tokens_are_the_models(model: Any) -> None:
    """A grammar does not change them; after the chain, a forced token is certain."""
    model.engine.run_ahead = True
    plain, post = (
        add(model, CHAINS[0], budget(model, 2, ""), 9, logprobs=True, top_logprobs=1)
        for _ in range(2)
    )
    post.post_sampling = True
    first, second = finish(model, plain, post)
    assert first == second
    forced = len(model.tokenizer.encode("</think>", add_special=False))
    told = [(p.logprob, q.logprob) for p, q in zip(plain.pieces, post.pieces, strict=True)]
    assert all(p < -0.5 and q == 0 for p, q in told[2 : 2 + forced])
    assert all(p.top_logprobs[0].logprob >= p.logprob for p in plain.pieces)


def test_a_format_without_reasoning_has_no_budget(model: Any) -> None:
    chat_format = by_name("hermes").with_reasoning("", "", opened=False)
    assert reasoning_budget(chat_format, model.tokenizer, 5) is None
