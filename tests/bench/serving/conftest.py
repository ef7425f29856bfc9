"""A server that does as it is told: for each request it sends bytes and waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Step = bytes | float | None  # what is sent, seconds of waiting, the end of the connection
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeServer:
    """answer: (path, body, number of the request) -> steps. What came is kept."""

    def __init__(self, answer: Callable[[str, dict[str, Any], int], Iterable[Step]]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.n_now = self.peak = self.n_connections = self.n_lost = 0
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with suppress(*gone):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((x for x in head.lower().split("\r\n") if "content-length" in x), ":0")
        body = await reader.readexactly(int(length.partition(":")[2]))
        path, number = head.split(" ")[1], len(self.bodies)
        self.headers.append(head)
        if path.startswith("/v1/c"):
            self.bodies.append(json.loads(body))
        self.n_now += 1
        self.peak = max(self.peak, self.n_now)
        try:
            for step in self.answer(path, json.loads(body or b"{}"), number):
                if step is None:
                    return False
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    writer.write(step)
                    await writer.drain()
                if reader.at_eof():
                    self.n_lost += 1
                    return False
        finally:
            self.n_now -= 1
        return True

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do some work while the server runs, in the same event loop."""

        async def both() -> T:
            server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                return await work()
            finally:
                server.close()

        return asyncio.run(both())


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(found: Any) -> bytes:
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def chat(text: str | None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat's answer."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


def ending(n_prompt: int = 3, n_output: int = 4) -> list[bytes]:
    """The last events, and the last chunk."""
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n_output}
    last = [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
        "[DONE]",
    ]
    return [chunked(b"".join(map(event, last))), b"0\r\n\r\n"]


def stream(texts: Sequence[str], wait: float = 0.0, n_output: int | None = None) -> list[Step]:
    """An answer: the role, the texts with a wait before each, and the end."""
    steps: list[Step] = [HEAD + chunked(event(chat("")))]
    for text in texts:
        steps += [wait, chunked(event(chat(text)))]
    return steps + ending(n_output=len(texts) if n_output is None else n_output)


def whole(status: str, found: Any, *headers: str) -> list[Step]:
    """A response of JSON."""
    body = json.dumps(found).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return ["\r\n".join(lines).encode() + body]


class Fakes:
    """What tests use of this file."""

    Server = FakeServer
    HEAD = HEAD
    chunked = staticmethod(chunked)
    event = staticmethod(event)
    chat = staticmethod(chat)
    ending = staticmethod(ending)
    stream = staticmethod(stream)
    whole = staticmethod(whole)


@pytest.fixture(scope="session")
def fake() -> type[Fakes]:
    return Fakes
