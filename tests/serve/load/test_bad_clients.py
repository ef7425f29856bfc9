"""Clients that do harm, on purpose or not: each gets a clear error, and another client's stream has
the right text all the while.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest
from running_server import RunningServer, eventually, idle, running

from ggpy.serve.http import protocol

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {"messages": HELLO, "max_tokens": 3900, "ignore_eos": True, "stream": True}
WITNESS = {"prompt": "the witness", "max_tokens": 60, "temperature": 0, "stream": True}
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that waits for clients half a second and no more."""
    with pytest.MonkeyPatch.context() as patch, running(n_ctx=4096, timeout=0.5) as found:
        patch.setattr(protocol, "HEAD_SECONDS", 0.5)
        yield found


@pytest.fixture(scope="module")
def patient_server() -> Iterator[RunningServer]:
    """A server whose time for a body is not what a large body meets, however busy the machine."""
    with running(n_ctx=4096) as found:
        yield found


@contextmanager
def undisturbed(server: RunningServer) -> Iterator[None]:
    """A client that streams one answer after the other meanwhile, and compares their texts."""
    expected, ended, texts = _witness(server), threading.Event(), []

    def watch() -> None:
        while not ended.is_set():
            texts.append(_witness(server))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
    assert texts and set(texts) == {expected}
    assert eventually(lambda: idle(server))


def _witness(server: RunningServer) -> str:
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=WITNESS, timeout=30) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def connected(server: RunningServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    return sock


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def all_of(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    with suppress(ConnectionError):  # closed with data unread
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def is_whole(answer: bytes) -> bool:
    """Whether an answer, or the stream of its events, has all that it should have."""
    headers, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers)
    return len(body) == int(length[1]) if length else b"data: [DONE]" in body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# Too much


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/tokenize"])
def test_a_body_of_100_mb(patient_server: RunningServer, path: str) -> None:
    server = patient_server

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * MIB

    with undisturbed(server):
        with connected(server) as sock:  # refused before a byte of it was sent
            sock.sendall(head(path, 100 * MIB))
            assert status(sock.recv(1000)) == 413
        try:
            refused = httpx.post(server.url + path, content=chunks(), timeout=30)
        except httpx.WriteError:
            return  # the connection was closed within the body
        assert refused.status_code == 413
        assert "33554432 bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize("line", [b"X-A: " + b"a" * MIB, b"X-A: a\r\n" * 100_000])
def test_headers_without_end(server: RunningServer, line: bytes) -> None:
    with undisturbed(server), connected(server) as sock:
        with suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line)
        told = all_of(sock)
        assert not told or status(told) == 431


def test_headers_without_end_after_a_stream(server: RunningServer) -> None:
    data = json.dumps(ENDLESS).encode()
    with undisturbed(server), connected(server) as sock:
        sock.sendall(head(CHAT, len(data)) + data)
        assert status(sock.recv(100)) == 200
        with pytest.raises(ConnectionError):
            for _ in range(500):
                sock.sendall(b"GET / HTTP/1.1\r\nX-A: " + b"a" * 100_000)


def test_thousands_of_connections(server: RunningServer) -> None:
    """5000, or as many as this process may open: its own ends and the server's."""
    resource = pytest.importorskip("resource")
    n = min(5000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 300) // 2)
    with undisturbed(server), ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(n)]
        for sock in socks[: n // 2]:
            sock.send(b"GET /health HT")
        assert server.client.get("/health").json() == {"status": "ok"}
        last = socks[-1]
        last.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = all_of(last)
        assert not answer or status(answer) == 200
        assert eventually(lambda: _is_closed(socks[0])), "its head never came"
    assert n > 100


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(10) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


# Too slow


def test_heads_and_bodies_that_come_byte_by_byte(server: RunningServer) -> None:
    with undisturbed(server), ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(40)]
        for sock in socks[:20]:
            sock.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        for sock in socks[20:]:
            sock.sendall(head(CHAT, 100))
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for sock in socks:
                with suppress(ConnectionError):
                    sock.send(b"a")
            time.sleep(0.1)
        assert all(not all_of(sock) for sock in socks[:20]), "closed"
        assert {status(sock.recv(1000)) for sock in socks[20:]} == {408}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read(server: RunningServer, stream: bool) -> None:
    body = {**ENDLESS, "logprobs": True, "top_logprobs": 20, "stream": stream, "max_tokens": 1500}
    data = json.dumps(body).encode()
    # The server's ends inherit it: else they hold more than this answer.
    server._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    connections = server.process._uvicorn.server_state.connections
    others = {*connections}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", server.port))
        before = server.engine.stats().generated_tokens_total
        sock.sendall(head(CHAT, len(data)) + data)
        assert eventually(lambda: server.engine.stats().generated_tokens_total > before)
        mine = connections - others
        assert mine
        with undisturbed(server):
            # Without a stream all 1500 tokens come first: many seconds on a busy machine.
            assert eventually(lambda: not mine & connections, 60), "it is not waited for"
        told = all_of(sock)
        assert told and not is_whole(told), "it was cut off"


def test_half_closed_connections_free_their_pages(server: RunningServer) -> None:
    data = json.dumps(ENDLESS).encode()
    before = server.engine.stats().generated_tokens_total
    with undisturbed(server):
        for _ in range(4):
            with connected(server) as sock:
                sock.sendall(head(CHAT, len(data)) + data)
                sock.shutdown(socket.SHUT_WR)
                all_of(sock)
    assert server.engine.stats().generated_tokens_total - before < 4 * 3000


# Not HTTP, not JSON


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /he\xffalth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    ],
)
def test_what_is_not_http(server: RunningServer, data: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(data)
        assert 400 <= status(all_of(sock)) < 500


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    bodies = [json.dumps({"tokens": [5 + i % 90]}).encode() for i in range(300)]
    with undisturbed(server), connected(server) as sock:
        sock.sendall(b"".join(head("/detokenize", len(body)) + body for body in bodies))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = all_of(sock)
    one_by_one = [server.client.post("/detokenize", content=body).content for body in bodies]
    told = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK")[1:]]
    assert told == [*one_by_one, b'{"status":"ok"}']


def test_a_client_that_leaves_ends_the_first_of_its_pipelined_requests(
    server: RunningServer,
) -> None:
    body = json.dumps({**ENDLESS, "stream": False}).encode()
    before = server.engine.stats().generated_tokens_total
    with connected(server) as sock:
        sock.sendall(2 * (head(CHAT, len(body)) + body))
        assert eventually(lambda: server.engine.stats().n_running > 0)
    assert eventually(lambda: idle(server))
    assert server.engine.stats().generated_tokens_total - before < ENDLESS["max_tokens"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "\\ud800"}', "prompt has half of a surrogate pair"),
        (b'{"a": [{"b": "x\\uDFFFy"}]}', "a[0].b has half of a surrogate pair"),
        (b'{"\\uda00": 1}', "half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at offset 12"),
        (b'{"a":' + b"[" * 201 + b"]" * 201 + b"}", "too deep"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "too deep"),
        (b'{"prompt": ' + b"[" * MIB, "too deep"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "a",}', "not JSON"),
    ],
)
def test_what_is_not_json(server: RunningServer, body: bytes, told: str) -> None:
    for path in (CHAT, "/v1/messages", "/tokenize"):
        answer = server.client.post(path, content=body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


def test_whole_surrogate_pairs_and_written_escapes_are_text(server: RunningServer) -> None:
    body = b'{"content": "\\ud83d\\ude00 \\\\ud800"}'
    ids = server.client.post("/tokenize", content=body).json()["tokens"]
    assert "\U0001f600 \\ud800" in server.post("/detokenize", tokens=ids).json()["content"]


# Bombs


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


def _chain(n: int) -> dict[str, Any]:
    """Definitions, each of which has two choices of the next: 2^n in all."""
    next_two = [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)]
    definitions = {f"d{i}": schema for i, schema in enumerate(next_two)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n}": {"type": "null"}}}


BOMBS: dict[str, dict[str, Any]] = {
    "deep": {"json_schema": _nested(9)},
    "chain": {"json_schema": _chain(60)},
    "loop": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "many choices": {"json_schema": {"enum": [f"choice {i}" for i in range(40_000)]}},
    "long array": {"json_schema": {"type": "array", "minItems": 10**9, "items": {}}},
    "pattern": {"json_schema": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}},
    "many properties": {
        "json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(1_500)}}
    },
    "all of": {"json_schema": {"allOf": [{"minLength": i} for i in range(2_000)]}},
    "repeats": {"grammar": 'root ::= ((("a"{0,9999}){0,9999}){0,9999}){0,9999}'},
    "ambiguous": {"grammar": 'root ::= root root | "a" | ""'},
    "brackets": {"grammar": f"root ::= {'(' * 5000}a{')' * 5000}"},
    "many rules": {"grammar": "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(9000))},
    "too long": {"grammar": "root ::= " + '"a" ' * 100_000},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_answered_or_refused_in_time(patient_server: RunningServer, name: str) -> None:
    server, body = patient_server, {"prompt": "a", "n_predict": 4, "seed": 1, **BOMBS[name]}
    with undisturbed(server):
        answer = server.client.post("/completion", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] in ("json_schema", "grammar")
