"""The results of `ggpy compare` as a document and as a table: ggpy beside llama.cpp's llama-bench.

A row is one test that both programs ran. This module runs neither program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .table import BUSY, BUSY_NOTE, Row

KIND = "ggpy compare"
DOCUMENT = ("kind", "command", "time")
FIELDS = (
    *("model", "test", "ggpy_ts", "llama_ts", "ratio", "ggpy_spread", "llama_spread", "limit_ts"),
    *("ggpy_build", "llama_build", "ggpy_device", "llama_device"),
)


def checked(found: Any, path: Path) -> Row:
    """Return `found` if it is a document of `ggpy compare`. Raises ValueError otherwise."""
    from .kernels.table import checked_document  # numpy is not needed to print one

    return checked_document(found, path, KIND, DOCUMENT, "rows", FIELDS)


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """A Markdown table; below it the build and the device of both programs."""
    yield "| model | test | ggpy t/s | llama.cpp t/s | ratio | % of limit |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        limit = row["limit_ts"]
        figures = [figure(row, "ggpy"), figure(row, "llama"), f"{row['ratio']:.2f}"]
        share = f"{100 * row['ggpy_ts'] / limit:.1f}" if limit else ""
        yield "| " + " | ".join([row["model"], row["test"], *figures, share]) + " |"
    yield ""
    first = rows[0]
    yield f"ggpy {first['ggpy_build']} on {first['ggpy_device']}"
    yield f"llama.cpp {first['llama_build']} on {first['llama_device']}"
    if any(max(row["ggpy_spread"], row["llama_spread"]) > BUSY for row in rows):
        yield BUSY_NOTE


def figure(row: Row, who: str) -> str:
    """Tokens per second of a program, marked "!" if the spread of its runs is above BUSY."""
    return f"{row[who + '_ts']:.2f}" + (" !" if row[who + "_spread"] > BUSY else "")
