"""HTTP/1.1 for a client: the address of a server, requests as bytes, and a reader of responses.

The reader takes bytes as they come, cut anywhere, and hands on the bytes of the body at once.
Nothing here opens a connection or knows what a body means.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

LONGEST_HEAD = 64 << 10  # bytes of a status line with its headers
LONGEST_LINE = 4 << 10  # bytes of the line before a chunk
PORTS = {"http": 80, "https": 443}
WITHOUT_BODY = (204, 304)


class MalformedResponse(ValueError):
    """The response is not HTTP/1.1."""


@dataclass(frozen=True)
class LoadTarget:
    """The address of a server, and the prefix of its paths ("" or "/prefix")."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    api_key: str = ""

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request; a body is JSON."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += ["User-Agent: ggpy-bench_serve", "Accept: text/event-stream, application/json"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def target_of(url: str, api_key: str = "") -> LoadTarget:
    """The server at http(s)://host[:port][/prefix][/v1]; ValueError."""
    wrong = f"{url!r} is no address of a server: use http://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{wrong} ({error})") from None
    if parts.scheme not in PORTS or not host or parts.query or parts.fragment or "@" in url:
        raise ValueError(wrong)
    if not (url + api_key).isascii() or any(c <= " " for c in url + api_key):
        raise ValueError("an address or a key has a space, or a character that is not ASCII")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return LoadTarget(host, port or PORTS[parts.scheme], parts.scheme == "https", prefix, api_key)


class ResponseReader:
    """One response. `feed` returns the bytes of its body; `is_done` is set after the last of them.

    headers: names in lower case; of several with one name, the last.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self.n_bytes = 0  # received
        self._buffer = b""
        self._left: int | None = None  # bytes of the body, or of a chunk and the CRLF after it
        self._is_chunked = self._in_trailer = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection may carry another request."""
        closes = "close" in self.headers.get("connection", "").lower()
        return self.is_done and not closes and (self._is_chunked or self._left is not None)

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`; MalformedResponse."""
        self.n_bytes += len(data)
        if self._is_chunked:
            return self._chunks(data)
        if not self.status:
            rest = self._head(data)
            if rest is None:
                return b""
            return self._chunks(rest) if self._is_chunked else self._plain(rest)
        return self._plain(data)

    def end(self) -> bool:
        """Call it when the connection was closed: returns whether the response is complete."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_done = True
        return self.is_done

    def _head(self, data: bytes) -> bytes | None:
        """The bytes after the headers; None if these are not complete yet."""
        self._buffer += data
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            if len(self._buffer) > LONGEST_HEAD:
                raise MalformedResponse(f"headers of more than {LONGEST_HEAD} bytes")
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise MalformedResponse(f"the answer begins with {first[:40]!r}")
        self._buffer = b""
        if status.startswith("1"):  # 100 Continue and its kin come before the response
            return self._head(rest)
        self.status = int(status[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._body_begins(version)
        return rest

    def _body_begins(self, version: str) -> None:
        """Finds out from the headers how long the body is."""
        if version == "HTTP/1.0" and "keep-alive" not in self.headers.get("connection", "").lower():
            self.headers["connection"] = "close"
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.status in WITHOUT_BODY:
            self._is_chunked, length = False, "0"
        if self._is_chunked or length is None:
            return
        if not length.isdigit():
            raise MalformedResponse(f"Content-Length is {length[:20]!r}")
        self._left = int(length)

    def _plain(self, data: bytes) -> bytes:
        """A body of a known length, or one that lasts until the connection is closed."""
        if self._left is None:
            return data
        part = data[: self._left]
        self._left -= len(part)
        self.is_done = self._left == 0
        return part

    def _chunks(self, data: bytes) -> bytes:
        """The content of chunks."""
        data, found = self._buffer + data, []
        at = 0
        while not self.is_done:
            if self._left:
                stop = at + self._left
                found.append(data[at : max(at, min(stop - 2, len(data)))])
                self._left = max(stop - len(data), 0)
                at = min(stop, len(data))
                if self._left:
                    break
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            self._size(data[at:line_end])
            at = line_end + 2
        self._buffer = data[at:]
        if len(self._buffer) > LONGEST_LINE:
            raise MalformedResponse("a chunk does not begin with its size")
        return b"".join(found)

    def _size(self, line: bytes) -> None:
        """Reads the line before a chunk, or a line of the trailer."""
        if self._in_trailer:
            self.is_done = not line
            return
        digits = line.partition(b";")[0].strip()
        try:
            size = int(digits, 16)
        except ValueError:
            raise MalformedResponse(f"{digits[:20]!r} is no size of a chunk") from None
        self._in_trailer = size == 0
        self._left = size + 2 if size else 0
