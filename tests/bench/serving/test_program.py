"""`ggpy bench_serve`, from its command line to its output, against a server in a thread."""

from __future__ import annotations

import asyncio
import json
import runpy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ggpy.bench.serving.words import WORDS
from ggpy.util import paths

QUICK = ["--requests", "6", "--concurrency", "2", "--input-len", "8", "--output-len", "3"]
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    found: Callable[[list[str]], int] = runpy.run_path(
        str(paths.data_dir("tools") / "bench_serve.py")
    )["main"]
    return found


@pytest.fixture
def serving(fake: Any) -> Callable[..., Any]:
    """Run a fake server in a thread; its answers to chats are made by a function."""

    def answer_of(chat: Callable[[Any, int], Any]) -> Callable[[str, Any, int], Any]:
        def answer(path: str, body: Any, n: int) -> Any:
            if path == "/v1/models":
                return fake.whole("200 OK", MODELS)
            if path == "/tokenize":
                return fake.whole("200 OK", {"tokens": body["content"].split()})
            return chat(body, n)

        return answer

    @contextmanager
    def serve(chat: Callable[[Any, int], Any] | None = None, **replaced: Any) -> Iterator[Any]:
        server = fake.Server(answer_of(chat or (lambda body, n: fake.stream("abc", n_output=3))))
        if replaced:
            plain = server.answer
            server.answer = lambda path, body, n: (
                replaced["answer"](path, body, n) or plain(path, body, n)
            )
        ready, over = threading.Event(), threading.Event()

        async def wait() -> None:
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.005)

        thread = threading.Thread(target=server.run, args=(wait,))
        thread.start()
        ready.wait(10)
        try:
            yield server
        finally:
            over.set()
            thread.join(10)

    return serve


def test_the_table_json_and_picture(
    main: Any, serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "x.json", tmp_path / "x.png"
    with serving() as server:
        words = [*QUICK, "--url", server.url, "--warmup", "2", "--label", "test"]
        words += ["--json", str(out), "--texts", "--plot", str(picture), "--api-key", "secret"]
        assert main(words) == 0
    text = capsys.readouterr()
    lines = text.out.splitlines()
    head = "| label | load | ok | failed | req/s | output t/s | total t/s | s |"
    assert " ".join(lines[0].split()) == head
    assert (
        " ".join(lines[2].split()).startswith("| test | x2 | 6 | 0 |")
        and "| time to first token" in text.out
    )
    assert "prompts: 8 tokens, by the server's tokenizer" in text.out
    assert "secret" not in text.out + text.err + out.read_text()
    found = json.loads(out.read_text())
    assert found["kind"] == "ggpy bench_serve" and found["n_ok"] == 6 and found["model"] == "tiny"
    assert [s["text"] for s in found["samples"]] == ["abc"] * 6
    assert found["output_tokens"] == 18 and found["ttft_ms"]["n"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(server.bodies) == 8, "six and two to warm up"
    assert all("Authorization: Bearer secret" in head for head in server.headers)
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == 8 and {*" ".join(prompts).split()} <= {*WORDS}


def test_a_failed_request_is_status_1(
    main: Any, serving: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = fake.whole("503 Busy", {"error": {"message": "queue full"}}, "Retry-After: 3")
    with serving(lambda body, n: busy if n % 2 else fake.stream("ab")) as server:
        assert main([*QUICK, "--url", server.url]) == 1
        out = capsys.readouterr().out
        assert "x HTTP 503: queue full" in out and "had a Retry-After header" in out
        assert main([*QUICK, "--url", server.url, "--fail-fast", "--requests", "500"]) == 1
    assert len(server.bodies) < 20


def test_soak(main: Any, serving: Any, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body, n: fake.stream("abcdefgh", wait=0.001)) as server:
        words = ["--requests", "60", "--concurrency", "8", "--input-len", "1-4", "--output-len"]
        words += ["8", "--abort", "0.4", "--random-params", "--url", server.url]
        assert main(words) == 0
    assert "| cut off |" in capsys.readouterr().out and server.n_lost > 5
    assert len({tuple(sorted(body)) for body in server.bodies}) > 10


def test_without_a_tokenizer_words_are_tokens(
    main: Any, serving: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str, body: Any, n: int) -> Any:
        missing = fake.whole("404 Not Found", {"error": {"message": "no such path"}})
        return missing if path == "/tokenize" else None

    with serving(answer=answer) as server:
        assert main([*QUICK, "--url", server.url + "/v1", "--endpoint", "completions"]) == 0
    captured = capsys.readouterr()
    assert "of a word each, an estimate" in captured.out
    assert "a word counts as a token" in captured.err and "no such path" in captured.err
    assert all(len(body["prompt"].split()) == 8 for body in server.bodies)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [("/v1/models", 1, "HTTP 401: no key"), ("/v1/chat/completions", 1, "the warm-up failed")],
)
def test_a_server_that_refuses_at_once(
    main: Any, serving: Any, fake: Any, path: str, status: int, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    refusal = fake.whole("401 Unauthorized", {"error": {"message": "no key"}})
    with serving(answer=lambda p, body, n: refusal if p == path else None) as server:
        assert main([*QUICK, "--warmup", "1", "--url", server.url]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and "no key" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "host"], "is no address"),
        (["--url", "http://127.0.0.1:1"], "no server at 127.0.0.1:1: "),
        (["--rate", "0"], "'0' is not a number of requests"),
        (["--rate", "5", "--concurrency", "2"], "not allowed with"),
        (["--abort", "1.5"], "a share from 0 to 1"),
        (["--input-len", "nothing.jsonl"], "is no file"),
        (["--output-len", "5-2"], "no number of tokens"),
        (["--json-schema", "/nowhere.json"], "No such file"),
        (["--extra", "[1]"], "is no JSON object"),
        (["--json", "/nowhere/x.json"], "no such folder"),
        (["--texts"], "name a file"),
        (["--plot", "x.doc"], "ends in none of"),
        (["--input-len", __file__, "--shared-prefix", "4"], "--shared-prefix is for"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    main: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("ggpy bench_serve: error: ") and message in captured.err
