"""Server-sent events: the data of each event, from bytes that are cut anywhere.

Data stays bytes, so even a character may be cut. What the data means is not known here.
"""

from __future__ import annotations


class EventReader:
    """Reads a stream of events (WHATWG's text/event-stream); names and ids are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now."""
        if self._rest:
            data = self._rest + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # perhaps the first half of a CRLF
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [found for event in whole if (found := _data(event)) is not None]

    def end(self) -> list[bytes]:
        """The data of a last event that the server did not end with a blank line."""
        return self.feed(b"\n\n")


def _data(event: bytes) -> bytes | None:
    """The data of an event; None for a comment."""
    event = event.lstrip(b"\n")
    if event.startswith(b"data:") and b"\n" not in event:
        return event[6:] if event[5:6] == b" " else event[5:]
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines) if lines else None
