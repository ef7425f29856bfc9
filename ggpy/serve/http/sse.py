"""Sends a stream of server-sent events, and notices a client that goes away.

An ASGI application for one answer: chunks of bytes in, HTTP out. While no chunk comes, a comment
goes out now and then, so that proxies keep the connection. Nothing here knows what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import ApiError

CLIENT_GONE = 499  # nginx's status, which only the metrics see
DIRECT_SEND = "ggpy.send"  # in a request's scope: the server's own `send`, behind no middleware

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the events
)


class EventStream:
    """The answer to a request: chunks as they come. `cancel()` is called if the client goes away,
    or takes longer than `timeout` seconds to read; the chunks then end.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        cancel: Callable[[], None],
        *,
        ping: bytes = PING,
        ping_seconds: float = 30.0,
        timeout: float = 600.0,
    ) -> None:
        self._chunks, self._cancel = chunks, cancel
        self._ping, self._ping_seconds, self._timeout = ping, ping_seconds, timeout
        self._gone = self._ended = False
        self._sent_at = 0.0
        self._sending = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await self._send_chunks(scope.get(DIRECT_SEND, send))
        finally:
            watch.cancel()
            self._cancel()

    async def _send_chunks(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        timer = asyncio.create_task(self._keep_time(send))
        try:
            async for chunk in self._chunks:
                if self._gone:
                    continue  # the sequence is cancelled: the chunks end soon
                # Returns at once, unless the client is slow to read.
                self._sent_at, self._sending = loop.time(), True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending = False
        finally:
            self._ended = True
            timer.cancel()
        with suppress(asyncio.CancelledError):
            await timer  # no comment follows the end
        if not self._gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _give_up(self) -> None:
        self._gone = True
        self._cancel()

    async def _watch(self, receive: Receive) -> None:
        """Wait for the client to go away."""
        await _gone(receive)
        self._give_up()

    async def _keep_time(self, send: Send) -> None:
        """Give up a client that takes too long to read, and send a comment where nothing else was
        sent. One task does it, because a timer for each chunk would cost as much as the chunk.
        """
        loop = asyncio.get_running_loop()
        while not (self._gone or self._ended):  # wait_for may take a cancellation for itself
            limit = self._timeout if self._sending else self._ping_seconds
            wait = self._sent_at + limit - loop.time()
            if wait > 0:
                await asyncio.sleep(min(wait, self._timeout))
            elif self._sending:
                self._give_up()
            else:
                await self._send_ping(send)

    async def _send_ping(self, send: Send) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        ping = {"type": "http.response.body", "body": self._ping, "more_body": True}
        try:
            await asyncio.wait_for(send(ping), self._timeout)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            self._give_up()


class DirectSend:
    """ASGI middleware, the outermost: streams send chunks past all others, which have nothing to do
    with them once the headers are sent.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        try:
            await self._app(scope, receive, send)
        finally:
            del scope[DIRECT_SEND]  # which refers to the scope: no cycle is left


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(
    receive: Receive, work: Awaitable[Result], cancel: Callable[[], object]
) -> Result:
    """What `work` returns; `cancel()` is called if the client goes away before."""

    async def watch() -> None:
        await _gone(receive)
        cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """What `work` returns; it is cancelled if the client goes away before, and an ApiError says so
    to whoever counts errors.
    """
    task = asyncio.ensure_future(work)
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    try:
        return await while_connected(receive, task, leave)
    except asyncio.CancelledError:
        if not gone:  # the server ends
            raise
        raise ApiError(CLIENT_GONE, "the client has gone") from None
