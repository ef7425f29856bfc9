"""Prints rows of measured kernels, and compares them with an older measurement.

A document is the output of `-o json`: the machine, then one row per line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from pathlib import Path
from typing import Any

from ..table import BUSY, BUSY_NOTE, rate
from .runs import FIELDS, Row

KIND = "ggpy bench_kernels"
MACHINE: dict[str, type] = {
    **dict.fromkeys(("kind", "gpu", "driver", "compiler", "build", "command", "time"), str),
    **dict.fromkeys(("bandwidth", "matrix_rate"), float),
}
SMALLEST = 0.03  # least relative change that counts: two measurements of one kernel differed by 2%
SMALLEST_US = 0.4  # microseconds that operand addresses change from process to process
SIGMAS = 4.0
JITTER_US = 1.0  # microseconds by which runs of short kernels differ on an otherwise idle GPU
Document = dict[str, Any]


def document(machine: Mapping[str, Any], rows: Sequence[Row]) -> Document:
    """The document of a measurement."""
    return {**machine, "rows": list(rows)}


def read(path: Path) -> Document:
    """Read a document; raises OSError, or ValueError if the file is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return checked(found, path)


def checked(found: Any, path: Path) -> Document:
    """The document; ValueError if it is not one."""
    return checked_document(found, path, KIND, MACHINE, "rows", FIELDS)


def checked_document(
    found: Any, path: Path, kind: str, head: Iterable[str], list_name: str, fields: Iterable[str]
) -> Document:
    """The JSON document of the program `kind`: `head`, and a list of rows with `fields`."""
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ValueError(f"{path}: is no result of `{kind} -o json`")
    rows = found.get(list_name)
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{path}: has no {list_name}: measure again")
    missing = [n for n in head if n not in found] + [n for n in fields if n not in rows[0]]
    if missing:
        raise ValueError(f"{path}: the {list_name} have no {missing[0]!r}: measure again")
    return found


# Comparison


def compare(new: Document, old: Document) -> list[Row]:
    """The new rows with `old_us`, `change` (new / old - 1) and `verdict`."""
    before = {row["name"]: row for row in old["rows"]}
    return [row | _verdict(row, before.get(row["name"])) for row in new["rows"]]


def _verdict(row: Row, old: Row | None) -> Row:
    if row["error"]:
        return {"old_us": old and old["us"], "change": None, "verdict": "failed"}
    if old is None or not old["us"]:
        return {"old_us": None, "change": None, "verdict": "new"}
    change = row["us"] / old["us"] - 1
    noise = hypot(row["noise_us"] / row["us"], old["noise_us"] / old["us"])
    same = abs(change) <= max(SMALLEST, SIGMAS * noise, SMALLEST_US / old["us"])
    verdict = "same" if same else "slower" if change > 0 else "faster"
    return {"old_us": old["us"], "change": change, "verdict": verdict}


# Text


def lines(kind: str, found: Document, rows: Sequence[Row]) -> Iterator[str]:
    """The document as md, csv or json."""
    return {"md": markdown, "csv": _csv, "json": _json}[kind](found, rows)


def _json(found: Document, rows: Sequence[Row]) -> Iterator[str]:
    machine = json.dumps({k: v for k, v in found.items() if k != "rows"}, ensure_ascii=False)
    yield machine[:-1] + ', "rows": ['
    for i, row in enumerate(rows):
        yield json.dumps(row, ensure_ascii=False) + ("," if i < len(rows) - 1 else "")
    yield "]}"


def _csv(found: Document, rows: Sequence[Row]) -> Iterator[str]:
    names = list(rows[0]) if rows else list(FIELDS)
    yield ",".join(names)
    for row in rows:
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(
            ["" if row[n] is None else row[n] for n in names]
        )
        yield out.getvalue()


HEADINGS = (
    *("what", "where", "format", "shape", "tokens", "us", "spread", "GB/s", "TFLOP/s"),
    *("% of limit", "registers", "shared"),
)


def markdown(found: Document, rows: Sequence[Row]) -> Iterator[str]:
    """A table, then the machine."""
    compared = bool(rows) and "verdict" in rows[0]
    headings = [*HEADINGS, *(["before", "change", "verdict"] if compared else [])]
    yield "| " + " | ".join(headings) + " |"
    yield "| --- | --- | --- | --- |" + " ---: |" * (len(headings) - 4)
    for row in rows:
        yield "| " + " | ".join([*cells(row), *(_change(row) if compared else [])]) + " |"
    yield ""
    yield from (f"{row['name']}: {row['error']}" for row in rows if row["error"])
    yield (
        f"limit: {rate(found['bandwidth'], 'B/s')} read, {rate(found['matrix_rate'], 'FLOP/s')}, "
        f"measured on {found['gpu']}"
    )
    if any(map(busy, rows)):
        yield BUSY_NOTE
    yield f"build: {found['build']}"


def busy(row: Row) -> bool:
    """Whether runs differed by more than launches of an idle GPU do."""
    spread = row["spread"] or 0.0
    return bool(spread > BUSY and spread * row["us"] > JITTER_US)


def cells(row: Row) -> list[str]:
    """A row's cells, in the order of HEADINGS."""
    first = [row["what"], row["where"], row["format"], row["shape"], str(row["tokens"])]
    if row["error"]:
        return [*first, "failed", *[""] * (len(HEADINGS) - 6)]
    percent = row["percent_of_limit"]
    return [
        *first,
        f"{row['us']:.2f}",
        f"{row['spread']:.1%}" + (" !" if busy(row) else ""),
        f"{row['gb_s']:.0f}",
        f"{row['tflop_s']:.1f}" if row["flops"] else "",
        f"{percent:.1f}" if percent else "",
        f"{row['registers']}" + (f" (spills {row['spills']})" if row["spills"] else ""),
        str(row["shared"]),
    ]


def _change(row: Row) -> list[str]:
    before, change = row["old_us"], row["change"]
    return [
        f"{before:.2f}" if before else "",
        f"{change:+.1%}" if change is not None else "",
        row["verdict"],
    ]


def verdicts(rows: Sequence[Row]) -> str:
    """The number of rows with each verdict."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
