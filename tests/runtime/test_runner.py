"""One model, or one engine, and many threads: everybody's text, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ggpy
from ggpy.model import Model
from ggpy.runtime.engine import Occupied
from ggpy.runtime.mailbox import Mailbox
from ggpy.runtime.runner import Runner
from ggpy.sampling import SamplingParams

PROMPTS = [[i + 1, 5, 9, 30 + i] for i in range(4)]
SECONDS = 60  # more than anything here takes, and less than a hang


@pytest.fixture(autouse=True)
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def load(tiny_path) -> Iterator[Callable[..., Model]]:
    models = []

    def load(n_seq: int = 1, n_ctx: int = 128) -> Model:
        path = tiny_path("llama")
        models.append(ggpy.load(path, "cpu", n_ctx=n_ctx, n_seq=n_seq, n_threads=1))
        return models[-1]

    yield load
    for model in models:
        model.close()


def tokens(model: Model, prompt: list[int], **options) -> list[int]:
    return [p.id for p in model.generate(prompt, **{"max_tokens": 30, "temperature": 0, **options})]


def together(*work: Callable[[], object]) -> list:
    """What each returns, all begun at the same time in threads of their own."""
    start = threading.Barrier(len(work))

    def begin(f):
        start.wait(SECONDS)
        return f()

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(begin, f) for f in work]
        return [f.result(SECONDS) for f in futures]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never comes true"
        time.sleep(0.001)


def all_free(model: Model) -> bool:
    """An owner inside a step gives pages back only after it, so soon and not at once."""
    return not model.engine.busy and model.engine.cache.n_free == model.engine.cache.n_pages


@pytest.mark.parametrize("n_seq", [1, 2, 4])
def test_every_thread_gets_its_text(load, n_seq):
    expected = [tokens(load(), p) for p in PROMPTS]
    model = load(n_seq)
    for _ in range(4):
        jobs = [lambda p=p: [tokens(model, p) for _ in range(3)] for p in PROMPTS]
        assert together(*jobs) == [[text] * 3 for text in expected]
    wait_until(lambda: all_free(model))


def test_seeds_repeat_whoever_is_beside(load):
    options = {"temperature": 1.3, "seed": 7}
    expected = tokens(load(), PROMPTS[0], **options)
    model = load(3)
    beside = [lambda: [tokens(model, PROMPTS[1], seed=s) for s in range(4)] for _ in range(2)]
    found, *_ = together(lambda: [tokens(model, PROMPTS[0], **options) for _ in range(4)], *beside)
    assert found == [expected] * 4


def test_one_thread_after_the_other_needs_no_owner(load):
    model = load()
    expected = tokens(model, PROMPTS[0])
    generators = [model.generate(PROMPTS[0], max_tokens=30, temperature=0) for _ in range(2)]
    ids: list[list[int]] = [[], []]
    for _ in PROMPTS * 7:  # in turns, each time in another thread
        for i, generator in enumerate(generators):
            with ThreadPoolExecutor(1) as pool:
                ids[i].append(pool.submit(next, generator).result(SECONDS).id)
    assert ids == [expected[:28]] * 2 and model._runner is None


def in_owner_mode(model: Model) -> Model:
    """As it is once two threads have met."""
    model._start_runner()
    return model


def test_an_answer_that_began_without_the_owner_goes_on_with_it(load):
    model = load(2)
    expected = tokens(model, PROMPTS[0])
    generator = model.generate(PROMPTS[0], max_tokens=30, temperature=0)
    ids = [next(generator).id for _ in range(5)]
    in_owner_mode(model)
    assert ids + [p.id for p in generator] == expected
    assert tokens(model, PROMPTS[0]) == expected
    wait_until(lambda: all_free(model))


def test_a_second_thread_that_meets_a_step_starts_the_owner(load):
    model = load(2)
    expected = [tokens(model, p) for p in PROMPTS[:2]]
    inside, go = threading.Event(), threading.Event()
    run = model.decoder.run

    def slow(step):
        inside.set()
        assert go.wait(SECONDS)
        return run(step)

    model.decoder.run = slow
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tokens, model, PROMPTS[0])
        assert inside.wait(SECONDS)
        with pytest.raises(Occupied, match="another thread is at work with this engine"):
            model.engine.step()
        second = pool.submit(tokens, model, PROMPTS[1])
        wait_until(lambda: model._runner is not None)
        go.set()
        assert [first.result(SECONDS), second.result(SECONDS)] == expected


@pytest.mark.parametrize("owner", [False, True])
def test_logits_wait_for_their_turn(load, owner):
    model = load(2)
    expected = model.logits([5, 6, 7])
    model = in_owner_mode(model) if owner else model
    texts = [tokens(model, p) for p in PROMPTS[:2]]
    *found, a, b = together(
        *[lambda: [model.logits([5, 6, 7]) for _ in range(10)]] * 2,
        *[lambda p=p: tokens(model, p) for p in PROMPTS[:2]],
    )
    np.testing.assert_array_equal(found, [[expected] * 10] * 2)
    assert [a, b] == texts
    with pytest.raises(ValueError, match="no tokens"):
        model.logits([])


@pytest.mark.parametrize("owner", [False, True])
def test_abandoned_answers_are_released_by_whichever_thread(load, owner):
    model = load(2)
    expected = tokens(model, PROMPTS[0], max_tokens=100)
    model = in_owner_mode(model) if owner else model

    def abandon() -> None:
        for how in ("close", "break", "drop", "cycle"):
            generator = model.generate(PROMPTS[1], temperature=0)
            next(generator)
            if how == "close":
                generator.close()
            elif how == "break":
                for _ in generator:
                    break
            elif how == "cycle":  # collected by whoever has the next collection, in a step too
                cycle: list = [generator]
                cycle.append(cycle)
            del generator

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        text, *_ = together(
            lambda: tokens(model, PROMPTS[0], max_tokens=100), *[lambda: [abandon(), abandon()]] * 3
        )
    finally:
        gc.set_threshold(*thresholds)
    assert text == expected
    gc.collect()
    wait_until(lambda: all_free(model))


def test_a_failing_answer_is_its_own_thread_s(load):
    expected = tokens(load(), PROMPTS[0])
    model = in_owner_mode(load(3))
    nothing = dict.fromkeys(range(model.tokenizer.n_vocab), -float("inf"))

    def fails() -> str:
        with pytest.raises(ValueError, match="no token can be chosen") as caught:
            tokens(model, PROMPTS[1], logit_bias=nothing)
        return str(caught.value)

    texts = together(*[lambda: tokens(model, PROMPTS[0])] * 2, fails)
    assert texts[:2] == [expected] * 2
    with pytest.raises(ValueError, match="top_p"):
        tokens(model, PROMPTS[0], top_p=3)
    wait_until(lambda: all_free(model))


def test_an_error_of_the_machine_reaches_everybody_and_the_next_answer_is_right(load):
    model = load(3)
    expected = tokens(model, PROMPTS[0])
    in_owner_mode(model)
    run, steps = model.decoder.run, []

    def broken(step):
        steps.append(len(step.ids))
        if len(step.page_tables[0]) == 3 and len(steps) > 5:
            raise ArithmeticError("the device fell off")
        return run(step)

    model.decoder.run = broken

    def fails() -> None:
        with pytest.raises(ArithmeticError, match="the device fell off"):
            tokens(model, PROMPTS[0], max_tokens=None, context_shift=True)

    together(fails, fails, fails)
    model.decoder.run = run
    wait_until(lambda: all_free(model))
    assert tokens(model, PROMPTS[0]) == expected


@pytest.mark.parametrize("owner", [False, True])
def test_closing_tells_who_waits_and_who_comes(load, owner):
    model = load(1)
    model = in_owner_mode(model) if owner else model
    begun = threading.Barrier(4)

    def waits() -> None:
        generator = model.generate(PROMPTS[0], temperature=0, context_shift=True)
        begun.wait(SECONDS)
        with pytest.raises(RuntimeError, match=r"the model (was|is) closed"):
            for _ in generator:
                pass

    def closes() -> None:
        begun.wait(SECONDS)
        wait_until(lambda: model.engine.busy)
        model.close()

    together(waits, waits, waits, closes)
    wait_until(lambda: all_free(model))
    for call in (lambda: tokens(model, PROMPTS[0]), lambda: model.logits([5])):
        with pytest.raises(RuntimeError, match="the model is closed"):
            call()
    model.close()


def test_the_owner_s_thread_ends_with_its_model(load, tiny_path):
    before = threading.active_count()
    model = ggpy.load(tiny_path("llama"), "cpu", n_threads=1)
    in_owner_mode(model)
    assert threading.active_count() == before + 1
    del model
    gc.collect()
    wait_until(lambda: threading.active_count() == before)
    closed = in_owner_mode(load())
    closed.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("n_seq", [1, 3])
def test_threads_with_lists_of_prompts(load, n_seq):
    expected = [tokens(load(), p) for p in PROMPTS]
    model = in_owner_mode(load(n_seq))

    def texts() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in PROMPTS]
        for piece in model.generate(PROMPTS, max_tokens=30, temperature=0):
            found[piece.index].append(piece.id)
        return found

    assert together(texts, texts, lambda: tokens(model, PROMPTS[0])) == [
        *[expected] * 2,
        expected[0],
    ]
    wait_until(lambda: all_free(model))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_has_no_owner(load):
    """It says so, where it would wait for ever."""
    model = in_owner_mode(load())
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        told = ""
        try:
            tokens(model, PROMPTS[0])
        except BaseException as error:
            told = str(error)
        os._exit("load the model in this process" not in told)
    assert os.waitpid(child, 0)[1] == 0
    assert tokens(model, PROMPTS[0])


def test_a_runner_for_an_engine(load):
    """As a server uses it: sequences of the engine, followed or told about."""
    model = load(2)
    expected = tokens(model, PROMPTS[0])
    greedy = SamplingParams(temperature=0)
    runner = Runner(model.engine)
    told, done = [], threading.Event()
    quiet = model.engine.add(PROMPTS[0], greedy, max_tokens=30)

    def notify() -> None:
        told.append(threading.current_thread().name)
        if quiet.finish:
            done.set()

    quiet.notify = notify
    followed = model.engine.add(PROMPTS[0], greedy, max_tokens=30)
    assert [p.id for p in runner.pieces(followed)] == expected
    assert done.wait(SECONDS) and [p.id for p in quiet.pieces] == expected
    assert set(told) == {"ggpy engine"}
    endless = model.engine.add(PROMPTS[0], greedy, context_shift=True)
    pieces = runner.pieces(endless)
    next(pieces)
    model.engine.cancel(endless)
    list(pieces)
    assert endless.finish == "cancelled"
    wait_until(lambda: all_free(model))
    runner.close()


def test_who_comes_after_the_news_does_not_wait_for_more(load):
    model = load(1)
    s = model.engine.add(PROMPTS[0], max_tokens=1)
    runner = Runner(model.engine)
    wait_until(lambda: not model.engine.step(wait=True) and s.finish is not None)
    waiting = threading.Thread(target=runner.waiter(s), daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    runner.close()


def test_nobody_waits_for_sequences_that_cannot_be_ended(load, monkeypatch):
    """Neither who waits already, nor who comes later."""
    model = in_owner_mode(load(2))
    going, failing = threading.Event(), threading.Event()

    def fails(*_: object) -> None:
        going.set()
        assert failing.wait(SECONDS)
        raise ArithmeticError("a step")

    def cannot(error: BaseException) -> None:
        raise KeyError("an end") from error

    monkeypatch.setattr(model.engine, "step", lambda wait: fails())
    monkeypatch.setattr(model.engine, "abort", cannot)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(tokens, model, prompt) for prompt in PROMPTS[:2]]
        assert going.wait(SECONDS)
        failing.set()
        for waiting in waits:
            with pytest.raises(RuntimeError, match="could not be ended: load the model again"):
                waiting.result(SECONDS)
    with pytest.raises(RuntimeError, match="load the model again") as caught:
        tokens(model, PROMPTS[2])
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_was_posted_during_a_step_that_fails_is_done(load):
    model = load(1)
    s = model.engine.add(PROMPTS[0], SamplingParams(temperature=0))

    def fails(step):
        model.engine.cancel(s)
        assert s.finish is None, "this step is under way"
        raise ArithmeticError

    model.decoder.run = fails
    with pytest.raises(ArithmeticError):
        model.engine.step()
    assert s.finish == "cancelled" and all_free(model)


def test_requests_are_done_once_and_in_order_by_who_is_inside():
    mailbox, done = Mailbox(), []
    mailbox.post(lambda: done.append("alone"))
    assert done == ["alone"] and not mailbox.pending
    with mailbox.inside:
        for i in range(3):
            mailbox.post(lambda i=i: done.append(i))
        assert mailbox.pending and done == ["alone"]
        mailbox.apply()
        mailbox.post(lambda: done.append("late"))
    assert done == ["alone", 0, 1, 2]
    mailbox.settle()
    assert done[-1] == "late"
    assert together(*[lambda i=i: mailbox.call(lambda: i) for i in range(4)]) == [0, 1, 2, 3]
    assert mailbox.call(lambda: done[-1], lambda: done.append("first")) == "first"
    with pytest.raises(ZeroDivisionError):
        mailbox.call(lambda: 1 // 0)
