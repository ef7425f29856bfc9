"""Load on a fake server: how many at a time and when, what is cut off, and what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ggpy.bench.serving.client import LoadClient, LoadPlan, LoadRun, arrivals
from ggpy.bench.serving.connection import ConnectionPool
from ggpy.bench.serving.http1 import target_of
from ggpy.bench.serving.record import CUT, OK, UNFINISHED
from ggpy.bench.serving.requests import LoadRequest

PATH = "/v1/chat/completions"


def load(
    server: Any, n: int = 1, cuts: Sequence[int | None] = (), url: str = "", **plan: Any
) -> LoadRun:
    """Send n requests to a fake server; cuts: where each is cut off."""

    async def work() -> LoadRun:
        pool = ConnectionPool(target_of(url or server.url))
        numbered = itertools.zip_longest(range(n), cuts[:n])
        found = [LoadRequest(b'{"n": %d}' % i, 1, 9, cut, 0.01) for i, cut in numbered]
        run = await LoadClient(pool, LoadPlan(PATH, **plan)).measure(found)
        pool.close()
        return run

    return server.run(work)


def outcomes(run: LoadRun) -> list[str]:
    return [record.outcome for record in run.records]


def test_concurrency_is_reached_and_never_exceeded(fake: Any) -> None:
    server = fake.Server(lambda path, body, n: fake.stream("abc", wait=0.002 + n % 3 * 0.003))
    run = load(server, n=40, concurrency=7)
    assert outcomes(run) == [OK] * 40 and sorted(b["n"] for b in server.bodies) == [*range(40)]
    assert server.peak == run.peak == 7
    assert server.n_connections == run.n_connections == 7, "connections are kept"
    assert [(r.n_prompt, r.n_output, r.n_events) for r in run.records] == [(3, 3, 3)] * 40


def test_times_are_those_of_the_server(fake: Any) -> None:
    """No part is early; on a busy machine it may be late."""
    server = fake.Server(lambda path, body, n: fake.stream("abcd", wait=0.03))
    (record,) = load(server).records
    times = [record.start, *record.arrivals]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) == 4 and sum(gaps) >= 0.119
    assert min(gaps) >= 0 and record.end >= record.arrivals[-1]


def test_chunks_may_be_cut_anywhere(fake: Any) -> None:
    data = fake.HEAD + fake.chunked(fake.event(fake.chat("é🎉")))
    data += b"".join(fake.ending(n_output=1))
    server = fake.Server(lambda path, body, n: [data[:n], data[n:]] if n else [data])
    run = load(server, n=len(data))
    assert outcomes(run) == [OK] * len(data)
    assert {record.n_events for record in run.records} == {1} and run.n_connections == 1


def test_arrivals_are_a_poisson_process() -> None:
    first = list(itertools.islice(arrivals(20.0, 3), 5000))
    assert first == list(itertools.islice(arrivals(20.0, 3), 5000)) and first[0] == 0
    assert first != list(itertools.islice(arrivals(20.0, 4), 5000))
    gaps = [b - a for a, b in itertools.pairwise(first)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1), "exponential"


def test_a_rate_does_not_wait_for_answers(fake: Any) -> None:

    def answer(path: str, body: Any, n: int) -> Iterator[Any]:
        while len(server.bodies) < 20:
            yield 0.005
        yield from fake.stream("a")

    server = fake.Server(answer)
    run = load(server, n=20, rate=100.0, seed=5)
    expected = list(itertools.islice(arrivals(100.0, 5), 20))
    assert outcomes(run) == [OK] * 20 and run.peak == server.peak == 20
    starts = [record.start - run.start for record in run.records]
    assert starts == pytest.approx(expected), "a request counts from when it was due"
    assert run.end - run.start > expected[-1]


def test_requests_that_are_cut_off_close_their_connection(fake: Any) -> None:
    server = fake.Server(lambda path, body, n: fake.stream("abcdefgh", wait=0.02))
    run = load(server, n=6, cuts=[2, None, 0, 3, None, 1], concurrency=3)
    assert sorted(outcomes(run)) == sorted([CUT, OK, CUT, CUT, OK, CUT])
    cut = {record.request.cut_at: record for record in run.records if record.outcome == CUT}
    assert [cut[n].n_events for n in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert server.n_lost == 4 and server.n_now == 0


def test_an_answer_that_ends_before_the_cut_is_ok(fake: Any) -> None:
    run = load(fake.Server(lambda path, body, n: fake.stream("ab")), cuts=[8])
    assert outcomes(run) == [OK]


def test_errors_are_counted_by_kind(fake: Any) -> None:
    answers = [
        fake.whole("503 Busy", {"error": {"message": "full"}}, "Retry-After: 1"),
        fake.stream("ab"),
        fake.whole("400 Bad Request", {"error": {"message": "no"}}),
        [fake.HEAD + fake.chunked(fake.event(fake.chat("a"))), None],
        [b"gopher\r\n\r\n"],
        [fake.HEAD, fake.chunked(fake.event({"error": {"message": "GPU"}})), *fake.ending()],
        [0.5],
        fake.stream("ab"),
    ]
    run = load(fake.Server(lambda path, body, n: answers[n]), n=8, timeout=0.25)
    assert outcomes(run) == [
        *("HTTP 503", OK, "HTTP 400", "connection lost", "malformed response"),
        *("error in stream", "timeout", OK),
    ]
    assert [record.has_retry_after for record in run.records] == [True] + [False] * 7
    assert run.records[0].detail == "full" and run.records[5].detail == "GPU"


def test_a_connection_that_the_server_closed_is_replaced(fake: Any) -> None:
    """Between two requests, with or without being told."""
    told = fake.whole("404 Not Found", {"error": {}}, "Connection: close")
    for steps in ([*fake.stream("ab"), None], [*told, None]):
        server = fake.Server(lambda path, body, n, steps=steps: steps)
        run = load(server, n=3)
        assert set(outcomes(run)) <= {OK, "HTTP 404"} and server.n_connections == 3


def test_no_server(fake: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = load(fake.Server(lambda *_: []), n=2, url=f"http://127.0.0.1:{port}")
    assert outcomes(run) == ["no connection"] * 2 and "Connect" in run.records[0].detail


def test_fail_fast(fake: Any) -> None:
    bad = fake.whole("500 Error", {"error": {"message": "x"}})
    server = fake.Server(lambda path, body, n: bad if n == 3 else fake.stream("a", wait=0.005))
    run = load(server, n=50, fails_fast=True)
    assert outcomes(run) == [OK] * 3 + ["HTTP 500"] and run.is_failed
    assert len(load(server, n=9, fails_fast=False).records) == 9


@pytest.mark.parametrize("rate", [None, 200.0])
def test_a_signal_ends_the_test_and_keeps_what_was_measured(fake: Any, rate: float | None) -> None:
    def answer(path: str, body: Any, n: int) -> list[Any]:
        if n == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return fake.stream("ab", wait=5.0 if n >= 5 else 0.001)

    before = signal.getsignal(signal.SIGINT)
    run = load(fake.Server(answer), n=30, concurrency=1, rate=rate)
    assert run.signal == signal.SIGINT and signal.getsignal(signal.SIGINT) is before
    found = outcomes(run)
    if rate is None:
        assert found == [OK] * 5 + [UNFINISHED]
    assert {OK, UNFINISHED} >= {*found} and UNFINISHED in found
    assert len(found) < 30 and not run.is_failed


def test_nothing_is_left_behind(fake: Any) -> None:
    """Neither tasks nor sockets, with a third of the requests cut off."""

    async def work() -> int:
        before = len(os.listdir("/dev/fd"))
        pool = ConnectionPool(target_of(server.url))
        draws = random.Random(2)
        found = [
            LoadRequest(b"{}", 1, 9, draws.choice([None, None, draws.randrange(5)]), 0.002)
            for _ in range(150)
        ]
        await LoadClient(pool, LoadPlan(PATH, concurrency=16)).measure(found)
        pool.close()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(os.listdir("/dev/fd")) <= before and server.n_now == 0:
                break
        return len(os.listdir("/dev/fd")) - before

    server = fake.Server(lambda path, body, n: fake.stream("abcde", wait=0.001))
    assert server.run(work) <= 0 and server.n_lost > 20
