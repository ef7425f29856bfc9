"""Ids of difficult texts, for every pre-tokenizer and every kind of vocabulary, against
llama.cpp's.

`make_golden_ids.py` wrote the expected ids.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import small_vocab

from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.pre import BY_NAME, TABLE, lookup

GOLDEN = json.loads(Path(__file__).with_name("golden_ids.json").read_text())
OTHERS = {
    "gemma4": small_vocab.gemma4,
    "sentencepiece": lambda: small_vocab.sentencepiece(True),
    "sentencepiece_bare": lambda: small_vocab.sentencepiece(False),
}
BYTE_LEVEL = sorted(name for name, row in BY_NAME.items() if not row.raw)


def check(metadata: dict[str, Any], texts: tuple[str, ...], expected: list[int], parse: bool):
    tokenizer = Tokenizer(metadata)
    for text, number in zip(texts, expected, strict=True):
        ids = tokenizer.encode(text, parse_special=parse)
        assert " ".join(map(str, ids)) == GOLDEN["pool"][number], ascii(text)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_bpe(name: str) -> None:
    expected = GOLDEN["byte_level"][name]
    check(small_vocab.byte_level(name), small_vocab.TEXTS, expected, parse=False)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds(name: str) -> None:
    check(OTHERS[name](), small_vocab.TEXTS, GOLDEN[name], parse=False)


@pytest.mark.parametrize("name", GOLDEN["special"])
def test_special_tokens_in_text(name: str) -> None:
    made = OTHERS[name]() if name in OTHERS else small_vocab.byte_level("gpt-2")
    check(made, small_vocab.SPECIAL_TEXTS, GOLDEN["special"][name], parse=True)


def test_the_texts_tell_any_two_rows_apart() -> None:
    rows = {row.names: GOLDEN["byte_level"][row.names.split()[0]] for row in TABLE if not row.raw}
    for one, other in combinations(rows, 2):
        assert rows[one] != rows[other], f"{one} | {other}"


def test_names_of_one_row_agree() -> None:
    for row in TABLE:
        ids = [GOLDEN["byte_level"][name] for name in row.names.split() if not row.raw]
        assert all(other == ids[0] for other in ids)


def test_no_name_is_in_two_rows() -> None:
    assert len(BY_NAME) == sum(len(row.names.split()) for row in TABLE)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'qwen9'; known: .*llama-bpe.*qwen2"):
        lookup("qwen9")
