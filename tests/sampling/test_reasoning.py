"""The mask that ends reasoning: what it counts, what it forces when, what it says in advance."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ggpy.sampling import (
    ReasoningBudget,
    ReasoningMarkers,
    Sampler,
    SamplingParams,
    allowed_tokens,
    n_words,
)
from ggpy.sampling.params import without_bans
from ggpy.sampling.reasoning import UNLIMITED

PIECES = [
    *(b"<think>", b"</think>", b" a", b" b", b"\n", b"</", b"think", b">", b" stop.", b"\xf0\x9f"),
    *(b"\x98\x80", b"<|channel|>", b"analysis", b"<|message|>", b"<|end|>", b"final", b"<"),
]
OPEN, CLOSE, A, B, LINE, SLASH, THINK, GREATER, STOP, HALF, REST = range(11)
CHANNEL, ANALYSIS, MESSAGE, END, FINAL, LESS = range(11, 17)
V = 70  # a part of a word
THINKING = ReasoningMarkers(
    re.compile(rb"\A\s*<think>"), b"</think>", start=b"<think>", spelled=True
)
CHANNELS = ReasoningMarkers(
    re.compile(rb"<\|channel\|>analysis<\|message\|>"),
    b"<|end|>",
    (b"<|channel|>",),
    begun=re.compile(rb"<\|channel\|>analysis$"),
)


def budget(limit: int, markers=THINKING, ending=(STOP, CLOSE), **options) -> ReasoningBudget:
    return ReasoningBudget(limit, markers, ending, ending[-1:], PIECES.__getitem__, V, **options)


def run(mask: ReasoningBudget, wanted: list[int], n: int = 12) -> list[int]:
    """n tokens at most: those that are forced, else those that are wanted."""
    wanted, said = list(wanted), []
    while len(said) < n and (mask.active or wanted):
        row = np.empty(n_words(V) + 1, np.int32)
        mask.fill(row)
        allowed = np.flatnonzero(allowed_tokens(row, 32 * len(row))).tolist()
        assert allowed == list(range(V)) if not mask.active else len(allowed) == 1
        token = wanted.pop(0) if not mask.active else allowed[0]
        settled = not mask.waits
        mask.accept(token)
        assert not (settled and mask.active), "it says in advance that a token may be forced"
        said.append(token)
    return said


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_end_is_forced_where_the_limit_is_reached(limit: int) -> None:
    thoughts, answer = [A, B, A, B][:limit], [B, OPEN, A, A]
    assert run(budget(limit), [LINE, OPEN, *thoughts, *answer]) == [
        *(LINE, OPEN, *thoughts, STOP, CLOSE),
        *answer,
    ]
    assert run(budget(limit, opened=True), thoughts + answer) == [*thoughts, STOP, CLOSE, *answer]


def test_an_answer_that_stays_below_the_limit_is_left_alone() -> None:
    for wanted in ([OPEN, A, CLOSE, *[B] * 9], [*[A] * 3, OPEN, *[A] * 9], [LINE, LESS, *[A] * 9]):
        mask = budget(2)
        assert run(mask, wanted) == wanted[:12]
        assert not mask.waits, "a draw never waits again"


def test_far_from_the_limit_nobody_waits() -> None:
    mask, waits = budget(5, opened=True), []
    for _ in range(5):
        waits.append(mask.waits)
        mask.accept(A)
    assert waits == [False] * 4 + [True] and mask.active and mask.n_reasoning == 5


def test_a_limit_may_be_lowered_while_reasoning_goes_on() -> None:
    """To two more tokens, of which it still says in advance that they are the last."""
    mask = budget(UNLIMITED, opened=True)
    assert run(mask, [A, B, A, B]) == [A, B, A, B] and not mask.waits
    mask.end_soon()
    assert run(mask, [A, HALF, REST, B, B]) == [A, HALF, REST, STOP, CLOSE, B, B]
    mask.end_soon()
    assert run(mask, [B]) == [B]
    lower = budget(3, opened=True)
    lower.end_soon()
    assert run(lower, [A, B, A, B]) == [A, B, STOP, CLOSE, A, B]


def test_a_character_and_a_marker_that_have_begun_are_completed() -> None:
    assert run(budget(2, opened=True), [A, HALF, REST, A]) == [A, HALF, REST, STOP, CLOSE, A]
    closer = [SLASH, THINK, GREATER]
    assert run(budget(2, opened=True), [A, *closer, B]) == [A, *closer, B]
    assert run(budget(2, opened=True), [A, LESS, B, B]) == [A, LESS, B, STOP, CLOSE, B]
    assert run(budget(2, opened=True), [HALF] * 30, 30)[18:20] == [STOP, CLOSE], "not for ever"


def test_the_budget_is_of_all_messages_and_the_message_is_said_once() -> None:
    thought = [CHANNEL, ANALYSIS, MESSAGE]
    mask = budget(3, CHANNELS, (STOP, END))
    wanted = [*thought, A, END, *thought, A, B, *thought, CHANNEL, FINAL, MESSAGE, A]
    assert run(mask, wanted, 30) == [
        *(*thought, A, END, *thought, A, B, STOP, END),
        *(*thought, END, CHANNEL, FINAL, MESSAGE, A),
    ]
    assert not mask.waits, "which an answer need not wait for, as nothing opens reasoning"


class Grammar:
    """Allows some tokens, always."""

    finished = False

    def __init__(self, *allowed: int) -> None:
        self.allowed, self.told = allowed, list[int]()

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(32 * len(row), np.uint8)
        bits[list(self.allowed)] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        self.told.append(token)


def test_a_grammar_is_obeyed_too() -> None:
    logits = np.zeros(V, np.float32)
    logits[[A, B]] = 2, 3
    for grammar, expected in (
        (Grammar(A, STOP, CLOSE), [A, A, STOP, CLOSE, A]),
        (Grammar(A, CLOSE), [A, A, A, A, A]),  # it forbids the message, so the end is given up
    ):
        mask = budget(2, opened=True, mask=grammar)
        sampler = Sampler(SamplingParams(temperature=0), V, mask=mask)
        for _ in expected:
            assert mask.waits and mask.active
            assert mask.current is (mask if mask._forced else grammar)
            sampler.accept(sampler.sample(logits))
        assert grammar.told == sampler.history == expected


def test_a_banned_token_can_be_forced() -> None:
    params = SamplingParams(temperature=0, logit_bias={CLOSE: -np.inf, A: -np.inf, B: 1})
    mask = budget(0, ending=(CLOSE,), opened=True)
    params = without_bans(params, mask.forced_ids)
    assert params.logit_bias[A] == -np.inf and params.logit_bias[B] == 1
    assert Sampler(params, V, mask=mask).sample(np.zeros(V, np.float32)) == CLOSE
