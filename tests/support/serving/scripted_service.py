"""A service that answers with the events of a script, and the APIs on a port over it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ggpy.sampling import SamplingParams
from ggpy.serve.api import anthropic, embeddings, rerank, responses
from ggpy.serve.errors import ApiError, openai_error
from ggpy.serve.events import (
    AnswerTimings,
    CallDelta,
    CallStart,
    ChatRequest,
    Finished,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from ggpy.serve.fields import Fields
from ggpy.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny" / "llama.gguf"
USAGE = Usage(n_prompt=20, n_cached=8, n_generated=5, n_reasoning=2)
TIMES = AnswerTimings()
END = Finished("stop", USAGE, TIMES)
CUT = Finished("length", USAGE, TIMES)
CALLED = Finished("tool_calls", USAGE, TIMES)
TEXT = (TextDelta("Hel"), TextDelta("lo"), END)
CALLS = (
    ReasoningDelta("Two "),
    ReasoningDelta("cities."),
    TextDelta("I look."),
    CallStart(0, "call_a", "weather"),
    CallDelta(0, '{"city": '),
    CallDelta(0, '"Üsküp"}'),
    CallStart(1, "call_b", "time"),
    CallDelta(1, "{}"),
    CALLED,
)


class ScriptedService:
    """Answers every request with `script`; an exception in it is raised at its place. `pings`:
    whether every piece of a stream is followed by a ping.
    """

    model_name = "tiny"

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_gguf(TINY)
        self.script: tuple[Any, ...] = TEXT
        self.refusal: ApiError | None = None  # raised instead of any answer
        self.requests: list[ChatRequest] = []
        self.n_closed = 0
        self.pings = False
        self.vectors = np.array([[3, 4, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]], np.float32)

    def sampling_defaults(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, min_p=0.1)

    def check_model(self, name: str | None) -> None:
        if name == "unknown":
            raise ApiError(404, "model 'unknown' is not served: use tiny", param="model")

    async def chat(self, request: ChatRequest, client: str) -> Any:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        return self._events()

    async def _events(self) -> Any:
        try:
            for event in self.script:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.n_closed += 1

    async def count_chat_tokens(self, request: ChatRequest) -> int:
        self.requests.append(request)
        return 17

    async def embed(self, inputs: list[Any], client: str) -> list[tuple[Any, int]]:
        return [(v, len(text)) for text, v in zip(inputs, self.vectors, strict=False)]

    async def relevance(
        self, query: str, documents: list[str], client: str
    ) -> list[tuple[float, int]]:
        words = set(query.split())
        return [(len(words & set(d.split())) / len(words), len(d)) for d in documents]


async def fields_of(request: Request) -> Fields:
    return Fields(await request.json())


def app(service: ScriptedService) -> Starlette:
    """The APIs' routes; `service` may change its script between requests."""

    def streamed(chunks: AsyncIterator[bytes], ping: bytes) -> Response:
        async def pinged() -> AsyncIterator[bytes]:
            yield ping
            async for chunk in chunks:
                yield chunk + ping

        told = pinged() if service.pings else chunks
        return StreamingResponse(told, media_type="text/event-stream")

    async def messages(request: Request) -> Response:
        call = anthropic.read(await fields_of(request), service)
        events = await service.chat(call.request, "client")
        if call.stream:
            return streamed(anthropic.stream(events, service.model_name), anthropic.PING)
        return JSONResponse(await anthropic.message(events, service.model_name))

    async def count_tokens(request: Request) -> Response:
        call = anthropic.read(await fields_of(request), service, counting=True)
        return JSONResponse(anthropic.token_count(await service.count_chat_tokens(call.request)))

    async def respond(request: Request) -> Response:
        call = responses.read(await fields_of(request), service)
        events = await service.chat(call.request, "client")
        if call.stream:
            return streamed(responses.stream(events, service.model_name, call.echo), b": ping\n\n")
        return JSONResponse(await responses.response(events, service.model_name, call.echo))

    async def input_tokens(request: Request) -> Response:
        call = responses.read(await fields_of(request), service)
        return JSONResponse(responses.token_count(await service.count_chat_tokens(call.request)))

    async def embed(request: Request) -> Response:
        call = embeddings.read(await fields_of(request), service)
        vectors = await service.embed(call.inputs, "client")
        return JSONResponse(embeddings.answer(vectors, call, service.model_name))

    async def rank(request: Request) -> Response:
        call = rerank.read(await fields_of(request), service)
        scores = await service.relevance(call.query, call.documents, "client")
        return JSONResponse(rerank.answer(scores, call, service.model_name))

    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        messages = request.url.path.startswith("/v1/messages")
        body = anthropic.error_body(error) if messages else openai_error(error)
        return JSONResponse(body, error.status, error.headers)

    routes = {
        "/v1/messages": messages,
        "/v1/messages/count_tokens": count_tokens,
        "/v1/responses": respond,
        "/v1/responses/input_tokens": input_tokens,
        "/v1/embeddings": embed,
        "/v1/rerank": rank,
    }
    listed = [Route(path, endpoint, methods=["POST"]) for path, endpoint in routes.items()]
    return Starlette(routes=listed, exception_handlers={ApiError: told})


@contextmanager
def serving(service: ScriptedService) -> Iterator[str]:
    """The address of a server on a port of its own."""
    server = uvicorn.Server(uvicorn.Config(app(service), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def sse(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of server-sent events; comments are left out."""
    found = []
    for frame in body.decode().split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def replaced(body: Any, path: str, value: Any) -> Any:
    """The body with another value at a path such as "messages[0].role"."""
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    at = body
    for name in parents:
        at = at[int(name) if name.isdigit() else name]
    at[int(last) if last.isdigit() else last] = value
    return body


def paths_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of everything inside a body."""
    if isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else name, v) for name, v in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    else:
        inner = []
    for found, v in inner:
        yield found
        yield from paths_of(v, found)


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    1e300,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"": 1},
)


def odd_bodies(full: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """(path, body with another value there) for everything in a body and every odd value."""
    for path in paths_of(full()):
        for value in ODD:
            yield path, replaced(full(), path, value)


def field_of(path: str) -> str:
    """The field of the body in which a path is."""
    return path.split(".")[0].split("[")[0]
