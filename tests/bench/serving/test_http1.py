"""Responses and events that are cut at any byte, addresses, and what is no HTTP."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpy.bench.serving.events import EventReader
from ggpy.bench.serving.http1 import MalformedResponse, ResponseReader, target_of

BODY = "data: é日本🎉\n\ndata: two\n\n".encode()
HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: 1\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY),
    "close": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
}


def response(kind: str, sizes: tuple[int, ...] = (5, 1, 9)) -> bytes:
    """A response with BODY; its chunks have these sizes, and the rest is one chunk."""
    if kind != "chunked":
        return HEADS[kind] + BODY
    parts, at = [], 0
    for size in (*sizes, len(BODY)):
        part = BODY[at : at + size]
        at += size
        if part:
            parts.append(b"%X;name=value\r\n%s\r\n" % (len(part), part))
    return HEADS[kind] + b"".join(parts) + b"0\r\nTrailer: x\r\n\r\n"


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(map(reader.feed, pieces))


@pytest.mark.parametrize("kind", HEADS)
def test_a_response_may_be_cut_at_any_byte(kind: str) -> None:
    data = response(kind)
    for cut in range(len(data)):
        reader, body = read([data[:cut], data[cut:]])
        assert body == BODY and reader.status == 200
        assert reader.end() and reader.is_reusable == (kind != "close")
    assert read([data[i : i + 1] for i in range(len(data))])[1] == BODY


@pytest.mark.parametrize("kind", ["chunked", "length"])
def test_a_response_that_is_cut_short_is_not_done(kind: str) -> None:
    data = response(kind)
    for end in range(len(data)):
        reader, _ = read([data[:end]])
        assert not reader.is_done and not reader.end(), data[:end]


@given(st.lists(st.integers(1, 12), max_size=6), st.lists(st.integers(0, 120), max_size=6))
def test_chunks_and_reads_need_not_agree(sizes: list[int], cuts: list[int]) -> None:
    data = response("chunked", tuple(sizes))
    at = sorted({0, *(c for c in cuts if c < len(data)), len(data)})
    reader, body = read([data[a:b] for a, b in pairwise(at)])
    assert body == BODY and reader.is_done


def test_a_100_continue_comes_before_the_response() -> None:
    reader, body = read([b"HTTP/1.1 100 Continue\r\n\r\n" + response("length")])
    assert body == BODY and reader.status == 200


def test_a_response_without_a_body_ends_with_its_head() -> None:
    reader, _ = read([b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 2\r\n\r\n"])
    assert reader.is_done and reader.is_reusable and reader.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        HEADS["chunked"] + b"zz\r\n",
        HEADS["chunked"] + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    ],
)
def test_what_is_no_http_is_told(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        read([data])


def events(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [found for piece in pieces for found in reader.feed(piece)]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_events_may_be_cut_at_any_byte(newline: bytes) -> None:
    """Within a character of several bytes, and between the CR and the LF of a line, too."""
    lines = [": ping", "", "event: x", "data: é🎉", "id: 7", "", "data:a", "data: b", "", ""]
    data = newline.join(line.encode() for line in lines) + newline
    expected = ["é🎉".encode(), b"a\nb"]
    for cut in range(len(data)):
        assert events([data[:cut], data[cut:], b"\n"]) == expected, cut
    assert events([data[i : i + 1] for i in range(len(data))] + [b"\n"]) == expected


def test_the_last_event_needs_no_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: [DONE]\n") == []
    assert reader.end() == [b"[DONE]"] and reader.end() == []


def test_addresses() -> None:
    found = target_of("https://host/prefix/v1/", "key")
    assert (found.host, found.port, found.is_tls, found.prefix) == ("host", 443, True, "/prefix")
    message = found.request("POST", "/v1/x", b"{}").decode()
    assert message.startswith("POST /prefix/v1/x HTTP/1.1\r\nHost: host:443\r\n")
    assert "\r\nAuthorization: Bearer key\r\n" in message
    assert message.endswith("\r\nContent-Length: 2\r\n\r\n{}")
    v6 = target_of("http://[::1]:8080")
    assert (v6.host, v6.port, v6.prefix) == ("::1", 8080, "")
    assert b"Host: [::1]:8080\r\n" in v6.request("GET", "/health")


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://h:0x1", "http://u:p@h", "http://h/a b"]
)
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        target_of(url)


def test_a_key_cannot_add_headers() -> None:
    with pytest.raises(ValueError, match="a key"):
        target_of("http://host", "key\r\nX: 1")
