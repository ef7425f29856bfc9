"""uvicorn's HTTP protocol, with a bound on how long a request's head may take.

Without it a client that sends a byte now and then keeps a connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_SECONDS = 20.0


def bounded() -> type[asyncio.Protocol]:
    """The class of uvicorn's protocol, bounded; httptools where that is installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    class BoundedProtocol(Base):  # type: ignore[misc, valid-type]
        """Closes a connection whose next request has no complete head after HEAD_SECONDS."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            if self._head_timer is None and self._between_requests():
                self._wait_for_head()
            super().data_received(data)
            if not self._between_requests():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait_for_head(self) -> None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            self._head_timer = None
            if self._between_requests() and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
