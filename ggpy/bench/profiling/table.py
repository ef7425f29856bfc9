"""Profiles of decode steps as text: one Markdown table per profile, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..kernels.table import checked_document
from ..table import ABOVE, ABOVE_NOTE, BUSY
from .profile import Part, Profile

KIND = "ggpy bench --profile"
MACHINE: dict[str, type] = {
    **dict.fromkeys(("kind", "gpu", "driver", "build", "command", "time"), str),
    **dict.fromkeys(("bandwidth", "matrix_rate"), float),
}
FIELDS: dict[str, type] = {
    **{"model": str, "model_type": str, "test": str, "n_seq": int, "n_depth": int},
    **dict.fromkeys(("step_us", "spread", "device_us", "limit_us"), float),
    **{"parts": list, "ops": list},
}
PART_FIELDS: dict[str, type] = {
    **{"op": str, "name": str, "count": int, "us": float, "registers": int, "shared": int}
}
OP_FIELDS: dict[str, type] = {"op": str, "count": int, "us": float, "limit_us": float}
HEADINGS = ("where", "launches", "us", "us each", "% of step", "limit us", "% of limit")
BETWEEN = "between steps (host, launch of the graph)"
Row = dict[str, Any]


def row_of(profile: Profile, bandwidth: float) -> Row:
    """The row of the document for a profile."""
    test, facts = profile.test, profile.facts
    return {
        "model": facts.name,
        "model_type": facts.type,
        "test": test.name,
        "n_seq": test.n_seq,
        "n_depth": test.n_depth,
        "step_us": profile.step_us,
        "spread": profile.spread,
        "device_us": profile.device_us,
        "limit_us": profile.limit_us,
        "parts": [{name: getattr(part, name) for name in PART_FIELDS} for part in profile.parts],
        "ops": list(_ops(profile.parts, profile.nbytes, bandwidth)),
    }


def _ops(parts: Sequence[Part], nbytes: Mapping[str, int], bandwidth: float) -> Iterator[Row]:
    """Sums the parts by op, in order of first appearance."""
    for op in dict.fromkeys(part.op for part in parts if part.op):
        of_op = [part for part in parts if part.op == op]
        reads = nbytes.get(op, 0)
        yield {
            "op": op,
            "count": sum(part.count for part in of_op),
            "us": sum(part.us for part in of_op),
            "limit_us": 1e6 * reads / bandwidth if bandwidth and reads else None,
        }


def checked(found: Any, path: Path) -> Row:
    """Return `found` if it is a document of profiles. Raises ValueError otherwise."""
    return checked_document(found, path, KIND, MACHINE, "profiles", FIELDS)


def lines(kind: str, machine: Row, rows: Iterator[Row]) -> Iterator[str]:
    """The profiles as md or json; yields each profile as soon as it is measured."""
    if kind == "json":
        yield json.dumps(machine, ensure_ascii=False)[:-1] + ', "profiles": ['
        separator = ""
        for row in rows:
            yield separator + json.dumps(row, ensure_ascii=False)
            separator = ","
        yield "]}"
        return
    for row in rows:
        yield from markdown(row)


def markdown(row: Row) -> Iterator[str]:
    """The table of one step: a line per op, and below it a line per kernel of the op."""
    limit, step = row["limit_us"], row["step_us"]
    of_limit = f", {100 * limit / step:.1f} % of the limit of {limit:.1f} us" if limit else ""
    yield f"\n{row['model']}, {row['test']}: a step takes {step:.1f} us{of_limit}\n"
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "| --- |" + " ---: |" * (len(HEADINGS) - 1)
    ops = {op["op"]: op for op in row["ops"]}
    order = ["", *ops]
    parts = sorted(row["parts"], key=lambda part: order.index(part["op"]))
    for op, group in groupby(parts, lambda part: part["op"]):
        if op:
            yield _line(op, ops[op], step)
        for part in group:
            yield _line(("· " if op else "") + _named(part), part, step)
    yield _line("sum", {"count": "", "us": row["device_us"]}, step)
    yield _line(BETWEEN, {"count": "", "us": step - row["device_us"]}, step)
    if limit and 100 * limit > ABOVE * step:
        yield f"\n{ABOVE_NOTE}"
    if row["spread"] > BUSY:
        yield f"\n! steps differed by {row['spread']:.1%}: was the machine busy?"


def _named(part: Row) -> str:
    """The name of a kernel with its registers and shared memory."""
    name = part["name"].replace("Scales::", "").replace("<", "\\<")
    if part["registers"] is None:
        return name
    return f"{name} ({part['registers']} registers, {part['shared']} B shared)"


def _line(name: str, row: Row, step: float) -> str:
    count, us, limit = row["count"], row["us"], row.get("limit_us")
    cells = [
        name,
        str(count),
        f"{us:.1f}",
        f"{us / count:.2f}" if count else "",
        f"{100 * us / step:.1f}",
        f"{limit:.1f}" if limit else "",
        f"{100 * limit / us:.1f}" if limit else "",
    ]
    return "| " + " | ".join(cells) + " |"
