"""The figures of a load test as text: two Markdown tables, and notes below them.

Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...util.messages import one_line
from .summary import PERCENTS, TIMES, Document

BUSY = 0.8  # share of a core; above it the client may delay what it measures
LATE = 10.0  # ms; the p99 of the timers' delay above which it is short of time
BUSY_NOTE = "! the client was short of time, which is part of these times: give it a quiet core"


def lines(found: Document) -> Iterator[str]:
    """All lines that are printed."""
    yield from _table(*_speeds(found))
    yield ""
    yield from _table(*_times(found))
    yield ""
    yield from notes(found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """A Markdown table whose first `left` columns are aligned to the left."""
    widths = (max(len(row[i]) for row in (head, *rows)) for i in range(len(head)))
    columns = [(width, "<" if i < left else ">") for i, width in enumerate(widths)]
    for row in (head, None, *rows):
        if row is None:
            row = ["-" * (w - 1) + ("-" if s == "<" else ":") for w, s in columns]
        cells = [f"{text:{s}{w}}" for text, (w, s) in zip(row, columns, strict=True)]
        yield "| " + " | ".join(cells) + " |"


def _speeds(found: Document) -> tuple[list[str], list[list[str]]]:
    cells = {
        "label": found["label"] or found["model"] or found["url"],
        "load": load_of(found),
        "ok": str(found["n_ok"]),
        "cut off": str(found["n_cut"]),
        "failed": str(found["n_failed"]),
        "unfinished": str(found["n_unfinished"]),
        "req/s": f"{found['requests_per_s']:.2f}",
        "output t/s": f"{found['output_ts']:.1f}",
        "total t/s": f"{found['total_ts']:.1f}",
        "s": f"{found['duration_s']:.2f}",
    }
    unusual = {"cut off": "n_cut", "unfinished": "n_unfinished"}
    shown = [n for n in cells if n not in unusual or found[unusual[n]]]
    return shown, [[cells[name] for name in shown]]


def load_of(found: Document) -> str:
    """How the requests were sent: "x64", or "5/s" on average."""
    return f"{found['rate']:g}/s" if found["rate"] else f"x{found['concurrency']}"


def _times(found: Document) -> tuple[list[str], list[list[str]]]:
    columns = [*(f"p{n}" for n in PERCENTS), "max", "mean"]
    rows = []
    for name, meaning in TIMES.items():
        times = found[f"{name}_ms"]
        if times and (name != "token" or has_token_times(found)):
            rows.append([meaning, *(_ms(times[column]) for column in columns)])
    return ["ms", *columns], rows


def has_token_times(found: Document) -> bool:
    """Whether times between tokens differ from those between chunks."""
    chunks, token_times = found["chunk_ms"], found["token_ms"]
    return bool(chunks and token_times and chunks["n"] != token_times["n"])


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


# Notes


def notes(found: Document) -> Iterator[str]:
    """The notes below the tables: tokens, errors, the client itself."""
    yield f"{found['model'] or 'no model named'} at {found['url']}, {found['endpoint']}"
    yield _prompts(found)
    yield from _outputs(found)
    yield from _errors(found)
    yield from _client(found)


def _prompts(found: Document) -> str:
    low, high = found["prompt_tokens_min"], found["prompt_tokens_max"]
    told = f"{low}" if low == high else f"{low} to {high}"
    by_usage = f"{told} tokens by the server's usage" if high else "no usage from the server"
    cached = f", {found['cached_tokens']} of all cached" if found["cached_tokens"] else ""
    return f"prompts: {found['prompts']}; {by_usage}{cached}"


def _outputs(found: Document) -> Iterator[str]:
    n, events = found["output_tokens"], found["output_events"]
    text = f"output: {n} tokens in {events} events"
    without = found["n_without_usage"]
    yield text + (f"; {without} answers without usage count their events" if without else "")
    if found.get("steady_ts"):
        yield (
            f"{found['steady_ts']:.1f} t/s in the {found['steady_s']:.2f} s in which "
            f"{found['concurrency']} answers were being generated"
        )
    if found["n_without_text"]:
        yield f"{found['n_without_text']} answers have no text"


def _errors(found: Document) -> Iterator[str]:
    for kind, n in found["errors"].items():
        said = one_line(found["messages"].get(kind, ""), 200)
        yield f"failed: {n} x {kind}" + (f": {said}" if said else "")
    if found["n_retry_after"]:
        yield f"{found['n_retry_after']} of them had a Retry-After header"


def _client(found: Document) -> Iterator[str]:
    late: Mapping[str, Any] = found["client_late_ms"] or {"p99": 0.0, "max": 0.0}
    share = found["client_core_share"]
    yield (
        f"client: {share:.0%} of a core, timers late by {late['p99']:.2f} ms (p99), "
        f"{late['max']:.2f} ms (max); {found['n_connections']} connections opened, "
        f"{found['peak_concurrency']} requests at most at the same time"
    )
    if share > BUSY or late["p99"] > LATE:
        yield BUSY_NOTE
