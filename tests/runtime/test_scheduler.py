"""Who runs, who waits and who is preempted, where pages are fewer than sequences could hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from steps import finish

from ggpy import arch
from ggpy.backends.interface import PAGE_SIZE
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine, Piece
from ggpy.runtime.page_pool import OutOfPages
from ggpy.runtime.sequence import Sequence
from ggpy.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
N_CTX = 4 * PAGE_SIZE


@pytest.fixture(scope="module")
def make(tiny_path) -> Callable[..., Engine]:
    files = {name: File(tiny_path(name)) for name in ("llama", "gemma3")}

    def make_engine(name: str = "llama", n_ctx: int = N_CTX, **options) -> Engine:
        ops = Reference(1)
        return Engine(arch.load(files[name], ops, n_ctx), ops, NoText(), n_ctx, **options)

    return make_engine


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 350, n).tolist()


def sizes_of_steps(engine: Engine) -> list[int]:
    """Filled with the tokens of each step from now on."""
    sizes: list[int] = []
    run = engine.decoder.run
    engine.decoder.run = lambda step: (sizes.append(len(step.ids)), run(step))[1]
    return sizes


# Preemption


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(
    ("prefix_cache", "params"),
    [
        *((False, GREEDY), (True, GREEDY), (True, SamplingParams(seed=3, presence_penalty=0.5))),
        (True, SamplingParams(seed=3, mirostat=2, mirostat_tau=3.0, mirostat_eta=1.0)),
    ],
)
def test_a_text_is_the_same_though_it_was_preempted(make, name, run_ahead, prefix_cache, params):
    prompts = [ids_of(n, n) for n in (10, 50, 90, 30)]
    alone = make(name)
    expected = [finish(alone, alone.add(p, params, max_tokens=120))[0] for p in prompts]
    engine = make(
        name,
        n_seq=4,
        n_batch=32,
        n_positions=6 * PAGE_SIZE,
        run_ahead=run_ahead,
        prefix_cache=prefix_cache,
    )
    sequences = [engine.add(p, params, max_tokens=120) for p in prompts]
    assert finish(engine, *sequences) == expected
    stats = engine.stats()
    assert stats.preemptions_total > 1 and stats.n_pages_free == stats.n_pages
    assert bool(stats.n_pages_cached) == prefix_cache
    assert all(s.sampler.n_drawn == s.n_generated == 120 for s in sequences)


def test_the_youngest_gives_its_pages_and_is_the_next_to_run(make):
    engine = make(n_seq=3, n_positions=4 * PAGE_SIZE, run_ahead=False)
    first, second, third = (engine.add(ids_of(n, n), GREEDY, max_tokens=150) for n in (60, 50, 40))
    engine.step()
    late = engine.add(ids_of(5), GREEDY, max_tokens=2)
    shown = 0
    while engine.stats().preemptions_total < 1:
        shown = third.n_generated
        engine.step()
    assert shown > 0 and (third.pages.n_held, third.n_evaluated) == (0, 0)
    assert third.finish is None and len(third.pieces) == shown, "what was shown stays"
    assert engine.stats().n_running == 2 and engine.stats().n_waiting == 2
    while third.n_generated == shown:
        assert not late.n_generated, "the preempted one comes first"
        engine.step()
    assert first.finish or second.finish
    texts = finish(engine, first, second, third)
    alone = make()
    for n, text in zip((60, 50, 40), texts, strict=True):
        assert text == finish(alone, alone.add(ids_of(n, n), GREEDY, max_tokens=150))[0]


def test_the_youngest_gives_way_itself_when_it_is_the_one_that_grows(make):
    engine = make(n_seq=2, n_positions=5 * PAGE_SIZE, run_ahead=False)
    old = engine.add(ids_of(2 * PAGE_SIZE - 3), GREEDY, max_tokens=40)
    young = engine.add(ids_of(2 * PAGE_SIZE - 10, 1), GREEDY, max_tokens=20)
    while engine.busy and not engine.stats().preemptions_total:
        engine.step()
    assert young.n_generated == 11 and not young.pages.n_held and old.pages.n_held == 3
    finish(engine, old, young)
    assert (old.finish, young.finish) == ("length", "length")


def test_one_that_does_not_fit_alone_fails(make):
    """It cannot be, as long as nobody else takes pages."""
    engine = make(n_seq=2, n_positions=N_CTX)
    (pool,) = engine.cache.pools
    pool.take()
    good = engine.add(ids_of(9), GREEDY, max_tokens=80)
    bad = engine.add(ids_of(3 * PAGE_SIZE - 4), GREEDY, max_tokens=80)
    finish(engine, good, bad)
    assert (good.finish, bad.finish, bad.n_generated) == ("length", "error", 5)
    assert isinstance(bad.error, OutOfPages)
    assert pool.n_free == pool.n_pages - 1


def test_nobody_is_preempted_while_its_token_is_under_way(make):
    engine = make(n_seq=4, n_positions=5 * PAGE_SIZE, run_ahead=True)
    preempt, under_way = engine._scheduler._preempt, []

    def watched(s: Sequence) -> None:
        under_way.append(engine._flight)
        preempt(s)

    engine._scheduler._preempt = watched
    finish(engine, *[engine.add(ids_of(40, i), GREEDY, max_tokens=100) for i in range(4)])
    assert under_way and under_way == [None] * len(under_way)


# Admission


def test_a_prompt_waits_for_its_pages_and_others_for_it(make):
    engine = make(n_seq=4, n_positions=7 * PAGE_SIZE, n_batch=PAGE_SIZE)
    running = engine.add(ids_of(2 * PAGE_SIZE), GREEDY, max_tokens=30)
    while not running.n_generated:
        engine.step()
    large = engine.add(ids_of(3 * PAGE_SIZE, 1), GREEDY, max_tokens=3)
    small = engine.add(ids_of(5, 2), GREEDY, max_tokens=3)
    engine.step()
    assert (engine.stats().n_running, engine.stats().n_waiting) == (2, 1)
    assert large.t_admitted and not small.t_admitted, "the pages are promised, though not taken"
    while not running.finish:
        engine.step()
    assert large.finish and engine.stats().preemptions_total == 0
    finish(engine, small)
    assert small.finish == "length"


def test_promised_pages_are_not_promised_twice(make):
    """Prompts in many chunks that would all fit if the others had none."""
    engine = make(n_seq=4, n_positions=6 * PAGE_SIZE, n_batch=16)
    sequences = [engine.add(ids_of(2 * PAGE_SIZE, i), GREEDY, max_tokens=2) for i in range(4)]
    engine.step()
    assert engine.stats().n_running == 2
    finish(engine, *sequences)
    assert engine.stats().preemptions_total == 0
    assert [s.finish for s in sequences] == ["length"] * 4


def test_kept_pages_make_room_for_who_waits(make):
    engine = make(n_seq=4, n_positions=N_CTX)
    kept = engine.add(ids_of(2 * PAGE_SIZE + 5), GREEDY, max_tokens=2, keep=True)
    finish(engine, kept)
    other = engine.add(ids_of(3 * PAGE_SIZE, 1), GREEDY, max_tokens=2)
    running = engine.add(ids_of(3, 2), GREEDY, max_tokens=2)
    finish(engine, other, running)
    assert other.finish == running.finish == "length" and not kept.pages.n_held


def test_who_was_refused_is_not_forgotten_when_all_others_are_cancelled(make):
    engine = make(n_seq=4, n_positions=N_CTX)
    sequences = [engine.add(ids_of(3 * PAGE_SIZE, i), GREEDY, max_tokens=3) for i in range(3)]
    engine.step()
    assert engine.stats().n_running == 1
    engine.cancel(sequences[0])
    engine.step()
    engine.cancel(sequences[1])
    finish(engine, *sequences)
    assert [s.finish for s in sequences] == ["cancelled", "cancelled", "length"]


def test_too_few_positions_for_one_context_are_refused(make):
    with pytest.raises(ValueError, match="KV cache has 255 positions, a context 256: raise n_pos"):
        make(n_positions=N_CTX - 1)


def test_clients_take_turns(make):
    engine = make(n_seq=3)
    order = []
    for client, n in (("a", 5), ("b", 1), ("a", 1), ("c", 2)):
        order += [(client, i) for i in range(n)]
    sequences = [
        engine.add(ids_of(9, i), GREEDY, max_tokens=4 + i, client=client)
        for i, (client, _) in enumerate(order)
    ]
    engine.step()
    running = [s for s in sequences if s.t_admitted]
    assert [s.client for s in running] == ["a", "b", "c"]
    assert [sequences.index(s) for s in running] == [0, 5, 7], "the oldest of each"
    while not running[0].finish:
        engine.step()
    engine.step()
    assert sequences[1].t_admitted and not sequences[8].t_admitted, "a has none running, and c one"
    engine.cancel(sequences[2])
    engine.cancel(sequences[3])
    finish(engine)
    admitted = sorted((s for s in sequences if s.t_admitted), key=lambda s: s.t_admitted)
    assert [sequences.index(s) for s in admitted] == [0, 5, 7, 1, 4, 6, 8]
    assert engine.stats().n_waiting == 0


def test_the_times_of_a_sequence_are_in_order(make):
    engine = make(n_seq=1)
    first, second = (engine.add(ids_of(9, i), GREEDY, max_tokens=4) for i in range(2))
    assert 0 < first.t_begun < second.t_begun and not first.t_admitted
    engine.step()
    assert first.t_begun < first.t_admitted < first.t_first and not second.t_admitted
    finish(engine)
    assert first.t_first < second.t_admitted < second.t_first


# Chunked prefill


@pytest.mark.parametrize("run_ahead", [False, True])
def test_prompts_are_read_in_small_chunks_while_others_answer(make, run_ahead):
    engine = make(n_seq=4, n_batch=100, prefill_tokens=20, run_ahead=run_ahead)
    sizes = sizes_of_steps(engine)
    first = engine.add(ids_of(150), GREEDY, max_tokens=40)
    while not first.n_generated:
        engine.step()
    assert sizes[:2] == [100, 50], "nobody waits for these steps"
    sizes.clear()
    second = engine.add(ids_of(90, 1), GREEDY, max_tokens=2)
    third = engine.add(ids_of(30, 2), GREEDY, max_tokens=2)
    while not third.n_generated:
        engine.step()
        whole = second.n_evaluated >= 90 or second.finish
        assert whole or not third.n_evaluated, "first come, first served"
    assert max(sizes) <= 20 and sizes.count(20) >= 4
    texts = finish(engine, first, second, third)
    prompts = [(150, 0, 40), (90, 1, 2), (30, 2, 2)]
    alone = make()
    assert texts == [
        finish(alone, alone.add(ids_of(n, seed), GREEDY, max_tokens=k))[0] for n, seed, k in prompts
    ]


def test_no_chunk_is_empty(make):
    engine = make(n_seq=3, prefill_tokens=1)
    others = [engine.add(ids_of(2), GREEDY, max_tokens=60) for _ in range(2)]
    engine.step()
    s = engine.add(ids_of(9), GREEDY, max_tokens=1)
    while not s.finish:
        engine.step()
    assert not any(other.finish for other in others), "a prompt does not wait for their end"
    with pytest.raises(ValueError, match="prefill_tokens is 0: it must be 1 or more"):
        Engine(None, None, NoText(), 10, prefill_tokens=0)  # type: ignore[arg-type]


# What is passed on


class Codes:
    """A tokenizer that writes ids, and control tokens (above 300) only where it is asked to."""

    def __init__(self, end_ids=(), special: bool = False) -> None:
        self.end_ids, self.special = frozenset(end_ids), special
        self.suppressed_ids: frozenset[int] = frozenset()

    def stream(self, special: bool = False) -> Codes:
        return Codes(special=special)

    def add(self, id: int) -> str:
        return f"{id} " if id <= 200 or self.special else ""

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("special", [False, True])
def test_control_tokens_are_written_where_they_are_wanted(make, special):
    engine = make()
    prompt = ids_of(8)
    (ids,) = finish(engine, engine.add(prompt, GREEDY, max_tokens=20))
    end = next(i for i in range(5, 20) if ids[i] not in ids[:i])
    engine = make()
    engine.tokenizer, engine._end_ids = Codes(), frozenset(ids[end : end + 1])
    s = engine.add(prompt, GREEDY, special=special)
    finish(engine, s)
    assert any(id > 200 for id in ids[:end])
    shown = [id for id in ids[:end] if special or id <= 200]
    assert "".join(p.text for p in s.pieces) == "".join(f"{id} " for id in shown)
    assert s.finish == "stop", "the end token has no text"


class Listener:
    """A mask that allows everything, and knows what it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.finished = False
        self.sequence: Any = None

    def fill(self, row: np.ndarray) -> None:
        row[:] = -1
        if self.sequence is not None:
            assert self.told == self.sequence.ids[self.sequence.n_prompt :]

    def accept(self, token: int) -> None:
        self.told.append(token)


def test_a_mask_is_told_each_token_before_the_next_draw(make):
    engine = make(n_seq=4, n_positions=6 * PAGE_SIZE, run_ahead=True)
    masks = [Listener() for _ in range(2)]
    prompts = [ids_of(40 + i, i) for i in range(4)]
    plain = [engine.add(p, GREEDY, max_tokens=90) for p in prompts[:2]]
    masked = [
        engine.add(p, GREEDY, max_tokens=60, grammar=mask)
        for p, mask in zip(prompts[2:], masks, strict=True)
    ]
    for mask, s in zip(masks, masked, strict=True):
        mask.sequence = s
    ahead, run = [], engine.decoder.run

    def watched(step: Any) -> Any:
        ahead.append(engine._flight is not None)
        return run(step)

    engine.decoder.run = watched
    texts = finish(engine, *plain, *masked)
    assert ahead[1:4] == [True] * 3, "the device has a step while masks are made"
    assert engine.stats().preemptions_total > 0
    alone = make()
    assert texts == [
        finish(alone, alone.add(p, GREEDY, max_tokens=n))[0]
        for p, n in zip(prompts, (90, 90, 60, 60), strict=True)
    ]
    assert [mask.told for mask in masks] == texts[2:]


class Refusing(Listener):
    def accept(self, token: int) -> None:
        if len(self.told) == 3:
            raise ValueError("the grammar does not allow the token")
        super().accept(token)


def test_a_mask_that_fails_ends_its_sequence_alone(make):
    engine = make(n_seq=2)
    good = engine.add(ids_of(9), GREEDY, max_tokens=8)
    bad = engine.add(ids_of(9), GREEDY, max_tokens=8, grammar=Refusing())
    finish(engine, good, bad)
    assert (good.finish, bad.finish, bad.n_generated) == ("length", "error", 3)
    with pytest.raises(ValueError, match="the grammar does not allow"):
        list(engine.pieces(bad))
    assert isinstance(good.pieces[0], Piece) and engine.cache.n_free == engine.cache.n_pages


# Statistics


def test_statistics_count_what_happened(make):
    engine = make(n_seq=2, n_batch=50, run_ahead=True, prefix_cache=True)
    before = engine.stats()
    assert (before.n_pages, before.n_pages_free, before.steps_total) == (8, 8, 0)
    sizes = sizes_of_steps(engine)
    prompt = ids_of(2 * PAGE_SIZE + 1)
    finish(engine, engine.add(prompt, GREEDY, max_tokens=3))
    engine.add(prompt, GREEDY, max_tokens=5)
    engine.step()
    now = engine.stats()
    assert (now.n_running, now.n_waiting, now.n_pages_free, now.n_pages_cached) == (1, 0, 5, 0)
    finish(engine)
    stats = engine.stats()
    assert stats.prompt_tokens_total == len(prompt) + 1
    assert stats.cached_tokens_total == 2 * PAGE_SIZE
    assert stats.query_tokens_total == 2 * len(prompt)
    assert stats.generated_tokens_total == 8
    assert stats.steps_total == len(sizes)
    assert (stats.n_running, stats.n_pages_free, stats.n_pages_cached) == (0, 8, 2)
