"""Generates BENCHMARKS.md, the page of measurements, from committed JSON files only.

Each file in the folder is the output of one `ggpy bench -o json`, `ggpy bench --profile -o json`,
`ggpy bench_kernels -o json` or `ggpy compare -o json`. It becomes one section with its machine,
date and command. This module contains no measured number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..util.output_file import write_whole
from . import compare_table
from .kernels import table as kernel_table
from .profiling import table as profile_table
from .table import BUSY, FIELDS, Row, rate

HEAD = """\
# Benchmarks

Measurements of `ggpy bench`, `ggpy bench_kernels` and `ggpy compare`. `ggpy bench --report` makes
this page from the JSON files in `{folder}/`; `ggpy make_benchmarks` measures everything on a GPU
and writes both. Any other output of `-o json` may be added to the folder.

- *t/s*: tokens a second of all sequences together, median of the repetitions.
- *spread*: distance of the slowest and the fastest repetition. A large one means that the machine
  was busy, or that its clocks changed because the GPU drew all the power it may have.
- *limit*: t/s if the weights and the context were read once, or the weights multiplied, at the
  speeds measured on the same machine.

Times of kernels include their launch. Launches follow each other in a graph, and their operands are
in no cache."""
ADDED = ("activations",)  # fields that older results lack, and that the page does not show
COLUMNS = (
    *("model", "size", "test", "t/s", "spread", "limit", "% of limit"),
    *("first token", "load", "GPU memory"),
)


class ReportError(ValueError):
    """A file does not hold results of a measurement."""


def write(folder: Path) -> Path:
    """Write BENCHMARKS.md into the parent of the folder. Raises ReportError."""
    path = folder.resolve().parent / "BENCHMARKS.md"
    write_whole(path, "\n".join(page(folder)) + "\n")
    return path


def page(folder: Path) -> Iterator[str]:
    """The lines of the page. Raises ReportError for an empty folder or an unknown kind of file."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ReportError(f"{folder}: no .json files: put the output of `ggpy bench -o json` there")
    yield HEAD.format(folder=folder.resolve().name)
    for path in files:
        yield f"\n## {path.stem.replace('-', ' ').replace('_', ' ')}\n"
        yield from section(path)


def section(path: Path) -> Iterator[str]:
    """The lines of the section of a file. Raises ReportError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("kind") == kernel_table.KIND:
            yield from kernels(kernel_table.checked(found, path))
        elif isinstance(found, dict) and found.get("kind") == profile_table.KIND:
            yield from steps(profile_table.checked(found, path))
        elif isinstance(found, dict) and found.get("kind") == compare_table.KIND:
            yield from both(compare_table.checked(found, path))
        else:
            yield from speeds(checked(found, path))
    except (OSError, ValueError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def commands(rows: Iterable[Row]) -> str:
    """The block of the commands that measured rows, each of them once."""
    return "\n".join(["```sh", *dict.fromkeys(row["command"] for row in rows), "```\n"])


def where(first: Row, gpu: str, build: str) -> Iterator[str]:
    """The lines with the machine, the date and the limits of a run."""
    driver = f", driver for CUDA {first['driver']}" if first["driver"] else ""
    known = "unknown"
    if first["bandwidth"]:
        known = f"{rate(first['bandwidth'], 'B/s')}, {rate(first['matrix_rate'], 'FLOP/s')}"
    time = first.get("test_time") or first["time"]
    yield f"{gpu}{driver}, {time[:10]}, build {build}."
    yield f"Limits: {known}.\n"


# Speeds


def checked(rows: Any, path: Path) -> list[Row]:
    """Return `rows` if they are rows of `ggpy bench`. Raises ReportError otherwise."""
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise ReportError(f"{path}: is no list of results: write it with `ggpy bench -o json`")
    missing = [name for name in FIELDS if name not in rows[0] and name not in ADDED]
    if missing:
        raise ReportError(f"{path}: the results have no {missing[0]!r}: measure again")
    return rows


def speeds(rows: list[Row]) -> Iterator[str]:
    """The table of `ggpy bench`."""
    first = rows[0]
    yield from where(first, first["gpu_info"] or first["cpu_info"], first["build_commit"])
    yield commands(rows)
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


# Steps


def steps(found: Row) -> Iterator[str]:
    """The tables of `ggpy bench --profile`."""
    yield from where(found, found["gpu"], found["build"])
    yield commands([found])
    for row in found["profiles"]:
        yield from profile_table.markdown(row)


# Both programs


def both(found: Row) -> Iterator[str]:
    """The table of `ggpy compare`."""
    yield f"{found['time'][:10]}.\n"
    yield commands([found])
    yield from compare_table.markdown(found["rows"])


# Kernels


def kernels(found: Row) -> Iterator[str]:
    """A collapsible table per kind of work: microseconds and % of the limit."""
    yield from where(found, found["gpu"], f"{found['build']}, compiler {found['compiler']}")
    yield commands([found])
    for what in dict.fromkeys(row["what"] for row in found["rows"]):
        yield f"\n<details><summary>{what}</summary>\n"
        yield from pivot([row for row in found["rows"] if row["what"] == what])
        yield "\n</details>"


def pivot(rows: list[Row]) -> Iterator[str]:
    """A table with a line per place and format, and a column per number of tokens and type."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        number = row["shape"].partition(" ")[2]
        column = f"{number} x{row['tokens']}".strip()
        columns[column] = None
        cell = "failed" if row["error"] else f"{row['us']:.2f} us"
        if row["percent_of_limit"]:
            cell += f", {row['percent_of_limit']:.0f} %" + (" !" if kernel_table.busy(row) else "")
        lines.setdefault((row["where"], row["format"]), {})[column] = cell
    yield "| where | format | " + " | ".join(columns) + " |"
    yield "| --- | --- |" + " ---: |" * len(columns)
    for (place, format), cells in lines.items():
        found = [cells.get(column, "") for column in columns]
        yield "| " + " | ".join([place, format, *found]) + " |"
