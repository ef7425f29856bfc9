"""Some hundred requests of all kinds, a third of which are cut off midway: nothing is left of them.

No page, sequence, ticket, task, thread or file descriptor may be lost. `ggpy bench_serve --requests
10000 --abort 0.3 --random-params` is the same at length.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from typing import Any

import httpx
import pytest
from clients_of_servers import Clock, Weather, function
from running_server import RunningServer, eventually, idle, running

N, AT_ONCE, CUT_OFF = 300, 24, 0.3
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def drawn(draws: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    text = "".join(draws.choices("abc de", k=draws.randint(1, 120)))
    chat = [{"role": "user", "content": text}]
    options: dict[str, Any] = {
        "max_tokens": draws.randint(1, 60),
        "temperature": draws.choice([0, 0.7, 1.5]),
        "seed": draws.randint(0, 1 << 40),
        "stream": draws.random() < 0.7,
    }
    extra = {
        "top_k": draws.choice([0, 1, 40]),
        "min_p": draws.choice([0, 0.05]),
        "repeat_penalty": draws.choice([1, 1.3]),
        "dry_multiplier": draws.choice([0, 0.8]),
        "mirostat": draws.choice([0, 0, 2]),
        "cache_prompt": draws.random() < 0.8,
    }
    tools = [function(Weather), function(Clock)]
    return draws.choice(
        [
            ("/v1/chat/completions", {"messages": chat, **options, **extra, "n": 2}),
            ("/v1/chat/completions", {"messages": chat, **options, "json_schema": SCHEMA}),
            (
                "/v1/chat/completions",
                {"messages": chat, "tools": tools, "tool_choice": "required", **options},
            ),
            ("/v1/completions", {"prompt": [text, "b"], **options, **extra, "logprobs": 3}),
            ("/completion", {"prompt": text, **options, **extra, "stop": ["e"]}),
            ("/v1/messages", {"messages": chat, **options}),
            ("/v1/responses", {"input": text, "max_output_tokens": 9, "stream": True}),
            ("/v1/embeddings", {"input": [text, "c"]}),
            ("/tokenize", {"content": text}),
            ("/v1/completions", {"prompt": text, "temperature": "hot"}),
        ]
    )


async def ask(client: httpx.AsyncClient, i: int) -> int:
    """Send a request, and perhaps go away; its status, 0 if nobody waited for it."""
    draws = random.Random(i)
    path, body = drawn(draws)
    cut_off = draws.random() < CUT_OFF
    seconds = draws.random() * 0.3 if cut_off else 60

    async def read() -> int:
        async with client.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_bytes():
                if cut_off and draws.random() < 0.1:
                    return 0
            return answer.status_code

    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        return 0


def n_tasks(server: RunningServer) -> int:
    """Tasks of the server's event loop."""
    loop = server.process.server.service.worker._loop  # type: ignore[union-attr]
    return len(asyncio.all_tasks(loop))


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_nothing_is_lost() -> None:
    with running(n_seq=8, n_ctx=2048, n_positions=8192, pooling="mean") as server:
        asyncio.run(ask_all(server, range(AT_ONCE)))  # threads and child processes have begun
        assert eventually(lambda: idle(server))
        threads, files, tasks = threading.active_count(), n_files(), n_tasks(server)
        statuses = asyncio.run(ask_all(server, range(AT_ONCE, AT_ONCE + N)))
        assert set(statuses) <= {0, 200, 400}
        assert 0.1 * N < statuses.count(0) < 0.5 * N
        assert statuses.count(200) > 0.4 * N
        assert eventually(lambda: idle(server))
        assert eventually(lambda: n_tasks(server) <= tasks)
        assert eventually(lambda: n_files() <= files)
        assert threading.active_count() <= threads + 4, "asyncio's pool may have grown"
        answer = server.post("/completion", prompt="hello", n_predict=4, temperature=0)
        assert answer.status_code == 200


async def ask_all(server: RunningServer, numbers: range) -> list[int]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one(i: int) -> int:
            async with gate:
                return await ask(client, i)

        return await asyncio.gather(*[one(i) for i in numbers])
