"""How a server begins and ends: what is told, what running answers get, and the exit status."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import TINY, RunningServer

from ggpy import model
from ggpy.cli import serve
from ggpy.serve.answers.worker import EngineWorker
from ggpy.serve.process import ServeError, ServerProcess, listen
from ggpy.serve.settings import ServerSettings

LONG = {"prompt": "a b", "stream": True, "n_predict": -1, "ignore_eos": True}
N_CTX = 1 << 16  # an answer that goes on longer than any test


def load() -> model.Model:
    return model.load(TINY / "llama.gguf", "cpu", n_ctx=N_CTX, n_positions=N_CTX, n_seq=2)


@contextmanager
def answering(drain_seconds: float) -> Iterator[tuple[RunningServer, Iterator[str]]]:
    """A server with an answer under way, and the lines of that answer."""
    server = RunningServer(ServerSettings(port=0, drain_seconds=drain_seconds), load)
    assert server.ready.wait(60), server.error
    try:
        with server.client.stream("POST", "/completion", json=LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            yield server, lines
    finally:
        server.close()


def stop(server: RunningServer) -> None:
    """What Ctrl-C does."""
    server.process._uvicorn.handle_exit(signal.SIGINT, None)


def test_an_answer_that_outlasts_the_drain_ends_with_an_error() -> None:
    with answering(drain_seconds=0.3) as (server, lines):
        stop(server)
        assert "the server is stopping" in "".join(lines)
        server.join()
        assert server.status == 0 and server.error is None


def test_a_second_signal_does_not_wait() -> None:
    with answering(drain_seconds=3600) as (server, lines):
        stop(server)
        stop(server)
        assert "the server is stopping" in "".join(lines)
        server.join()
        assert server.status == 0


def test_an_answer_that_ends_in_time_is_whole() -> None:
    server = RunningServer(ServerSettings(port=0, drain_seconds=30), load)
    assert server.ready.wait(60), server.error
    with server.client.stream("POST", "/completion", json={**LONG, "n_predict": 300}) as response:
        lines = response.iter_lines()
        next(lines)
        stop(server)
        *_, last = (line for line in lines if line)
    assert '"stop": true' in last.replace('":true', '": true') and "error" not in last
    server.close()
    assert server.status == 0


def test_what_is_asked_while_the_engines_thread_ends_is_answered() -> None:
    async def asked() -> None:
        with model.load(TINY / "llama.gguf", "cpu", n_ctx=64) as found:
            worker = EngineWorker(found.engine, asyncio.get_running_loop(), 1, pytest.fail)
            inbox = worker._inbox

            class Late(queue.SimpleQueue):  # type: ignore[type-arg]
                def put(self, request: Any, *_: Any) -> None:
                    worker._stopped = True
                    inbox.put(None)
                    worker._thread.join()
                    super().put(request)

            worker._inbox = Late()
            ticket = worker.submit(found.engine.prepare([5]))
            with pytest.raises(RuntimeError, match="the server is stopping"):
                await asyncio.wait_for(ticket.pieces(), 10)
            assert not worker.tickets

    asyncio.run(asked())


def test_a_client_that_keeps_the_server_waiting_is_cut_off() -> None:
    """It has announced a body, which does not come."""
    server = RunningServer(ServerSettings(port=0, drain_seconds=0.1), load)
    assert server.ready.wait(60), server.error
    state = server.process._uvicorn.server_state
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        deadline = time.monotonic() + 10
        while not state.tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state.tasks
        stop(server)
        server.join()
    server.client.close()
    assert server.status == 0


def test_a_model_that_is_being_loaded_is_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> model.Model:
        begun.set()
        assert go.wait(30)
        return load()

    server = RunningServer(ServerSettings(port=0), slow)
    told: queue.Queue[str] = queue.Queue()
    server.process._say = told.put
    assert begun.wait(30)
    assert server.client.get("/health").status_code == 503
    stop(server)
    assert told.get(timeout=10) == "stopping, once the model is loaded; Ctrl-C leaves now"
    go.set()
    server.join()
    assert server.status == 0 and not server.ready.is_set()
    server.client.close()


def test_the_process_says_what_it_does_and_ends_with_0() -> None:
    command = [sys.executable, "-m", "ggpy", "serve", str(TINY / "llama.gguf")]
    command += ["--device", "numpy", "--port", "0", "-c", str(N_CTX), "-np", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(8)]
        url = lines[0].split()[1].rstrip(";")
        assert [line.partition(":")[0] for line in lines] == [
            *("listening", "device", "model", "note", "answers", "context", "page", "ready")
        ]
        assert lines[4:6] == [
            "answers: 2 at a time; more wait\n",
            f"context: {N_CTX} tokens, which all answers share\n",
        ]
        assert lines[6] == f"page: {url}/\n" and "Ctrl-C" in lines[7]
        with httpx.stream("POST", f"{url}/completion", json=LONG, timeout=30) as response:
            got = response.iter_lines()
            next(got)
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline().startswith("stopping: 1 request may go on for 30 s")
            process.send_signal(signal.SIGINT)
            assert "the server is stopping" in "".join(got)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_packages_that_are_missing_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An environment without them: all that is known of site-packages are the others."""
    hidden = "import sys\nsys.modules['uvicorn'] = sys.modules['starlette'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    command = [sys.executable, "-m", "ggpy", "serve", str(TINY / "llama.gguf")]
    assert subprocess.run(command, env=environment).returncode == 2
    told = capfd.readouterr().err
    assert told == (
        "ggpy serve: error: the server needs packages that are not installed (starlette, "
        "uvicorn): pip install 'ggpy[server]'\n"
    )


def test_what_a_port_that_cannot_be_had_calls_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(TINY / "llama.gguf"), "--host", "192.0.2.1"]  # an address of nobody
    assert serve.main(words) == 2
    assert "no such address: give another --host" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no 127.0.0.2")
def test_several_addresses_are_one_server(tmp_path: Path) -> None:
    """A file beside TCP; the first address chooses the port of all. All are there or none."""
    path = tmp_path / "ggpy.sock"
    settings = ServerSettings(hosts=("127.0.0.1", str(path), "127.0.0.2"), port=0)
    sockets = listen(settings)
    first, _, other = sockets
    port = first.getsockname()[1]
    assert other.getsockname() == ("127.0.0.2", port)
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.2:{port}"):
        taken = tmp_path / "taken.sock"
        listen(ServerSettings(hosts=(str(taken), "127.0.0.2"), port=port))
    assert not taken.exists() and path.exists()
    loaded = threading.Event()
    process = ServerProcess(settings, load, lambda service: loaded.set())
    thread = threading.Thread(target=process.run, args=[sockets])
    thread.start()
    try:
        assert loaded.wait(30)
        for address in (f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"):
            assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://ggpy/health").json() == {"status": "ok"}
    finally:
        process.stop()
        thread.join(30)
    assert not path.exists()


def test_a_socket_file_goes_and_one_that_was_left_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "ggpy.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    settings = ServerSettings(hosts=(str(path),))
    (first,) = listen(settings)
    with first:
        with pytest.raises(ServeError, match=f"cannot listen on {path}: a server listens"):
            listen(settings)
        assert path.is_socket(), "it is another server's"
    long = str(tmp_path / f"{'a' * 120}.sock")
    with pytest.raises(ServeError, match=f"cannot listen on {long}: AF_UNIX path too long"):
        listen(ServerSettings(hosts=(long,)))
    process = ServerProcess(settings, load)
    threading.Timer(0.5, process.stop).start()
    assert process.run() == 0
    assert not path.exists()
