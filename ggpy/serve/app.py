"""The ASGI application: routes, and what each endpoint does with a request.

An endpoint reads its fields, asks the service, and writes the answer in its API's form; the modules
in `api` know the forms. Nothing here knows the engine, and no process or socket.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from . import status
from .answers.answer import Answering
from .answers.merge import cancel_all, merged
from .api import chat, completions, native
from .api.chat import More, nothing_more
from .api.options import are_quick
from .errors import RETRY_AFTER, ApiError
from .events import AnswerOptions, ChatRequest, Event, Finished
from .fields import Fields
from .http.access import RequireKey, error_response
from .http.body import JsonAnswer, read_body
from .http.sse import PING, DirectSend, EventStream, while_connected
from .metrics import Metrics
from .service import ModelService
from .settings import ServerSettings

Call = TypeVar("Call")

BODY_SECONDS = 120.0  # for a request's body, whatever --timeout says


class Server:
    """What the endpoints share. `service` is None while the model is being loaded; `failure` is
    why the engine cannot go on.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.metrics, self.started = settings, Metrics(), int(time.time())
        self.service: ModelService | None = None
        self.failure: BaseException | None = None

    def ready(self) -> ModelService:
        """The service; ApiError 503 while there is none."""
        if self.failure is not None:
            raise ApiError(503, f"the engine failed: {self.failure}")
        if self.service is None:
            raise ApiError(503, "the model is being loaded", retry_after=RETRY_AFTER)
        return self.service

    async def read(self, reader: Callable[..., Call], body: Fields, *args: Any) -> Call:
        """reader(body, *args), in another thread if its options may take long to read."""
        if are_quick(body):
            return reader(body, *args)
        return await asyncio.to_thread(reader, body, *args)

    async def body(self, request: Request) -> Fields:
        """The JSON object of a request."""
        timeout = min(BODY_SECONDS, self.settings.timeout)
        return await read_body(request, self.settings.max_body, timeout)

    # OpenAI

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        service, body = self.ready(), await self.body(request)
        call = await self.read(chat.read_chat, body, service.tokenizer, *self._defaults())
        ping, verbose = read_ping(body), body.flag("verbose", self.settings.verbose)
        with chat.named_as_given(call):
            answers = await service.chat_all(call.request, client_of(request), call.n)
        events, id, model = self._counted(answers), new_id("chatcmpl-"), service.model_name
        for answer in answers:
            answer.ticket.name = id
        form = call.request.options, call.stream, call.timings_per_token
        more = self._verbose(answers, *form) if verbose else nothing_more
        if call.stream:
            told = (events, call, id, model, lambda i: answers[i].so_far(), more)
            return self.stream(chat.chat_chunks(*told), answers, ping_seconds=ping)
        whole = chat.whole_chat(events, call, id, model, more)
        return await self.whole(request, whole, answers)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions"""
        service, body = self.ready(), await self.body(request)
        options, default = self._defaults()
        default = completions.DEFAULT_TOKENS if default is None else default
        reader = completions.read_completion
        call = await self.read(reader, body, service.tokenizer, options, default)
        ping, verbose = read_ping(body), body.flag("verbose", self.settings.verbose)
        answers = await service.complete_all(call.prompts, call.options, client_of(request), call.n)
        events, id = self._counted(answers), new_id("cmpl-")
        said = completions.Said(call, service.tokenizer, [a.prompt_ids for a in answers[:: call.n]])
        form = call.options, call.stream
        more = self._verbose(answers, *form) if verbose else nothing_more
        told = (events, call, id, service.model_name, said, more)
        if call.stream:
            chunks = completions.completion_chunks(*told)
            return self.stream(chunks, answers, ping_seconds=ping)
        return await self.whole(request, completions.whole_completion(*told), answers)

    # llama.cpp

    async def completion(self, request: Request) -> Response:
        """POST /completion"""
        service, body = self.ready(), await self.body(request)
        options = await self._options(body)
        return await self._native(
            request, body, native.read_native(body, service.tokenizer, options)
        )

    async def infill(self, request: Request) -> Response:
        """POST /infill"""
        service, body = self.ready(), await self.body(request)
        options = await self._options(body)
        most = service.engine.n_ctx - 2 * (options.max_tokens or 0)  # as llama-server leaves it
        prompt = service.infill.prompt(body, most)
        call = native.read_native(body, service.tokenizer, options, prompt)
        return await self._native(request, body, call)

    async def _options(self, body: Fields) -> AnswerOptions:
        return await self.read(native.read_options, body, self.ready().tokenizer, *self._defaults())

    async def _native(self, request: Request, body: Fields, call: native.NativeCall) -> Response:
        service, ping = self.ready(), read_ping(body)
        answers = await service.complete_all(call.prompts, call.options, client_of(request), call.n)
        events, server = self._counted(answers), self._answered_by(answers)
        if call.stream:
            chunks = native.answer_chunks(events, call, server, lambda i: answers[i].so_far())
            return self.stream(chunks, answers, ping_seconds=ping)
        return await self.whole(request, native.whole_answer(events, call, server), answers)

    def _answered_by(self, answers: Sequence[Answering]) -> native.AnsweredBy:
        service = self.ready()
        decode = service.tokenizer.decode
        last: tuple[Sequence[int], str] = (), ""  # answers share prompts, which may be long

        def prompt(i: int) -> str:
            nonlocal last
            ids = answers[i].prompt_ids
            if last[0] != ids:
                last = ids, decode(ids, special=True)
            return last[1]

        return native.AnsweredBy(service.model_name, service.engine.n_ctx, prompt)

    def _verbose(
        self,
        answers: Sequence[Answering],
        options: AnswerOptions,
        stream: bool,
        timings_per_token: bool = False,
    ) -> More:
        """What llama.cpp's `verbose` adds to the end of answers."""
        server = self._answered_by(answers)
        call = native.NativeCall((), options, stream=stream, timings_per_token=timings_per_token)

        def more(i: int, end: Finished) -> Mapping[str, Any]:
            return {"__verbose": native.verbose(i, answers[i].written(), end, call, server)}

        return more

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        service, body = self.ready(), await self.body(request)
        return JsonAnswer(await service.aside(native.tokenized, body))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        service, body = self.ready(), await self.body(request)
        return JsonAnswer(await service.aside(native.detokenized, body))

    async def apply_template(self, request: Request) -> Response:
        """POST /apply-template"""
        service, body = self.ready(), await self.body(request)
        call = await self.read(chat.read_chat, body, service.tokenizer, *self._defaults())
        return JsonAnswer({"prompt": await service.render(call.request)})

    # State

    async def health(self, request: Request) -> Response:
        """GET /health"""
        self.ready()
        return JsonAnswer({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JsonAnswer(status.models(self.ready()))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        (found,) = status.models(self.ready())["data"]
        name = request.path_params["name"]
        if name not in found["aliases"]:
            raise ApiError(404, f"there is no model {name!r}: there is {found['id']!r}")
        return JsonAnswer(found)

    async def props(self, request: Request) -> Response:
        """GET /props"""
        return JsonAnswer(status.props(self.ready(), self.settings))

    async def slots(self, request: Request) -> Response:
        """GET /slots"""
        if not self.settings.slots:
            raise ApiError(501, "the server was started without --slots")
        found = status.slots(self.ready())
        wanted = request.query_params.get("fail_on_no_slot")
        if wanted in ("1", "true") and all(slot["is_processing"] for slot in found):
            raise ApiError(503, "no slot is available: try later", retry_after=RETRY_AFTER)
        return JsonAnswer(found)

    async def slot_action(self, request: Request) -> Response:
        """POST /slots/N, as llama-server answers it without --slot-save-path."""
        raise ApiError(
            501, "slots have no state to save, restore or erase: pages are found by text"
        )

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics"""
        if not self.settings.metrics:
            raise ApiError(501, "the server was started without --metrics")
        text, started = self.metrics.text(self.ready().engine.stats()), str(self.started)
        headers = {"Process-Start-Time-Unix": started}
        return Response(text, headers=headers, media_type="text/plain; version=0.0.4")

    # Answers

    def _defaults(self) -> tuple[Any, int | None]:
        return self.settings.sampling, self.settings.max_tokens

    async def _counted(self, answers: Sequence[Answering]) -> AsyncIterator[tuple[int, Event]]:
        """The events of answers; the metrics count each answer that ends."""
        async for i, event in merged(answers):
            if isinstance(event, Finished):
                self.metrics.answered(event)
            yield i, event

    def stream(
        self,
        chunks: AsyncIterator[bytes],
        answers: Sequence[Answering],
        ping: bytes = PING,
        ping_seconds: float | None = None,
    ) -> Any:
        """A response of server-sent events. ping_seconds: None is the server's setting."""
        return EventStream(
            chunks,
            lambda: cancel_all(answers),
            ping=ping,
            ping_seconds=self.settings.ping_seconds if ping_seconds is None else ping_seconds,
            timeout=self.settings.timeout,
        )

    async def whole(
        self, request: Request, work: Awaitable[Any], answers: Sequence[Answering]
    ) -> Response:
        """A response of one object, or a list."""
        found = await while_connected(request.receive, work, lambda: cancel_all(answers))
        return JsonAnswer(found)

    async def answer(
        self, request: ChatRequest, client: str
    ) -> tuple[AsyncIterator[Event], Answering]:
        """The events of one answer to a conversation, and the answer itself."""
        (answer,) = await self.ready().chat_all(request, client)

        async def events() -> AsyncIterator[Event]:
            async for _, event in self._counted([answer]):
                yield event

        return events(), answer


def read_ping(body: Fields) -> float | None:
    """llama.cpp's sse_ping_interval: seconds, None is the server's; -1 is no comments."""
    seconds = body.integer("sse_ping_interval", None, -1, 1 << 31)
    return inf if seconds is not None and seconds <= 0 else seconds


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return prefix + secrets.token_hex(16)


def client_of(request: Request) -> str:
    """The client, as RequireKey names it."""
    return str(request.scope.get("state", {}).get("client", ""))


Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(
    server: Server, more: Mapping[str, Endpoint] | None = None, page: Sequence[Route] = ()
) -> ASGIApp:
    """The application. more: path -> endpoint of a POST, of further APIs. page: its routes."""
    settings, prefix = server.settings, server.settings.api_prefix
    post: dict[str, Endpoint] = {
        "/v1/chat/completions": server.chat,
        "/chat/completions": server.chat,
        "/v1/completions": server.complete,
        "/completions": server.completion,
        "/completion": server.completion,
        "/infill": server.infill,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
        "/apply-template": server.apply_template,
        "/slots/{id_slot}": server.slot_action,
        **(more or {}),
    }
    get = {
        "/health": server.health,
        "/v1/health": server.health,
        "/models": server.models,
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model,
        "/props": server.props,
        "/slots": server.slots,
        "/metrics": server.metrics_text,
    }
    routes = [
        Route(prefix + path, _counting(server, path, f), methods=["POST"])
        for path, f in post.items()
    ]
    routes += [Route(prefix + path, f, methods=["GET"]) for path, f in get.items()]
    routes += page
    app = Starlette(routes=routes, exception_handlers=_handlers(server))
    files = [route.path.removeprefix(prefix) for route in page if "GET" in (route.methods or ())]
    app.add_middleware(RequireKey, keys=settings.api_keys, prefix=prefix, files=files)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return DirectSend(app)


def _counting(server: Server, path: str, endpoint: Any) -> Any:
    """The endpoint, whose answers the metrics count by status."""

    async def counted(request: Request) -> Response:
        try:
            response: Response = await endpoint(request)
        except Exception as error:
            status = error.status if isinstance(error, ApiError) else 500
            server.metrics.requests[path, status] += 1
            raise
        server.metrics.requests[path, getattr(response, "status_code", 200)] += 1
        return response

    return counted


def _handlers(server: Server) -> dict[Any, Any]:
    """Handlers of errors; each writes its error in the form of the API."""
    prefix = server.settings.api_prefix

    def path_of(request: Request) -> str:
        return request.url.path.removeprefix(prefix)

    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(path_of(request), error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = path_of(request)
        told, headers = f"{request.method} {path} is not known here", error.headers or {}
        if allowed := headers.get("Allow"):
            methods = sorted({*allowed.split(", ")} - {"HEAD"})
            told = f"{path} does not take {request.method}: send {' or '.join(methods)}"
        response = error_response(path, ApiError(error.status_code, told))
        response.headers.update(headers)
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(path_of(request), ApiError(500, f"{type(error).__name__}: {error}"))

    return {ApiError: told, HTTPException: http, Exception: unexpected}
