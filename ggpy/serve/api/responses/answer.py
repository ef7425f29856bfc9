"""OpenAI's Responses API: the response object of an answer, whole or as a stream of typed events.

Bodies are read in `request`. Nothing is stored: the identifiers mean nothing later.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from ...errors import ApiError
from ...events import AnswerToken, Event, Finished, PromptProgress, Usage
from ..blocks import AnswerBlock, Blocks, collected
from ..chat import token_logprob
from ..sse import dumps, framed, written
from ..timings import progress_of, timings_of
from .request import sealed

ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
UNSAID = ("namespaces", "sealed")  # of what a call repeats
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded", 503: "rate_limit_exceeded"}


async def response(
    events: AsyncIterator[Event], model: str, echo: Mapping[str, Any]
) -> dict[str, Any]:
    """The response object of a whole answer. echo: of the ApiCall. Raises what the events raise."""
    shape = ResponseShape(model, echo)
    blocks, end = await collected(events)
    return shape.ended(blocks, end)


def stream(
    events: AsyncIterator[Event],
    model: str,
    echo: Mapping[str, Any],
    so_far: Callable[[], Finished] | None = None,
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of an answer. echo: of the ApiCall. so_far: what the answer has cost
    until now, if llama.cpp's timings are wanted.
    """
    return written(events, ResponseWriter(model, echo, so_far))


def token_count(n: int) -> dict[str, Any]:
    """The answer of input_tokens."""
    return {"object": "response.input_tokens", "input_tokens": n}


class ResponseShape:
    """The JSON objects of one response: itself, its items and their parts."""

    def __init__(self, model: str, echo: Mapping[str, Any]) -> None:
        self._id = f"resp_{uuid4().hex}"
        self._item_ids: dict[int, str] = {}
        self._sealed = bool(echo.get("sealed"))
        self._namespaces: Mapping[str, tuple[str, str]] = echo.get("namespaces", {})
        self._fields: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **{name: value for name, value in echo.items() if name not in UNSAID},
        }

    def at(self, status: str, output: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """The response object in some status."""
        unset = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, "status": status, "output": list(output), **unset, **more}

    def ended(self, blocks: Sequence[AnswerBlock], end: Finished) -> dict[str, Any]:
        """The response object of a finished answer."""
        cut = end.reason == "length"
        last = len(blocks) - 1
        output = [self.item(b, status(cut and b.index == last), whole=True) for b in blocks]
        why = {"reason": "max_output_tokens"} if cut else None
        return self.at(status(cut), output, incomplete_details=why, usage=_usage(end.usage))

    def failed(self, blocks: Sequence[AnswerBlock], error: ApiError) -> dict[str, Any]:
        """The response object of an answer that an error has ended."""
        output = [self.item(block, "incomplete", whole=True) for block in blocks]
        told = {"code": error_code(error), "message": error.message}
        return self.at("failed", output, error=told)

    def item_id(self, block: AnswerBlock) -> str:
        """The identifier of the item that a block is."""
        if block.index not in self._item_ids:
            self._item_ids[block.index] = f"{ID_PREFIXES[block.kind]}_{uuid4().hex}"
        return self._item_ids[block.index]

    def item(self, block: AnswerBlock, status: str, whole: bool) -> dict[str, Any]:
        """The output item of a block: as it is, or without content as when it begins."""
        named = {"id": self.item_id(block), "status": status}
        if block.kind == "call":
            arguments = block.text if whole else ""
            call = {"call_id": block.id, **self.called(block), "arguments": arguments}
            return {**named, "type": "function_call", **call}
        content = [self.part(block, whole=True)] if whole else []
        if block.kind == "text":
            return {**named, "type": "message", "role": "assistant", "content": content}
        kept = sealed(block.text) if whole and self._sealed else None
        hidden = {"encrypted_content": kept} if kept else {}
        return {**named, "type": "reasoning", "summary": [], "content": content, **hidden}

    def called(self, block: AnswerBlock) -> dict[str, str]:
        """The name of the function that a block calls, and its namespace if it has one."""
        space, name = self._namespaces.get(block.name, ("", block.name))
        return {"namespace": space, "name": name} if space else {"name": name}

    def part(self, block: AnswerBlock, whole: bool) -> dict[str, Any]:
        """The only part of a message or of reasoning."""
        text = block.text if whole else ""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = _logprobs(block.pieces) if whole else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseWriter:
    """Writes an answer as typed events, numbered from 0. so_far: as of `stream`."""

    def __init__(
        self,
        model: str,
        echo: Mapping[str, Any],
        so_far: Callable[[], Finished] | None = None,
    ) -> None:
        self._so_far = so_far
        self._shape, self._blocks, self._number = ResponseShape(model, echo), Blocks(), 0
        self._end: Finished | None = None

    def start(self) -> bytes:
        """response.created and response.in_progress."""
        begun = self._shape.at("in_progress")
        created = self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def write(self, happened: Event) -> bytes:
        """What an event becomes."""
        if isinstance(happened, PromptProgress):
            told = progress_of(happened, self._so_far is not None)
            begun = self._shape.at("in_progress")
            return self._event("response.in_progress", response=begun, **told)
        if not isinstance(happened, Finished):
            return self._blocks.add(happened, self)
        self._end = happened
        closed = self._blocks.close(self)
        ended = self._shape.ended(self._blocks.all, happened)
        timings = {"timings": timings_of(happened)} if self._so_far else {}
        return closed + self._event(f"response.{ended['status']}", response=ended, **timings)

    def fail(self, error: ApiError) -> bytes:
        """An error event, then response.failed."""
        why = {"code": error_code(error), "message": error.message, "param": error.param}
        failed = self._shape.failed(self._blocks.all, error)
        return self._event("error", **why) + self._event("response.failed", response=failed)

    def opened(self, block: AnswerBlock) -> bytes:
        """output_item.added, and content_part.added where the item has a part."""
        item = self._shape.item(block, "in_progress", whole=False)
        told = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return told
        part = self._shape.part(block, whole=False)
        return told + self._part_event("response.content_part.added", block, part=part)

    def extended(self, block: AnswerBlock, text: str, pieces: tuple[AnswerToken, ...]) -> bytes:
        """A delta, written out because there is one for each token."""
        name, number = DELTAS[block.kind], self._next_number()
        where = "" if block.kind == "call" else '"content_index":0,'
        scored = dumps(_logprobs(pieces)) if pieces else "[]"
        more = f',"logprobs":{scored}' if block.kind == "text" else ""
        if self._so_far is not None:
            more += f',"timings":{dumps(timings_of(self._so_far()))}'
        return framed(
            name,
            f'{{"type":"{name}","sequence_number":{number},"output_index":{block.index},{where}'
            f'"item_id":"{self._shape.item_id(block)}","delta":{json.dumps(text)}{more}}}',
        )

    def closed(self, block: AnswerBlock) -> bytes:
        """The events that repeat a finished block: its text, its part, its item."""
        cut = self._end is not None and self._end.reason == "length"
        item = self._shape.item(block, status(cut), whole=True)
        told = self._contents_done(block)
        return told + self._event("response.output_item.done", output_index=block.index, item=item)

    def _contents_done(self, block: AnswerBlock) -> bytes:
        if block.kind == "call":
            where = {"output_index": block.index, "item_id": self._shape.item_id(block)}
            call = {"name": self._shape.called(block)["name"], "arguments": block.text}
            return self._event("response.function_call_arguments.done", **where, **call)
        part = self._shape.part(block, whole=True)
        if block.kind == "text":
            texts = {"text": part["text"], "logprobs": part["logprobs"]}
            told = self._part_event("response.output_text.done", block, **texts)
        else:
            told = self._part_event("response.reasoning_text.done", block, text=part["text"])
        return told + self._part_event("response.content_part.done", block, part=part)

    def _part_event(self, name: str, block: AnswerBlock, /, **data: Any) -> bytes:
        where = {"output_index": block.index, "content_index": 0}
        return self._event(name, **where, item_id=self._shape.item_id(block), **data)

    def _event(self, name: str, /, **data: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._next_number(), **data}
        return framed(name, dumps(numbered))

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


def status(cut: bool) -> str:
    """The status of what has ended: whether max_tokens cut it off."""
    return "incomplete" if cut else "completed"


def error_code(error: ApiError) -> str:
    """The code of an error inside a response, one of OpenAI's unless the error has its own."""
    return error.code or ERROR_CODES.get(error.status, "server_error")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_generated,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_generated,
    }


def _logprobs(pieces: Sequence[AnswerToken]) -> list[dict[str, Any]]:
    """Log probabilities of tokens, each with the tokens that were most probable."""
    return [
        {**token_logprob(p), "top_logprobs": [token_logprob(t) for t in p.best]} for p in pieces
    ]
