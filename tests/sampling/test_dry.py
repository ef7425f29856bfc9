"""DRY: repetitions, sequence breakers, and llama.cpp's own results."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpy.sampling import DRY_SEQUENCE_BREAKERS, dry
from ggpy.sampling.ranking import softmax


@given(st.lists(st.integers(0, 2), max_size=40))
def test_suffix_matches_equal_comparing_every_suffix(tokens: list[int]) -> None:
    def common(a: list[int], b: list[int]) -> int:
        pairs = zip(reversed(a), reversed(b), strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))

    expected = [common(tokens[: len(tokens) - i], tokens) for i in range(len(tokens))]
    assert dry.suffix_matches(tokens) == expected


# Histories, settings and results that llama.cpp's own test of DRY states as well.
@pytest.mark.parametrize(
    ("n_vocab", "history", "multiplier", "allowed", "breakers", "expected"),
    [
        (4, [0, 1], 1.0, 2, [], [0.25] * 4),
        (4, [0, 1, 2, 0, 1], 1.0, 2, [], [0.296923, 0.296923, 0.109232, 0.296923]),
        (5, [0, 1, 3, 4, 0, 1], 1.0, 2, [(3,)], [0.2] * 5),
        (5, [0, 1, 2, 0, 1], 2.0, 2, [], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        (5, [0, 1, 2, 3, 4, 0, 1], 1.0, 4, [], [0.2] * 5),
    ],
)
def test_dry(n_vocab, history, multiplier, allowed, breakers, expected) -> None:  # type: ignore[no-untyped-def]
    out = dry.dry(np.zeros(n_vocab, np.float32), history, multiplier, 1.1, allowed, breakers)
    assert softmax(out) == pytest.approx(expected, abs=1e-5)


def test_dry_grows_with_the_repetition_and_stays_finite() -> None:
    logits = np.zeros(8, dtype=np.float32)
    history = [1, 2, 3, 4, 0, 1, 2, 3]
    assert dry.dry(logits, history, 1.0, 2.0, 2)[4] == -2.0  # three repeated, two allowed
    assert np.isfinite(dry.dry(logits, [1] * 3000, 1e-6, 1.75, 2)).all()


def test_a_breaker_of_several_tokens_ends_a_repetition() -> None:
    history = [1, 2, 3, 1, 2]
    assert dry.repetitions(history, 2, []) == {3: 2}
    assert dry.tokens_since_breaker([5, 6, 1], [(5, 6)]) == 1
    assert dry.tokens_since_breaker([5, 7, 1], [(5, 6)]) == 3
    assert dry.repetitions([1, 2, 3, 9, 1, 2], 3, [(9,)]) == {}


def test_a_single_breaker_is_not_penalised_itself() -> None:
    history = [1, 2, 7, 1, 2]
    logits = np.zeros(8, dtype=np.float32)
    assert dry.dry(logits, history, 1.0, 1.75, 2)[7] == -1.0
    assert dry.dry(logits, history, 1.0, 1.75, 2, [(7,)])[7] == 0.0


def test_breaker_sequences_find_text_inside_and_across_tokens() -> None:
    pieces = [b"a", b"x\n", b":", b"<|", b"|>", b"a<"]
    ids = {">": [4], "|>": [4], "end": [9]}
    found = dry.breaker_sequences(["\n", "<|>"], pieces, lambda text: ids[text])
    assert found == ((1,), (3, 4), (5, 4))
    assert dry.breaker_sequences(DRY_SEQUENCE_BREAKERS, pieces, lambda text: []) == ((1,), (2,))


def test_too_many_texts_of_breakers_are_refused() -> None:
    with pytest.raises(ValueError, match="65 sequence breakers: at most 64 are possible"):
        dry.breaker_sequences(["x"] * 65, [], lambda text: [])


def test_breaker_sequences_are_those_of_every_token() -> None:
    """Beside a search without an index, for texts that overlap and repeat."""
    rng = random.Random(3)
    pieces = [bytes(rng.choices(b"ab\n", k=rng.randint(0, 5))) for _ in range(400)]
    for text in ("a", "ab", "aba\nab", "bbbbbbbb", "\u00e4a"):
        whole, wanted = text.encode(), set()
        for token, piece in enumerate(pieces):
            heads = [text[:i] for i in range(1, len(text))]
            if whole in piece:
                wanted.add((token,))
            else:
                ending = [h for h in heads if piece.endswith(h.encode())]
                wanted |= {(token, *text.removeprefix(h).encode()) for h in ending}
        for vocabulary in (pieces, dry.Pieces(pieces)):
            found = dry.breaker_sequences([text], vocabulary, lambda rest: list(rest.encode()))
            assert set(found) == wanted and len(found) == len(wanted)


def test_texts_in_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry, "MAX_BREAKERS", 3)
    with pytest.raises(ValueError, match="in over 3 forms: give fewer of them"):
        dry.breaker_sequences(["ab"], [b"a"] * 4, lambda text: [1])


def test_dry_takes_off_what_float32_holds() -> None:
    logits = np.zeros(8, np.float32)
    for base, multiplier in ((1e20, 1.0), (1e20, 1e20), (3.4e38, 3.4e38), (1.0, 2.0)):
        out = dry.dry(logits, [1] * 3000, multiplier, base, 1)
        assert -dry.FLOAT32_MAX <= out[1] < -1 and not out[2:].any()
