"""The figures of a load test as one document, with all samples on request.

Percentiles are interpolated between the two nearest samples, as numpy does. Nothing here prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .client import LoadRun
from .record import CUT, OK, UNFINISHED, StreamRecord, answer_of

KIND = "ggpy bench_serve"
PERCENTS = (50, 90, 99)
# Names of the distributions, which are in milliseconds, and their meanings.
TIMES = {
    "ttft": "time to first token",
    "chunk": "between chunks",
    "token": "between tokens",
    "tpot": "time per output token",
    "e2e": "end to end",
}
Document = dict[str, Any]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the ordered samples are."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def distribution(seconds: Iterable[float]) -> dict[str, float] | None:
    """Milliseconds of percentiles, mean and max; None without samples."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    found = {f"p{n}": 1e3 * percentile(ordered, n) for n in PERCENTS}
    return found | {
        "max": 1e3 * ordered[-1], "mean": 1e3 * sum(ordered) / len(ordered), "n": len(ordered)
    }  # fmt: skip


# Samples of one request, in seconds


def chunk_gaps(record: StreamRecord) -> Iterator[float]:
    """Times between reads that brought text."""
    at = record.arrivals
    return (at[i] - at[i - 1] for i in range(1, len(at)))


def tokens_per_event(record: StreamRecord) -> float:
    """Average tokens of an event, by the server's usage; at least one."""
    return max(1.0, record.n_tokens / record.n_events) if record.n_events else 1.0


def token_gaps(record: StreamRecord) -> Iterator[float]:
    """Times between tokens: those of a read share the time since the read before.

    A read has as many tokens as it has events, each with as many as the usage says on average.
    """
    ratio = tokens_per_event(record)
    for gap, count in zip(chunk_gaps(record), record.counts[1:], strict=True):
        n = max(1, round(count * ratio))
        yield from (gap / n for _ in range(n))


def time_per_token(record: StreamRecord) -> float | None:
    """Seconds per token after the first one; None if there are fewer than two.

    The first read counts as one token, as in other clients.
    """
    if record.n_tokens < 2 or len(record.arrivals) < 2:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / (record.n_tokens - 1)


def samples_of(records: Sequence[StreamRecord]) -> dict[str, list[float]]:
    """All samples in seconds. Requests that were cut off count until then; failed ones do not."""
    good = [r for r in records if r.outcome in (OK, CUT, UNFINISHED)]
    whole = [r for r in good if r.outcome == OK]
    return {
        "ttft": [r.arrivals[0] - r.start for r in good if r.arrivals],
        "chunk": [gap for r in good for gap in chunk_gaps(r)],
        "token": [gap for r in good for gap in token_gaps(r)],
        "tpot": [t for r in whole if (t := time_per_token(r)) is not None],
        "e2e": [r.end - r.start for r in whole],
    }


# The document


def summary(run: LoadRun, about: Mapping[str, Any], detailed: bool = False) -> Document:
    """`about`, which describes the test, and all figures; detailed: with times of each request."""
    records = run.records
    found: Document = {"kind": KIND, **about}
    found |= _counts(run) | _tokens(records) | _rates(run)
    found |= steady_rate(records, about["concurrency"]) if not about["rate"] else {}
    found |= {f"{name}_ms": distribution(s) for name, s in samples_of(records).items()}
    found |= _client(run)
    if detailed:
        found["samples"] = [_sample(record, run.start) for record in records]
    return found


def _counts(run: LoadRun) -> Document:
    outcomes = Counter(record.outcome for record in run.records)
    failed = [record for record in run.records if record.is_failed]
    return {
        "n_requests": len(run.records),
        "n_ok": outcomes[OK],
        "n_cut": outcomes[CUT],
        "n_unfinished": outcomes[UNFINISHED],
        "n_failed": len(failed),
        "errors": dict(Counter(record.outcome for record in failed).most_common()),
        "messages": {record.outcome: record.detail for record in reversed(failed)},  # the first
        "n_retry_after": sum(record.has_retry_after for record in failed),
        "n_without_text": sum(r.outcome == OK and not r.arrivals for r in run.records),
        "n_connections": run.n_connections,
        "peak_concurrency": run.peak,
        "signal": run.signal,
    }


def _tokens(records: Sequence[StreamRecord]) -> Document:
    """Tokens by the server's usage; of an answer without one, its events."""
    told = [r for r in records if r.n_prompt is not None]
    prompts = [r.n_prompt or 0 for r in told]
    return {
        "prompt_tokens": sum(prompts),
        "prompt_tokens_min": min(prompts, default=0),
        "prompt_tokens_max": max(prompts, default=0),
        "cached_tokens": sum(r.n_cached or 0 for r in told),
        "output_tokens": sum(r.n_tokens for r in records),
        "output_events": sum(r.n_events for r in records),
        "n_without_usage": sum(r.n_output is None and r.outcome == OK for r in records),
    }


def _rates(run: LoadRun) -> Document:
    seconds = run.end - run.start
    tokens = _tokens(run.records)
    n_out, n_all = tokens["output_tokens"], tokens["output_tokens"] + tokens["prompt_tokens"]
    n_ok = sum(record.outcome == OK for record in run.records)
    rates = {"requests_per_s": n_ok, "output_ts": n_out, "total_ts": n_all}
    return {
        "duration_s": seconds,
        **{name: n / seconds if seconds else 0.0 for name, n in rates.items()},
    }


def steady_rate(records: Sequence[StreamRecord], concurrency: int) -> Document:
    """Tokens a second while `concurrency` answers were being generated, and no prompt was read.

    An answer is being generated from its first to its last read with text. This is what
    `ggpy bench --batch` measures without a server. If so many answers never ran at the same time,
    steady_s is 0, and steady_ts None.
    """
    running = [r for r in records if len(r.arrivals) > 1]
    if not running:
        return {"steady_s": 0.0, "steady_ts": None}
    times = np.concatenate([r.arrivals for r in running])
    tokens = np.concatenate([np.array(r.counts) * tokens_per_event(r) for r in running])
    order = np.argsort(times)
    times, total = times[order], np.cumsum(tokens[order])
    begins = np.sort([r.arrivals[0] for r in running])
    ends = np.sort([r.arrivals[-1] for r in running])
    borders = np.unique(np.concatenate([begins, ends]))
    started = np.searchsorted(begins, borders, side="right")
    full = started - np.searchsorted(ends, borders, side="right") >= concurrency
    start, stop = borders[:-1][full[:-1]], borders[1:][full[:-1]]
    seconds = float((stop - start).sum())
    before, until = (total[np.searchsorted(times, at, side="right") - 1] for at in (start, stop))
    n = float((until - before).sum())
    return {"steady_s": seconds, "steady_ts": n / seconds if seconds else None}


def _client(run: LoadRun) -> Document:
    seconds = run.end - run.start
    return {
        "client_core_share": run.cpu / seconds if seconds else 0.0,
        "client_late_ms": distribution(run.lateness),
    }


def _sample(record: StreamRecord, start: float) -> Document:
    """One request: seconds since the test began, and milliseconds between its reads."""
    found: Document = {
        "start_s": round(record.start - start, 6),
        "end_s": round(record.end - start, 6),
        "outcome": record.outcome,
        "detail": record.detail,
        "finish": record.finish,
        "n_input": record.request.n_input,
        "n_prompt": record.n_prompt,
        "n_cached": record.n_cached,
        "n_output": record.n_output,
        "n_events": record.n_events,
        "ttft_ms": round(1e3 * (record.arrivals[0] - record.start), 3) if record.arrivals else None,
        "chunk_ms": [round(1e3 * gap, 3) for gap in chunk_gaps(record)],
        "chunk_events": list(record.counts),
    }
    return found | ({"text": answer_of(record)} if record.is_kept else {})
