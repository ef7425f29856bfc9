"""Anthropic's Messages API: the message of an answer, whole or as a stream of events.

Bodies are read in `request`. Thinking blocks carry a signature because clients send only
signed ones back; nobody checks it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ...errors import ApiError, anthropic_error
from ...events import AnswerToken, Event, Finished, Usage
from ..blocks import AnswerBlock, Blocks, collected
from ..sse import dumps, event, framed, written

PING = b'event: ping\ndata: {"type": "ping"}\n\n'  # says that an answer still goes on
SIGNATURE = "unsigned"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {  # kind of a block -> type and field of its delta
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def message(events: AsyncIterator[Event], model: str) -> dict[str, Any]:
    """The message of a whole answer. Raises the ApiError that the events raise."""
    blocks, end = await collected(events)
    content = [_content(block) for block in blocks]
    return {**_message(model, end.usage), "content": content, **_stop(end)}


def stream(
    events: AsyncIterator[Event], model: str, usage: Usage | None = None
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of an answer. usage: of the prompt, if it is known at the start."""
    return written(events, MessageWriter(model, usage))


def token_count(n: int) -> dict[str, Any]:
    """The answer of count_tokens."""
    return {"input_tokens": n}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form. A prompt that is too long is told in the words by which Claude
    Code knows that it must shorten the conversation.
    """
    n_prompt, n_ctx = (error.more.get(name) for name in ("n_prompt_tokens", "n_ctx"))
    body = anthropic_error(error)
    if n_prompt is not None and n_ctx is not None:
        told = f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum"
        body["error"]["message"] = f"{told} ({error.message})"
    return body


class MessageWriter:
    """Writes an answer as message_start, the blocks' events, message_delta and message_stop."""

    def __init__(self, model: str, usage: Usage | None = None) -> None:
        self._model, self._usage = model, usage or Usage()
        self._blocks = Blocks()

    def start(self) -> bytes:
        """message_start."""
        started = {**_message(self._model, replace(self._usage, n_generated=0)), "content": []}
        return event("message_start", message={**started, **_stop(None)})

    def write(self, happened: Event) -> bytes:
        """What an event becomes."""
        if not isinstance(happened, Finished):
            return self._blocks.add(happened, self)
        closed = self._blocks.close(self)
        told = event("message_delta", delta=_stop(happened), usage=_usage(happened.usage))
        return closed + told + event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """An error event, which ends the stream."""
        return framed("error", dumps(error_body(error)))

    def opened(self, block: AnswerBlock) -> bytes:
        """content_block_start, with nothing in the block."""
        if block.kind == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
        elif block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            empty = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        return event("content_block_start", index=block.index, content_block=empty)

    def extended(self, block: AnswerBlock, text: str, pieces: tuple[AnswerToken, ...]) -> bytes:
        """content_block_delta, written out because there is one for each token."""
        kind, name = DELTAS[block.kind]
        delta = f'{{"type":"{kind}","{name}":{json.dumps(text)}}}'
        head = f'{{"type":"content_block_delta","index":{block.index},"delta":'
        return framed("content_block_delta", f"{head}{delta}}}")

    def closed(self, block: AnswerBlock) -> bytes:
        """content_block_stop, after the signature of a thinking block."""
        told = event("content_block_stop", index=block.index)
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            return event("content_block_delta", index=block.index, delta=delta) + told
        return told


def _message(model: str, usage: Usage) -> dict[str, Any]:
    id = f"msg_{uuid4().hex}"
    named = {"id": id, "type": "message", "role": "assistant", "model": model}
    return {**named, "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, int]:
    """Tokens as Anthropic counts them: input_tokens are those that no cache had."""
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_generated,
    }


def _stop(end: Finished | None) -> dict[str, str | None]:
    if end is None:
        return {"stop_reason": None, "stop_sequence": None}
    by_text = end.reason == "stop" and end.stop is not None
    reason = "stop_sequence" if by_text else STOP_REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop if by_text else None}


def _content(block: AnswerBlock) -> dict[str, Any]:
    """A block of a whole answer."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    given = _arguments(block.text)
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call. A text that is no JSON object, because max_tokens cut it off, is kept
    under the name that Anthropic's documentation gives to such input.
    """
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": text}
