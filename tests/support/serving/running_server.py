"""Servers of tiny models, in threads of the test's process, on free ports."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ggpy import model
from ggpy.sampling import SamplingParams
from ggpy.serve.process import ServerProcess, listen
from ggpy.serve.settings import ServerSettings

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


class RunningServer:
    """A server in a thread; `client` speaks to it."""

    def __init__(self, settings: ServerSettings, load: Callable[[], model.Model]) -> None:
        self.ready = threading.Event()
        self.process = ServerProcess(settings, load, lambda service: self.ready.set())
        self._sockets = listen(settings)
        self.port = self._sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.status: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
        self.client = httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def _run(self) -> None:
        try:
            self.status = self.process.run(self._sockets)
        except BaseException as error:
            self.error = error

    @property
    def engine(self) -> Any:
        assert self.process.server.service is not None
        return self.process.server.service.engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def leave(self, path: str, body: Any, once: Callable[[], bool]) -> None:
        """Post a body, and close the connection as soon as something holds."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: tests\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(head.encode() + content)
            assert eventually(once)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.client.close()
        self.process.stop()
        self.join()


@contextmanager
def running(
    architecture: str = "llama",
    n_seq: int = 4,
    n_ctx: int = 256,
    n_positions: int | None = None,
    path: Path | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server of a model that has been loaded: of path, or the tiny one of an architecture.
    n_positions: of the KV cache, None is enough for all sequences. Its answers have a seed, unless
    `sampling` says otherwise: a text without one is another in each run, and may end anywhere.
    """
    settings.setdefault("sampling", SamplingParams(seed=5))

    def load() -> model.Model:
        return model.load(
            path or TINY / f"{architecture}.gguf",
            "cpu",
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=64,
            n_positions=n_positions or n_seq * n_ctx,
            prefill_tokens=32,
            prefix_cache=True,
        )

    server = RunningServer(ServerSettings(port=0, drain_seconds=5, **settings), load)
    try:
        assert server.ready.wait(60), server.error
        yield server
    finally:
        server.close()


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether something holds within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


def settled(count: Callable[[], int], seconds: float = 0.3) -> int:
    """A count that did not change for some seconds, or the one after 10 seconds."""
    seen, since = count(), time.monotonic()

    def has_settled() -> bool:
        nonlocal seen, since
        if count() != seen:
            seen, since = count(), time.monotonic()
        return time.monotonic() > since + seconds

    eventually(has_settled)
    return seen


def calls_apart(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each piece of work apart from sequences, which takes 10 ms more."""
    calls: list[int] = []
    plain = server.engine.apart

    def apart(work: Any) -> Any:
        calls.append(1)
        time.sleep(0.01)
        return plain(work)

    monkeypatch.setattr(server.engine, "apart", apart)
    return calls


def metric(server: RunningServer, name: str) -> float:
    """The value of a metric."""
    lines = server.client.get("/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.split()[0] == name]
    return float(value)


def idle(server: RunningServer) -> bool:
    """Whether no sequence runs or waits, the event loop knows of their ends, all pages are free."""
    stats = server.engine.stats()
    free = stats.n_running == stats.n_waiting == 0 and stats.n_pages_free == stats.n_pages
    return free and not server.process.server.service.worker.tickets
