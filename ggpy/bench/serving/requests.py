"""The requests of a load test: their bodies, and where each is cut off. Equal seeds give equal
requests.

Bodies are made before anything is measured. Nothing here sends them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .lengths import DEFAULT_INPUT, DEFAULT_OUTPUT, TokenRange
from .words import PromptMaker

Api = Literal["chat", "completions"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
LATEST_CUT = 0.25  # seconds after which a request with cut_at 0 is cut off, at most

# What --random-params draws for about half of the requests each, within every server's bounds.
DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda r: r.choice([0, round(r.uniform(0.1, 1.5), 3)]),
    "top_p": lambda r: round(r.uniform(0.3, 1), 3),
    "top_k": lambda r: r.choice([0, 1, r.randint(2, 200)]),
    "min_p": lambda r: round(r.uniform(0, 0.3), 3),
    "repeat_penalty": lambda r: round(r.uniform(1, 1.5), 3),
    "presence_penalty": lambda r: round(r.uniform(-1, 1), 3),
    "frequency_penalty": lambda r: round(r.uniform(-1, 1), 3),
    "seed": lambda r: r.randrange(1 << 31),
    "stop": lambda r: r.sample(["the", "\n", ".", "ab"], r.randint(1, 2)),
    "logit_bias": lambda r: {str(r.randrange(3, 300)): r.randint(-20, 5)},
}


@dataclass(frozen=True)
class LoadRequest:
    """A request.

    cut_at: the request is cut off after so many events with text; 0: cut_delay seconds after it was
    sent; None: never.
    """

    body: bytes
    n_input: int | None  # wanted tokens of the prompt; None for a prompt from a file
    max_tokens: int
    cut_at: int | None = None
    cut_delay: float = 0.0


@dataclass(frozen=True)
class RequestOptions:
    """What the requests of a test have in common, and how they are drawn."""

    model: str = ""
    api: Api = "chat"
    input_len: TokenRange = DEFAULT_INPUT
    output_len: TokenRange = DEFAULT_OUTPUT
    prompts: Sequence[Mapping[str, Any]] = ()  # from a file, instead of input_len
    n_shared: int = 0  # tokens with which all prompts begin
    seed: int = 0
    temperature: float | None = None
    ignores_eos: bool = False
    schema: Any = None
    abort_share: float = 0.0
    has_random_params: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def requests(options: RequestOptions, n: int, maker: PromptMaker) -> Iterator[LoadRequest]:
    """n requests; ValueError for a prompt of a file that the endpoint cannot take."""
    texts, draws = random.Random(options.seed), random.Random(options.seed + 1)
    shared = maker.text(options.n_shared, texts)
    for i in range(n):
        if options.prompts:
            row = dict(options.prompts[i % len(options.prompts)])
            n_input = None
        else:
            n_input = options.input_len.draw(texts)
            row = {"prompt": f"{shared} {maker.text(n_input, texts)}".strip()}
        row.setdefault("max_tokens", options.output_len.draw(texts))
        asked = _asked(options, row) | dict(options.extra)
        most = int(asked["max_tokens"])
        cut_at, delay = _cut(options, most, draws)
        drawn = _drawn(draws) if options.has_random_params else {}
        if cut_at is not None:
            drawn.pop("stop", None)  # it could end the answer earlier
        data = json.dumps(_common(options) | drawn | asked, ensure_ascii=False).encode()
        yield LoadRequest(data, n_input, most, cut_at, delay)


def _common(options: RequestOptions) -> dict[str, Any]:
    """The fields that all requests have."""
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if options.model:
        body["model"] = options.model
    if options.temperature is not None:
        body["temperature"] = options.temperature
    if options.schema is not None and options.api == "chat":
        schema = {"name": "answer", "strict": True, "schema": options.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif options.schema is not None:
        body["json_schema"] = options.schema
    return body


def _asked(options: RequestOptions, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one prompt. Other fields of a file are sent as they are."""
    body = dict(row)
    if options.ignores_eos:  # llama.cpp's name and vLLM's
        body |= {"ignore_eos": True, "min_tokens": row["max_tokens"]}
    if options.api == "chat" and "prompt" in body:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if options.api == "completions" and "messages" in body:
        raise ValueError('a prompt with "messages" needs --endpoint chat')
    return body


def _drawn(draws: random.Random) -> dict[str, Any]:
    """Random sampling parameters."""
    return {name: draw(draws) for name, draw in DRAWN.items() if draws.random() < 0.5}


def _cut(options: RequestOptions, most: int, draws: random.Random) -> tuple[int | None, float]:
    """(cut_at, cut_delay) of a request, see LoadRequest; most: tokens of its answer.

    It is cut off in the first half, because an answer may have fewer events than tokens.
    """
    if draws.random() >= options.abort_share:
        return None, 0.0
    return draws.randrange((most + 1) // 2), draws.uniform(0, LATEST_CUT)
