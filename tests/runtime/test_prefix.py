"""The prefix cache: what is found again, by whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from steps import finish

from ggpy import arch
from ggpy.backends.interface import PAGE_SIZE
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.runtime.page_pool import OutOfPages, PagePool
from ggpy.runtime.prefix import PrefixHashes, longest
from ggpy.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
N_CTX = 6 * PAGE_SIZE


@pytest.fixture(scope="module")
def make(tiny_path) -> Callable[..., Engine]:
    files = {name: File(tiny_path(name)) for name in ("llama", "gemma3")}

    def make_engine(name: str = "llama", **options) -> Engine:
        ops, options = Reference(1), {"prefix_cache": True, "n_seq": 3, **options}
        return Engine(arch.load(files[name], ops, N_CTX), ops, NoText(), N_CTX, **options)

    return make_engine


def test_a_prompt_alone_is_there_for_others(make):
    engine = make()
    prompt = ids_of(PAGE_SIZE + 5)
    assert answer(engine, prompt, max_tokens=0) == (0, [])
    assert answer(engine, prompt) == (PAGE_SIZE, answer(make(), prompt)[1])


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 350, n).tolist()


def answer(engine: Engine, ids: list[int], **options) -> tuple[int, list[int]]:
    """Tokens that were reused, and the answer."""
    s = engine.add(ids, GREEDY, **{"max_tokens": 5, **options})
    (text,) = finish(engine, s)
    return s.n_reused, text


# Hashes


def test_a_hash_is_one_of_the_whole_text_up_to_there():
    ids = ids_of(3 * PAGE_SIZE)
    hashes = PrefixHashes()
    found = [hashes.of(page, ids) for page in range(3)]
    assert len(set(found)) == 3 and all(len(h) == 16 for h in found)
    assert [PrefixHashes().of(page, ids) for page in (2, 1)] == found[:0:-1]
    for at in (0, PAGE_SIZE - 1, PAGE_SIZE):
        other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
        changed = [PrefixHashes().of(page, other) for page in range(3)]
        assert [a == b for a, b in zip(found, changed, strict=True)] == [
            page < at // PAGE_SIZE for page in range(3)
        ]
    assert PrefixHashes(b"salt").of(0, ids) != found[0]


def test_hashes_follow_a_text_that_is_cut():
    ids, hashes = ids_of(3 * PAGE_SIZE), PrefixHashes()
    found = [hashes.of(page, ids) for page in range(3)]
    other = [*ids[: PAGE_SIZE + 9], *ids_of(2 * PAGE_SIZE, 1)]
    hashes.cut(PAGE_SIZE + 9)
    assert hashes.of(0, other) == found[0]
    assert hashes.of(2, other) == PrefixHashes().of(2, other) != found[2]


# Pages


def published(pool: PagePool, *texts: bytes) -> list[int]:
    pages = [pool.take() for _ in texts]
    for page, text in zip(pages, texts, strict=True):
        pool.publish(page, text)
        pool.trust(page)
    return pages


def test_the_least_recently_used_page_goes_first_and_free_ones_before_it():
    pool = PagePool(4, caches=True)
    a, b, c = published(pool, b"a", b"b", b"c")
    for page in (a, b, c):
        pool.release(page)
    assert (pool.n_free, pool.n_cached) == (4, 3)
    assert pool.take() not in (a, b, c), "that one was free"
    pool.share(a)
    pool.release(a)
    assert [pool.take() for _ in range(3)] == [b, c, a]
    assert [pool.find(text) for text in (b"a", b"b", b"c")] == [None] * 3
    with pytest.raises(OutOfPages):
        pool.take()


def test_a_cached_page_that_is_shared_is_no_longer_free():
    pool = PagePool(2, caches=True)
    (page,) = published(pool, b"a")
    pool.release(page)
    pool.share(page)
    assert (pool.references(page), pool.n_free, pool.n_cached) == (1, 1, 0)
    pool.share(page)
    pool.release(page)
    assert pool.n_cached == 0 and pool.find(b"a") == page
    pool.release(page)
    assert pool.n_cached == 1


def test_what_may_be_nan_or_is_written_on_is_not_found():
    pool = PagePool(5, caches=True)
    doubtful = pool.take()
    pool.publish(doubtful, b"a")
    assert pool.find(b"a") == doubtful
    pool.suspect([doubtful])
    assert pool.find(b"a") is None and pool.suspects == {doubtful}
    pool.publish(doubtful, b"a")
    assert pool.find(b"a") is None, "a suspect is never published"
    unseen = pool.take()
    pool.publish(unseen, b"b")
    pool.release(unseen)
    assert pool.find(b"b") is None, "nobody has seen that it is finite"
    (known,) = published(pool, b"c")
    pool.suspect([known])
    assert pool.find(b"c") == known and known not in pool.suspects
    pool.rewrite(known)
    assert pool.find(b"c") is None
    pool.release(known)
    assert pool.n_cached == 0


def test_of_two_pages_with_one_text_one_stays():
    pool = PagePool(3, caches=True)
    first, second = published(pool, b"a", b"a")
    pool.release(first)
    assert pool.n_cached == 0 and pool.find(b"a") == second
    pool.release(second)
    assert pool.n_cached == 1 and pool.find(b"a") == second


def test_a_pool_that_does_not_cache_forgets_with_the_last_reference():
    pool = PagePool(2)
    (page,) = published(pool, b"a")
    assert pool.find(b"a") == page
    pool.release(page)
    assert pool.find(b"a") is None and pool.n_cached == 0


@pytest.mark.parametrize(
    ("whole", "window", "n"),
    [
        ("abcde", "abcde", 5),
        ("abcde", "cde", 5),  # a token after e sees d and e, and a little of c
        ("abcde", "de", 0),
        ("abc", "abcde", 3),
        ("abde", "abcde", 2),
        ("abcde", "a cde", 5),
        ("abcde", "abc", 3),
        ("abcde", "abd", 2),
        ("", "abcde", 0),
        ("abcde", "", 0),
    ],
)
def test_the_longest_prefix_has_all_that_is_seen(whole, window, n):
    pools = [PagePool(9), PagePool(9, window=2 * PAGE_SIZE + 5)]
    for pool, letters in zip(pools, (whole, window), strict=True):
        published(pool, *(letter.encode() for letter in letters))
    texts = [b"a", b"b", b"c", b"d", b"e", b"x"]
    assert longest(pools, texts) == n
    assert longest(pools[::-1], texts) == n


# Sequences


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_ended_sequence_leaves_its_pages_to_others(make, name, run_ahead):
    engine = make(name, run_ahead=run_ahead)
    prompt = ids_of(2 * PAGE_SIZE + 20)
    longer = [*prompt[: PAGE_SIZE + 10], *ids_of(90, 1)]
    expected = [answer(make(name), p)[1] for p in (prompt, prompt, longer)]
    assert answer(engine, prompt) == (0, expected[0])
    assert answer(engine, prompt) == (2 * PAGE_SIZE, expected[1])
    assert answer(engine, longer) == (PAGE_SIZE, expected[2])
    stats = engine.stats()
    assert (stats.cached_tokens_total, stats.query_tokens_total) == (
        3 * PAGE_SIZE,
        2 * len(prompt) + len(longer),
    )
    assert stats.n_pages_free == stats.n_pages > stats.n_pages_cached > 0
    assert answer(make(name, prefix_cache=False), prompt)[0] == 0


def test_pages_that_an_answer_filled_are_found_as_well(make):
    engine = make()
    s = engine.add(ids_of(50), GREEDY, max_tokens=100)
    finish(engine, s)
    n, text = answer(engine, [*s.ids[:140], 7])
    assert n == 2 * PAGE_SIZE and text == answer(make(), [*s.ids[:140], 7])[1]


def test_the_last_token_of_a_prompt_is_always_evaluated(make):
    engine = make()
    prompt = ids_of(2 * PAGE_SIZE)
    first = answer(engine, prompt)
    assert answer(engine, prompt) == (PAGE_SIZE, first[1])
    assert answer(engine, prompt)[0] == PAGE_SIZE
    assert answer(engine, [*prompt, 7])[0] == 2 * PAGE_SIZE


def test_texts_are_shared_with_the_same_salt_alone(make):
    engine = make()
    prompt = ids_of(PAGE_SIZE + 5)
    assert [answer(engine, prompt, salt=salt)[0] for salt in (b"a", b"b", b"", b"a", b"")] == [
        0,
        0,
        0,
        PAGE_SIZE,
        PAGE_SIZE,
    ]
    running = engine.add(prompt, GREEDY, salt=b"c")
    engine.step()
    beside = engine.add(prompt, GREEDY, max_tokens=3, salt=b"d")
    engine.step()
    assert running.n_generated and beside.n_reused == 0
    with pytest.raises(ValueError, match="salt is 'c': give bytes"):
        engine.prepare(prompt, salt="c")


def test_a_sequence_without_cache_neither_gives_nor_takes(make):
    engine = make()
    prompt = ids_of(PAGE_SIZE + 5)
    assert answer(engine, prompt, cache=False)[0] == 0
    assert engine.stats().n_pages_cached == 0
    assert answer(engine, prompt)[0] == 0
    assert answer(engine, prompt, cache=False)[0] == 0
    assert answer(engine, prompt)[0] == PAGE_SIZE


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_prompt_that_is_being_read_is_shared_already(make, run_ahead):
    """Those that came together, too, once their turn to be read has come."""
    engine = make(n_batch=PAGE_SIZE, run_ahead=run_ahead)
    system = ids_of(4 * PAGE_SIZE)
    sequences = [engine.add([*system, i], GREEDY, max_tokens=5) for i in (7, 8, 9)]
    texts = finish(engine, *sequences)
    assert [s.n_reused for s in sequences] == [0, 4 * PAGE_SIZE, 4 * PAGE_SIZE]
    assert texts == [answer(make(), [*system, i])[1] for i in (7, 8, 9)]
    assert engine.stats().prompt_tokens_total == len(system) + 3


def test_pages_of_nan_are_not_found(make):
    engine = make(n_batch=PAGE_SIZE)
    prompt, run = ids_of(2 * PAGE_SIZE + 5), engine.decoder.run
    engine.decoder.run = lambda step: run(step) * np.float32("nan")
    s = engine.add(prompt, GREEDY)
    finish(engine, s)
    assert s.finish == "error" and engine.stats().n_pages_cached == 0
    engine.decoder.run = run
    assert answer(engine, prompt) == (0, answer(make(), prompt)[1])


def test_who_leaves_while_it_is_read_takes_nothing_known_away(make):
    engine = make(n_batch=PAGE_SIZE)
    prompt = ids_of(PAGE_SIZE + 5)
    answer(engine, prompt)
    s = engine.add([*prompt[:PAGE_SIZE], *ids_of(200, 1)], GREEDY)
    engine.step()
    assert s.n_reused == PAGE_SIZE and not s.n_generated
    engine.cancel(s)
    assert answer(engine, prompt)[0] == PAGE_SIZE
    assert answer(engine, s.ids)[0] == PAGE_SIZE, "of its own nobody knows what is in it"


def test_a_shifted_context_is_not_taken_for_the_text_before(make):
    engine = make()
    prompt = ids_of(5 * PAGE_SIZE)
    s = engine.add(prompt, GREEDY, max_tokens=200, context_shift=True, n_keep=PAGE_SIZE + 9)
    finish(engine, s)
    assert len(s.ids) < len(prompt) + 200
    for text in (s.ids[: N_CTX - 9], [*prompt, 5], [*prompt[:200], *s.ids[200:300]]):
        n, found = answer(engine, text)
        assert n >= PAGE_SIZE and found == answer(make(), text)[1]


def test_an_old_text_goes_where_a_new_one_needs_the_pages(make):
    engine = make(n_seq=2, n_positions=N_CTX)
    texts = [ids_of(2 * PAGE_SIZE + 5, i) for i in range(3)]
    assert [answer(engine, texts[i])[0] for i in (0, 1, 0)] == [0, 0, 2 * PAGE_SIZE]
    assert answer(engine, texts[2])[0] == 0
    again = [answer(engine, texts[i])[0] for i in (0, 2)]
    assert again == [2 * PAGE_SIZE, 2 * PAGE_SIZE], "the second was used least recently"
    assert answer(engine, texts[1])[0] < 2 * PAGE_SIZE
