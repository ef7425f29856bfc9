"""Greedy answers among 63 others are those of the library alone, token by token.

64 prompts, some of which begin alike and some of which are longer than a chunk of prefill, through
three endpoints, streamed and whole; once with pages for all of them, and once with so few that
sequences are preempted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer, running

import ggpy

N, N_TOKENS, N_CTX = 64, 48, 256
TEXT = "the sky is blue and a fox ran over hills while birds sang of rain in may"
WORDS = TEXT.split()


def prompt(i: int) -> str:
    """A text of 1 to 40 words; two in four begin with the same page."""
    shared = TEXT * 2 if i % 4 < 2 else ""
    return shared + " ".join(WORDS[(i * 5 + k * (1 + i % 3)) % 17] for k in range(1 + i % 23))


Answer = tuple[list[int], str]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """The ids and texts of the library's answers to the prompts, one by one."""
    found = []
    with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=N_CTX) as model:
        end = model.tokenizer.end_ids
        for i in range(N):
            pieces = list(model.generate(prompt(i), max_tokens=N_TOKENS, temperature=0))
            ids = [piece.id for piece in pieces if piece.id not in end]
            found.append((ids, "".join(piece.text for piece in pieces)))
    return found


@pytest.fixture(scope="module", params=[None, 24 * 64], ids=["enough pages", "few pages"])
def crowded(request: Any) -> Iterator[RunningServer]:
    with running(n_seq=N, n_ctx=N_CTX, n_positions=request.param) as server:
        yield server


async def ask(client: httpx.AsyncClient, i: int) -> tuple[list[int] | None, str]:
    """The ids of an answer, where the endpoint tells them, and its text."""
    body = {"prompt": prompt(i), "max_tokens": N_TOKENS, "temperature": 0, "stream": i % 2 == 0}
    if i % 4 < 2:
        return await _native(client, {**body, "n_probs": 1 + i % 3})
    answer = await client.post("/v1/completions", json=body)
    if not body["stream"]:
        return None, answer.json()["choices"][0]["text"]
    return None, "".join(event["choices"][0]["text"] for event in _events(answer))


async def _native(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    answer = await client.post("/completion", json=body)
    events = _events(answer) if body["stream"] else [answer.json()]
    told = [p["id"] for event in events for p in event.get("completion_probabilities", [])]
    return told, "".join(event["content"] for event in events)


def _events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_answers_among_63_others_are_those_of_one(
    crowded: RunningServer, alone: list[Answer]
) -> None:
    async def ask_all() -> list[tuple[list[int] | None, str]]:
        limits = httpx.Limits(max_connections=N)
        async with httpx.AsyncClient(base_url=crowded.url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*[ask(client, i) for i in range(N)])

    before = crowded.engine.stats()
    answers = asyncio.run(ask_all())
    for i, (ids, text) in enumerate(answers):
        expected, text_alone = alone[i]
        assert text == text_alone, i
        assert ids is None or ids[: len(expected)] == expected, i
    after = crowded.engine.stats()
    assert after.n_running == 0
    few = after.n_pages < N
    assert (after.preemptions_total > before.preemptions_total) == few
