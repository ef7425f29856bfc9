"""uvicorn's HTTP protocol, with bounds on the time and the size of a request's head, and on the
time that a client takes to read.

Without them a client that sends a byte now and then, or does not read, keeps a connection for ever,
and one that sends headers without end takes all memory.

Offers to go on in another protocol are not seen: Java's client makes one in its first request, and
httptools would take the body of that request for the other protocol.

An answer of unknown length to an HTTP/1.0 request ends with the connection: 1.0 has no chunks.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any

UPGRADE = re.compile(rb"(^|\r\n)Upgrade(?=[ \t]*:)", re.IGNORECASE)
HEAD_SECONDS = 20.0
HEAD_BYTES = 64 << 10  # beside those of the packet in which the head begins
_TOLD = (
    b'{"error":{"message":"the headers are larger than %d bytes, which is the limit","code":431}}'
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


class UnknownLength(int):
    """The Content-Length of an answer that has none: no body is longer or shorter."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> UnknownLength:
        return self


def bounded(read_seconds: float) -> type[asyncio.Protocol]:
    """The class of uvicorn's protocol, bounded; httptools where that is installed. read_seconds:
    that a client may take to read what was written, before more is.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    class BoundedProtocol(Base):  # type: ignore[misc, valid-type]
        """Closes a connection whose next request has no complete head after HEAD_SECONDS, or after
        HEAD_BYTES, and one whose client does not read.
        """

        _head_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None
        _in_head = False  # httptools alone says so; h11 has a bound of its own
        _n_head = 0  # bytes

        def connection_made(self, transport: Any) -> None:
            self._cycles: deque[Any] = deque()  # of pipelined requests: `cycle` is the last one
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            if self._head_timer is None and self._between_requests():
                self._wait_for_head()
            if self._in_head or self._between_requests():
                data = without_upgrade(data)
            began_before = self._in_head
            super().data_received(data)
            if self._in_head and began_before:
                self._count_head(len(data))
            if not self._between_requests():
                self._stop_waiting()

        def on_message_begin(self) -> None:
            self._in_head, self._n_head = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()
            if self.cycle is None:
                return
            self._cycles.append(self.cycle)
            while self._cycles[0].response_complete:
                self._cycles.popleft()
            if self.cycle.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = UnknownLength()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            self._stop_waiting_for_reader()
            super().resume_writing()
            if self.transport.is_closing():
                self._wait_for_reader()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():  # once all is read
                self._wait_for_reader()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._wait_for_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_waiting_for_reader()
            super().connection_lost(exc)
            for cycle in self._cycles:  # the first of these is being answered
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            self._cycles.clear()

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _count_head(self, n: int) -> None:
            self._n_head += n
            if self._n_head <= HEAD_BYTES or self.transport.is_closing():
                return
            if self._between_requests():
                told = _TOLD % HEAD_BYTES
                self.transport.write(_TOO_LARGE % (len(told), told))
            self.transport.close()

        def _wait_for_head(self) -> None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _wait_for_reader(self) -> None:
            if self._read_timer is None and self in self.connections:  # it is not lost
                self._read_timer = self.loop.call_later(read_seconds, self.transport.abort)

        def _stop_waiting_for_reader(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _give_up(self) -> None:
            self._head_timer = None
            if self._between_requests() and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol


def without_upgrade(data: bytes) -> bytes:
    """The data of a request, with another name for the header Upgrade in its head."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(rb"\1X-Offered-Upgrade", head) + end + rest
