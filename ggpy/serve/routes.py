"""The endpoints of the further APIs, and all routes of the application.

Anthropic's messages, OpenAI's responses, embeddings and rerank, in the manner of the endpoints in
`app`. Nothing here knows the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .answers.control import end_reasoning
from .api import anthropic, chat, embeddings, rerank, responses
from .api.embeddings import EmbeddingsCall
from .app import Server, client_of, make_app
from .errors import ApiError
from .events import Usage
from .fields import Fields
from .http.body import JsonAnswer
from .http.sse import until_gone
from .render import render_markdown
from .static import WebPage


class FurtherApis:
    """The endpoints; `server` has what they share with the others."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def routes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Path -> endpoint of a POST."""
        return {
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/v1/responses": self.responses,
            "/responses": self.responses,
            "/v1/responses/input_tokens": self.input_tokens,
            "/responses/input_tokens": self.input_tokens,
            "/v1/chat/completions/input_tokens": self.chat_tokens,
            "/chat/completions/input_tokens": self.chat_tokens,
            "/v1/chat/completions/control": self.control,
            "/v1/embeddings": self.embeddings,
            "/embeddings": self.embedding,
            "/embedding": self.embedding,
            "/v1/rerank": self.rerank,
            "/rerank": self.rerank,
            "/v1/reranking": self.rerank,
            "/reranking": self.rerank,
            **({"/render": self.render} if self.server.settings.with_ui else {}),
        }

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages"""
        server = self.server
        service, body = server.ready(), await server.body(request)
        call = await server.read(anthropic.read, body, service)
        events, answer = await server.answer(call.request, client_of(request))
        if call.stream:
            chunks = anthropic.stream(events, service.model_name, Usage(answer.n_prompt))
            return server.stream(chunks, [answer], anthropic.PING)
        return await server.whole(request, anthropic.message(events, service.model_name), [answer])

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        service, body = self.server.ready(), await self.server.body(request)
        reader = partial(anthropic.read, counting=True)
        call = await self.server.read(reader, body, service)
        n = await service.count_chat_tokens(call.request)
        return JsonAnswer(anthropic.token_count(n))

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        server = self.server
        service, body = server.ready(), await server.body(request)
        call = await server.read(responses.read, body, service, server.settings.max_tokens)
        events, answer = await server.answer(call.request, client_of(request))
        if call.stream:
            so_far = answer.so_far if call.timed else None
            chunks = responses.stream(events, service.model_name, call.echo, so_far)
            return server.stream(chunks, [answer])
        whole = responses.response(events, service.model_name, call.echo)
        return await server.whole(request, whole, [answer])

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens"""
        service, body = self.server.ready(), await self.server.body(request)
        call = await self.server.read(responses.read, body, service)
        n = await service.count_chat_tokens(call.request)
        return JsonAnswer(responses.token_count(n))

    async def chat_tokens(self, request: Request) -> Response:
        """POST /v1/chat/completions/input_tokens"""
        service, body = self.server.ready(), await self.server.body(request)
        settings = self.server.settings
        defaults = settings.sampling, settings.max_tokens
        call = await self.server.read(chat.read_chat, body, service.tokenizer, *defaults)
        n = await service.count_chat_tokens(call.request)
        return JsonAnswer(responses.token_count(n))

    async def control(self, request: Request) -> Response:
        """POST /v1/chat/completions/control"""
        service, body = self.server.ready(), await self.server.body(request)
        name = body.filled_text("id")
        if body.needed_text("action") != "reasoning_end":
            raise body.error("action", "reasoning_end")
        reason = await end_reasoning(service.worker, name)
        return JsonAnswer({"success": not reason, **({"message": reason} if reason else {})})

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings; with llama.cpp's `content` for `input` as POST /embeddings."""
        service, body = self.server.ready(), await self.server.body(request)
        if "content" in body and "input" not in body:
            return await self._native_embeddings(body, request)
        call = embeddings.read(body, service)
        if self.server.settings.pooling == "none":
            told = "with --pooling none each token has a vector: ask /embeddings, or start the "
            raise ApiError(400, f"{told}server with another --pooling")
        vectors = await self._embedded(call, request)
        return JsonAnswer(embeddings.answer(vectors, call, service.model_name))

    async def embedding(self, request: Request) -> Response:
        """POST /embeddings"""
        body = await self.server.body(request)
        return await self._native_embeddings(body, request)

    async def _native_embeddings(self, body: Fields, request: Request) -> Response:
        call = embeddings.read_native(body)
        try:
            vectors = await self._embedded(call, request)
        except ApiError as error:
            if error.param == "input" and "content" in body:
                error.param = "content"
            raise
        return JsonAnswer(embeddings.native_answer(vectors, call))

    async def _embedded(self, call: EmbeddingsCall, request: Request) -> Any:
        """The vectors of a call, whose prompts the metrics count."""
        started = time.perf_counter()
        work = self.server.ready().embed(call.inputs, client_of(request), call.norm)
        vectors = await until_gone(request.receive, work)
        seconds = time.perf_counter() - started
        self.server.metrics.embedded(sum(n for _, n in vectors), seconds)
        return vectors

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank"""
        service, body = self.server.ready(), await self.server.body(request)
        call = rerank.read(body, service)
        work = service.relevance(call.query, call.documents, client_of(request))
        scores = await until_gone(request.receive, work)
        answer: Any = rerank.answer(scores, call, service.model_name)
        return JsonAnswer(answer)

    async def render(self, request: Request) -> Response:
        """POST /render: Markdown to HTML, for the page."""
        body = await self.server.body(request)
        html = await asyncio.to_thread(render_markdown, body.text("text", "") or "")
        return JsonAnswer({"html": html})


def page_routes(server: Server) -> list[Route]:
    """The page's files; FileNotFoundError, ValueError for a folder that has no page."""
    if not server.settings.with_ui:
        return []
    page = WebPage(server.settings.ui)
    prefix = server.settings.api_prefix

    async def file(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix)
        answer = page.answer(path, request.headers.get("if-none-match"))
        if answer is None:
            raise ApiError(404, f"there is no file {path}")
        return Response(answer.body, answer.status, answer.headers)

    return [Route(f"{prefix}/{name}", file, methods=["GET"]) for name in ("", *page.files)]


def make_routed_app(server: Server) -> ASGIApp:
    """The application with every API."""
    return make_app(server, FurtherApis(server).routes(), page_routes(server))
