"""`ggpy serve` as a process: sockets, https, keys, the environment, signals, exit statuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import eventually

MODEL = "models/tiny/llama.gguf"
CHAT = "/v1/chat/completions"
ENDLESS = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8000,
    "ignore_eos": True,
    "stream": True,
}
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")


class Program:
    """A running `ggpy serve`. where: what it says that it listens on."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ggpy", "serve", MODEL, "--device", "cpu", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self.where = self._until("listening: ").split(";")[0]
        self._until("ready: ")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _until(self, begin: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(begin):
                return line.removeprefix(begin).strip()
        raise AssertionError(f"it ended: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def said(self, begin: str) -> None:
        """Wait for a line that begins so."""
        assert eventually(lambda: any(line.startswith(begin) for line in list(self.lines)))

    def end(self, sign: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(sign)
        return self.status()

    def status(self) -> int:
        status = self.process.wait(30)
        self._reader.join(10)
        return status


def run(*words: str) -> Any:
    """The result of a program that ends by itself."""
    command = [sys.executable, "-m", "ggpy", "serve", MODEL, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextmanager
def program(*words: str, **environment: str) -> Iterator[Program]:
    found = Program(*words, **environment)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def test_the_environment_a_file_of_keys_and_a_port_in_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalpha\nbeta\n")
    environment = {
        "LLAMA_ARG_PORT": "0",
        "LLAMA_ARG_ALIAS": "mine",
        "LLAMA_ARG_N_PARALLEL": "3",
        "LLAMA_ARG_CTX_SIZE": "2048",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_NO_UI": "1",
    }
    with program("--api-key-file", str(keys), "--api-prefix", "/llm", **environment) as server:
        assert server.where.startswith("http://127.0.0.1:") and server.where.endswith("/llm")
        port = server.where.split(":")[2].split("/")[0]
        for key, status in (("alpha", 200), ("beta", 200), ("ours", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            found = httpx.get(f"{server.where}/props", headers=headers)
            assert found.status_code == status
        client = httpx.Client(base_url=server.where, headers={"x-api-key": "alpha"})
        props = client.get("/props").json()
        assert props["model_alias"] == "mine"
        assert props["total_slots"] == 3
        assert props["default_generation_settings"]["n_ctx"] == 2048
        assert client.get("/metrics").status_code == 200
        assert client.get("/").status_code == 404
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code in (401, 404)
        second = run("--port", port)
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: it is in use" in second.stderr
        assert "Traceback" not in second.stderr
        assert client.get("/health").json() == {"status": "ok"}
        assert server.end(signal.SIGINT) in (0, 130)


def test_https_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    words = ["--port", "0", "--ssl-key-file", str(key), "--ssl-cert-file", str(certificate)]
    with program(*words) as server:
        assert server.where.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.where, verify=context, timeout=30) as client:
            body: dict[str, Any] = {**ENDLESS, "max_tokens": 4}
            assert client.post(CHAT, json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.where}/health")
        assert server.end() == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "ggpy.sock")
    with program("--host", path) as server:
        assert server.where == f"unix:{path}"
        second = run("--host", path)
        assert second.returncode == 2
        assert f"cannot listen on {path}: a server listens there" in second.stderr
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with program("--host", path) as server:  # what is left of the other is in nobody's way
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=30) as client:
            answer = client.post(f"http://any{CHAT}", json={**ENDLESS, "max_tokens": 4})
            assert answer.text.endswith("data: [DONE]\n\n")
        assert server.end() == 0
    assert not os.path.exists(path)


def refuses(server: Program) -> bool:
    """Whether no new connection is taken."""
    try:
        httpx.get(f"{server.where}/health")
    except httpx.TransportError:
        return True
    return False


@contextmanager
def streaming(server: Program, n: int) -> Iterator[Iterator[str]]:
    """The lines of a stream of n tokens, whose first has come."""
    url, body = server.where + CHAT, {**ENDLESS, "max_tokens": n}
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"content": "' in line)
        yield lines


def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    with program("--port", "0", "-c", "4096") as server:
        with streaming(server, 400) as lines:
            server.process.send_signal(signal.SIGTERM)
            rest = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert rest[-1]["timings"]["predicted_n"] == 400
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.where}/health")
        assert server.status() == 0
        assert "Traceback" not in "".join(server.lines)


@pytest.mark.parametrize("wait", ["--drain=1", "--drain=60"])
def test_answers_are_ended_by_a_second_signal_or_after_a_time(wait: str) -> None:
    with program("--port", "0", "-c", "8192", wait) as server:
        with streaming(server, 8000) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: refuses(server)), "the first signal was taken"
            if wait == "--drain=60":
                server.said("stopping")  # two signals at once would be one
                server.process.send_signal(signal.SIGTERM)
            *_, last, _ = lines
        assert "the server is stopping" in last, "clients are told"
        assert server.status() == 0
        assert "Traceback" not in "".join(server.lines), server.lines
