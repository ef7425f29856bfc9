"""Figures of records whose times are known, beside those of numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ggpy.bench.serving.client import LoadRun
from ggpy.bench.serving.record import CUT, OK, UNFINISHED, StreamRecord
from ggpy.bench.serving.requests import LoadRequest
from ggpy.bench.serving.summary import (
    TIMES,
    distribution,
    percentile,
    samples_of,
    steady_rate,
    summary,
)
from ggpy.bench.serving.table import BUSY_NOTE, lines

ABOUT: dict[str, Any] = {
    "label": "", "url": "http://h:1", "model": "tiny", "endpoint": "/v1/chat/completions",
    "rate": None, "concurrency": 2, "prompts": "512 tokens, by the server's tokenizer",
}  # fmt: skip


def record_of(
    start: float, arrivals: list[float], end: float, outcome: str = OK, **more: Any
) -> StreamRecord:
    """A record with an event for each arrival; more: its other attributes."""
    record = StreamRecord(LoadRequest(b"", 512, 9), start)
    record.arrivals.extend(arrivals)
    record.counts.extend(more.pop("counts", [1] * len(arrivals)))
    record.end, record.outcome, record.n_events = end, outcome, sum(record.counts)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def run_of(*records: StreamRecord) -> LoadRun:
    ends = [record.end for record in records]
    return LoadRun(list(records), 100.0, max(ends), cpu=0.5, peak=2, lateness=[0.0, 0.001])


RUN = run_of(
    record_of(100.0, [100.2, 100.3, 100.5], 100.6, n_prompt=10, n_output=3),
    record_of(100.1, [100.5, 100.6], 102.0, counts=[1, 2], n_prompt=20, n_output=6, n_cached=8),
    record_of(100.2, [100.4], 100.4, CUT),
    record_of(100.3, [100.9], 101.0, "HTTP 503", detail="full", has_retry_after=True),
    record_of(100.3, [], 101.0, "HTTP 503", detail="other"),
    record_of(100.4, [], 101.0, "timeout", detail="no end after 1 s"),
    record_of(100.5, [101.5], 101.6, UNFINISHED),
)


def test_percentiles_are_numpys() -> None:
    draws = random.Random(1)
    for n in (1, 2, 3, 10, 101, 1000):
        values = sorted(draws.expovariate(1) for _ in range(n))
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_distribution_is_in_milliseconds() -> None:
    found = distribution(n / 1000 for n in range(101, 0, -1))
    assert found == pytest.approx(
        {"p50": 51, "p90": 91, "p99": 100, "max": 101, "mean": 51, "n": 101}
    )
    assert distribution([]) is None


def test_samples() -> None:
    found = samples_of(RUN.records)
    assert found["ttft"] == pytest.approx([0.2, 0.4, 0.2, 1.0]), "those that failed do not count"
    assert found["chunk"] == pytest.approx([0.1, 0.2, 0.1])
    # Of the second answer an event is two tokens, and two events came at once: four tokens.
    assert found["token"] == pytest.approx([0.1, 0.2, *[0.025] * 4])
    assert found["tpot"] == pytest.approx([0.3 / 2, 0.1 / 5])
    assert found["e2e"] == pytest.approx([0.6, 1.9])


def test_counts_and_rates() -> None:
    found = summary(RUN, ABOUT)
    assert [found[f"n_{name}"] for name in ("requests", "ok", "cut", "failed", "unfinished")] == [
        *(7, 2, 1, 3, 1)
    ]
    assert found["errors"] == {"HTTP 503": 2, "timeout": 1} and found["n_retry_after"] == 1
    assert found["messages"]["HTTP 503"] == "full", "the first of its kind"
    assert found["duration_s"] == pytest.approx(2)
    assert found["output_tokens"] == 3 + 6 + 1 + 1 + 1 and found["prompt_tokens"] == 30
    assert found["output_ts"] == pytest.approx(6) and found["total_ts"] == pytest.approx(21)
    assert found["requests_per_s"] == pytest.approx(1) and found["cached_tokens"] == 8
    assert found["client_core_share"] == pytest.approx(0.25)
    assert "samples" not in found


def test_the_steady_rate_is_of_the_time_in_which_all_answers_run() -> None:
    """Two answers run from 2 to 4 s: the first has then two reads, one of them of three tokens, and
    the second one of two tokens.
    """
    first = record_of(0, [1.0, 2.0, 3.0, 4.0, 5.0], 5.0, counts=[1, 1, 1, 3, 1])
    second = record_of(0, [2.0, 4.0], 4.0, n_output=4)
    alone = record_of(0, [6.0], 6.0)
    assert steady_rate([first, second, alone], 2) == {"steady_s": 2.0, "steady_ts": 3.0}
    assert steady_rate([first, alone], 1) == {"steady_s": 4.0, "steady_ts": 1.5}
    assert steady_rate([first, second], 3) == {"steady_s": 0.0, "steady_ts": None}
    assert steady_rate([alone], 1) == {"steady_s": 0.0, "steady_ts": None}
    text = "\n".join(lines(summary(run_of(first, second), ABOUT)))
    assert "3.0 t/s in the 2.00 s in which 2 answers were being generated" in text


def test_samples_of_each_request() -> None:
    first = summary(RUN, ABOUT, detailed=True)["samples"][0]
    assert (first["ttft_ms"], first["chunk_ms"], first["end_s"]) == (200, [100, 200], 0.6)
    assert first["outcome"] == OK and first["n_output"] == 3 and "text" not in first


def test_the_tables() -> None:
    found = list(lines(summary(RUN, ABOUT)))
    head, rule, row = found[:3]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert set(rule) == set("|-: ") and len(head) == len(rule) == len(row)
    assert dict(zip(columns, cells, strict=True)) == {
        "label": "tiny", "load": "x2", "ok": "2", "cut off": "1", "failed": "3",
        "unfinished": "1", "req/s": "1.00", "output t/s": "6.0", "total t/s": "21.0", "s": "2.00",
    }  # fmt: skip
    text = "\n".join(found)
    assert all(f"\n| {meaning} " in text for meaning in TIMES.values())
    assert "failed: 2 x HTTP 503: full" in text and "1 of them had a Retry-After header" in text
    assert "10 to 20 tokens by the server's usage, 8 of all cached" in text
    assert BUSY_NOTE not in text


def test_the_table_leaves_out_what_is_not_there() -> None:
    """Columns of usual tests, and the time between tokens where chunks are tokens."""
    record = record_of(100.0, [100.1, 100.2], 101.0, n_prompt=5, n_output=2)
    text = "\n".join(lines(summary(run_of(record), ABOUT)))
    assert "cut off" not in text and "unfinished" not in text and "between tokens" not in text
    assert "between chunks" in text and "5 tokens by the server's usage" in text
    silent = record_of(100.0, [], 101.0, "no connection", detail="refused\x1b[31m")
    text = "\n".join(lines(summary(run_of(silent), ABOUT)))
    assert "no usage from the server" in text and "refused\\x1b[31m" in text


def test_a_client_that_is_short_of_time_says_so() -> None:
    run = run_of(record_of(100.0, [100.1], 101.0))
    run.cpu = 0.9
    assert BUSY_NOTE in list(lines(summary(run, ABOUT)))
    run.cpu, run.lateness = 0.1, [0.02] * 10
    assert BUSY_NOTE in list(lines(summary(run, ABOUT)))
