"""Work apart from answers, embeddings and relevance: answers go on beside it, and it ends with its
client.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from running_server import RunningServer, calls_apart, eventually, idle, running, settled

from ggpy.grammar import GrammarUntried
from ggpy.serve.answers.worker import EngineWorker


class CountingEngine:
    """An engine that always has an answer to go on with, and counts its steps."""

    n_seq, busy, steps = 1, True, 0

    def step(self, wait: bool) -> None:
        self.steps += 1
        time.sleep(0.001)

    def abort(self, error: BaseException) -> None:
        """Nothing has to end."""


def test_clients_that_ask_again_at_once_leave_room_for_steps() -> None:
    engine, n_calls = CountingEngine(), 40

    async def ask(worker: EngineWorker) -> None:
        for _ in range(n_calls):
            await worker.call(lambda: time.sleep(0.005))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        worker = EngineWorker(engine, loop, 1, pytest.fail)  # type: ignore[arg-type]
        await asyncio.gather(*(ask(worker) for _ in range(3)))
        worker.close()

    asyncio.run(run())
    assert engine.steps >= n_calls, "each client has one call between two steps at most"


def test_it_ends_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(metrics=True) as server:
        calls, asked = calls_apart(server, monkeypatch), ["a b c d e f g h " * 5] * 400
        for path, body in (
            ("/v1/embeddings", {"input": asked}),
            ("/embeddings", {"content": asked}),
        ):
            calls.clear()
            server.leave(path, body, lambda: len(calls) > 0)
            assert settled(lambda: len(calls)) < len(asked), path
            assert eventually(lambda: idle(server))
        counted = server.client.get("/metrics").text
        assert 'path="/v1/embeddings",status="499"} 1' in counted.replace(", ", ",")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/completion", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_breakers_are_looked_up_apart_from_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A large vocabulary takes half a second, in which other answers go on."""
    in_loop: list[bool] = []

    def breakers(texts: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
        in_loop.append(asyncio._get_running_loop() is not None)
        return ((1,),)

    monkeypatch.setattr("ggpy.serve.api.options.dry_breakers", breakers)
    wanted = {"max_tokens": 1, "dry_multiplier": 0.5, "dry_sequence_breakers": ["a"]}
    answer = server.post(path, model="llama", **body, **wanted)
    assert answer.status_code == 200, answer.text
    assert in_loop == [False]


def test_logits_that_are_nan_are_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        plain = server.engine.ops.sample
        broken = lambda logits, samplers: plain(np.full_like(logits, np.nan), samplers)  # noqa: E731
        monkeypatch.setattr(server.engine.ops, "sample", broken)
        for more in ({}, {"ignore_eos": True}, {"logit_bias": [[5, False]]}):
            answer = server.post("/completion", prompt="a", n_predict=3, **more)
            assert answer.status_code == 500 and "highest logit is nan" in answer.text


def test_a_grammar_that_could_not_be_tried_may_be_tried_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(*given: Any) -> Any:
        raise GrammarUntried("the process that tries the grammar was killed: is memory short?")

    service = server.process.server.service
    assert service is not None
    with monkeypatch.context() as patch:
        patch.setattr(service.model.grammars, "compile", compile)
        answer = server.post("/completion", prompt="a", n_predict=2, grammar='root ::= "xyz"')
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "is memory short?" in answer.json()["error"]["message"]
    answer = server.post("/completion", prompt="a", n_predict=2, grammar='root ::= "xyz"')
    assert answer.status_code == 200


def test_biases_that_forbid_all_are() -> None:
    with running() as server:
        banned = [[id, False] for id in range(server.engine.decoder.sizes.n_vocab)]
        answer = server.post("/completion", prompt="a", n_predict=3, logit_bias=banned)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logit_bias"


def test_texts_of_a_long_prompt_are_encoded_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as server:
        service = server.process.server.service
        assert service is not None
        plain, threads = service.tokenizer.encode, set()

        def encode(*args: Any, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return plain(*args, **options)

        monkeypatch.setattr(service.tokenizer, "encode", encode)
        long = "word and so on " * 20_000
        for prompt in (long, [1, long], [[1, long], "a"]):
            threads.clear()
            answer = server.post("/completion", prompt=prompt, n_predict=1)
            assert answer.status_code == 400 and "context" in answer.text
            assert threads and server._thread.ident not in threads
        both = server.post("/completion", prompt=[1, "abc"], n_predict=1, n=2).json()
        assert len({answer["prompt"] for answer in both}) == 1 and "abc" in both[0]["prompt"]


def test_a_huge_bias_is_refused() -> None:
    with running() as server:
        answer = server.post("/completion", prompt="a", logit_bias={"5": 10**400})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


def test_a_prompt_that_is_only_evaluated_is_in_the_cache() -> None:
    """As llama-server's n_predict of 0."""
    with running(n_ctx=512) as server:
        prompt = "a b c d e f g h " * 20
        first, second = (
            server.post("/completion", prompt=prompt, n_predict=n).json() for n in (0, 2)
        )
        assert (first["content"], first["stop_type"]) == ("", "limit")
        assert first["timings"]["prompt_ms"] > 0 and first["timings"]["predicted_n"] == 0
        assert first["timings"]["cache_n"] == 0 < second["timings"]["cache_n"]
        assert second["timings"]["predicted_n"] == 2
