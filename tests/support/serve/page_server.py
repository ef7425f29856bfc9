"""A server that speaks the page's dialect, with scripted answers: a test knows every piece."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ggpy.serve.render import render_markdown
from ggpy.serve.static import WebPage

N_CTX = 8192
FULL = {
    "message": "the prompt has 9000 tokens, the context 8192: shorten it",
    "type": "exceed_context_size_error",
    "code": 400,
    "n_ctx": N_CTX,
    "n_prompt_tokens": 9000,
}


class PageServer:
    """The page and its endpoints on a port of this machine.

    script: question -> pieces of the answer; a question that is not in it is answered with itself.
    A piece is a text, a delta of OpenAI's, or what is to happen: "<wait>", "<break>", "<error>".
    seconds: between pieces. key: what clients must give.
    """

    def __init__(self, script: dict[str, list[Any]] | None = None, seconds: float = 0.01) -> None:
        self.model = "SmolLM2-135M-Instruct"
        self.script, self.seconds, self.key = script or {}, seconds, ""
        self.bodies: list[dict[str, Any]] = []  # of chat completions
        self.renderings = 0
        self.render_fails = False
        self.left = threading.Event()  # a client went before the end of its answer
        self.go = threading.Event()  # the piece "<wait>" waits for it
        self._page = WebPage()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            self._app(), http="h11", log_level="error", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(10)

    def _app(self) -> Starlette:
        routes = [
            Route("/props", self._props),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/render", self._render, methods=["POST"]),
            Route("/{path:path}", self._file),
        ]
        return Starlette(routes=routes)

    async def _file(self, request: Request) -> Response:
        answer = self._page.answer(request.url.path, request.headers.get("if-none-match"))
        if answer is None:
            return Response(status_code=404)
        return Response(answer.body, answer.status, answer.headers)

    def _refused(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").encode("latin-1").decode()
        if not self.key or given == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "Invalid API key", "code": 401}}, 401)

    async def _props(self, request: Request) -> Response:
        settings = {"default_generation_settings": {"n_ctx": N_CTX}, "total_slots": 4}
        known = {"model_alias": self.model, "chat_template_caps": {}}
        return self._refused(request) or JSONResponse({**settings, **known})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "SmolLM2", "object": "model"}]})

    async def _tokenize(self, request: Request) -> Response:
        content = (await request.json())["content"]
        return JSONResponse({"tokens": list(range(len(content.split())))})

    async def _render(self, request: Request) -> Response:
        self.renderings += 1
        if refused := self._refused(request):
            return refused
        if self.render_fails:
            return Response("no", 500)
        text = (await request.json())["text"]
        return JSONResponse({"html": await run_in_threadpool(render_markdown, text)})

    async def _chat(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "too long":
            return JSONResponse({"error": FULL}, 400)
        if question == "busy":
            told = {"error": {"message": "1024 requests wait", "code": 503}}
            return JSONResponse(told, 503, headers={"Retry-After": "5"})
        pieces = self.script.get(question, [f"You said: {question}"])
        return StreamingResponse(self._stream(body, pieces), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], pieces: list[Any]) -> AsyncIterator[str]:
        n = 0
        prompt = sum(len(m["content"].split()) for m in body["messages"])
        try:
            yield _chunk({"role": "assistant", "content": None}) + ": ping\n\n"
            for piece in pieces:
                await asyncio.sleep(self.seconds)
                if piece == "<wait>":
                    while not self.go.is_set():
                        await asyncio.sleep(0.005)
                    continue
                if piece == "<break>":
                    raise ConnectionAbortedError
                if piece == "<error>":
                    told = {"message": "the GPU failed", "type": "server_error", "code": 500}
                    yield f"data: {json.dumps({'error': told})}\n\n"
                    return
                n += 1
                delta = {"content": piece} if isinstance(piece, str) else piece
                yield _chunk(delta, timings=_timings(prompt, n))
            calls = any(isinstance(piece, dict) and "tool_calls" in piece for piece in pieces)
            yield _chunk({}, finish="tool_calls" if calls else "stop")
            usage = {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}
            last = {"choices": [], "model": self.model, "usage": usage}
            yield _event({**last, "timings": _timings(prompt, n)})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


def _chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({"object": "chat.completion.chunk", "choices": [choice], **more})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _timings(prompt: int, n: int) -> dict[str, float]:
    speed = {"predicted_ms": n * 12.5, "predicted_per_second": 80.0}
    return {"prompt_n": prompt, "cache_n": 0, "prompt_ms": 20.0, "predicted_n": n, **speed}
