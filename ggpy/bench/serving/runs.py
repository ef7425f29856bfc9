"""A whole load test: asks for the model's name, counts the tokens of words with the server's
tokenizer, warms up, and measures.

Nothing here prints a result or reads options.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import clock
from .client import LoadClient, LoadPlan, LoadRun, allow_connections
from .connection import ConnectionPool
from .http1 import LoadTarget, MalformedResponse
from .record import message_of
from .requests import RequestOptions, requests
from .summary import Document
from .words import PromptMaker, measured

LOOK = 30.0  # seconds in which a server must answer a small request


class TokenizerMissing(RuntimeError):
    """The server has no /tokenize in llama.cpp's form."""


@dataclass(frozen=True)
class LoadTest:
    """A measurement: n requests after n_warmup requests that do not count."""

    target: LoadTarget
    plan: LoadPlan
    options: RequestOptions
    n: int
    n_warmup: int = 0
    say: Callable[[str], None] = field(default=lambda message: None)
    step: Callable[[int], None] = field(default=lambda n: None)


def run(test: LoadTest) -> tuple[LoadRun, Document]:
    """(the records, the part of the document that describes the test). ValueError, OSError or
    RuntimeError before the measurement.
    """
    return clock.run(lambda stamp: _run(test, stamp))


async def _run(test: LoadTest, stamp: clock.Clock) -> tuple[LoadRun, Document]:
    streams = test.plan.concurrency if test.plan.rate is None else test.n
    allow_connections(streams)
    pool = ConnectionPool(test.target, stamp)
    try:
        model = test.options.model or await first_model(pool)
        maker = PromptMaker()
        if not test.options.prompts:
            maker = await prompt_maker(pool, test.say)
        options = replace(test.options, model=model)
        found = list(requests(options, test.n_warmup + test.n, maker))
        about = {"model": model, "prompts": prompts_of(options, maker)}
        warmup, counted = found[: test.n_warmup], found[test.n_warmup :]
        if warmup:
            test.say(f"warming up with {len(warmup)} requests")
            warm = LoadClient(pool, replace(test.plan, rate=None, fails_fast=True))
            done = await warm.measure([replace(request, cut_at=None) for request in warmup])
            _check_warmup(done)
            if done.signal:
                return LoadRun(signal=done.signal), about
        gc.collect()
        gc.freeze()  # a collection during the test leaves the bodies alone
        return await LoadClient(pool, test.plan, test.step).measure(counted), about
    finally:
        gc.unfreeze()
        pool.close()


def _check_warmup(done: LoadRun) -> None:
    """RuntimeError where the warm-up failed: the test would, too."""
    for record in done.records:
        if record.is_failed:
            raise RuntimeError(f"the warm-up failed: {record.outcome}: {record.detail}")


async def first_model(pool: ConnectionPool) -> str:
    """The name of the first model that the server lists; OSError, RuntimeError."""
    found = await ask(pool, "GET", "/v1/models")
    models = found.get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise RuntimeError("the server lists no models at /v1/models: name one with --model")
    return str(models[0].get("id", ""))


async def prompt_maker(pool: ConnectionPool, say: Callable[[str], None]) -> PromptMaker:
    """A maker that counts by the server's tokenizer; a word counts as a token if it has none."""

    async def count(text: str) -> int:
        try:
            found = await ask(pool, "POST", "/tokenize", {"content": text})
        except RuntimeError as error:
            raise TokenizerMissing(str(error)) from None
        tokens = found.get("tokens")
        if not isinstance(tokens, list):
            raise TokenizerMissing("the answer of /tokenize has no tokens")
        return len(tokens)

    try:
        await count("a")
        return await measured(count)
    except TokenizerMissing as error:
        say(f"a word counts as a token, because the server does not count them: {error}")
        return PromptMaker()


async def ask(
    pool: ConnectionPool, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object that answers a small request; OSError, or RuntimeError for another answer."""
    data = b"" if body is None else json.dumps(body).encode()
    try:
        status, answer = await asyncio.wait_for(pool.fetch(method, path, data), LOOK)
    except (asyncio.TimeoutError, TimeoutError):
        raise RuntimeError(f"{method} {path}: no answer within {LOOK:g} s") from None
    except MalformedResponse as error:
        raise RuntimeError(f"{method} {path}: no HTTP: {error}") from None
    except OSError as error:
        where = f"{pool.target.host}:{pool.target.port}"
        raise ConnectionError(f"no server at {where}: {error}: start it, or give --url") from None
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if status != 200 or not isinstance(found, dict):
        said = message_of(found) if isinstance(found, dict) else repr(answer[:80])
        raise RuntimeError(f"{method} {path}: HTTP {status}: {said}")
    return found


def prompts_of(options: RequestOptions, maker: PromptMaker) -> str:
    """A description of the prompts, for the document."""
    if options.prompts:
        return f"{len(options.prompts)} of a file"
    how = "by the server's tokenizer" if maker.is_measured else "of a word each, an estimate"
    shared = f" after {options.n_shared} that all share" if options.n_shared else ""
    return f"{options.input_len} tokens{shared}, {how}"
