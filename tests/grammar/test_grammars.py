"""Kinds of grammars, what is kept of them, and grammars that would take for ever."""

from __future__ import annotations

import builtins
import json
import os
import signal
import threading
import time
from itertools import count

import numpy as np
import pytest
from grammar.walks import accepts, allowed, random_text

from ggpy.grammar import KINDS, GrammarError, Grammars, GrammarUntried, kind_and_text, masks
from ggpy.grammar.lark import to_lark
from ggpy.grammar.trial import Trial
from ggpy.sampling import allowed_tokens


@pytest.fixture
def impatient(monkeypatch):
    """Gives up soon, so that the tests are fast."""
    trial = Trial(seconds=0.15)
    monkeypatch.setattr(masks, "_trial", trial)
    yield trial
    trial.close()


KNOWN = [
    ("regex", r"[a-f]+/\d{2}", ["abc/12", "f/00"], ["abc/1", "/12", "abc/123"]),
    ("regex", "", [""], ["a"]),
    ("regex", "é|\\n\"'", ["é", "\n\"'"], ["e"]),
    ("lark", 'start: "a" b+\nb: /[xy]/', ["ax", "axyx"], ["a", "b", "axa"]),
    ("lark", '%ignore / +/\nstart: "a" "b"', ["ab", "a  b"], ["a", "a\nb"]),
    ("lark", '%llguidance {"allow_initial_skip": true}\n%ignore / /\nstart: "a"', [" a"], ["b"]),
    ("lark", 'start: "x" %json {"enum": [1, null]}', ["x1", "xnull"], ["x", "1"]),
    ("gbnf", 'root ::= "yes" | "no"', ["yes", "no"], ["y", "yesno"]),
    ("json_object", "", ["{}"], ["[]"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), KNOWN)
def test_kinds(grammars, tokenizer, kind, text, good, bad):
    assert [t for t in good if not accepts(grammars.compile(kind, text), tokenizer, t)] == []
    assert [t for t in bad if accepts(grammars.compile(kind, text), tokenizer, t)] == []


REFUSED = [
    ("python", "x", "is no kind of grammar: give one of json_schema"),
    ("regex", "(a", "invalid regex: unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", 7, "give a text"),
    ("regex", "\ud800", "surrogate"),
    ("lark", "start: b", '1\\(8\\): unknown name: "b"'),
    ("lark", "\n\nstart: b", "3\\(8\\)"),
    ("lark", "", "no start"),
    ("lark", '%llguidance {x}\nstart: "a"', "must be a JSON object in one line"),
    ("gbnf", "#" * 200_001, "has 200001 bytes: the limit is 200000"),
    ("lark", "#" * 1_000_001, "has 1000001 bytes: the limit is 1000000"),
]


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED)
def test_wrong_grammars_are_refused(grammars, kind, text, words):
    for _ in range(2):  # what is wrong is kept, too
        with pytest.raises(GrammarError, match=words):
            grammars.compile(kind, text)


def test_every_way_to_write_a_text_in_tokens_is_allowed(grammars, tokenizer):
    """Not only one that llguidance takes for the model's own."""
    mask = grammars.compile("regex", "the model")
    pieces = {tokenizer.piece(int(id)) for id in allowed(mask, tokenizer)}
    every = {tokenizer.piece(id) for id in range(tokenizer.n_vocab)} - {b""}
    assert (
        pieces == {piece for piece in every if b"the model".startswith(piece)} and len(pieces) > 1
    )


def test_control_tokens_are_no_text(grammars, tokenizer):
    mask = grammars.compile("regex", r"[^a]*")
    assert not {id for id in allowed(mask, tokenizer) if tokenizer.piece(int(id)) == b""} - {
        *tokenizer.end_ids
    }
    for text in ("<|im_start|>", "</s>"):
        assert accepts(grammars.compile("regex", r"[^b]*"), tokenizer, text), "as plain text"


def test_a_mask_tells_when_it_is_finished(grammars, tokenizer):
    mask = grammars.compile("regex", "ab?")
    a, b, end = (tokenizer.encode("xab")[-2], tokenizer.encode("xab")[-1], min(tokenizer.end_ids))
    assert not mask.finished
    mask.accept(a)
    assert not mask.finished and end in allowed(mask, tokenizer)
    mask.accept(b)
    assert mask.finished and set(allowed(mask, tokenizer)) == tokenizer.end_ids
    mask.accept(max(tokenizer.end_ids))
    assert mask.finished


def test_a_token_that_is_not_allowed_is_an_error(grammars, tokenizer):
    mask = grammars.compile("regex", "ab")
    with pytest.raises(GrammarError, match="does not allow token 2 here"):
        mask.accept(min(tokenizer.end_ids))
    with pytest.raises(GrammarError):
        mask.fill(np.zeros(15, np.int32))  # it must not allow to end
    assert not mask.finished


def test_a_row_may_be_longer_and_must_not_be_shorter(grammars):
    row = np.full(20, -1, np.int32)
    grammars.compile("regex", "a").fill(row)
    assert row[:15].any() and not row[15:].any()
    with pytest.raises(ValueError, match="15 words, the row 14"):
        grammars.compile("regex", "a").fill(np.zeros(14, np.int32))


@pytest.mark.parametrize(("cores", "worth"), [(1, 0), (8, 0), (8, 0.3), (8, 9)])
def test_many_masks_together_are_those_one_by_one(grammars, tokenizer, monkeypatch, cores, worth):
    """One thread makes all of them, or the first four, or the first one and a slow one."""
    monkeypatch.setattr(masks, "usable_cores", lambda: cores)
    monkeypatch.setattr(masks, "ENOUGH_SEEN", 1 if worth else 4)
    monkeypatch.setattr(masks, "WORTH_THREADS", worth)
    monkeypatch.setattr(masks, "perf_counter", count().__next__)
    masks._executor.cache_clear()
    made = [grammars.compile("regex", "[ab]{2,5}c") for _ in range(5)]
    n = masks.n_words(tokenizer.n_vocab)
    for i, mask in enumerate(made):
        for _ in range(i):
            row = np.zeros(n, np.int32)
            mask.fill(row)
            mask.accept(int(allowed_tokens(row, tokenizer.n_vocab).argmax()))
    rows, expected = np.full((2, 5, n), -1, np.int32)
    assert masks.GrammarMask.fill_many(made, rows) == [None] * 5
    for mask, row in zip(made, expected, strict=True):
        mask.fill(row)
    assert np.array_equal(rows, expected) and len({row.tobytes() for row in rows}) > 1


def test_sequences_have_masks_of_their_own(grammars, tokenizer):
    first, second = (grammars.compile("gbnf", 'root ::= "yes" | "no"') for _ in range(2))
    first.accept(int(allowed(first, tokenizer)[0]))
    third = grammars.compile("gbnf", 'root ::= "yes" | "no"')
    both = [set(allowed(mask, tokenizer)) for mask in (second, third)]
    assert both[0] == both[1] != set(allowed(first, tokenizer))


def test_the_last_64_grammars_are_kept(tokenizer, monkeypatch):
    grammars, checked = Grammars(tokenizer), []
    monkeypatch.setattr(masks._trial, "check", checked.append)
    for n in [*range(65), 64, 1, 65, 1, 0, 2]:
        grammars.compile("regex", f"a{{{n}}}")
    assert len(checked) == 68 and len(grammars._kept) == masks.MAX_KEPT


def test_who_asks_for_a_kept_grammar_waits_for_nobody(tokenizer):
    grammars, text = Grammars(tokenizer), '{"enum": [1, 2]}'
    assert grammars.known("json_schema", text) is None
    mask = grammars.compile("json_schema", text)
    with pytest.raises(GrammarError) as refused:
        grammars.compile("json_schema", "[]")
    with grammars._compiling:  # somebody compiles another one
        known = grammars.known("json_schema", text)
        with pytest.raises(GrammarError, match=str(refused.value)):
            grammars.known("json_schema", "[]")
    mask.accept(int(allowed(mask, tokenizer)[0]))
    assert accepts(known, tokenizer, "1"), "a state of its own"


def test_threads_compile_at_the_same_time(tokenizer):
    grammars, texts = Grammars(tokenizer), []

    def write(i):
        rng = np.random.default_rng(i)
        for n in range(5):
            mask = grammars.compile("json_schema", json.dumps({"enum": [n, "x", i % 2]}))
            texts.append((n, i % 2, json.loads(random_text(mask, tokenizer, rng))))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 40 and all(text in (n, "x", i) for n, i, text in texts)


def chain(n: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(n))
    return f'start: r0\n{rules}r{n}: "a"'


def references(n: int) -> str:
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(n)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**parts, f"d{n}": {"type": "string"}}})


PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(200)]
DOUBLE = {
    f"d{i}": {"allOf": [link, {"anyOf": [link, link]}]}
    for i, link in enumerate({"$ref": f"#/$defs/d{i + 1}"} for i in range(16))
}  # fmt: skip
BOMBS = [
    ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "takes more than 0.15 s"),
    ("json_schema", json.dumps({"allOf": PATTERNS}), "takes more than 0.15 s"),
    ("lark", "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(90)), "0.15"),
    ("lark", "start: " + " | ".join(f'"{i:06d}"' for i in range(70_000)), "takes more than 0.15"),
    ("lark", chain(10_000), "too large or too deep"),
    ("json_schema", references(8_000), "too large or too deep"),
    ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": {**DOUBLE, "d16": {}}}), "large"),
    ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "too deeply nested"),
    ("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"',
     "too big"),
    ("gbnf", 'root ::= r0\n' + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
     + 'r60 ::= root', "no text matches|too complex"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "words"), BOMBS)
def test_grammars_that_need_too_much_are_refused(
    impatient, tokenizer, monkeypatch, kind, text, words
):
    grammars, words = Grammars(tokenizer), f"{words}|takes more than 0.15 s"
    began = time.monotonic()
    with pytest.raises(GrammarError, match=words):
        grammars.compile(kind, text)
    assert time.monotonic() - began < 8
    with monkeypatch.context() as patch, pytest.raises(GrammarError, match=words):
        patch.setattr(Grammars, "_compiled", None)  # it is not tried again
        grammars.compile(kind, text)
    assert accepts(grammars.compile("regex", "ab"), tokenizer, "ab"), "others are not harmed"


HARMLESS = [
    ("json_schema", json.dumps({"enum": [f"{i:08d}" for i in range(10_000)]})),
    ("json_schema", json.dumps({"type": "string", "minLength": 10**6, "maxLength": 10**8})),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**9, "items": {}})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"})),
    ("json_schema", json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}})),
    ("gbnf", 'root ::= (("a"{1,1000}){1,1000}){1,1000}'),
    ("gbnf", 'root ::= r0\n' + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
     + 'r60 ::= "a"'),
    ("regex", "(((a{1,999}){1,999}){1,999}b|(a|b)*a(a|b){50})"),
    ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}* r{i + 1}*\n" for i in range(60))
     + 'r60: "a"*'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), HARMLESS)
def test_what_only_looks_large_costs_little(grammars, tokenizer, kind, text):
    """Each step is bounded; if the grammar becomes too complex on the way, that is an error."""
    mask, rng = grammars.compile(kind, text), np.random.default_rng(0)
    for _ in range(60):
        began = time.monotonic()
        try:
            ids = [int(id) for id in allowed(mask, tokenizer) if id not in tokenizer.end_ids]
            if not ids:
                break
            mask.accept(int(rng.choice(ids)))
        except GrammarError as error:
            assert "too complex" in str(error)
            break
        assert time.monotonic() - began < 5


def test_the_process_for_trials_is_started_again(impatient, tokenizer):
    grammars = Grammars(tokenizer)
    grammars.compile("regex", "a")
    before = impatient._child
    grammars.compile("regex", "b")
    assert impatient._child is before
    before.kill()
    before.wait()
    grammars.compile("regex", "c")
    assert impatient._child is not before
    impatient.close()
    assert impatient._child is None


def test_a_process_that_others_kill_says_nothing_of_the_grammar(tokenizer, monkeypatch):
    """The next use of the same grammar tries it again."""
    trial, slow = Trial(seconds=60), '{"type": "integer", "multipleOf": 99999989}'
    monkeypatch.setattr(masks, "_trial", trial)
    grammars = Grammars(tokenizer)
    try:
        for text in ("ab", "cd"):
            grammars.compile("regex", text)
            timer = threading.Timer(0.3, trial._child.kill)
            timer.start()
            with pytest.raises(GrammarUntried, match="was killed: is memory short"):
                grammars.compile("json_schema", slow)
            timer.join()
    finally:
        trial.close()


def test_an_answer_that_is_not_read_is_not_that_to_the_next_grammar(impatient):
    class Interrupted:
        def __init__(self, pipe):
            self.pipe = pipe

        def __getattr__(self, name):
            return getattr(self.pipe, name)

        def readline(self):
            raise KeyboardInterrupt

    impatient.check('start: "a"')
    child = impatient._child
    pipe, child.stdout = child.stdout, Interrupted(child.stdout)
    with pytest.raises(KeyboardInterrupt):
        impatient.check("start: nothing")
    child.stdout = pipe
    impatient.check('start: "a"')


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_has_a_process_for_trials_of_its_own(impatient):
    impatient.check('start: "a"')
    before = impatient._child
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        status = 1
        try:
            impatient.close()  # as at its end
            impatient._child = before
            impatient.check('start: "b"')
            status = int(impatient._child is before)
            impatient.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    impatient.check('start: "c"')
    assert impatient._child is before


def test_without_the_library_it_is_told_what_to_install(tokenizer, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "llguidance":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'ggpy\[grammar\]'") as caught:
        Grammars(tokenizer).compile("regex", "a")
    assert isinstance(caught.value, GrammarError)


def test_a_tokenizer_without_an_end_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "end_ids", frozenset())
    with pytest.raises(GrammarError, match="no token that ends a text"):
        Grammars(tokenizer).compile("regex", "a")


def test_texts_and_schemas_as_arguments():
    assert kind_and_text(None, None) is None
    assert kind_and_text("root", None) == ("gbnf", "root")
    lark = '\n%llguidance {}\nstart: "a"'
    assert kind_and_text(lark, None) == ("lark", lark)
    assert kind_and_text(None, {"enum": ["é"]}) == ("json_schema", '{"enum": ["\\u00e9"]}')
    assert kind_and_text(None, '{"a"') == ("json_schema", '{"a"')
    for wrong in ([1], 7, {"a": {1}}, {"a": b""}):
        with pytest.raises(GrammarError, match="json_schema"):
            kind_and_text(None, wrong)
    with pytest.raises(GrammarError, match="give one of them"):
        kind_and_text("root", "{}")
    assert {kind for kind, *_ in KNOWN} | {"json_schema"} == set(KINDS)
    assert "no_forcing" in to_lark("json_object", "")
