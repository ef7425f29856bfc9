"""Bad input, keys, limits, clients that go away, and how the server ends."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import httpx
import pytest
from running_server import RunningServer, eventually, idle, running

from ggpy import model
from ggpy.serve.app import read_ping
from ggpy.serve.fields import Fields
from ggpy.serve.http import protocol
from ggpy.serve.http.sse import EventStream
from ggpy.serve.settings import ServerSettings

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"a": \xff}', "UTF-8"),
        (b"[" * 100_000, "deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "JSON"),
        (b'{"a": [-1e999]}', "-1e999 is too large a number"),
    ],
)
def test_bodies_that_are_no_objects(server: RunningServer, body: bytes, told: str) -> None:
    answer = server.client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_a_byte_order_mark_is_skipped(server: RunningServer) -> None:
    """Shells of Windows write it at the beginning of a file."""
    assert server.client.post("/tokenize", content=b"\xef\xbb\xbf{}").json() == {"tokens": []}


def test_encoded_bodies_are_refused(server: RunningServer) -> None:
    body = gzip.compress(b'{"content": "hello"}')
    for encoding, status in (("gzip", 415), ("zstd", 415), ("identity", 400)):
        refused = server.client.post(
            "/tokenize", content=body, headers={"Content-Encoding": encoding}
        )
        assert refused.status_code == status
        assert (encoding in refused.json()["error"]["message"]) == (status == 415)


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert server.client.get("/nothing").status_code == 404
    wrong = server.client.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == f"{CHAT} does not take GET: send POST"
    assert wrong.headers["Allow"] == "POST"
    wrong = server.client.delete("/v1/models")
    assert wrong.json()["error"]["message"] == "/v1/models does not take DELETE: send GET"
    assert server.client.get("/nothing").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("packets", [1, 2])
def test_an_offer_of_http_2_is_not_taken(server: RunningServer, packets: int) -> None:
    """Java's HTTP client makes it with the first request of a connection, whatever its body is."""
    body = json.dumps({"prompt": "hello", "n_predict": 2}).encode()
    head = (
        "POST /completion HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        f"Content-Length: {len(body)}\r\nHost: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
        "Upgrade: h2c\r\nContent-Type: application/json\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        for part in [head + body] if packets == 1 else [head, body]:
            sock.sendall(part)
            threading.Event().wait(0.05)
        assert b'"tokens_predicted":2' in _answer(sock)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'{"status":"ok"}' in _answer(sock)


def _answer(sock: socket.socket) -> bytes:
    """An answer that is one JSON object."""
    data = b""
    while not data.endswith(b"}"):
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_has_no_chunks(server: RunningServer, stream: bool) -> None:
    body = json.dumps({"prompt": "hello", "n_predict": 5, "stream": stream}).encode()
    head = f"POST /completion HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head + body)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, answer = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    for event in answer.strip().split(b"\n\n"):
        assert json.loads(event.removeprefix(b"data: "))["content"] is not None


def test_a_body_beyond_the_limit() -> None:
    with running(max_body=10_000) as server:
        answer = server.client.post(CHAT, content=b" " * 20_000)
        assert answer.status_code == 413

        def chunks() -> Any:
            for _ in range(20):
                yield b" " * 1000

        assert server.client.post(CHAT, content=chunks()).status_code == 413
        assert server.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


def test_keys() -> None:
    with running(api_keys=("alpha", "beta")) as server:
        for key, status in (("alpha", 200), ("beta", 200), ("gamma", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            found = httpx.post(
                f"{server.url}{CHAT}", headers=headers, json={"messages": HELLO, "max_tokens": 1}
            )
            assert found.status_code == status
        named = httpx.get(f"{server.url}/props", headers={"x-api-key": "beta"})
        assert named.status_code == 200
        assert httpx.get(f"{server.url}/props").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_clients_with_other_keys_do_not_see_cached_prompts() -> None:
    prompt = "a secret that fills more than one page of the cache " * 4
    with running(api_keys=("alpha", "beta")) as server:

        def cached(key: str) -> int:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            found = httpx.post(f"{server.url}/v1/completions", headers=headers, json=body).json()
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("alpha") == 0
        assert cached("beta") == 0
        assert cached("alpha") > 0


def test_pages_of_other_origins(server: RunningServer) -> None:
    asked = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = server.client.request("OPTIONS", CHAT, headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_answer(server: RunningServer, stream: bool) -> None:
    body = {"messages": HELLO, "stream": stream, "max_tokens": 200, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    before = server.engine.stats().generated_tokens_total
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head + data)
        assert eventually(lambda: server.engine.stats().generated_tokens_total > before)
    assert eventually(lambda: idle(server))
    assert server.engine.stats().generated_tokens_total < before + 200


@pytest.mark.parametrize(("seconds", "read"), [(None, None), (7, 7), (0, inf), (-1, inf)])
def test_a_request_says_how_often_comments_come(seconds: Any, read: float | None) -> None:
    assert read_ping(Fields({"sse_ping_interval": seconds})) == read


def test_no_ping_follows_the_end_of_a_stream() -> None:
    """Though it becomes due at the same moment, while the event loop is busy."""
    sent: list[bytes] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        asyncio.get_running_loop().call_soon(time.sleep, 0.02)
        await asyncio.sleep(0.004)

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def asked() -> None:
        stream = EventStream(chunks(), lambda: None, ping_seconds=0.002)
        await stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        await asyncio.sleep(0.02)

    asyncio.run(asked())
    assert sent[:2] == [None, b"a"] and sent.index(b"") == len(sent) - 1


def test_a_head_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n")
        sock.settimeout(10)
        assert sock.recv(100) == b""
        assert server.client.get("/health").status_code == 200


def test_more_requests_than_may_wait() -> None:
    with running(n_seq=1, n_waiting=1, n_ctx=8192) as server:
        body = {"messages": HELLO, "stream": True, "max_tokens": 8000, "ignore_eos": True}
        with (
            server.client.stream("POST", CHAT, json=body) as first,
            server.client.stream("POST", CHAT, json=body) as second,
        ):
            assert first.status_code == second.status_code == 200
            third = server.post(CHAT, messages=HELLO)
            assert third.status_code == 503
            assert int(third.headers["retry-after"]) > 0
        assert eventually(lambda: idle(server))


def test_503_while_the_model_is_loaded() -> None:
    go = threading.Event()

    def load() -> model.Model:
        go.wait(30)
        raise ValueError("this file is broken")

    server = RunningServer(ServerSettings(port=0), load)
    assert eventually(lambda: _status(server) == 503)
    answer = server.client.get("/health")
    assert "loaded" in answer.json()["error"]["message"]
    go.set()
    server.join()
    assert str(server.error) == "this file is broken"


def _status(server: RunningServer) -> int:
    try:
        return server.client.get("/health").status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize("can_abort", [True, False])
def test_an_engine_that_fails_ends_the_process(can_abort: bool) -> None:
    with running() as server:

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the GPU is gone")

        server.engine.decoder.run = fail
        if not can_abort:
            server.engine.abort = fail
        answer = server.post(CHAT, messages=HELLO)
        assert answer.status_code == 503
        assert "the GPU is gone" in answer.json()["error"]["message"]
        server.join()
        assert server.status == 1


def test_stopping_lets_an_answer_end() -> None:
    with running() as server:
        body = {"messages": HELLO, "stream": True, "max_tokens": 100, "temperature": 0}
        with server.client.stream("POST", CHAT, json={**body, "ignore_eos": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.stop()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" or "data: [DONE]" in rest
        server.join()
        assert server.status == 0


def test_nothing_is_left_after_many_requests_of_all_kinds(server: RunningServer) -> None:
    n_threads = threading.active_count()

    def one(i: int) -> None:
        body = {"prompt": f"hello {i}", "stream": True, "max_tokens": 5 + i % 20, "seed": i}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for n, _ in enumerate(answer.iter_lines()):
                if i % 3 == 0 and n > i % 7:
                    break

    threads = [
        threading.Thread(target=lambda k=k: [one(i) for i in range(k, k + 10)])
        for k in range(0, 40, 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: idle(server))
    assert eventually(lambda: threading.active_count() <= n_threads + 8)
