"""Models whose layers see a window: pages that are given back, and what can be taken over then."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from steps import finish

from ggpy import arch
from ggpy.arch.cache import CacheGroups
from ggpy.backends.interface import PAGE_SIZE, CacheShape, PagedKV, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.runtime.kv_cache import PageTable
from ggpy.runtime.sequence import Sequence
from ggpy.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
N_CTX = 10 * PAGE_SIZE
SMALL, LARGE = 16, 512  # tokens of a step: pages of windows are given back, or there is no need


@pytest.fixture(scope="module", params=["gemma2", "gemma3", "gemma4"])
def make(tiny_path, request) -> Callable[..., Engine]:
    file = File(tiny_path(request.param))

    def make_engine(n_batch: int = SMALL, n_ctx: int = N_CTX, **options) -> Engine:
        ops = Reference(1)
        decoder = arch.load(file, ops, n_ctx)
        return Engine(decoder, ops, NoText(), n_ctx, n_batch, **options)

    return make_engine


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 450, n).tolist()


def answer(engine: Engine, ids: list[int], **options) -> list[int]:
    return finish(engine, engine.add(ids, GREEDY, **options))[0]


def window_of(s: Sequence) -> PageTable:
    return next(table for table in s.pages.tables if table.pool.window)


def test_a_long_text_takes_few_pages_of_a_window(make):
    engine = make()
    window, whole = sorted(engine.cache.pools, key=lambda pool: -pool.window)
    assert (window.window, window.n_pages, whole.n_pages) == (8, 2, 10)
    s = engine.add(ids_of(200), GREEDY, max_tokens=300)
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, window.n_pages - window.n_free)
    assert most == 2 and s.n_generated == 300
    assert [p.id for p in s.pieces] == answer(make(LARGE), ids_of(200), max_tokens=300)
    assert engine.cache.n_free == engine.cache.n_pages
    logits = engine.logits(ids_of(N_CTX)), make(LARGE).logits(ids_of(N_CTX))
    np.testing.assert_allclose(*logits, atol=3e-5)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_many_at_once_share_the_pages(make, run_ahead):
    engine = make(n_seq=3, run_ahead=run_ahead)
    prompts = [ids_of(n, n) for n in (30, 250, 100, 400, 70)]
    answers = finish(engine, *[engine.add(p, GREEDY, max_tokens=90) for p in prompts])
    assert answers == [answer(make(LARGE), p, max_tokens=90) for p in prompts]
    assert engine.cache.n_free == engine.cache.n_pages


@pytest.mark.parametrize("n_keep", [0, 5, 70])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_context_that_shifts(make, n_keep, run_ahead):
    """What is kept is evaluated again where the window before it is gone."""
    options = {"max_tokens": 150, "context_shift": True, "n_keep": n_keep}
    texts = [
        answer(make(n_batch, 3 * PAGE_SIZE, run_ahead=run_ahead), ids_of(150), **options)
        for n_batch in (SMALL, LARGE)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 150


def test_a_conversation_goes_on_though_its_beginning_is_gone(make):
    engine = make()
    first = engine.add(ids_of(250), GREEDY, max_tokens=20, keep=True)
    finish(engine, first)
    assert window_of(first).first == 3
    longer = [*first.ids, *ids_of(20, 8)]
    second = engine.add(longer, GREEDY, max_tokens=10, keep=True, previous=first)
    assert second.n_reused == 269
    assert finish(engine, second) == [answer(make(LARGE), longer, max_tokens=10)]
    little = [*second.ids[:-9], *ids_of(9, 9)]
    third = engine.add(little, GREEDY, max_tokens=10, keep=True, previous=second)
    assert third.n_reused == len(little) - 9
    assert finish(engine, third) == [answer(make(LARGE), little, max_tokens=10)]
    far = [*third.ids[:150], *ids_of(9, 9)]
    fourth = engine.add(far, GREEDY, max_tokens=10, previous=third)
    assert fourth.n_reused == 0
    assert finish(engine, fourth) == [answer(make(LARGE), far, max_tokens=10)]
    assert engine.cache.n_free == engine.cache.n_pages


def test_room_to_go_back_may_be_asked_for(make):
    engine = make(n_rewind=100)
    first = engine.add(ids_of(350), GREEDY, max_tokens=20, keep=True)
    finish(engine, first)
    assert window_of(first).first > 0
    back = [*first.ids[: 369 - SMALL - 100], 7, 8]
    again = engine.add(back, GREEDY, max_tokens=10, previous=first)
    assert again.n_reused == len(back) - 2
    assert finish(engine, again) == [answer(make(LARGE), back, max_tokens=10)]


def test_a_prefix_is_shared_while_its_window_is_there(make):
    engine = make(n_seq=3)
    system = ids_of(2 * PAGE_SIZE + 20)
    first = engine.add([*system, 9], GREEDY, max_tokens=300)
    while first.n_generated < 2:
        engine.step()
    second = engine.add([*system, 10], GREEDY, max_tokens=30)
    engine.step()
    assert second.n_reused == 2 * PAGE_SIZE
    assert window_of(second).pages[0] == window_of(first).pages[0]
    while first.n_generated < 100:
        engine.step()
    late = engine.add([*system, 11], GREEDY, max_tokens=30)
    engine.step()
    assert late.n_reused == 0
    found = finish(engine, first, second, late)
    alone = [([*system, 9], 300), ([*system, 10], 30), ([*system, 11], 30)]
    assert found == [answer(make(LARGE), ids, max_tokens=n) for ids, n in alone]
    assert engine.cache.n_free == engine.cache.n_pages


# Whatever is called


V, BAD = 128, 13
CONTEXT = 6 * PAGE_SIZE


def chained(before: int, id: int) -> int:
    """What a position holds: it follows from the ids of the text up to there."""
    return (before * 1_000_003 + id + 1) % (1 << 61)


def token_after(content: int) -> int:
    return content // 7 % V


class Pages:
    """A decoder and its ops, of which only the pages are real.

    A position holds what follows from the text up to it, in every group the same. From a token BAD
    on, all of a text is NaN. In a page that a step has taken, what follows the last token must not
    be NaN.
    """

    asynchronous = causal = True

    def __init__(self, windows: list[int]) -> None:
        """windows: of each group; the first sees everything."""
        self.specs = [PagedKV(1, 1, 8, 8, window) for window in windows]
        self.sizes = SimpleNamespace(n_vocab=V)
        self.sampled = np.zeros(0, np.int64)

    def cache_shape(
        self, n_seq: int, n_ctx: int, n_batch: int, n_positions: int | None = None
    ) -> CacheShape:
        return CacheGroups(self.specs).shape(n_seq, n_ctx, n_batch, n_positions)

    def allocate_cache(self, shape: CacheShape) -> None:
        sizes = [(group.n_pages, PAGE_SIZE) for group in shape.groups]
        self.content = [np.zeros(size, np.int64) for size in sizes]
        self.is_nan = [np.zeros(size, bool) for size in sizes]

    def clear_pages(self, group: int, pages: list[int]) -> None:
        self.is_nan[group][pages] = False
        self.content[group][pages] = -1

    def run(self, step: Step) -> np.ndarray:
        logits = np.zeros((len(step.ids), V), np.float32)
        ids = [self.sampled[~id] if id < 0 else id for id in step.ids.tolist()]
        for s in np.unique(step.sequences):
            mine = np.flatnonzero(step.sequences == s)
            tables = [table[s] for table in step.page_tables]
            self._check_what_is_seen(tables, int(step.positions[mine[0]]))
            for t in mine:
                logits[t] = self._write(tables, int(step.positions[t]), int(ids[t]))
            self._check_behind(tables, int(step.positions[mine[-1]]))
        return logits[step.rows]

    def _write(self, tables: list[np.ndarray], position: int, id: int) -> np.ndarray:
        """A token's row of logits; its position is written in all groups."""
        last = (tables[0][(position - 1) // PAGE_SIZE], (position - 1) % PAGE_SIZE)
        content = chained(int(self.content[0][last]) if position else 0, id)
        is_nan = id == BAD or bool(position and self.is_nan[0][last])
        for group, table in enumerate(tables):
            at = table[position // PAGE_SIZE], position % PAGE_SIZE
            self.content[group][at], self.is_nan[group][at] = content, is_nan
        row = np.full(V, np.nan if is_nan else 0, np.float32)
        row[token_after(content)] += 1
        return row

    def _check_what_is_seen(self, tables: list[np.ndarray], start: int) -> None:
        """Before the first token, every group holds the same text."""
        for group, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            first = max(0, start - spec.window + 1) if spec.window else 0
            for p in range(first, start):
                page, offset = p // PAGE_SIZE, p % PAGE_SIZE
                same = self.content[0][tables[0][page], offset]
                assert self.content[group][table[page], offset] == same

    def _check_behind(self, tables: list[np.ndarray], last: int) -> None:
        for is_nan, table in zip(self.is_nan, tables, strict=True):
            assert not is_nan[table[last // PAGE_SIZE], last % PAGE_SIZE + 1 :].any()

    def sample(self, logits: np.ndarray, samplers: list) -> np.ndarray:
        for sampler in samplers:
            sampler.n_drawn += 1
        ids = np.where(np.isnan(logits[:, 0]), -1, logits.argmax(1))
        self.sampled = np.maximum(ids, 0)
        return ids

    def read(self, array: np.ndarray) -> np.ndarray:
        return array


class NoMask:
    """A mask that allows every token: draws wait for the tokens before, whatever it allows."""

    finished = False

    def fill(self, row: Any) -> None:
        row[:] = -1

    def accept(self, token: int) -> None:
        pass


class AnyOrder:
    """An engine on such pages in any order of calls, with texts that begin alike."""

    windows = ([0, 70], [0, 1], [0, 200, 64])
    kind: Any = Pages
    shifts = (False, False, True)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        ops = self.kind(choose(self.windows))
        options = {"n_batch": choose([7, 64, 100]), "run_ahead": choose([False, True])}
        options |= {"n_rewind": choose([0, 0, 50]), "n_seq": choose([1, 2, 3, 5])}
        options |= {"n_positions": choose([None, CONTEXT, CONTEXT, 2 * CONTEXT])}
        options |= {"prefix_cache": choose([False, True]), "prefill_tokens": choose([None, 5])}
        self.engine = Engine(ops, ops, NoText(), CONTEXT, **options)
        self.all: list[Sequence] = []
        self.whole: list[Sequence] = []  # their texts are never cut

    def call(self) -> None:
        weighted = {self.add: 4, self.go_on: 4, self.end: 1, self.step: 8, self.logits: 1}
        weighted |= {self.interrupt: 2, self.interrupt_a_token: 1}
        self.random.choices(list(weighted), list(weighted.values()))[0]()

    def add(self) -> None:
        choose = self.random.choice
        prompt = [choose([5, 5, 6])] * choose([PAGE_SIZE + 6, 3 * PAGE_SIZE, 0])
        prompt += [choose([*range(20, 30), BAD])] * choose([1, 8, 70])
        self._begin(prompt, choose(self.shifts))

    def go_on(self) -> None:
        choose, ended = self.random.choice, [s for s in self.all if s.finish]
        if ended:
            previous = choose([s for s in ended if s.pages.n_held] or ended)
            cut = choose([CONTEXT, CONTEXT, len(previous.ids) - 5, 2 * PAGE_SIZE + 9, 1])
            text = choose([previous, previous, choose(self.all)]).ids[: max(1, cut)]
            self._begin([*text, *[7] * choose([0, 1, 20])], False, previous=previous)

    def _begin(self, ids: list[int], shifts: bool, **options: Any) -> None:
        choose = self.random.choice
        n = choose([100, 300]) if shifts else choose([1, 2, 3, 90, None])
        options |= {
            "context_shift": shifts,
            "n_keep": choose([0, 4, 80]),
            "keep": choose([1, 1, 0]),
            "cache": choose([True, True, False]),
            "client": choose("ab"),
            "grammar": choose([None, None, NoMask()]),
        }
        s = self.engine.add(ids[:CONTEXT], GREEDY, max_tokens=n, **options)
        self.all.append(s)
        if not shifts:
            self.whole.append(s)

    def end(self) -> None:
        if self.all:
            s = self.random.choice(self.all)
            self.random.choice([self.engine.cancel, self.engine.release])(s)

    def step(self) -> None:
        for _ in range(self.random.choice([1, 3, 20])):
            self.engine.step()

    def interrupt(self) -> None:
        """A step, before or after one of its parts."""
        ops: Any = self.engine.ops
        name = self.random.choice(["run", "sample", "read", "clear_pages"])
        work, whole = getattr(ops, name), self.random.choice([False, True])

        def interrupted(*args: Any) -> None:
            delattr(ops, name)
            if whole:
                work(*args)
            raise KeyboardInterrupt

        setattr(ops, name, interrupted)
        with suppress(KeyboardInterrupt):
            self.engine.step()
        vars(ops).pop(name, None)

    def interrupt_a_token(self) -> None:
        """A step, in the middle of a token of some sequence, which fails."""
        running = [s for s in self.all if s.finish is None]
        if running:
            s = self.random.choice(running)
            shown = s.stops.add

            def interrupted(text: str) -> None:
                s.stops.add = shown  # type: ignore[method-assign]
                raise KeyboardInterrupt

            s.stops.add = interrupted  # type: ignore[assignment]
            with suppress(KeyboardInterrupt):
                self.engine.step()
            s.stops.add = shown  # type: ignore[method-assign]

    def logits(self) -> None:
        n = self.random.choice([1, CONTEXT])
        bad = self.random.choice([0, n // 2, n])
        found = self.engine.logits([9] * bad + [BAD] * (n - bad))
        assert np.isfinite(found[:bad]).all() and np.isnan(found[bad:]).all()

    def finish(self) -> None:
        finish(self.engine, *self.all)
        for s in self.whole:
            content = 0
            for i, id in enumerate(s.ids):
                assert i < s.n_prompt or id == token_after(content)
                content = chained(content, id)
            wrong = BAD in s.ids[: s.n_prompt] or BAD in [p.id for p in s.pieces]
            assert s.finish != "error" or wrong or "interrupted" in str(s.error)
            assert s.finish == "error" or s.sampler.n_drawn == s.n_generated
        for s in self.all:
            self.engine.release(s)
        stats = self.engine.stats()
        assert self.engine.cache.n_free == self.engine.cache.n_pages == stats.n_pages_free
        assert stats.generated_tokens_total == sum(len(s.pieces) for s in self.all)
        answered = [s for s in self.all if s.pieces]
        assert stats.query_tokens_total == sum(s.n_prompt for s in answered)
        assert stats.cached_tokens_total == sum(s.n_reused for s in answered)


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_every_step_sees_its_own_text_and_no_nan_of_others(seed):
    engine = AnyOrder(seed)
    for _ in range(40):
        engine.call()
    engine.finish()


@pytest.mark.parametrize("seed", range(6))
def test_many_that_begin_alike_with_few_pages(seed):
    """Each of them is admitted, and most are preempted; some leave, and some fail."""
    choose = random.Random(seed).choice
    ops: Any = Pages([[0], [0, 70], [0, 200, 64]][seed % 3])
    options: dict[str, Any] = {"n_seq": 6, "n_batch": choose([16, 100]), "prefill_tokens": 10}
    options |= {"n_positions": 9 * PAGE_SIZE, "prefix_cache": seed % 2 == 0, "run_ahead": seed > 2}
    engine = Engine(ops, ops, NoText(), CONTEXT, **options)
    sequences = []
    for i in range(14):
        prompt = [5] * choose([10, 40, 80]) + [choose([20, 21])] * choose([1, 30])
        prompt += [BAD] * (i == 7)
        sequences.append(engine.add(prompt, GREEDY, max_tokens=200, client=choose("abc")))
    while engine.busy:
        engine.step()
        if choose(range(100)) == 0:
            engine.cancel(choose(sequences))
        held = [
            {p for s in sequences for p in s.pages.tables[g].pages} for g in range(len(ops.specs))
        ]
        for pool, pages in zip(engine.cache.pools, held, strict=True):
            assert pool.n_free == pool.n_pages - len(pages) and pool.n_cached <= pool.n_free
    for s in sequences:
        content = 0
        for i, id in enumerate(s.ids):
            assert i < s.n_prompt or id == token_after(content)
            content = chained(content, id)
        assert s.finish == "cancelled" or (s.finish == "error") == (BAD in s.ids)
    stats = engine.stats()
    assert stats.preemptions_total > 2 and stats.n_pages_free == stats.n_pages
    assert bool(stats.n_pages_cached) == options["prefix_cache"]
