"""OpenAI's text completions: reads requests, writes answers.

Nothing here knows HTTP or how an answer is made.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sampling import SamplingParams
from ...tokenizer import Tokenizer
from ..errors import ApiError, openai_error
from ..events import AnswerOptions, AnswerToken, Event, Finished, PromptProgress, TextDelta
from ..fields import Fields
from ..http.sse import DONE
from .chat import (
    MAX_N,
    ChoiceText,
    More,
    head_of,
    nothing_more,
    sse,
    token_logprobs,
    wants_usage,
)
from .options import MAX_PROBS, MAX_TOP_LOGPROBS, answer_options
from .prompts import Prompt, prompt_of, read_prompts
from .timings import progress_of, timings_of, usage_of

MAX_PROMPTS = 256
DEFAULT_TOKENS = 16  # OpenAI's, for /v1/completions


@dataclass(frozen=True)
class CompletionCall:
    """A request to continue prompts, and how the answer is wanted. probs: log probabilities have
    llama.cpp's form, because n_probs asked for them.
    """

    prompts: list[Prompt]
    options: AnswerOptions
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    probs: bool = False


def read_completion(
    body: Fields, tokenizer: Tokenizer, defaults: SamplingParams, max_tokens: int | None
) -> CompletionCall:
    """The request of a body; ApiError 400 names the field that is wrong."""
    options = answer_options(body, tokenizer, defaults, max_tokens)
    top = body.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
    probs = None if top is not None else body.integer("n_probs", None, 0, MAX_PROBS) or None
    if body.text("suffix"):
        raise ApiError(400, "suffix is not supported here: use /infill", param="suffix")
    n = body.integer("n", 1, 1, MAX_N) or 1
    best_of = body.integer("best_of", n, 1, MAX_N)
    if best_of != n:
        raise ApiError(400, f"best_of is {best_of}: it must be n, which is {n}", param="best_of")
    echo = body.flag("echo", False)
    if echo and (top is not None or probs is not None):
        told = "echo with logprobs is not supported: a prompt has no log probabilities here"
        raise ApiError(400, told, param="echo")
    return CompletionCall(
        prompts=prompts_of(body, tokenizer),
        options=replace(options, top_logprobs=probs or top),
        n=n,
        echo=echo,
        stream=body.flag("stream", False),
        include_usage=wants_usage(body),
        probs=probs is not None,
    )


def prompts_of(body: Fields, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a body; ApiError 400. Texts are not encoded: they may be long."""
    prompts = [prompt_of(*entry) for entry in read_prompts(body, "prompt", MAX_PROMPTS)]
    n, lists = tokenizer.n_vocab, [p for p in prompts if not isinstance(p, str)]
    if not all(0 <= part < n for p in lists for part in p if not isinstance(part, str)):
        told = f"prompt has ids that are not in the vocabulary: they go from 0 to {n - 1}"
        raise ApiError(400, told, param="prompt")
    return prompts


async def whole_completion(
    events: AsyncIterator[tuple[int, Event]],
    call: CompletionCall,
    id: str,
    model: str,
    said: Said,
    more: More = nothing_more,
) -> dict[str, Any]:
    """The answer as one object. said: what `echo` repeats."""
    choices = [ChoiceText() for _ in range(call.n * len(call.prompts))]
    async for i, event in events:
        choices[i].add(event)
    ends = [c.end for c in choices if c.end is not None]
    return {
        **head_of(id, "text_completion", model),
        "choices": [
            {
                "text": said.before(i) + c.text,
                "index": i,
                "logprobs": _logprobs(c.pieces, call),
                "finish_reason": c.end.reason if c.end else "stop",
            }
            for i, c in enumerate(choices)
        ],
        "usage": _usage(ends, call),
        "timings": timings_of(ends[0]),
        **more(0, ends[0]),
    }


class Said:
    """The prompts of a call, as `echo` repeats them before each choice. ids: of each prompt."""

    def __init__(
        self, call: CompletionCall, tokenizer: Tokenizer, ids: Sequence[Sequence[int]]
    ) -> None:
        self._texts = [""] * len(call.prompts)
        self._n = call.n
        if call.echo:
            self._texts = [
                p if isinstance(p, str) else tokenizer.decode(of_prompt)
                for p, of_prompt in zip(call.prompts, ids, strict=True)
            ]

    def before(self, i: int) -> str:
        """What stands before choice i."""
        return self._texts[i // self._n]


async def completion_chunks(
    events: AsyncIterator[tuple[int, Event]],
    call: CompletionCall,
    id: str,
    model: str,
    said: Said,
    more: More = nothing_more,
) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    base = head_of(id, "text_completion", model)
    head = b"data: " + json.dumps(base)[:-1].encode() + b', "choices": [{"text": '

    def chunk(
        i: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any
    ) -> bytes:
        rest = {"index": i, "logprobs": logprobs, "finish_reason": reason}
        return sse({**base, "choices": [{"text": text, **rest}], **more})

    def plain(i: int, text: str) -> bytes:  # the usual chunk, of which little is new
        tail = b', "index": %d, "logprobs": null, "finish_reason": null}]}\n\n' % i
        return head + json.dumps(text).encode() + tail

    ends: list[Finished] = []
    n_said = [0] * (call.n * len(call.prompts))  # characters of each choice
    try:
        for i in range(len(n_said)):
            if said.before(i):
                yield chunk(i, said.before(i))
        async for i, event in events:
            if isinstance(event, TextDelta) and not event.pieces:
                yield plain(i, event.text)
            elif isinstance(event, TextDelta):
                yield chunk(i, event.text, _logprobs(event.pieces, call, n_said[i]))
                n_said[i] += len(event.text)
            elif isinstance(event, PromptProgress):
                yield chunk(i, "", **progress_of(event))
            elif isinstance(event, Finished):
                ends.append(event)
                timings = {} if call.include_usage else {"timings": timings_of(event)}
                yield chunk(i, "", reason=event.reason, **timings, **more(i, event))
        if call.include_usage:
            last = {"usage": _usage(ends, call), "timings": timings_of(ends[0])}
            yield sse({**base, "choices": [], **last})
    except ApiError as error:
        yield sse(openai_error(error))
        return
    yield DONE


def _usage(ends: Sequence[Finished], call: CompletionCall) -> dict[str, Any]:
    """Each prompt counts once."""
    usage = usage_of(ends)
    n_prompt = sum(end.usage.n_prompt for end in ends) // call.n
    usage["prompt_tokens"] = n_prompt
    usage["total_tokens"] = n_prompt + usage["completion_tokens"]
    return usage


def _logprobs(
    pieces: Sequence[AnswerToken], call: CompletionCall, at: int = 0
) -> dict[str, Any] | None:
    """OpenAI's older form: lists of the same length. at: characters of the choice before them."""
    if call.options.top_logprobs is None:
        return None
    if call.probs:
        return {"content": token_logprobs(pieces, call.options.post_sampling)}
    offsets = []
    for piece in pieces:
        offsets.append(at)
        at += piece.n_chars
    return {
        "tokens": [p.text for p in pieces],
        "token_logprobs": [p.logprob for p in pieces],
        "top_logprobs": [{t.text: t.logprob for t in p.best} for p in pieces],
        "text_offset": offsets,
    }
