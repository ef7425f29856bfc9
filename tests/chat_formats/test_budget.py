"""Every format's reasoning is ended where its budget ends, and its parser reads what is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ggpy.chat_formats import ReasoningPart, TextPart, reasoning_budget
from ggpy.chat_formats.chat_format import ChatFormat
from ggpy.chat_formats.table import TABLE

AFTER = {
    "harmony": "<|channel|>final<|message|>",
    "muse-glimmer": " to=user<|message|>",
    "solar": "<|begin|>assistant<|content|>",
}


class Bytes:
    """A tokenizer of bytes, and of control tokens, which some markers are."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = markers
        self.n_vocab = 256 + len(markers)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids: list[int] = []
        pattern = "|".join(map(re.escape, self.markers)) or "(?!)"
        for part in re.split(f"({pattern})", text) if parse_special else [text]:
            known = part in self.markers
            ids += [256 + self.markers.index(part)] if known else list(part.encode())
        return ids

    def piece(self, id: int, special: bool = False) -> bytes:
        if id < 256:
            return bytes([id])
        return self.markers[id - 256].encode() if special else b""

    def pieces(self, special: bool = False) -> dict[int, bytes]:
        return {id: self.piece(id, special) for id in range(self.n_vocab)}


def said(chat_format: ChatFormat, tokenizer: Any, parts: list[str], **options: Any) -> bytes:
    """What an answer becomes: each part as wanted, until an end is forced, then the next part."""
    mask = reasoning_budget(chat_format, tokenizer, 9, " Stop.", **options)
    assert mask is not None
    found = b""
    for part in parts:
        for id in tokenizer.encode(part, parse_special=True):
            mask.accept(id)
            found += tokenizer.piece(id, special=True)
            if mask.active:
                break
        while mask.active:
            id = mask.forced_ids[0]
            mask.accept(id)
            found += tokenizer.piece(id, special=True)
    return found


WITH_REASONING = [name for name, row in TABLE.items() if row.has_reasoning]


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("name", WITH_REASONING)
def test_the_parser_reads_what_is_forced(name: str, control: bool) -> None:
    chat_format = TABLE[name]
    channels = chat_format.channels
    markers = tuple(sorted(chat_format.markers, key=len, reverse=True)) if control else ()
    markers = tuple(m for m in markers if m != chat_format.reasoning_open or name != "gemma4")
    tokenizer: Any = Bytes(markers)
    opener = channels.thought_open if channels else chat_format.reasoning_open
    after = AFTER.get(name, "\n\n")
    parts = [opener + "abc defgh, and on it goes for ever", after + "Answer"]
    text = said(chat_format, tokenizer, parts).decode()
    closer = channels.thought_close if channels else chat_format.reasoning_close
    assert text == opener + "abc defgh Stop." + closer + (channels.between if channels else "") + (
        after + "Answer"
    )
    parser = chat_format.parser()
    deltas = parser.feed(text) + parser.finish()
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningPart))
    answer = "".join(d.text for d in deltas if isinstance(d, TextPart))
    assert (thought.strip(), answer.strip()) == ("abc defgh Stop.", "Answer")


@pytest.mark.parametrize("name", ["harmony", "muse-glimmer", "gemma4"])
def test_reasoning_that_is_opened_again(name: str) -> None:
    """It is closed at once, and nobody waits for it until its header is almost complete."""
    chat_format = TABLE[name]
    channels = chat_format.channels
    opener = channels.thought_open if channels else chat_format.reasoning_open
    markers = tuple(m for m in chat_format.markers if m != opener)
    tokenizer: Any = Bytes(tuple(sorted(markers, key=len, reverse=True)))
    mask = reasoning_budget(chat_format, tokenizer, 2, opened=True)
    if channels:
        mask = reasoning_budget(chat_format, tokenizer, 2)
        for id in tokenizer.encode(opener, parse_special=True):
            mask.accept(id)
    for id in b"ab":
        mask.accept(id)
    while mask.active:
        mask.accept(mask.forced_ids[0])
    for id in b"Some text of the answer":
        assert not mask.waits
        mask.accept(id)
    for id in tokenizer.encode(opener, parse_special=True):
        waited = mask.waits
        mask.accept(id)
    assert waited and mask.active and mask.n_reasoning == 2


def test_without_markers_there_is_no_budget() -> None:
    plain = TABLE["hermes"].with_reasoning("", "</think>", opened=False)
    assert reasoning_budget(plain, Bytes(()), 5) is None  # type: ignore[arg-type]
    mask = reasoning_budget(plain, Bytes(()), 0, opened=True)  # type: ignore[arg-type]
    assert mask is not None and mask.active
