"""The events of an answer, however many of its pieces come at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ggpy.chat_formats import by_name
from ggpy.runtime.sequence import Piece
from ggpy.serve.answers.answer import Answering
from ggpy.serve.events import (
    AnswerOptions,
    CallDelta,
    CallStart,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
)

PARTS = ["<think>", "I", " think", ".", "</think>", "Well", ", so", "<tool_call>", '{"name": "f"']
PARTS += [', "arguments": {"a"', ": 1}}", "</tool_call>"]


class Ticket:
    """Hands out the pieces of an answer, n at a time."""

    def __init__(self, n: int) -> None:
        self.pieces_left, self.n = [Piece(part, i) for i, part in enumerate(PARTS)], n
        numbers = {"n_prompt": 5, "n_reused": 0, "n_generated": len(PARTS)}
        times = dict.fromkeys(["t_begun", "t_admitted", "t_first"], 1.0)
        stops = SimpleNamespace(found=None)
        self.sequence = SimpleNamespace(finish="stop", stops=stops, **numbers, **times)

    async def pieces(self) -> list[Piece]:
        found, self.pieces_left = self.pieces_left[: self.n], self.pieces_left[self.n :]
        return found

    def cancel(self) -> None:
        pass


async def events_of(n: int) -> list[Event]:
    ticket: Any = Ticket(n)
    tokenizer: Any = None
    parser = by_name("hermes").parser(tools={"f": {}})
    return [event async for event in Answering(ticket, AnswerOptions(), tokenizer, parser)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 12])
def test_pieces_that_come_at_once_are_few_events_and_the_same_usage(n: int) -> None:
    *events, last = asyncio.run(events_of(n))
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.n_generated) == ("tool_calls", len(PARTS))
    assert last.usage.n_reasoning == 3, "tokens that became reasoning"
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "I think."
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Well, so"
    assert [e.name for e in events if isinstance(e, CallStart)] == ["f"]
    assert "".join(e.arguments for e in events if isinstance(e, CallDelta)) == '{"a": 1}'
    if n == len(PARTS):
        kinds = [ReasoningDelta, TextDelta, CallStart, CallDelta]
        assert [type(e) for e in events] == kinds
