"""OpenAI's chat completions, with llama.cpp's additions: reads requests, writes answers.

Nothing here knows HTTP or how an answer is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import exp
from typing import Any

from ...sampling import SamplingParams
from ...tokenizer import Tokenizer
from ..errors import ApiError, openai_error
from ..events import (
    AnswerToken,
    CallDelta,
    CallStart,
    ChatRequest,
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
)
from ..fields import Fields
from ..http.sse import DONE
from .messages import read_messages, read_tool_choice, read_tools
from .options import MAX_PROBS, MAX_TOP_LOGPROBS, answer_options
from .reading import reasoning_limits, refuse
from .timings import progress_of, timings_of, usage_of

MAX_N = 64
More = Callable[[int, Finished], Mapping[str, Any]]  # what answer i has besides, at its end
FINGERPRINT = "ggpy"
OLDER_NAMES = {"tools": "functions", "tool_choice": "function_call"}
LEAST_LOGPROB = -9999.0  # OpenAI's figure for a probability of 0, which JSON has no number for


@dataclass(frozen=True)
class ChatCall:
    """A chat request, and how its answer is wanted. functions: in OpenAI's older form, in which an
    answer has one function_call in place of tool_calls.
    """

    request: ChatRequest
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    functions: bool = False


def read_chat(
    body: Fields, tokenizer: Tokenizer, defaults: SamplingParams, max_tokens: int | None
) -> ChatCall:
    """The request of a body; ApiError 400 names the field that is wrong."""
    options = answer_options(body, tokenizer, defaults, max_tokens)
    options = replace(options, top_logprobs=_top_logprobs(body))
    choice, tools = read_tool_choice(body, read_tools(body))
    begins, continues = body.raw("add_generation_prompt"), body.raw("continue_final_message")
    if begins is True and continues is True:
        refuse(body, "continue_final_message", "add_generation_prompt is true, too: give one")
    functions = "functions" in body
    request = ChatRequest(
        messages=read_messages(body),
        options=options,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.flag("parallel_tool_calls", True) and not functions,
        template_variables=_variables(body),
        reasoning=body.text("reasoning_format", "auto") != "none",
        **reasoning_limits(body),
        reasoning_control=body.flag("reasoning_control", False),
        continues=body.flag("continue_final_message", True),
        generation_prompt=body.flag("add_generation_prompt", True),
    )
    return ChatCall(
        request,
        n=body.integer("n", 1, 1, MAX_N) or 1,
        stream=body.flag("stream", False),
        include_usage=wants_usage(body),
        timings_per_token=body.flag("timings_per_token", False),
        functions=functions,
    )


@contextmanager
def named_as_given(call: ChatCall) -> Iterator[None]:
    """Errors name the fields of functions, if a body had those and not tools."""
    try:
        yield
    except ApiError as error:
        if call.functions and error.param is not None:
            error.param = OLDER_NAMES.get(error.param, error.param)
        raise


def wants_usage(body: Fields) -> bool:
    """Whether a stream ends with a chunk of usage."""
    asked = body.object("stream_options")
    return asked is not None and asked.flag("include_usage", False)


def _variables(body: Fields) -> dict[str, Any]:
    """Variables of the chat template."""
    given = body.object("chat_template_kwargs")
    variables = dict(given.values) if given is not None else {}
    effort = body.text("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def _top_logprobs(body: Fields) -> int | None:
    if not body.flag("logprobs", False):
        if "top_logprobs" in body:
            raise ApiError(
                400, "top_logprobs needs logprobs: set logprobs to true", param="logprobs"
            )
        return body.integer("n_probs", None, 0, MAX_PROBS) or None
    return body.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)


# Answers


@dataclass
class ChoiceText:
    """What an answer has so far."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[AnswerToken] = field(default_factory=list)
    end: Finished | None = None

    def add(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, TextDelta):
            self.text += event.text
            self.pieces += event.pieces
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            self.calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, CallDelta):
            self.calls[event.index]["function"]["arguments"] += event.arguments
        elif isinstance(event, Finished):
            self.end = event

    def message(self, functions: bool = False) -> dict[str, Any]:
        """The message of a choice. functions: as of the ChatCall."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            if functions:
                message["function_call"] = self.calls[0]["function"]
            else:
                message["tool_calls"] = self.calls
        return message


def nothing_more(i: int, end: Finished) -> Mapping[str, Any]:
    """The usual `More`."""
    return {}


async def whole_chat(
    events: AsyncIterator[tuple[int, Event]],
    call: ChatCall,
    id: str,
    model: str,
    more: More = nothing_more,
) -> dict[str, Any]:
    """The answer as one object."""
    choices = [ChoiceText() for _ in range(call.n)]
    async for i, event in events:
        choices[i].add(event)
    ends = [c.end for c in choices if c.end is not None]
    options = call.request.options

    def logprobs(pieces: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if options.top_logprobs is None:
            return None
        return {"content": token_logprobs(pieces, options.post_sampling)}

    return {
        **head_of(id, "chat.completion", model),
        "choices": [
            {
                "index": i,
                "message": c.message(call.functions),
                "logprobs": logprobs(c.pieces),
                "finish_reason": _reason(c.end, call) if c.end else "stop",
            }
            for i, c in enumerate(choices)
        ],
        "usage": usage_of(ends),
        "timings": timings_of(ends[0]),
        **more(0, ends[0]),
    }


def _reason(end: Finished, call: ChatCall) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "function_call" if call.functions and end.reason == "tool_calls" else end.reason


def head_of(id: str, kind: str, model: str) -> dict[str, Any]:
    """What an answer, or each chunk of one, begins with."""
    head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
    return {**head, "system_fingerprint": FINGERPRINT}


class ChunkWriter:
    """Writes the chunks of a stream. What is equal in all of them is written once."""

    def __init__(self, id: str, model: str) -> None:
        self.base = head_of(id, "chat.completion.chunk", model)
        start = json.dumps(self.base)[:-1].encode()
        self._head = b"data: " + start + b', "choices": [{"index": '

    def text(self, i: int, name: str, text: str) -> bytes:
        """The chunk of a delta that has one text; the usual one."""
        return b'%b%d, "delta": {"%b": %b}, "logprobs": null, "finish_reason": null}]}\n\n' % (
            self._head,
            i,
            name.encode(),
            json.dumps(text).encode(),
        )

    def choice(self, i: int, delta: dict[str, Any], **more: Any) -> bytes:
        """Any chunk of a choice."""
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
        choice.update({k: v for k, v in more.items() if k in choice})
        rest = {k: v for k, v in more.items() if k not in choice}
        return sse({**self.base, "choices": [choice], **rest})


async def chat_chunks(
    events: AsyncIterator[tuple[int, Event]],
    call: ChatCall,
    id: str,
    model: str,
    so_far: Callable[[int], Finished],
    more: More = nothing_more,
) -> AsyncIterator[bytes]:
    """The answer as server-sent events. so_far(i): what answer i has cost until now."""
    writer = ChunkWriter(id, model)
    ends: list[Finished] = []
    post = call.request.options.post_sampling
    for i in range(call.n):
        yield writer.choice(i, {"role": "assistant", "content": None})
    try:
        async for i, event in events:
            if isinstance(event, Finished):
                ends.append(event)
                timings = {} if call.include_usage else {"timings": timings_of(event)}
                rest = {**timings, **more(i, event)}
                yield writer.choice(i, {}, finish_reason=_reason(event, call), **rest)
            elif isinstance(event, PromptProgress):
                yield writer.choice(i, {}, **progress_of(event, call.timings_per_token))
            elif call.timings_per_token:
                now = timings_of(so_far(i))
                delta = _delta(event, call.functions)
                yield writer.choice(i, delta, logprobs=_logprobs(event, post), timings=now)
            elif isinstance(event, TextDelta) and not event.pieces:
                yield writer.text(i, "content", event.text)
            elif isinstance(event, ReasoningDelta):
                yield writer.text(i, "reasoning_content", event.text)
            else:
                delta = _delta(event, call.functions)
                yield writer.choice(i, delta, logprobs=_logprobs(event, post))
        if call.include_usage:
            last = {"choices": [], "usage": usage_of(ends), "timings": timings_of(ends[0])}
            yield sse({**writer.base, **last})
    except ApiError as error:
        yield sse(openai_error(error))
        return
    yield DONE


Delta = TextDelta | ReasoningDelta | CallStart | CallDelta


def _logprobs(event: Delta, post: bool) -> dict[str, Any] | None:
    """The log probabilities of a piece of text, where they were asked for."""
    if isinstance(event, TextDelta) and event.pieces:
        return {"content": token_logprobs(event.pieces, post)}
    return None


def _delta(event: Delta, functions: bool) -> dict[str, Any]:
    """What an event adds to the message. functions: as of the ChatCall."""
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    call: dict[str, Any]
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        if functions:
            return {"function_call": function}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
    elif functions:
        return {"function_call": {"arguments": event.arguments}}
    else:
        call = {"index": event.index, "function": {"arguments": event.arguments}}
    return {"tool_calls": [call]}


def token_logprobs(pieces: Sequence[AnswerToken], post: bool = False) -> list[dict[str, Any]]:
    """OpenAI's logprobs.content of some pieces. post: llama.cpp's probabilities of the draw."""
    if post:
        return [{**drawn(p), "top_probs": [drawn(t) for t in p.best]} for p in pieces]
    return [
        {
            **token_logprob(p),
            "id": p.id,
            "top_logprobs": [{**token_logprob(t), "id": t.id} for t in p.best],
        }
        for p in pieces
    ]


def token_logprob(token: AnswerToken) -> dict[str, Any]:
    """A token and its log probability, which is finite: JSON has no infinity."""
    value = LEAST_LOGPROB if token.logprob is None else max(token.logprob, LEAST_LOGPROB)
    return {"token": token.text, "logprob": value, "bytes": list(token.data)}


def drawn(token: AnswerToken) -> dict[str, Any]:
    """A token and the probability with which the sampler chain draws it, in llama.cpp's form."""
    p = 0.0 if token.logprob is None else exp(token.logprob)
    return {"id": token.id, "token": token.text, "bytes": list(token.data), "prob": p}


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
