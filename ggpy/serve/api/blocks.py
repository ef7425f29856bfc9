"""Splits an answer into blocks: what is thought, what is said, each call of a tool.

Both of the APIs that answer in typed blocks write them from here, each in its own form.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..events import AnswerToken, CallDelta, CallStart, Event, Finished, ReasoningDelta, TextDelta
from .sse import closing

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class AnswerBlock:
    """A part of an answer. index: 0 for the first. id, name: of a call. pieces: its tokens, where
    log probabilities are wanted.
    """

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    pieces: list[AnswerToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything in it; of a call, the JSON of its arguments."""
        return "".join(self.parts)


class BlockWriter(Protocol):
    """Says in the form of one API what happens to blocks."""

    def opened(self, block: AnswerBlock) -> bytes: ...

    def extended(self, block: AnswerBlock, text: str, pieces: tuple[AnswerToken, ...]) -> bytes: ...

    def closed(self, block: AnswerBlock) -> bytes: ...


class Blocks:
    """The blocks of an answer so far. One is open at a time: the last."""

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._calls: dict[int, AnswerBlock] = {}

    def add(self, event: Event, writer: BlockWriter | None = None) -> bytes:
        """Takes any event but Finished; returns what the writer says of it."""
        if isinstance(event, CallStart):
            self._calls[event.index], told = self._begin("call", writer, event.id, event.name)
            return told
        if isinstance(event, CallDelta):
            return self._extend(self._calls[event.index], event.arguments, (), writer)
        if isinstance(event, TextDelta):
            return self._say("text", event.text, event.pieces, writer)
        if isinstance(event, ReasoningDelta):
            return self._say("reasoning", event.text, (), writer)
        raise TypeError(f"{event!r} is no part of an answer")

    def close(self, writer: BlockWriter | None = None) -> bytes:
        """Closes the open block, if there is one."""
        block, self._open = self._open, None
        return writer.closed(block) if block and writer else b""

    def _say(
        self,
        kind: BlockKind,
        text: str,
        pieces: tuple[AnswerToken, ...],
        writer: BlockWriter | None,
    ) -> bytes:
        block, told = self._open, b""
        if not text and not pieces:
            return told
        if block is None or block.kind != kind:
            block, told = self._begin(kind, writer)
        return told + self._extend(block, text, pieces, writer)

    def _begin(
        self, kind: BlockKind, writer: BlockWriter | None, id: str = "", name: str = ""
    ) -> tuple[AnswerBlock, bytes]:
        told = self.close(writer)
        self._open = block = AnswerBlock(kind, len(self.all), id, name)
        self.all.append(block)
        return block, told + writer.opened(block) if writer else told

    def _extend(
        self,
        block: AnswerBlock,
        text: str,
        pieces: tuple[AnswerToken, ...],
        writer: BlockWriter | None,
    ) -> bytes:
        block.parts.append(text)
        block.pieces.extend(pieces)
        return writer.extended(block, text, pieces) if writer else b""


async def collected(events: AsyncIterator[Event]) -> tuple[list[AnswerBlock], Finished]:
    """Collect a whole answer. Raises the ApiError that the events raise."""
    blocks = Blocks()
    async with closing(events):
        async for event in events:
            if isinstance(event, Finished):
                return blocks.all, event
            blocks.add(event)
    raise RuntimeError("the events of an answer ended without Finished")
