"""Models with recurrent states: what a sequence takes over, goes back to, and evaluates again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from steps import finish

from ggpy import arch
from ggpy.backends.interface import PAGE_SIZE, Recurrent, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.states import NO_STATE, STATES
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.runtime.page_pool import OutOfPages, PagePool
from ggpy.runtime.state_table import StateTable
from ggpy.sampling import SamplingParams

from .test_windows import BAD, AnyOrder, Pages, V, chained, token_after

GREEDY = SamplingParams(temperature=0)
N_CTX = 6 * PAGE_SIZE


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 350, n).tolist()


# A table


def row_of(table: StateTable) -> list[int]:
    row = np.full(3, 9, np.int32)
    table.write(row)
    assert row[2] == 0
    return row[:2].tolist()


def test_a_step_leaves_the_state_that_it_begins_with():
    pool = PagePool(STATES, window=PAGE_SIZE + 1, limit=STATES)
    table = StateTable(pool)
    table.grow(0, 10, 0)
    read, first = row_of(table)
    assert read == NO_STATE
    table.grow(10, 11, 0)
    assert row_of(table)[0] == first != row_of(table)[1]
    again = row_of(table)
    table.grow(10, 11, 0)
    assert row_of(table)[0] == again[0], "a step that was interrupted begins at the same state"
    assert (table.keepable(11), table.keepable(10), table.keepable(9)) == (11, 10, 0)
    table.grow(11, 12, 0)
    assert pool.n_free == STATES - 2, "the state after an older step is given back"
    table.truncate(0)
    assert pool.n_free == STATES and table.keepable(12) == 0


def test_a_published_state_stays_until_the_next_one():
    pool = PagePool(STATES, window=PAGE_SIZE + 1, limit=STATES, caches=True)
    table = StateTable(pool)
    table.grow(0, PAGE_SIZE, 0)
    table.publish(0, b"one", finite=False)
    kept = row_of(table)[1]
    for position in range(PAGE_SIZE, PAGE_SIZE + 5):
        table.grow(position, position + 1, 0)
        assert kept not in row_of(table) or position == PAGE_SIZE
    assert pool.n_free == 0 and table.missing(500) == 0
    table.publish(0, b"one", finite=True)
    assert table.keepable(PAGE_SIZE + 2) == PAGE_SIZE
    other = StateTable(PagePool(1))
    with pytest.raises(OutOfPages):
        for start in range(2):
            other.grow(start, start + 1, 0)
    table.truncate(0)
    assert pool.n_cached == 1
    table.reuse([b"one"])
    assert table.keepable(99) == PAGE_SIZE and pool.n_cached == 0
    table.suspect(0)
    table.truncate(0)
    assert pool.find(b"one") == kept, "it is known to hold no NaN"


def test_a_state_that_may_be_nan_is_not_found():
    pool = PagePool(STATES, window=PAGE_SIZE + 1, limit=STATES, caches=True)
    table = StateTable(pool)
    table.grow(0, PAGE_SIZE, 0)
    table.publish(0, b"one", finite=False)
    table.suspect(PAGE_SIZE)
    assert pool.find(b"one") is not None, "it is before what may be NaN"
    table.suspect(PAGE_SIZE - 1)
    assert pool.find(b"one") is None and not pool.suspects
    with pytest.raises(ValueError, match="no state after position 7"):
        table.grow(7, 8, 0)


# A model


@pytest.fixture(scope="module")
def make(tiny_path) -> Callable[..., Engine]:
    file = File(tiny_path("qwen35"))

    def make_engine(n_batch: int = 512, n_ctx: int = N_CTX, **options) -> Engine:
        ops = Reference(1)
        return Engine(arch.load(file, ops, n_ctx), ops, NoText(), n_ctx, n_batch, **options)

    return make_engine


def answer(engine: Engine, ids: list[int], **options) -> list[int]:
    return finish(engine, engine.add(ids, GREEDY, **options))[0]


@pytest.mark.parametrize("n_batch", [1, 7, 64, 100])
def test_borders_of_chunks_change_nothing(make, n_batch):
    ids = ids_of(150)
    found, whole = make(n_batch).logits(ids), make().logits(ids)
    assert np.sqrt(np.mean(np.square(found - whole)) / np.mean(np.square(whole))) < 1e-5


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_many_at_once_answer_as_if_alone(make, run_ahead, prefix_cache):
    engine = make(50, n_seq=3, run_ahead=run_ahead, prefix_cache=prefix_cache)
    prompts = [ids_of(n, n) for n in (30, 150, 64, 200, 70)]
    answers = finish(engine, *[engine.add(p, GREEDY, max_tokens=40) for p in prompts])
    assert answers == [answer(make(), p, max_tokens=40) for p in prompts]
    assert engine.cache.n_free == engine.cache.n_pages


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_conversation_goes_on_where_it_ended(make, run_ahead):
    engine = make(run_ahead=run_ahead)
    first = engine.add(ids_of(100), GREEDY, max_tokens=20, keep=True)
    finish(engine, first)
    longer = [*first.ids, *ids_of(20, 8)]
    second = engine.add(longer, GREEDY, max_tokens=10, keep=True, previous=first)
    assert second.n_reused == 119, "all but the last token, which nobody evaluated"
    assert finish(engine, second) == [answer(make(), longer, max_tokens=10)]


def test_a_token_of_the_step_that_ran_ahead_is_undone(make):
    """The end of an answer is found when the next step is already under way."""
    engine = make(run_ahead=True)
    alone = answer(make(), ids_of(30), max_tokens=10)
    end = alone[6]
    engine._end_ids = frozenset([end])
    first = engine.add(ids_of(30), GREEDY, max_tokens=50, keep=True)
    finish(engine, first)
    assert first.finish == "stop" and first.n_evaluated == len(first.ids) == 37
    without = [*first.ids[:-1], 9, 9]
    engine._end_ids = frozenset()
    second = engine.add(without, GREEDY, max_tokens=10, previous=first)
    assert second.n_reused == 36, "the state before the end is there still"
    assert finish(engine, second) == [answer(make(), without, max_tokens=10)]


def test_an_answer_that_is_not_repeated_is_evaluated_from_its_prompt_on(make):
    """Templates drop the reasoning of earlier turns: texts part a few tokens before the answer."""
    engine = make()
    prompt = ids_of(2 * PAGE_SIZE + 30)
    first = engine.add(prompt, GREEDY, max_tokens=70, keep=True)
    finish(engine, first)
    other = [*prompt[:-2], *ids_of(40, 3)]
    second = engine.add(other, GREEDY, max_tokens=10, keep=True, previous=first)
    assert second.n_reused == 2 * PAGE_SIZE
    assert finish(engine, second) == [answer(make(), other, max_tokens=10)]
    early = [*prompt[:50], *ids_of(40, 4)]
    third = engine.add(early, GREEDY, max_tokens=10, previous=second)
    assert third.n_reused == 0, "there is no state in front of it"
    assert finish(engine, third) == [answer(make(), early, max_tokens=10)]
    assert engine.cache.n_free == engine.cache.n_pages


def test_texts_that_begin_alike_share_a_state(make):
    engine = make(n_seq=3, prefix_cache=True)
    prompt = ids_of(2 * PAGE_SIZE + 5)
    first = engine.add(prompt, GREEDY, max_tokens=30)
    while first.n_generated < 2:
        engine.step()
    second = engine.add([*prompt[:-3], 9, 9], GREEDY, max_tokens=30)
    while second.n_generated < 1:
        engine.step()
    assert second.n_reused == 2 * PAGE_SIZE
    texts = finish(engine, first, second)
    late = engine.add([*prompt, 7], GREEDY, max_tokens=30)
    salted = engine.add([*prompt, 7], GREEDY, max_tokens=1, salt=b"other")
    texts += finish(engine, late)
    assert (late.n_reused, salted.n_reused) == (2 * PAGE_SIZE, 0)
    alone = [prompt, [*prompt[:-3], 9, 9], [*prompt, 7]]
    assert texts == [answer(make(), ids, max_tokens=30) for ids in alone]
    stats = engine.stats()
    assert stats.n_pages_free == stats.n_pages and stats.n_pages_cached > 0


def test_who_loses_its_pages_is_evaluated_again(make):
    engine = make(40, 4 * PAGE_SIZE, n_seq=3, n_positions=5 * PAGE_SIZE)
    prompts = [ids_of(n, n) for n in (60, 61, 100)]
    answers = finish(engine, *[engine.add(p, GREEDY, max_tokens=100) for p in prompts])
    assert engine.stats().preemptions_total > 0
    assert answers == [answer(make(), p, max_tokens=100) for p in prompts]
    assert engine.cache.n_free == engine.cache.n_pages


def test_a_context_that_would_shift_is_refused(make):
    with pytest.raises(ValueError, match=r"recurrent states.*leave context_shift.*n_ctx"):
        make().add([5, 6], context_shift=True)


def test_a_step_can_be_repeated(make):
    """It leaves the state that it began with as it was."""
    engine = make()
    pages = engine._scheduler.make_room(64)
    run = engine.decoder.run
    for start, ids in ((0, ids_of(20)), (20, [9])):
        pages.grow(start, start + len(ids), start)
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        tables = tuple(np.zeros((1, 2), np.int32) for _ in pages.tables)
        for table, rows in zip(pages.tables, tables, strict=True):
            table.write(rows[0])
        owner = np.zeros(len(ids), np.int32)
        step = Step(np.array(ids, np.int32), positions, owner, tables, np.array([len(ids) - 1]))
        np.testing.assert_array_equal(run(step).copy(), run(step))
    pages.release()


def test_what_the_cache_takes(make):
    engine = make(n_seq=2, n_ctx=128)
    keys, states = engine.cache.describe("f32")
    assert keys.startswith("KV cache: f32 and f32")
    assert states == "recurrent states: 8 of 0.0 MB for 3 layers"
    kv, state = engine.ops._cache
    arrays = kv.keys.array, kv.values.array, state.conv, state.matrix
    assert engine.cache.nbytes("f32") == sum(array.nbytes for array in arrays)


# Whatever is called


class States(Pages):
    """Pages beside a recurrent state, which holds what its last position does."""

    def __init__(self, windows: list[int]) -> None:
        super().__init__(windows)
        self.specs.append(Recurrent(1, 1, 8, 4))  # type: ignore[arg-type]

    def run(self, step: Step) -> np.ndarray:
        *paged, states = step.page_tables
        content, is_nan = (kept[-1][:, 0] for kept in (self.content, self.is_nan))
        for s in np.unique(step.sequences):
            start = int(step.positions[step.sequences == s][0])
            read, written = states[s].tolist()
            assert read != written and (read == NO_STATE) == (start == 0)
            if start:
                last = paged[0][s][(start - 1) // PAGE_SIZE], (start - 1) % PAGE_SIZE
                assert content[read] == self.content[0][last]
                assert is_nan[read] == self.is_nan[0][last]
        assert len(set(states[:, 1].tolist())) == len(states)
        assert not set(states[:, 0].tolist()) & set(states[:, 1].tolist())
        ids = [int(self.sampled[~id]) if id < 0 else id for id in step.ids.tolist()]
        logits = np.zeros((len(ids), V), np.float32)
        specs, self.specs = self.specs, self.specs[:-1]
        for t, s in enumerate(step.sequences.tolist()):
            tables = [table[s] for table in paged]
            position = int(step.positions[t])
            logits[t] = self._write(tables, position, ids[t])
            at = tables[0][position // PAGE_SIZE], position % PAGE_SIZE
            content[states[s, 1]], is_nan[states[s, 1]] = self.content[0][at], self.is_nan[0][at]
        self.specs = specs
        return logits[step.rows]


class AnyOrderOfStates(AnyOrder):
    windows = ([0], [0, 70])  # type: ignore[assignment]
    kind = States
    shifts = (False,)  # type: ignore[assignment]


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_every_step_begins_with_the_state_of_its_own_text(seed):
    engine = AnyOrderOfStates(seed)
    for _ in range(40):
        engine.call()
    engine.finish()


@pytest.mark.parametrize("seed", range(4))
def test_many_that_begin_alike_with_few_pages_and_states(seed):
    ops: Any = States([0])
    engine = Engine(ops, ops, NoText(), 6 * PAGE_SIZE, n_seq=4, n_batch=[16, 100][seed % 2],
                    n_positions=8 * PAGE_SIZE, prefix_cache=True, run_ahead=seed > 1)  # fmt: skip
    sequences = []
    for i in range(12):
        prompt = [5] * (10, 70, 140)[(i + seed) % 3] + [20 + i % 2] * 30 + [BAD] * (i == 7)
        sequences.append(engine.add(prompt, GREEDY, max_tokens=150, client="abc"[i % 3]))
    finish(engine)
    for s in sequences:
        content = 0
        for i, id in enumerate(s.ids):
            assert i < s.n_prompt or id == token_after(content)
            content = chained(content, id)
        assert (s.finish == "error") == (BAD in s.ids)
    stats = engine.stats()
    assert stats.n_pages_free == stats.n_pages and stats.preemptions_total > 0
    assert max(s.n_reused for s in sequences) >= PAGE_SIZE
