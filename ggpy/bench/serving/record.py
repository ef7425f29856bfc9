"""The answer to one request: when each part of its text came, and how it ended.

Every read has a time. JSON is decoded until the text begins, and after that only if an event has
more than text, so that hundreds of streams cost the client little. Nothing here opens a connection.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

from .events import EventReader
from .http1 import ResponseReader
from .requests import LoadRequest

OK, CUT, UNFINISHED = "ok", "cut off", "unfinished"
ENDED = (OK, CUT, UNFINISHED)  # outcomes that are no failures
DONE = b"[DONE]"
LONGEST_ERROR = 64 << 10  # bytes that are kept of the body of an error
TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
# An event without any of these is more text. A quote within text is escaped, so these are keys.
SIGNS = re.compile(rb'":\s*""|"finish_reason":\s*"|"error":|"usage":\s*\{')


class StreamRecord:
    """The answer to a request. Times are seconds of one clock.

    outcome: OK, CUT, UNFINISHED, or the kind of failure. arrivals: times of reads with text.
    counts: events with text in each of these reads. n_prompt, n_cached, n_output: tokens by the
    server's usage, None if it has none.
    """

    __slots__ = (
        *("request", "start", "end", "outcome", "detail", "arrivals", "counts", "n_events"),
        *("n_prompt", "n_cached", "n_output", "finish", "has_retry_after", "kept", "is_kept"),
        *("_events", "_error", "_is_done"),
    )

    def __init__(self, request: LoadRequest, start: float, is_kept: bool = False) -> None:
        self.request, self.start, self.end = request, start, start
        self.outcome, self.detail = UNFINISHED, ""
        self.arrivals, self.counts = array("d"), array("I")
        self.n_events = 0
        self.n_prompt: int | None = None
        self.n_cached: int | None = None
        self.n_output: int | None = None
        self.finish = ""
        self.has_retry_after = False
        self.is_kept, self.kept = is_kept, []  # type: ignore[var-annotated]
        self._events, self._error, self._is_done = EventReader(), b"", False

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer: the server's count, else one for each event."""
        return self.n_events if self.n_output is None else self.n_output

    @property
    def is_failed(self) -> bool:
        return self.outcome not in ENDED

    def receive(self, response: ResponseReader, body: bytes, now: float) -> bool:
        """Takes a part of the body that came at `now`; returns False to cut off the request."""
        self.end = now
        if response.status != 200:
            self._error = (self._error + body)[:LONGEST_ERROR]
            return True
        self._take(self._events.feed(body), now)
        cut = self.request.cut_at
        return cut is None or self._is_done or self.n_events < cut

    def _take(self, events: list[bytes], now: float) -> None:
        n = sum(map(self._has_text, events))
        if n:
            self.arrivals.append(now)
            self.counts.append(n)
            self.n_events += n

    def _has_text(self, event: bytes) -> bool:
        """Whether an event has text; records usage, errors and the reason of the end."""
        if event == DONE:
            self._is_done = True
            return False
        if self.is_kept:
            self.kept.append(event)
        if self.n_events and not SIGNS.search(event):
            return True
        try:
            return self._read(json.loads(event))
        except (ValueError, AttributeError, TypeError, LookupError):
            self._fail("malformed event", repr(event[:200]))
            return False

    def _read(self, found: dict[str, Any]) -> bool:
        if found.get("error"):
            self._fail("error in stream", message_of(found))
        usage = found.get("usage")
        if usage:
            self.n_prompt, self.n_output = usage.get("prompt_tokens"), usage["completion_tokens"]
            self.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = found.get("choices") or []
        for choice in choices:
            self.finish = choice.get("finish_reason") or self.finish
        return any(text_of(choice) for choice in choices)

    def close(self, response: ResponseReader, now: float) -> None:
        """Call it when the response is complete; `end` stays the time of its last part, if any."""
        if self.end == self.start:
            self.end = now
        if response.status != 200:
            self._refused(response)
            return
        self._take(self._events.end(), now)
        if self.outcome == UNFINISHED and (self._is_done or self.finish):
            self.outcome = OK
        elif self.outcome == UNFINISHED:
            kind = response.headers.get("content-type", "no type")
            self._fail("no end of stream", f"{self.n_events} events with text, {kind}")

    def fail(self, kind: str, detail: str, now: float) -> None:
        """Call it when the request failed, or was cut off, at `now`."""
        self.end = now
        if not self.is_failed:
            self._fail(kind, detail)

    def _fail(self, kind: str, detail: str) -> None:
        self.outcome, self.detail = kind, detail

    def _refused(self, response: ResponseReader) -> None:
        try:
            said = message_of(json.loads(self._error))
        except (ValueError, AttributeError):
            said = self._error[:200].decode(errors="replace")
        self.has_retry_after = "retry-after" in response.headers
        self._fail(f"HTTP {response.status}", said)


def text_of(choice: dict[str, Any]) -> Any:
    """The text, reasoning or tool calls that a choice adds to the answer; falsy if nothing."""
    delta = choice.get("delta") or {}
    return choice.get("text") or next((delta[name] for name in TEXTS if delta.get(name)), None)


def message_of(found: dict[str, Any]) -> str:
    """The message of an error object."""
    error = found.get("error", found)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def answer_of(record: StreamRecord) -> str:
    """The text of a kept answer, without its reasoning and its tool calls."""
    parts = []
    for event in record.kept:
        for choice in json.loads(event).get("choices") or []:
            parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(parts)
