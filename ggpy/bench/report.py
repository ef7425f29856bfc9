"""The page of measurements, BENCHMARKS.md, made of committed JSON and of nothing else.

Each file in the folder is the output of one `ggpy bench -o json`, and becomes one section with its
machine, date and command. Numbers are never typed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .table import BUSY, FIELDS, Row

HEAD = """\
# Benchmarks

What `ggpy bench` measured. This page is written by `ggpy bench --report` from the JSON files in
`{folder}/`; to add a machine, put the output of `ggpy bench ... -o json` there and run that again.

*t/s* is the median of all repetitions, of all sequences together; *spread* is how far the slowest
and the fastest of them are apart. *limit* is what reading the weights and the context once, or
multiplying them, would allow at the speeds measured on the same machine."""
COLUMNS = (
    *("model", "size", "test", "t/s", "spread", "limit", "% of limit"),
    *("first token", "load", "GPU memory"),
)


class ReportError(ValueError):
    """A file that is no output of `ggpy bench -o json`."""


def write(folder: Path) -> Path:
    """Write BENCHMARKS.md beside the folder; ReportError."""
    path = folder.resolve().parent / "BENCHMARKS.md"
    path.write_text("\n".join(page(folder)) + "\n", encoding="utf-8")
    return path


def page(folder: Path) -> Iterator[str]:
    """The lines of the page; ReportError for an empty folder or a file that is something else."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ReportError(f"{folder}: no .json files: put the output of `ggpy bench -o json` there")
    yield HEAD.format(folder=folder.resolve().name)
    for path in files:
        yield from section(path.stem, read(path))


def read(path: Path) -> list[Row]:
    """The rows of a file; ReportError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise ReportError(f"{path}: is no list of results: write it with `ggpy bench -o json`")
    missing = [name for name in FIELDS if name not in rows[0]]
    if missing:
        raise ReportError(f"{path}: the results have no {missing[0]!r}: measure again")
    return rows


def section(title: str, rows: list[Row]) -> Iterator[str]:
    """One run: where, when, how, and its table."""
    first = rows[0]
    driver = f", driver for CUDA {first['driver']}" if first["driver"] else ""
    yield f"\n## {title.replace('-', ' ').replace('_', ' ')}\n"
    yield f"{first['gpu_info'] or first['cpu_info']}{driver}, {first['test_time'][:10]}, "
    known = f"{first['bandwidth'] / 1e12:.3g} TB/s, {first['matrix_rate'] / 1e12:.3g} TFLOP/s"
    yield f"build {first['build_commit']}. Limits: {known if first['bandwidth'] else 'unknown'}.\n"
    yield f"```sh\n{first['command']}\n```\n"
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "| --- | ---: | --- |" + " ---: |" * (len(COLUMNS) - 3)
    for row in rows:
        yield "| " + " | ".join(_cells(row)) + " |"
    for row in rows:
        if row["error"]:
            yield f"\n{row['model_filename']}, {row['test']}: {row['error']}"


def _cells(row: Row) -> list[str]:
    if row["error"]:
        return [row["model_filename"], "", row["test"], "failed", *[""] * (len(COLUMNS) - 4)]
    busy = " (busy?)" if row["spread"] > BUSY else ""
    first, load, memory = row["first_token_ms"], row["load_s"], row["device_bytes"]
    return [
        row["model_filename"].rpartition("/")[2],
        f"{row['model_size'] / 2**30:.2f} GiB",
        row["test"],
        f"{row['median_ts']:.1f}",
        f"{row['spread']:.1%}{busy}",
        f"{row['limit_ts']:.0f}" if row["limit_ts"] else "",
        f"{row['percent_of_limit']:.1f}" if row["percent_of_limit"] else "",
        f"{first:.1f} ms" if first else "",
        f"{load:.1f} s" if load is not None else "",
        f"{memory / 2**30:.2f} GiB" if memory else "",
    ]
