"""Sequences, batches, run-ahead, stops, shifts and reuse, on tiny models."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from conftest import TINY
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ggpy import arch
from ggpy.backends.interface import PAGE_SIZE
from ggpy.backends.numpy.backend import Reference
from ggpy.device.base import CudaError
from ggpy.gguf import File
from ggpy.runtime.engine import ContextOverflow, Engine, Piece, StopStrings
from ggpy.runtime.page_pool import OutOfPages
from ggpy.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
V = 453


class Letters:
    """A tokenizer that makes a letter of each id."""

    def __init__(self, end_ids=()) -> None:
        self.end_ids = frozenset(end_ids)
        self.suppressed_ids: frozenset[int] = frozenset()

    def stream(self) -> Letters:
        return Letters()

    def add(self, id: int) -> str:
        return chr(97 + id % 26)

    def finish(self) -> str:
        return "!"


@pytest.fixture(scope="module")
def make_engine(tiny_path) -> Callable[..., Engine]:
    file = File(tiny_path("llama"))

    def make(n_ctx: int = 256, end_ids=(), **options) -> Engine:
        ops = Reference(1)
        return Engine(arch.load(file, ops, n_ctx), ops, Letters(end_ids), n_ctx, **options)

    return make


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, V, n).tolist()


def finish(engine: Engine, *sequences) -> None:
    while engine.busy:
        engine.step()
    assert all(s.finish for s in sequences)


def answer(engine: Engine, ids: list[int], params=GREEDY, **options) -> list[int]:
    s = engine.add(ids, params, **options)
    finish(engine, s)
    return [p.id for p in s.pieces]


# Batches


def test_ragged_batch_gives_what_each_gives_alone(make_engine):
    prompts = [ids_of(n, n) for n in (1, 5, 70, 130, 64)]
    alone = [answer(make_engine(), p, max_tokens=12) for p in prompts]
    together = make_engine(n_seq=5, n_batch=48)
    sequences = [together.add(p, GREEDY, max_tokens=12) for p in prompts]
    finish(together, *sequences)
    assert [[p.id for p in s.pieces] for s in sequences] == alone
    assert together.cache.n_free == together.cache.n_pages


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_logits_of_a_ragged_step_equal_those_alone(architecture, tiny_path):
    """Windows, several pages, pages that are no neighbours: to 1e-5."""
    from ggpy.runtime.batch import ragged
    from ggpy.runtime.kv_cache import KVCache, SequencePages

    ops = Reference(1)
    with File(tiny_path(architecture)) as file:
        decoder = arch.load(file, ops, 256)
    shape = decoder.cache_shape(4, 256, 256)
    ops.allocate_cache(shape)
    prompts, cache = [ids_of(n, n) for n in (3, 100, 1, 70)], KVCache(shape)
    alone = []
    for p in prompts:
        t = SequencePages(cache)
        t.grow(0, len(p), 0)
        alone.append(decoder.run(ragged([(t, p, 0)], np.arange(len(p), dtype=np.int32))))
        t.release()
    sequences = [SequencePages(cache) for _ in prompts]
    for n in (1, 64, 128):  # pages are taken in turns
        for t, p in zip(sequences, prompts, strict=True):
            t.grow(0, min(n, len(p)), 0)
    chunks = [(t, p, 0) for t, p in zip(sequences, prompts, strict=True)]
    rows = np.arange(sum(map(len, prompts)), dtype=np.int32)
    together = decoder.run(ragged(chunks, rows))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_batch", [1, 7, 64, 1000])
def test_prompt_in_chunks_equals_the_whole(make_engine, n_batch):
    ids = ids_of(150)
    whole = make_engine(n_batch=1000).logits(ids)
    assert whole.shape == (150, V) and whole.dtype == np.float32
    np.testing.assert_allclose(make_engine(n_batch=n_batch).logits(ids), whole, atol=1e-4)
    assert answer(make_engine(n_batch=n_batch), ids, max_tokens=8) == answer(
        make_engine(), ids, max_tokens=8
    )


def test_a_step_is_never_larger_than_n_batch_and_answers_come_first(make_engine):
    engine = make_engine(n_seq=3, n_batch=16)
    sizes = []
    run = engine.decoder.run
    engine.decoder.run = lambda step: (sizes.append(len(step.ids)), run(step))[1]
    first = engine.add(ids_of(4), GREEDY, max_tokens=20)
    engine.step()
    engine.add(ids_of(100, 1), GREEDY, max_tokens=2)
    while not first.finish:
        before = first.n_generated
        engine.step()
        assert first.n_generated == before + 1, "a long prompt does not stop an answer"
    finish(engine)
    assert max(sizes) == 16


def test_pages_survive_the_end_of_another_sequence(make_engine):
    ids = ids_of(80, 3)
    expected = answer(make_engine(), ids, max_tokens=60)
    engine = make_engine(n_seq=2)
    other = engine.add(ids_of(90, 4), GREEDY, max_tokens=5)
    mine = engine.add(ids, GREEDY, max_tokens=60)
    while not other.finish:
        engine.step()
    third = engine.add(
        ids_of(120, 5), GREEDY, max_tokens=30
    )  # takes the pages that were given back
    finish(engine, mine, third)
    assert [p.id for p in mine.pieces] == expected
    assert [p.id for p in third.pieces] == answer(make_engine(), ids_of(120, 5), max_tokens=30)


def test_more_sequences_than_room_wait(make_engine):
    engine = make_engine(n_seq=2)
    sequences = [engine.add(ids_of(10, i), GREEDY, max_tokens=4) for i in range(5)]
    engine.step()
    assert [s.n_generated for s in sequences] == [1, 1, 0, 0, 0]
    finish(engine, *sequences)
    for i, s in enumerate(sequences):
        assert [p.id for p in s.pieces] == answer(make_engine(), ids_of(10, i), max_tokens=4)


# Running ahead


PARAMS = [
    GREEDY,
    SamplingParams(seed=7),
    SamplingParams(seed=7, temperature=1.5, top_k=0, xtc_probability=0.5),
    SamplingParams(seed=3, repeat_penalty=1.3, repeat_last_n=5),
    SamplingParams(seed=3, frequency_penalty=0.5, dry_multiplier=1.5, dry_penalty_last_n=-1),
    SamplingParams(seed=5, mirostat=1, mirostat_eta=1.0),
    SamplingParams(seed=5, adaptive_target=0.2, samplers=("top_k", "penalties", "adaptive_p")),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("options", [{}, {"stop": ["a"]}, {"context_shift": True, "n_keep": 3}])
def test_running_ahead_changes_nothing(make_engine, params, options):
    texts = []
    for run_ahead in (False, True):
        engine = make_engine(
            n_ctx=100, n_seq=3, n_batch=20, end_ids=(7, 99, 150), run_ahead=run_ahead
        )
        prompts = [ids_of(n, n) for n in (3, 40, 60, 12, 5)]
        sequences = [engine.add(p, params, max_tokens=90, **options) for p in prompts]
        finish(engine, *sequences)
        engine.step()  # what was run ahead of the last end
        texts.append([(s.finish, list(s.pieces), s.sampler.n_drawn) for s in sequences])
        assert engine.cache.n_free == engine.cache.n_pages
    assert texts[0] == texts[1]


def test_the_next_step_is_handed_over_before_tokens_are_read(make_engine):
    engine = make_engine(run_ahead=True)
    order = []
    run, read = engine.decoder.run, engine.ops.read
    engine.decoder.run = lambda step: (order.append(step.ids.tolist()), run(step))[1]
    engine.ops.read = lambda *given: (order.append("read"), read(*given))[1]
    s = engine.add([5, 6], GREEDY, max_tokens=3)
    finish(engine, s)
    assert order == [[5, 6], [~0], "read", [~0], "read", "read"], "nothing after the last token"
    order.clear()
    engine.add([5], SamplingParams(seed=1, repeat_penalty=2.0), max_tokens=2)
    finish(engine)
    assert order == [[5], [~0], "read", "read"], "a penalty on the token does not wait for it"
    order.clear()
    engine.add([5], GREEDY, max_tokens=2, logprobs=True)
    finish(engine)
    assert order[1] == "read", "its logits would be overwritten"


def test_fixed_seed_gives_the_same_text_whatever_runs_beside_it(make_engine):
    params = SamplingParams(seed=11)
    alone = answer(make_engine(), ids_of(9), params, max_tokens=20)
    engine = make_engine(n_seq=3)
    engine.add(ids_of(30, 1), SamplingParams(seed=5), max_tokens=7)
    engine.step()
    assert answer(engine, ids_of(9), params, max_tokens=20) == alone
    assert answer(make_engine(), ids_of(9), SamplingParams(seed=12), max_tokens=20) != alone


# Ends


def test_length_and_zero_tokens(make_engine):
    engine = make_engine()
    s = engine.add(ids_of(4), GREEDY, max_tokens=3)
    finish(engine, s)
    assert s.finish == "length" and len(s.pieces) == s.n_generated == 3
    assert "".join(p.text for p in s.pieces).endswith("!"), "what the stream held back is given"


def test_no_tokens_are_the_prompt_alone(make_engine):
    engine = make_engine()
    s = engine.add(ids_of(13), GREEDY, max_tokens=0)
    finish(engine, s)
    assert (s.finish, s.ids) == ("length", ids_of(13))
    assert not s.pieces and not engine.busy and s.t_first > s.t_admitted
    stats = engine.stats()
    assert stats.prompt_tokens_total == stats.query_tokens_total == 13
    assert stats.generated_tokens_total == 0


def test_end_token_ends_and_has_no_text_of_its_own(make_engine):
    ids = answer(make_engine(), ids_of(4), max_tokens=10)
    engine = make_engine(end_ids={ids[5]})
    s = engine.add(ids_of(4), GREEDY)
    finish(engine, s)
    at = ids.index(ids[5])
    assert s.finish == "stop" and [p.id for p in s.pieces] == ids[: at + 1]
    assert s.pieces[-1].text == "!"


def test_stop_string_cuts_the_text(make_engine):
    plain = make_engine().add(ids_of(4), GREEDY, max_tokens=12)
    engine = make_engine()
    plain = engine.add(ids_of(4), GREEDY, max_tokens=12)
    finish(engine, plain)
    text = "".join(p.text for p in plain.pieces)[:-1]
    stop = text[5:8]
    s = engine.add(ids_of(4), GREEDY, max_tokens=12, stop=["nothing", stop])
    finish(engine, s)
    assert s.finish == "stop"
    assert "".join(p.text for p in s.pieces) == text[: text.index(stop)]


@pytest.mark.parametrize(
    "stops, pieces, shown",
    [
        (["STOP"], ["abST", "OPcd"], "ab"),
        (["STOP"], ["abST", "ILL"], "abSTILL"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["aab"], ["a", "a", "a", "b", "c"], "a"),
        (["xyz", "y"], ["ax", "yz"], "a"),  # both are there: the text ends before the first
        ([""], ["a", "b"], "ab"),
        ([], ["a"], "a"),
        (["END"], ["text EN"], "text EN"),
    ],
)
def test_stop_strings_straddle_pieces(stops, pieces, shown):
    s = StopStrings(stops)
    out = ""
    for piece in pieces:
        text, stopped = s.add(piece)
        out += text
        assert not any(x and x in out for x in stops)
        if stopped:
            break
    else:
        out += s.finish()
    assert out == shown


def test_stop_strings_never_show_the_beginning_of_one():
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        s = StopStrings(["aba", "bb"])
        out = ""
        for c in text:
            part, stopped = s.add(c)
            out += part
            if stopped:
                break
        else:
            out += s.finish()
        ends = [i for i in (text.find("aba"), text.find("bb")) if i >= 0]
        assert text.startswith(out) and "aba" not in out and "bb" not in out
        assert out == text or ends, "nothing is lost without a stop string"


def test_cancel_and_release(make_engine):
    engine = make_engine()
    s, waiting = engine.add(ids_of(40), GREEDY), engine.add(ids_of(3), GREEDY)
    engine.step()
    engine.cancel(waiting)
    engine.release(s)
    assert (s.finish, waiting.finish) == ("cancelled", "cancelled")
    assert not engine.busy and engine.step() == []
    assert engine.cache.n_free == engine.cache.n_pages


def test_logprob_is_the_models_own(make_engine):
    engine = make_engine()
    prompt = ids_of(6)
    s = engine.add(prompt, SamplingParams(seed=1, temperature=2.0), max_tokens=5, logprobs=True)
    finish(engine, s)
    ids = [p.id for p in s.pieces]
    logits = engine.logits(prompt + ids)[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose([p.logprob for p in s.pieces], expected[range(5), ids], atol=1e-4)
    assert Piece("x", 1).logprob is None


def test_a_prepared_sequence_waits_for_its_beginning(make_engine):
    engine = make_engine()
    s = engine.prepare(ids_of(6), GREEDY, max_tokens=3)
    assert not engine.busy and engine.step() == []
    engine.begin(s)
    finish(engine, s)
    assert [p.id for p in s.pieces] == answer(engine, ids_of(6), max_tokens=3)
    with pytest.raises(ValueError, match="another engine's"):
        make_engine().begin(engine.prepare(ids_of(6)))


def test_a_sequence_begins_once(make_engine):
    engine = make_engine()
    s = engine.add(ids_of(6), GREEDY, max_tokens=3)
    with pytest.raises(ValueError, match="begun already"):
        engine.begin(s)
    finish(engine, s)
    with pytest.raises(ValueError, match="begun already"):
        engine.begin(s)
    assert [p.id for p in s.pieces] == answer(engine, ids_of(6), max_tokens=3)


def test_a_sequence_that_is_cancelled_before_it_begins_stays_ended(make_engine):
    engine = make_engine()
    s = engine.prepare(ids_of(6), GREEDY, max_tokens=3)
    engine.cancel(s)
    engine.begin(s)
    engine.step()
    assert (engine.busy, s.finish, s.n_generated) == (False, "cancelled", 0)
    assert engine.cache.n_free == engine.cache.n_pages


# The context


def test_prompts_that_do_not_fit_are_refused(make_engine):
    engine = make_engine(n_ctx=20)
    message = "context is 20 tokens, the prompt has 21: raise n_ctx (-c) or shorten it"
    with pytest.raises(ContextOverflow, match=re.escape(message)):
        engine.add(ids_of(21))
    with pytest.raises(ContextOverflow, match=re.escape(message)):
        engine.logits(ids_of(21))
    with pytest.raises(ContextOverflow) as caught:
        engine.add(ids_of(21))
    copy = pickle.loads(pickle.dumps(caught.value))  # as it comes out of another process
    assert (str(copy), copy.n_ctx, copy.n_prompt) == (message, 20, 21)
    with pytest.raises(ValueError, match="no tokens"):
        engine.add([])
    for bad in (-1, V):
        with pytest.raises(
            ValueError, match=f"token id {bad} is not in the vocabulary: .* to {V - 1}"
        ):
            engine.add([5, bad])
    with pytest.raises(ValueError, match="n_keep is 20"):
        engine.add([5], n_keep=20)
    assert engine.logits(ids_of(20)).shape == (20, V)


@pytest.mark.parametrize("n_prompt", [1, 19, 20])
def test_a_full_context_ends_the_answer(make_engine, n_prompt):
    engine = make_engine(n_ctx=20)
    s = engine.add(ids_of(n_prompt), GREEDY)
    finish(engine, s)
    assert s.finish == "context" and len(s.pieces) == 21 - n_prompt


def test_context_shift_goes_on_as_if_the_rest_had_been_the_prompt(make_engine):
    engine = make_engine(n_ctx=40)
    prompt = ids_of(30)
    s = engine.add(prompt, GREEDY, max_tokens=30, context_shift=True, n_keep=4)
    finish(engine, s)
    assert s.finish == "length" and len(s.pieces) == 30
    made = [p.id for p in s.pieces]
    full = prompt + made[:11]  # one more than fits
    kept = full[:4] + full[4 + 37 // 2 :]
    assert made[11:15] == answer(make_engine(n_ctx=40), kept, max_tokens=4)


# Reuse


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_conversation_goes_on_in_its_pages(make_engine, run_ahead):
    engine = make_engine(run_ahead=run_ahead)
    first = engine.add(ids_of(50), GREEDY, max_tokens=10, keep=True)
    finish(engine, first)
    longer = first.ids + ids_of(20, 8)
    second = engine.add(longer, GREEDY, max_tokens=10, keep=True, previous=first)
    assert second.n_reused in (59, 60), "all but the last token, which was never evaluated"
    finish(engine, second)
    assert [p.id for p in second.pieces] == answer(make_engine(), longer, max_tokens=10)
    changed = [*longer[:33], *ids_of(9, 9)]
    third = engine.add(changed, GREEDY, max_tokens=5, previous=second)
    assert third.n_reused == 33
    finish(engine, third)
    assert [p.id for p in third.pieces] == answer(make_engine(), changed, max_tokens=5)
    assert engine.cache.n_free == engine.cache.n_pages


def test_the_same_prompt_again_evaluates_its_last_token(make_engine):
    engine = make_engine()
    first = engine.add(ids_of(10), GREEDY, max_tokens=3, keep=True)
    finish(engine, first)
    again = engine.add(ids_of(10), GREEDY, max_tokens=3, previous=first)
    assert again.n_reused == 9
    finish(engine, again)
    assert [p.id for p in again.pieces] == [p.id for p in first.pieces]


def test_a_running_sequence_cannot_be_continued(make_engine):
    engine = make_engine()
    s = engine.add(ids_of(4), GREEDY)
    with pytest.raises(ValueError, match="still running"):
        engine.add(ids_of(4), GREEDY, previous=s)


def test_a_common_prefix_is_evaluated_once(make_engine):
    engine = make_engine(n_seq=3)
    system = ids_of(2 * PAGE_SIZE + 20)
    first = engine.add([*system, 9], GREEDY, max_tokens=30)
    engine.step()
    second = engine.add([*system, 10, 11], GREEDY, max_tokens=30)
    engine.step()
    assert second.n_reused == 2 * PAGE_SIZE
    assert second.pages.tables[0].pages[:2] == first.pages.tables[0].pages[:2]
    finish(engine, first, second)
    assert [p.id for p in second.pieces] == answer(make_engine(), [*system, 10, 11], max_tokens=30)
    assert [p.id for p in first.pieces] == answer(make_engine(), [*system, 9], max_tokens=30)
    assert engine.cache.n_free == engine.cache.n_pages


def test_going_back_into_a_shared_page_leaves_the_other_alone(make_engine):
    engine = make_engine(n_seq=2)
    prompt = ids_of(PAGE_SIZE + 30)
    first = engine.add(prompt, GREEDY, max_tokens=2, keep=True)
    finish(engine, first)
    other = engine.add([*prompt, 7], GREEDY, max_tokens=40)
    engine.step()
    assert other.n_reused == PAGE_SIZE
    back = engine.add([*prompt[:20], *ids_of(20, 6)], GREEDY, max_tokens=10, previous=first)
    assert back.n_reused == 0, "the page is shared: nothing may be written into it"
    finish(engine, other, back)
    assert [p.id for p in other.pieces] == answer(make_engine(), [*prompt, 7], max_tokens=40)


def test_logits_between_steps_take_the_pages_they_need(make_engine):
    engine = make_engine(n_ctx=3 * PAGE_SIZE)
    prompt = ids_of(PAGE_SIZE + 3)
    s = engine.add(prompt, GREEDY, max_tokens=8)
    for n in (10, 3 * PAGE_SIZE, 20):
        engine.step()
        assert engine.logits(ids_of(n)).shape == (n, V)
    finish(engine, s)
    assert [p.id for p in s.pieces] == answer(make_engine(), prompt, max_tokens=8)


def test_an_interrupted_step_is_done_again(make_engine):
    engine = make_engine(run_ahead=True)
    s = engine.add(ids_of(70), GREEDY, max_tokens=12)
    engine.step()
    run, read = engine.decoder.run, engine.ops.read

    def interrupted(_):
        raise KeyboardInterrupt

    for owner, name in ((engine.decoder, "run"), (engine.ops, "read")):
        setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.decoder.run, engine.ops.read = run, read
    finish(engine, s)
    assert [p.id for p in s.pieces] == answer(make_engine(), ids_of(70), max_tokens=12)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_draws_of_an_interrupted_step_are_repeated(make_engine, run_ahead):
    """Though the samplers have learnt from them."""
    params = SamplingParams(seed=3, mirostat=2, mirostat_tau=2.0, mirostat_eta=2.0)
    expected = answer(make_engine(), ids_of(70), params, max_tokens=12)
    engine, n_interrupted = make_engine(run_ahead=run_ahead), 0
    s, sample = engine.add(ids_of(70), params, max_tokens=12), engine.ops.sample

    def interrupted(logits, samplers):
        sample(logits, samplers)
        raise KeyboardInterrupt

    while not s.finish:
        engine.ops.sample = interrupted
        try:
            engine.step()
        except KeyboardInterrupt:
            n_interrupted += 1
        engine.ops.sample = sample
        engine.step()
    assert [p.id for p in s.pieces] == expected and n_interrupted > 5


def test_pages_taken_over_by_one_that_waits_make_room(make_engine):
    engine = make_engine(n_ctx=4 * PAGE_SIZE, n_seq=1)
    kept = engine.add(ids_of(3 * PAGE_SIZE), GREEDY, max_tokens=2, keep=True)
    finish(engine, kept)
    first = engine.add(ids_of(200, 4), GREEDY)
    second = engine.add(kept.ids, GREEDY, max_tokens=3, previous=kept)
    assert second.n_reused > 0
    finish(engine, first, second)
    assert (first.finish, second.finish, second.n_reused) == ("context", "length", 0)
    assert [p.id for p in second.pieces] == answer(make_engine(), kept.ids, max_tokens=3)


def test_kept_pages_make_room(make_engine):
    engine = make_engine(n_ctx=PAGE_SIZE, n_seq=1)
    kept = engine.add(ids_of(40), GREEDY, max_tokens=2, keep=True)
    finish(engine, kept)
    assert engine.cache.n_free == 0
    assert engine.logits(ids_of(30)).shape == (30, V), "kept pages are given up"
    again = engine.add(kept.ids, GREEDY, max_tokens=2, previous=kept)
    assert again.n_reused == 0
    finish(engine, again)
    other = engine.add(ids_of(40, 2), GREEDY, max_tokens=2, keep=True)
    finish(engine, other)
    third = engine.add(ids_of(50, 3), GREEDY, max_tokens=2)
    finish(engine, third)
    assert third.finish == "length" and other.n_evaluated == 0


# One sequence's errors


class Choking(Letters):
    """A tokenizer whose stream fails at some ids."""

    def __init__(self, at=()) -> None:
        super().__init__()
        self.at = frozenset(at)

    def stream(self) -> Choking:
        return self

    def add(self, id: int) -> str:
        if id in self.at:
            raise UnicodeError(f"no text for {id}")
        return super().add(id)


FORBIDDING = SamplingParams(logit_bias=dict.fromkeys(range(V), -math.inf))


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("dry", [{}, {"dry_multiplier": 1.0}])
def test_a_sequence_without_a_token_ends_alone(make_engine, run_ahead, first, dry):
    """Wherever its row is; the others' seeds repeat, and no token comes twice."""
    params = SamplingParams(seed=5, temperature=1.3, presence_penalty=0.5, **dry)
    prompt = ids_of(9)
    expected = answer(make_engine(), prompt, params, max_tokens=8)
    engine = make_engine(n_seq=3, run_ahead=run_ahead)
    bad = engine.add(ids_of(12), FORBIDDING) if first else None
    good = [engine.add(prompt, params, max_tokens=8) for _ in range(2)]
    bad = bad or engine.add(ids_of(12), FORBIDDING)
    finish(engine, *good)
    assert (bad.finish, bad.n_generated, list(bad.pieces)) == ("error", 0, [])
    assert isinstance(bad.error, ValueError) and "no token can be chosen" in str(bad.error)
    for s in good:
        assert (s.finish, s.error, [p.id for p in s.pieces]) == ("length", None, expected)
        assert s.sampler.n_drawn == s.n_generated == 8
    assert engine.cache.n_free == engine.cache.n_pages


@pytest.mark.parametrize("run_ahead", [False, True])
def test_logits_that_are_none_end_their_sequence_alone(make_engine, run_ahead):
    """In the middle of an answer, whose tokens until then stay."""
    expected = answer(make_engine(), ids_of(5), max_tokens=9)
    engine = make_engine(n_seq=2, run_ahead=run_ahead)
    good = engine.add(ids_of(5), GREEDY, max_tokens=9)
    bad = engine.add(ids_of(7, 1), GREEDY, max_tokens=9, keep=True)
    run = engine.decoder.run

    def broken(step):
        logits = run(step)
        if bad.finish is None and step.positions[step.rows[-1]] == 10:  # the last row is its
            logits[-1] = np.nan
        return logits

    engine.decoder.run = broken
    finish(engine, good, bad)
    assert (bad.finish, bad.n_generated) == ("error", 4)
    assert good.finish == "length" and [p.id for p in good.pieces] == expected
    assert engine.cache.n_free == engine.cache.n_pages, "what may hold NaN is not kept"
    with pytest.raises(ValueError, match="highest logit is nan"):
        list(engine.pieces(bad))


@pytest.fixture
def cleared(make_engine):
    """An engine of two sequences in steps of 64 tokens, and the pages that it had cleared."""

    def make(**options):
        engine, found = make_engine(n_seq=2, n_batch=64, **options), []
        engine.ops.clear_pages = lambda group, pages: found.append((group, pages))
        return engine, found

    return make


@pytest.mark.parametrize("run_ahead", [False, True])
def test_only_pages_that_may_hold_nan_are_cleared(cleared, run_ahead):
    engine, found = cleared(run_ahead=run_ahead)
    answer(engine, ids_of(100), max_tokens=5)  # of which all logits were finite
    cancelled = engine.add(ids_of(150, 1), GREEDY)
    engine.step()
    pages = cancelled.pages.tables[0].pages.copy()
    assert len(pages) >= 1 and not found
    engine.cancel(cancelled)  # in the middle of a prompt: nobody knows
    s = engine.add(ids_of(10, 2), GREEDY, max_tokens=2)
    engine.step()
    assert found == [(0, s.pages.tables[0].pages)], "those that are taken"
    finish(engine, s)
    answer(engine, ids_of(200, 3), max_tokens=50)  # writes all of its pages but the last whole
    assert not engine.cache.pools[0].suspects & set(pages)


def test_pages_of_an_error_are_cleared_before_they_are_used(cleared):
    engine, found = cleared()
    bad = engine.add(ids_of(70), GREEDY, max_tokens=9)  # in two steps and pages
    sample, engine.ops.sample = engine.ops.sample, lambda logits, samplers: np.array([-1])
    finish(engine, bad)
    assert bad.finish == "error" and not found, "not before they are wanted"
    engine.ops.sample = sample
    suspects = engine.cache.pools[0].suspects
    assert suspects == {0, 1}
    answer(engine, ids_of(10, 2), max_tokens=2)
    assert len(found) == 1 and len(suspects) == 1
    answer(engine, ids_of(70, 2), max_tokens=2)
    assert len(found) == 2 and not suspects


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_kept_answer_is_taken_over_to_its_last_token(cleared, run_ahead):
    """The step after its end token was under way, and nobody has seen its logits."""
    plain = answer(cleared()[0], ids_of(20), max_tokens=6)
    engine, found = cleared(run_ahead=run_ahead, end_ids=[plain[3]])
    first = engine.add(ids_of(20), GREEDY, keep=True)
    finish(engine, first)
    assert first.finish == "stop"
    second = engine.add([*first.ids, 7, 8], GREEDY, max_tokens=2, previous=first)
    finish(engine, second)
    assert second.n_reused == len(first.ids) - (not run_ahead) and not found


@pytest.fixture
def interrupted():
    """Steps an engine, and interrupts it once the step was computed."""

    def step(engine: Engine) -> None:
        run = engine.decoder.run
        engine.decoder.run = lambda step: (run(step), (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.decoder.run = run

    return step


def test_pages_of_an_interrupted_step_are_cleared_before_they_are_used(cleared, interrupted):
    """Its sequence was cancelled before the step was repeated: nobody knows what it wrote."""
    engine, found = cleared()
    s = engine.add(ids_of(70), GREEDY, max_tokens=9)
    interrupted(engine)
    engine.cancel(s)
    answer(engine, ids_of(10), max_tokens=2)
    assert found == [(0, [0])]


def test_pages_of_an_interrupted_step_are_cleared_though_a_published_prefix_replaces_them(cleared):
    engine, found = cleared()
    other = engine.add(ids_of(70), GREEDY)
    while not other.n_generated:
        engine.step()
    s = engine.prepare(ids_of(70), GREEDY)
    s.pages.grow(0, 10, 0)  # as if by a step of which it was a part
    s.interrupted = True
    (page,) = s.pages.tables[0].pages
    engine.begin(s)
    engine.step()
    assert s.n_shared == PAGE_SIZE and (0, [page]) in found


def test_what_is_known_to_be_finite_is_not_cleared_where_it_is_taken_over(cleared, interrupted):
    """A page that was not published, in whose middle the common text ends."""
    engine, found = cleared()
    first = engine.add(ids_of(140), GREEDY, keep=True, cache=False)
    while not first.n_generated:
        engine.step()
    interrupted(engine)
    engine.cancel(first)
    second = engine.add([*first.ids[:100], 7], GREEDY, max_tokens=2, previous=first)
    finish(engine, second)
    assert second.n_reused == 100 and not found


def test_logits_that_are_not_finite_leave_no_page(cleared):
    engine, found = cleared()
    run = engine.decoder.run
    engine.decoder.run = lambda step: run(step) * np.float32("nan")
    engine.logits(ids_of(70))
    engine.decoder.run = run
    assert np.isfinite(engine.logits(ids_of(70))).all()
    assert [len(pages) for _, pages in found] == [1], "the other is written whole"
    assert not engine.cache.pools[0].suspects


def test_ids_that_a_device_refuses_have_a_reason(make_engine):
    """-1 comes without one from kernels."""
    engine = make_engine(n_seq=2)
    good, bad = (engine.add(ids_of(5), GREEDY, max_tokens=3) for _ in range(2))
    engine.ops.sample = lambda logits, samplers: np.array([7, -1][: len(samplers)])
    finish(engine, good, bad)
    assert (good.finish, bad.finish) == ("length", "error")
    assert "the highest logit is NaN or infinite: no token" in str(bad.error)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_stream_or_a_listener_that_fails_ends_its_sequence_or_nothing(make_engine, run_ahead):
    prompt = ids_of(4)
    ids = answer(make_engine(), prompt, max_tokens=10)
    at = next(i for i in range(2, 10) if ids[i] not in ids[:i])
    engine = make_engine(n_seq=2, run_ahead=run_ahead)
    good, deaf = (engine.add(prompt, GREEDY, max_tokens=10) for _ in range(2))
    engine.tokenizer = Choking(ids[at : at + 1])
    bad = engine.add(prompt, GREEDY, max_tokens=10)
    heard = []

    def fail():
        heard.append(deaf.n_generated)
        raise RuntimeError("the listener's loop is closed")

    deaf.notify = fail
    finish(engine, good, deaf, bad)
    assert (bad.finish, str(bad.error)) == ("error", f"no text for {ids[at]}")
    assert [p.id for p in bad.pieces] == ids[:at]
    assert [p.id for p in good.pieces] == [p.id for p in deaf.pieces] == ids and heard == [1]


def test_a_sequence_without_pages_ends_alone(make_engine):
    """It cannot be, as long as n_seq sequences have n_seq contexts; but then it is one's matter."""
    engine = make_engine(n_seq=2)
    good = engine.add(ids_of(5), GREEDY, max_tokens=70)
    bad = engine.add(ids_of(3 * PAGE_SIZE, 1), GREEDY, max_tokens=70)
    (pool,) = engine.cache.pools
    taken = [pool.take() for _ in range(pool.n_pages - 3)]
    finish(engine, good, bad)
    assert (bad.finish, good.finish) == ("error", "length") and isinstance(bad.error, OutOfPages)
    assert pool.n_free == pool.n_pages - len(taken)


@pytest.mark.parametrize("period", [3, 4, 5])  # each hits other places of a step
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_error_of_the_machine_is_everybodys_and_costs_no_token(make_engine, run_ahead, period):
    params = SamplingParams(seed=3, temperature=1.5, presence_penalty=0.3)
    expected = answer(make_engine(), ids_of(5), params, max_tokens=9)
    engine = make_engine(n_seq=2, run_ahead=run_ahead)
    sequences = [engine.add(ids_of(5), params, max_tokens=9) for _ in range(2)]
    calls = itertools.count()

    def failing(work):
        def call(*args):
            done = work(*args)
            if next(calls) % period == 2:
                raise CudaError("the device fell off")
            return done

        return call

    engine.ops.sample, engine.ops.read = failing(engine.ops.sample), failing(engine.ops.read)
    failures = 0
    while engine.busy:
        try:
            engine.step()
        except CudaError:
            failures += 1
    assert failures > 2
    assert [[p.id for p in s.pieces] for s in sequences] == [expected] * 2


def test_an_interrupt_within_a_token_ends_that_sequence_and_no_token_comes_twice(make_engine):
    expected = answer(make_engine(), ids_of(5), max_tokens=6)
    engine = make_engine(n_seq=3)
    sequences = [engine.add(ids_of(5), GREEDY, max_tokens=6) for _ in range(3)]
    engine.step()
    shown = sequences[1].stops.add
    sequences[1].stops.add = lambda text: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    sequences[1].stops.add = shown
    finish(engine, *sequences)
    assert [s.finish for s in sequences] == ["length", "error", "length"]
    assert "interrupted" in str(sequences[1].error)
    assert [[p.id for p in s.pieces] for s in sequences[::2]] == [expected] * 2


def test_the_tokens_before_an_interrupt_are_not_evaluated_ahead_again(make_engine):
    """One of them has shifted its context meanwhile."""
    options = {"max_tokens": 20, "context_shift": True, "n_keep": 3}
    expected = answer(make_engine(n_ctx=24), ids_of(20), **options)
    engine = make_engine(n_ctx=24, n_seq=2, run_ahead=True)
    good, bad = engine.add(ids_of(20), GREEDY, **options), engine.add(ids_of(5), GREEDY)
    while good.n_generated < 4:  # the context is full: no step is ahead of the next token
        engine.step()
    bad.stops.add = lambda text: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(good.ids) < 24 and bad.finish == "error"
    finish(engine, good)
    assert [p.id for p in good.pieces] == expected


# What is given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 7}, "stop is 7: give a text, or several"),
        ({"stop": [7]}, "stop holds 7: give a text, or several"),
        ({"stop": b"ab"}, "stop holds 97"),
        ({"stop": ["a"] * 65}, "stop has more than 64 texts: give at most 64"),
        ({"stop": itertools.repeat("a")}, "stop has more than 64 texts"),
        ({"stop": ["a" * 1025]}, "stop holds a text of 1025 characters: give at most 1024"),
        ({"max_tokens": "5"}, "max_tokens is '5': it must be a whole number"),
        ({"max_tokens": math.nan}, "max_tokens is nan"),
        ({"n_keep": 1.5}, "n_keep is 1.5: it must be a whole number"),
        ({"ids": [1.5]}, r"the prompt is \[1.5\]: give ids of tokens"),
        ({"ids": "12"}, "the prompt is '12': give ids of tokens"),
        ({"params": SamplingParams(logit_bias={V: 1.0})}, f"ids go from 0 to {V - 1}"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_given(make_engine, options, message):
    """And nothing is taken from the sequence that it was to continue."""
    engine = make_engine()
    kept = engine.add(ids_of(80), GREEDY, max_tokens=2, keep=True)
    finish(engine, kept)
    given = {"ids": kept.ids, "previous": kept, **options}
    with pytest.raises(ValueError, match=message) as caught:
        engine.add(**given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert not engine.busy and kept.pages.n_held
    again = engine.add(kept.ids, GREEDY, max_tokens=2, previous=kept)
    assert again.n_reused > 64


def test_as_many_and_as_long_stops_as_may_be(make_engine):
    engine = make_engine()
    s = engine.add(ids_of(4), GREEDY, max_tokens=12, stop=["~" * 1024] * 64)
    finish(engine, s)
    assert s.finish == "length" and len(s.pieces) == 12


def test_sequences_of_another_engine_are_refused(make_engine):
    mine, other = make_engine(), make_engine()
    s = other.add(ids_of(4), GREEDY, max_tokens=2, keep=True)
    finish(other, s)
    for call in (mine.cancel, mine.release, lambda s: mine.add(s.ids, previous=s)):
        with pytest.raises(ValueError, match="another engine"):
            call(s)
    assert s.pages.n_held


def test_a_closed_engine_says_so(make_engine):
    engine = make_engine(n_seq=1)
    sequences = [engine.add(ids_of(4), GREEDY, max_tokens=5) for _ in range(2)]
    engine.step()
    engine.close()
    assert [s.finish for s in sequences] == ["error", "error"] and not engine.busy
    assert engine.cache.n_free == engine.cache.n_pages and engine.step() == []
    for call in (lambda: list(engine.pieces(sequences[0])), lambda: engine.add([5])):
        with pytest.raises(RuntimeError, match=r"the model (is|was) closed"):
            call()
    with pytest.raises(RuntimeError, match="the model is closed"):
        engine.logits([5])


# Pages


def test_a_prefix_that_is_not_taken_over_is_not_held(make_engine):
    """A second turn has more of its own pages than another chat has in common with it."""
    engine = make_engine(n_seq=2)
    for k in range(4):
        system = [5 + k] * (PAGE_SIZE + 6)
        a = engine.add([*system, 1], GREEDY, max_tokens=2, keep=True)
        b = engine.add([*system, 2], GREEDY, max_tokens=2, keep=True)
        finish(engine, a, b)
        again = engine.add([*a.ids, 5], GREEDY, max_tokens=2, keep=True, previous=a)
        finish(engine, again)
        assert again.n_reused > PAGE_SIZE
        engine.release(again)
        engine.release(b)
        assert engine.cache.n_free == engine.cache.n_pages


def test_pages_that_another_prefix_replaces_are_given_back(make_engine):
    """A turn whose own pages hold less of it than another chat's."""
    engine = make_engine(n_seq=3)
    long = [5] * (2 * PAGE_SIZE + 6)
    other = engine.add([*long, 9], GREEDY, max_tokens=2, keep=True)
    previous = engine.add([*long[: PAGE_SIZE + 9], 8], GREEDY, max_tokens=2, keep=True)
    finish(engine, other, previous)
    again = engine.add([*long, 7], GREEDY, max_tokens=2, previous=previous)
    assert 0 < again.n_reused < 2 * PAGE_SIZE
    finish(engine, again)
    assert again.n_reused == 2 * PAGE_SIZE
    engine.release(other)
    assert engine.cache.n_free == engine.cache.n_pages


CONTEXT = 3 * PAGE_SIZE


class AnyOrder:
    """An engine in any order of calls, drawn by weights that make sequences meet."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        with File(TINY / f"{choose(['llama', 'gemma3', 'qwen3'])}.gguf") as file:
            ops = Reference(1)
            decoder = arch.load(file, ops, CONTEXT)
        options = {"n_batch": choose([7, 100]), "n_seq": choose([1, 2, 3])}
        options |= {"n_positions": choose([None, CONTEXT]), "prefix_cache": choose([False, True])}
        tokens = Choking(range(0, 350, 40))
        run_ahead = choose([False, True])
        self.engine = Engine(decoder, ops, tokens, CONTEXT, run_ahead=run_ahead, **options)
        n_vocab = decoder.sizes.n_vocab
        self.forbidding = SamplingParams(logit_bias=dict.fromkeys(range(n_vocab), -math.inf))
        self.all: list = []

    def call(self) -> None:
        weighted = {self.add: 4, self.go_on: 4, self.end: 1, self.step: 6, self.logits: 1}
        self.random.choices(list(weighted), list(weighted.values()))[0]()
        self.check()

    def add(self) -> None:
        choose = self.random.choice
        prompt = [choose([5, 5, 6])] * choose([PAGE_SIZE + 6, 2 * PAGE_SIZE, 0])
        prompt += [choose(range(7, 300))] * choose([1, 8, 70])
        shift = choose([False, False, True])
        params = SamplingParams(seed=choose([1, 2]), temperature=2.0)
        self._begin(
            prompt[:CONTEXT],
            choose([params, params, params, self.forbidding]),
            max_tokens=40 if shift else choose([1, 2, 3, 40, None, 0]),  # else it never ends
            context_shift=shift,
            n_keep=choose([0, 4]),
        )

    def go_on(self) -> None:
        choose, ended = self.random.choice, [s for s in self.all if s.finish]
        if ended:
            previous = choose([s for s in ended if s.pages.n_held] or ended)
            cut = choose([CONTEXT, CONTEXT, PAGE_SIZE + 9, PAGE_SIZE - 9, 1])
            text = choose([previous, previous, choose(self.all)]).ids[:cut]
            ids = [*text, *[7] * choose([0, 1, 20])][:CONTEXT]
            self._begin(ids, GREEDY, max_tokens=choose([0, 2, 5]), previous=previous)

    def _begin(self, ids, params, **options) -> None:
        keep = self.random.choice([True, True, False])
        self.all.append(self.engine.add(ids, params, keep=keep, **options))

    def end(self) -> None:
        if self.all:
            s = self.random.choice(self.all)
            self.random.choice([self.engine.cancel, self.engine.release])(s)
            assert s.finish

    def step(self) -> None:
        for _ in range(self.random.choice([1, 3, 10])):
            self.engine.step()

    def logits(self) -> None:
        n = self.random.choice([1, CONTEXT])
        assert self.engine.logits([9] * n).shape[0] == n

    def check(self) -> None:
        """Every page is free, or held as often as it is counted, by a sequence that may."""
        for group, pool in enumerate(self.engine.cache.pools):
            held = Counter(page for s in self.all for page in s.pages.tables[group].pages)
            in_use = {p: pool.references(p) for p in range(pool.n_pages) if pool.references(p)}
            assert in_use == held
            assert pool.n_free + len(held) == pool.n_pages
            for s in self.all:
                table = s.pages.tables[group]
                assert table.first <= pool.first_seen(s.n_evaluated)
                assert not pool.window or len(table.pages) <= pool.limit
        for s in self.all:
            assert (s.finish == "error") == (s.error is not None)
            assert not (s.finish and s.pages.n_held) or s.keep
            assert s.n_evaluated <= s.pages.capacity
            if s.finish != "error":
                assert len(s.pieces) == s.n_generated <= s.sampler.n_drawn <= s.n_generated + 1

    def finish(self) -> None:
        finish(self.engine, *self.all)
        self.check()
        for s in self.all:
            self.engine.release(s)
        assert self.engine.cache.n_free == self.engine.cache.n_pages


@settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_every_page_is_free_or_held_whatever_is_called(seed):
    engine = AnyOrder(seed)
    for _ in range(60):
        engine.call()
    engine.finish()
