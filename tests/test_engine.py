"""Sequences, batches, run-ahead, stops, shifts and reuse, on tiny models."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from ggpy import arch
from ggpy.engine import ContextOverflow, Engine, Piece, StopStrings
from ggpy.gguf import File
from ggpy.ops.interface import PAGE_SIZE
from ggpy.ops.reference import Reference
from ggpy.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
V = 453


class Letters:
    """A tokenizer that makes a letter of each id."""

    def __init__(self, end_ids=()) -> None:
        self.end_ids = frozenset(end_ids)

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
    assert together.pool.n_free == together.pool.n_pages


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_logits_of_a_ragged_step_equal_those_alone(architecture, tiny_path):
    """Windows, several pages, pages that are no neighbours: to 1e-5."""
    from ggpy.batch import ragged
    from ggpy.kv_cache import PagePool, PageTable

    ops = Reference(1)
    with File(tiny_path(architecture)) as file:
        decoder = arch.load(file, ops, 256)
    ops.allocate_cache(decoder.cache_shape(12))
    prompts, pool = [ids_of(n, n) for n in (3, 100, 1, 70)], PagePool(12)
    alone = []
    for p in prompts:
        t = PageTable(pool)
        t.grow(len(p))
        alone.append(decoder.run(ragged([(t, p, 0)], np.arange(len(p), dtype=np.int32))))
        t.release()
    tables = [PageTable(pool) for _ in prompts]
    for n in (1, 64, 128):  # pages are taken in turns
        for t, p in zip(tables, prompts, strict=True):
            t.grow(min(n, len(p)))
    chunks = [(t, p, 0) for t, p in zip(tables, prompts, strict=True)]
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
        assert engine.pool.n_free == engine.pool.n_pages
    assert texts[0] == texts[1]


def test_the_next_step_is_handed_over_before_tokens_are_read(make_engine):
    engine = make_engine(run_ahead=True)
    order = []
    run, read = engine.decoder.run, engine.ops.read
    engine.decoder.run = lambda step: (order.append(step.ids.tolist()), run(step))[1]
    engine.ops.read = lambda array: (order.append("read"), read(array))[1]
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
    none = engine.add(ids_of(4), GREEDY, max_tokens=0)
    assert none.finish == "length" and not none.pieces and not engine.busy


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
    assert engine.pool.n_free == engine.pool.n_pages


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


# The context


def test_prompts_that_do_not_fit_are_refused(make_engine):
    engine = make_engine(n_ctx=20)
    message = "context is 20 tokens, the prompt has 21: raise -c or shorten it"
    with pytest.raises(ContextOverflow, match=message):
        engine.add(ids_of(21))
    with pytest.raises(ContextOverflow, match=message):
        engine.logits(ids_of(21))
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
    assert engine.pool.n_free == engine.pool.n_pages


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
    assert second.table.pages[:2] == first.table.pages[:2]
    finish(engine, first, second)
    assert [p.id for p in second.pieces] == answer(make_engine(), [*system, 10, 11], max_tokens=30)
    assert [p.id for p in first.pieces] == answer(make_engine(), [*system, 9], max_tokens=30)
    assert engine.pool.n_free == engine.pool.n_pages


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
    assert engine.pool.n_free == 0
    assert engine.logits(ids_of(30)).shape == (30, V), "kept pages are given up"
    again = engine.add(kept.ids, GREEDY, max_tokens=2, previous=kept)
    assert again.n_reused == 0
    finish(engine, again)
    other = engine.add(ids_of(40, 2), GREEDY, max_tokens=2, keep=True)
    finish(engine, other)
    third = engine.add(ids_of(50, 3), GREEDY, max_tokens=2)
    finish(engine, third)
    assert third.finish == "length" and other.n_evaluated == 0
