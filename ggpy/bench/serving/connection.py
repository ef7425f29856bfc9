"""Connections of the load client: one request at a time on each, kept open for the next.

It is an asyncio protocol instead of a stream reader: bytes are handled in the callback of the read,
without waking a task, and all connections share one read buffer. Only the sink knows what a
response means.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter

from .clock import Clock
from .http1 import LoadTarget, MalformedResponse, ResponseReader

BUFFER = 64 << 10  # bytes that are read at once
# Takes the response, a part of its body and the time of the read; False ends the connection.
Sink = Callable[[ResponseReader, bytes, float], bool]


class StaleConnection(ConnectionError):
    """The server closed a kept connection before it answered; another may be tried."""


class CutOff(Exception):
    """The sink ended the request before its response was complete."""


class LoadConnection(asyncio.BufferedProtocol):
    """A connection, which reads one response after the other. clock: the time of a read."""

    def __init__(self, buffer: memoryview, clock: Clock) -> None:
        self._buffer, self._clock = buffer, clock
        self.transport: asyncio.Transport | None = None
        self.n_requests = 0
        self._sink: Sink | None = None
        self._response = ResponseReader()
        self._end: asyncio.Future[ResponseReader] | None = None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def exchange(self, message: bytes, sink: Sink) -> ResponseReader:
        """Sends a request and passes the body to `sink`; returns the response when it is complete.

        ConnectionError, MalformedResponse, CutOff. A task that is cancelled closes the connection.
        """
        if self.transport is None or not self.is_open:
            raise StaleConnection("the server closed the connection")
        self.n_requests += 1
        self._response, self._sink = ResponseReader(), sink
        self._end = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        try:
            return await self._end
        except BaseException:
            self.close()
            raise
        finally:
            self._sink = self._end = None

    def close(self) -> None:
        """Closes the connection at once, even if a response is incomplete."""
        if self.transport is not None:
            self.transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now, data = self._clock(), bytes(self._buffer[:nbytes])
        if self._sink is None or self._end is None or self._end.done():
            self.close()  # bytes without a request
            return
        response = self._response
        try:
            body = response.feed(data)
            goes_on = self._sink(response, body, now) if body else True
        except MalformedResponse as error:
            self._end.set_exception(error)
            return
        if response.is_done:
            self._end.set_result(response)
        elif not goes_on:
            self._end.set_exception(CutOff())
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is None or self._end.done():
            return
        if self._response.end():
            self._end.set_result(self._response)
        elif self.n_requests > 1 and not self._response.n_bytes:
            self._end.set_exception(StaleConnection("the server closed the connection"))
        else:
            said = str(error) if error else "the server closed the connection"
            self._end.set_exception(ConnectionError(said))


class ConnectionPool:
    """Connections to one server: those that wait for a request, and new ones."""

    def __init__(self, target: LoadTarget, clock: Clock = perf_counter) -> None:
        self.target = target
        self._clock, self._buffer = clock, memoryview(bytearray(BUFFER))
        self.n_opened = 0
        self._idle: list[LoadConnection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def exchange(self, message: bytes, sink: Sink) -> ResponseReader:
        """Like LoadConnection.exchange, on an idle connection if there is one. OSError."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, message, sink)
            except StaleConnection:
                continue
        return await self._exchange(await self._open(), message, sink)

    async def _exchange(
        self, connection: LoadConnection, message: bytes, sink: Sink
    ) -> ResponseReader:
        response = await connection.exchange(message, sink)
        if response.is_reusable and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _open(self) -> LoadConnection:
        loop = asyncio.get_running_loop()
        target = self.target
        self.n_opened += 1
        _, connection = await loop.create_connection(
            lambda: LoadConnection(self._buffer, self._clock),
            *(target.host, target.port),
            ssl=self._tls,
        )
        return connection

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """(status, body) of a small request; OSError, MalformedResponse."""
        parts: list[bytes] = []

        def keep(response: ResponseReader, part: bytes, now: float) -> bool:
            parts.append(part)
            return True

        response = await self.exchange(self.target.request(method, path, body), keep)
        return response.status, b"".join(parts)
