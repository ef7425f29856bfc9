"""One answer under way: the pieces of its sequence become events.

What is there is handed out at once, so that a client that reads slowly gets fewer and larger
events. Nothing here knows HTTP or the form of any API.
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import accumulate, groupby
from math import inf
from typing import Any

from ...chat_formats.deltas import CallArguments, CallBegin, CallEnd, ReasoningPart, TextPart
from ...runtime.sequence import Piece
from ...sampling import NothingAllowed
from ...tokenizer import Tokenizer
from ..errors import RETRY_AFTER, ApiError
from ..events import (
    AnswerEnd,
    AnswerOptions,
    AnswerTimings,
    AnswerToken,
    CallDelta,
    CallStart,
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from .indentation import Indentation
from .worker import Ticket

LETTERS = string.ascii_letters + string.digits
PROGRESS_SECONDS = 0.1  # between two looks at how much of a prompt is read


class Answering:
    """An asynchronous iterator of events, the last of which is Finished; `cancel` ends it."""

    def __init__(
        self,
        ticket: Ticket,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        parser: Any = None,
        *,
        short_ids: bool = False,
        one_call: bool = False,
    ) -> None:
        """parser: a chat_formats parser; None is plain text. short_ids: calls get ids of nine
        characters, which Mistral's templates demand. one_call: the answer ends where a second call
        begins.
        """
        self._tokenizer = tokenizer
        self.ticket, self._options, self._parser = ticket, options, parser
        self._keeps_tokens = options.tokens or options.top_logprobs is not None
        self._id_length = 9 if short_ids else 24
        self._n_reasoning = 0
        self._calls = False
        self._one_call, self._complete = one_call, False
        least = options.min_indent
        self._indentation = Indentation(least) if least and parser is None else None
        # Tokens of which no event has told yet, each with the text that it came with.
        self._held: list[tuple[AnswerToken, str]] = []
        self._events = self._run()

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.ticket.sequence.n_prompt

    @property
    def prompt_ids(self) -> list[int]:
        """Those tokens."""
        s = self.ticket.sequence
        return s.ids[: s.n_prompt]

    def written(self) -> tuple[list[int], str]:
        """The ids of the answer until now, and their text as the model wrote it, with markers."""
        s = self.ticket.sequence
        ids = s.ids[s.n_prompt :]
        ended = s.finish == "stop" and {*ids[-1:]} & {*self._tokenizer.end_ids}
        pieces = [self._tokenizer.piece(id, special=True) for id in ids]
        text = b"".join(pieces[:-1] if ended else pieces).decode("utf-8", "replace")
        return ids, text[: text.rfind(s.stops.found)] if s.stops.found else text

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    def so_far(self) -> Finished:
        """The last event, if the answer ended now."""
        s = self.ticket.sequence
        reason: AnswerEnd = "stop" if s.finish == "stop" or self._complete else "length"
        if self._indentation is not None and self._indentation.ended:
            reason = "length"
        if self._calls and reason == "stop":
            reason = "tool_calls"
        usage = Usage(s.n_prompt, s.n_reused, s.n_generated, self._n_reasoning)
        begun, admitted, first, now = s.t_begun, s.t_admitted, s.t_first, time.perf_counter()
        admitted = admitted or now
        first = first or now
        timings = AnswerTimings(admitted - begun, first - admitted, now - first)
        return Finished(reason, usage, timings, s.stops.found, s.finish == "context")

    def cancel(self) -> None:
        """End the answer, if it has not ended."""
        self.ticket.cancel()

    async def _run(self) -> AsyncIterator[Event]:
        timer = self._deadline()
        try:
            if self._options.progress:
                async for progress in self._progress():
                    yield progress
            while not self._complete and (pieces := await self._pieces()):
                for event in self._read(pieces):
                    yield event
                if self._is_late(pieces):
                    break
            for event in self._rest():
                yield event
            yield self.so_far()
        finally:
            self.ticket.cancel()
            if timer is not None:
                timer.cancel()

    async def _progress(self) -> AsyncIterator[PromptProgress]:
        """How much of the prompt is read, until there are pieces: first what a cache had, at last
        all of it.
        """
        s, told = self.ticket.sequence, -1
        while not await self.ticket.ready(PROGRESS_SECONDS):
            if s.t_admitted and s.n_reused <= s.n_evaluated < s.n_prompt:
                if told < 0:
                    yield self._read_until(s.n_reused)
                    told = s.n_reused
                if s.n_evaluated > told:
                    yield self._read_until(s.n_evaluated)
                    told = s.n_evaluated
        if s.n_generated:
            if told < 0:
                yield self._read_until(s.n_reused)
            yield self._read_until(s.n_prompt)

    def _read_until(self, n: int) -> PromptProgress:
        s = self.ticket.sequence
        seconds = (s.t_first or time.perf_counter()) - s.t_admitted if n > s.n_reused else 0.0
        return PromptProgress(s.n_prompt, s.n_reused, n, seconds)

    async def _pieces(self) -> list[Piece]:
        try:
            return await self.ticket.pieces()
        except (ValueError, MemoryError) as error:
            biases = self._options.params.logit_bias.values()
            if isinstance(error, NothingAllowed) and -inf in biases:
                told = "logit_bias forbids all tokens that could come next: allow one"
                raise ApiError(400, told, param="logit_bias") from None
            raise ApiError(500, str(error)) from None
        except RuntimeError as error:
            raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None

    def _deadline(self) -> asyncio.TimerHandle | None:
        if self._options.timeout is None:
            return None
        return asyncio.get_running_loop().call_later(self._options.timeout, self.cancel)

    def _is_late(self, pieces: list[Piece]) -> bool:
        """Whether the time of line_timeout is over, and these pieces end a line."""
        limit, first = self._options.line_timeout, self.ticket.sequence.t_first
        if limit is None or time.perf_counter() - first <= limit:
            return False
        return any("\n" in piece.text for piece in pieces)

    # Events

    def _read(self, pieces: list[Piece]) -> Iterable[Event]:
        """The events of some pieces."""
        if self._parser is None:
            text = "".join([piece.text for piece in pieces])
            if self._indentation is not None:
                text = self._indentation.feed(text)
                self._complete = self._indentation.ended
            kept = tuple(map(self._token, pieces)) if self._keeps_tokens else ()
            return (TextDelta(text, kept),) if text or kept else ()
        if self._keeps_tokens:
            return [event for piece in pieces for event in self._read_token(piece)]
        events = [e for piece in pieces for e in self._told(self._parser.feed(piece.text), 1)]
        return events if len(pieces) == 1 else _joined(events)

    def _read_token(self, piece: Piece) -> Iterable[Event]:
        """The events of a piece whose token is wanted, if it becomes text."""
        self._held.append((self._token(piece), piece.text))
        return self._told(self._parser.feed(piece.text), 1)

    def _token(self, piece: Piece) -> AnswerToken:
        """The token of a piece; one that ends the answer has no bytes."""
        data, best = self._tokenizer.piece, piece.top_logprobs
        ended = piece.id in self._tokenizer.end_ids and piece.finish_reason == "stop"
        return AnswerToken(
            piece.id,
            b"" if ended else data(piece.id, special=True),
            piece.logprob,
            len(piece.text),
            tuple(AnswerToken(t.id, data(t.id, special=True), t.logprob) for t in best),
        )

    def _rest(self) -> Iterable[Event]:
        """What the parser held back."""
        if self._parser is None or self._complete:
            return ()
        return self._told(self._parser.finish(), 0)

    def _told(self, deltas: Iterable[Any], n: int) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            self._complete |= self._one_call and isinstance(delta, CallBegin) and self._calls
            if self._complete:
                break
            if isinstance(delta, TextPart):
                events.append(TextDelta(delta.text, self._tokens_of(delta.text)))
            elif isinstance(delta, ReasoningPart):
                events.append(ReasoningDelta(delta.text))
            elif isinstance(delta, CallBegin):
                self._calls = True
                events.append(CallStart(delta.index, self._call_id(), delta.name))
            elif isinstance(delta, CallArguments):
                events.append(CallDelta(delta.index, delta.text))
            else:
                assert isinstance(delta, CallEnd)
        if events and isinstance(events[-1], ReasoningDelta):
            self._n_reasoning += n
        if events and not isinstance(events[-1], TextDelta):
            self._held.clear()
        return events

    def _tokens_of(self, text: str) -> tuple[AnswerToken, ...]:
        """The held tokens with which a text came. Those before it, as markers, became no text."""
        parts = [part for _, part in self._held]
        start = max(0, "".join(parts).rfind(text))
        places = accumulate(map(len, parts), initial=0)
        inside = [
            i
            for i, (part, place) in enumerate(zip(parts, places, strict=False))
            if place < start + len(text) and place + len(part) > start
        ]
        if not inside:
            return ()
        first, end = inside[0], inside[-1] + 1
        while first and not parts[first - 1]:  # a part of the first character
            first -= 1
        found = tuple(token for token, _ in self._held[first:end])
        del self._held[:end]
        return found

    def _call_id(self) -> str:
        letters = "".join(secrets.choice(LETTERS) for _ in range(self._id_length))
        return letters if self._id_length == 9 else f"call_{letters}"


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """The events, which have no tokens; neighbours of one kind as one."""
    for (kind, index), group in groupby(events, lambda e: (type(e), getattr(e, "index", 0))):
        same: list[Any] = list(group)
        if kind is CallStart:
            yield from same
        elif kind is CallDelta:
            yield CallDelta(index, "".join([e.arguments for e in same]))
        else:
            text = "".join([e.text for e in same])
            yield ReasoningDelta(text) if kind is ReasoningDelta else TextDelta(text)
