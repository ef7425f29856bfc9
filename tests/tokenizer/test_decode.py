"""Ids back to text: whole, streamed, and of any ids."""

from __future__ import annotations

from functools import cache

import pytest
import small_vocab
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.bpe import byte_alphabet

KINDS = {
    "byte_level": lambda: small_vocab.byte_level("llama-bpe"),
    "gemma4": small_vocab.gemma4,
    "sentencepiece": lambda: small_vocab.sentencepiece(True),
    "sentencepiece_bare": lambda: small_vocab.sentencepiece(False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


@kinds
@settings(deadline=None)
@given(st.text())
def test_decoding_undoes_encoding(kind: str, text: str) -> None:
    if kind != "byte_level":
        text = text.replace("\u2581", "_")  # which is how these vocabularies write a blank
    ids = tokenizer(kind).encode(text)
    assert tokenizer(kind).decode(ids) == text


@kinds
@settings(deadline=None)
@given(st.lists(st.integers(0, 1000)), st.booleans(), st.booleans())
def test_a_stream_says_what_decode_says(
    kind: str, ids: list[int], special: bool, continues: bool
) -> None:
    ids = [id % tokenizer(kind).n_vocab for id in ids]
    stream = tokenizer(kind).stream(special, continues)
    streamed = "".join([stream.add(id) for id in ids]) + stream.finish()
    assert streamed == tokenizer(kind).decode(ids, special, continues)


@kinds
@pytest.mark.parametrize("text", ["\u4f60\u597d", "\U0001f468\u200d\U0001f469", "e\u0301"])
def test_a_stream_never_splits_a_character(kind: str, text: str) -> None:
    stream = tokenizer(kind).stream(continues=False)
    said = [stream.add(id) for id in tokenizer(kind).encode(text)]
    assert "".join(said) == text and stream.finish() == ""
    assert "\ufffd" not in "".join(said)


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    made = tokenizer("byte_level")
    ids = made.encode("a\U0001f600", add_special=False)[:-1]
    stream = made.stream()
    assert "".join([stream.add(id) for id in ids]) == "a"
    assert stream.finish() == "\ufffd" and stream.finish() == ""
    assert made.decode(ids) == "a\ufffd"


def test_the_blank_before_the_first_word_belongs_to_encoding() -> None:
    made = tokenizer("sentencepiece")
    ids = made.encode("one")
    assert made.text(ids[1]).startswith("\u2581")
    assert made.decode(ids) == "one"
    assert made.decode(ids, continues=True) == " one"
    assert "".join(map(made.stream().add, ids)) == " one"
    assert made.decode(made.encode("  one")) == "  one"


def test_half_characters_in_the_input_are_replaced() -> None:
    made = tokenizer("byte_level")
    assert made.decode(made.encode("a\udc80b")) == "a\ufffdb"


@pytest.mark.parametrize("id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(id: int) -> None:
    made = tokenizer("byte_level")
    for ask in (made.piece, made.text, made.stream().add, lambda id: made.decode([id])):
        with pytest.raises(ValueError, match=rf"token id {id} .* 0 to {made.n_vocab - 1}"):
            ask(id)


def test_a_character_outside_the_alphabet_stands_for_itself() -> None:
    metadata = small_vocab.byte_level("gpt-2")
    metadata["tokenizer.ggml.tokens"][100] = "\u4e2d\u0120"
    assert Tokenizer(metadata | {"tokenizer.ggml.merges": []}).piece(100) == "\u4e2d ".encode()


def test_the_alphabet_is_gpt2s() -> None:
    assert byte_alphabet() == {char: byte for byte, char in enumerate(small_vocab.alphabet())}
