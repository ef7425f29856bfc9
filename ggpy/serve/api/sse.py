"""Server-sent events of answers in typed blocks: one event, and the stream that a writer makes.

JSON is ASCII, so that a lone surrogate in what a client sent cannot break a stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from ..errors import ApiError
from ..events import Event


class EventWriter(Protocol):
    """Writes an answer's events in the form of one API. Several results may be joined into one."""

    def start(self) -> bytes:
        """What comes before the first event."""
        ...

    def write(self, event: Event) -> bytes:
        """What an event becomes; b"" if nothing."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """What ends the stream instead of Finished."""
        ...


def dumps(value: Any) -> str:
    """Compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"))


def framed(name: str, data: str) -> bytes:
    """An event with a name; data: JSON text, which has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def event(name: str, /, **data: Any) -> bytes:
    """An event whose data repeats its name as "type"."""
    return framed(name, dumps({"type": name, **data}))


@asynccontextmanager
async def closing(events: AsyncIterator[Event]) -> AsyncGenerator[AsyncIterator[Event], None]:
    """Closes events that can be closed, which cancels their answer."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def written(events: AsyncIterator[Event], writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """The stream of an answer. Closing it closes the events.

    An ApiError midway ends the stream with the API's error event. So does any other exception,
    which is raised again after it.
    """
    async with closing(events):
        yield writer.start()
        try:
            async for happened in events:
                if told := writer.write(happened):
                    yield told
        except ApiError as error:
            yield writer.fail(error)
        except Exception:
            yield writer.fail(ApiError(500, "the server failed while it answered: see its log"))
            raise
