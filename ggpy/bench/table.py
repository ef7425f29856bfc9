"""Results as rows, and rows as text: Markdown, CSV, JSON, JSON lines, SQL.

The first fields are those of llama-bench, in its order and with its types, so programs that read
llama-bench output read this output too. Fields of ggpy follow. The row of a failed test has an
error and no speeds.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from ..cache_types import IN_NUMPY, ON_GPU, CacheTypes

if TYPE_CHECKING:
    from .runs import Result

BUSY = 0.05  # spread above which the machine was busy or its clocks changed
ABOVE = 110  # percent of the limit above which something is wrong with the limit
ABOVE_NOTE = (
    "! above the limit: the GPU was busy when that was measured (--fresh measures it again),"
    " or, of a mixture, tokens chose the same experts"
)
ABOVE_CPU_NOTE = "! above the limit: other programs ran when that was measured; measure again"
BUSY_NOTE = f"! runs differed by more than {BUSY:.0%}: the machine was busy or changed its clocks"
Row = dict[str, Any]

LLAMA_BENCH: dict[str, type] = {
    **dict.fromkeys(("build_commit",), str),
    **dict.fromkeys(("build_number",), int),
    **dict.fromkeys(("cpu_info", "gpu_info", "backends", "model_filename", "model_type"), str),
    **dict.fromkeys(("model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads"), int),
    **{"cpu_mask": str, "cpu_strict": bool, "poll": int, "type_k": str, "type_v": str},
    **{"n_gpu_layers": int, "n_cpu_moe": int, "split_mode": str, "main_gpu": int},
    **{"no_kv_offload": bool, "flash_attn": int, "devices": str, "tensor_split": str},
    **dict.fromkeys(("tensor_buft_overrides", "load_mode", "lazy_mode"), str),
    **{"embeddings": bool, "no_op_offload": int, "no_host": bool, "repack": bool},
    **dict.fromkeys(("fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth"), int),
    **{"test_time": str, "avg_ns": int, "stddev_ns": int, "avg_ts": float, "stddev_ts": float},
}
OURS: dict[str, type] = {
    "test": str,
    "n_seq": int,  # sequences of a step; speeds count all of them
    "median_ts": float,
    "spread": float,  # (slowest - fastest) / median
    "limit_ts": float,
    "percent_of_limit": float,  # 100 * median_ts / limit_ts
    "first_token_ms": float,  # median; tests with a prompt
    "load_s": float,
    "device_bytes": int,  # GPU memory that the program allocated
    "bandwidth": float,  # the ceilings: bytes per second, operations per second
    "matrix_rate": float,
    "activations": str,  # that quantised weights are multiplied by
    "driver": str,
    "command": str,
    "error": str,
}
FIELDS = {**LLAMA_BENCH, **OURS}
SAMPLES = ("samples_ns", "samples_ts")  # only in JSON
SQL_TYPES = {str: "TEXT", bool: "INTEGER", int: "INTEGER", float: "REAL"}


@dataclass(frozen=True)
class Machine:
    """The facts that are the same in all rows."""

    backend: str  # "CUDA", "CPU"
    cpu: str
    gpu: str
    driver: str
    activations: str  # "f16", "q8_1"; on the CPU "q16", "q8", "f32"
    n_threads: int
    ordinal: int
    commit: str
    command: str
    time: Callable[[], str]  # returns the current time, RFC 3339
    bandwidth: float
    matrix_rate: float


def row_of(result: Result, machine: Machine) -> Row:
    """All FIELDS and SAMPLES of a result. Unknown values are None."""
    row: Row = dict.fromkeys((*FIELDS, *SAMPLES))
    row |= _constants(machine) | _model(result)
    test = result.test
    types = CacheTypes(test.type_k, test.type_v)
    types = types.resolved(IN_NUMPY if machine.backend == "CPU" else ON_GPU)
    row |= {"type_k": types.k, "type_v": types.v}
    for name in ("n_prompt", "n_gen", "n_depth", "n_batch", "n_ubatch", "n_seq", "n_cpu_moe"):
        row[name] = getattr(test, name)
    row |= {"test": test.name, "test_time": machine.time(), "error": result.error}
    return row | (_speeds(result) if result.samples_ns else {"samples_ns": [], "samples_ts": []})


def _constants(machine: Machine) -> Row:
    """The fields that are options of llama-bench but have a single value in ggpy."""
    on_gpu = machine.backend != "CPU"
    return {
        "build_commit": machine.commit,
        "build_number": 0,
        "cpu_info": machine.cpu,
        "gpu_info": machine.gpu,
        "backends": machine.backend,
        "n_threads": machine.n_threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 0,
        "n_gpu_layers": -1 if on_gpu else 0,
        "split_mode": "none",
        "main_gpu": machine.ordinal,
        "no_kv_offload": False,
        "flash_attn": 1,
        "devices": "auto",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "load_mode": "mmap",
        "lazy_mode": "off",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": False,
        "repack": on_gpu,
        "fit_target": 0,
        "fit_min_ctx": 0,
        "activations": machine.activations,
        "driver": machine.driver,
        "command": machine.command,
        "bandwidth": machine.bandwidth,
        "matrix_rate": machine.matrix_rate,
    }


def _model(result: Result) -> Row:
    facts = result.facts
    return {
        "model_filename": facts.name,
        "model_type": facts.type or facts.name,
        "model_size": facts.size,
        "model_n_params": facts.n_params,
        "load_s": facts.load_s,
        "device_bytes": result.device_bytes,
    }


def _speeds(result: Result) -> Row:
    n, ns = result.test.n_tokens, result.samples_ns
    ts = [1e9 * n / t for t in ns]
    middle = median(ts)
    limit = n / result.limit_s if result.limit_s else None
    return {
        "avg_ns": round(mean(ns)),
        "stddev_ns": round(stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": stdev(ts) if len(ts) > 1 else 0.0,
        "median_ts": middle,
        "spread": (max(ts) - min(ts)) / middle,
        "limit_ts": limit,
        "percent_of_limit": 100 * middle / limit if limit else None,
        "first_token_ms": median(result.first_ns) / 1e6 if result.first_ns else None,
        "samples_ns": ns,
        "samples_ts": ts,
    }


# Text


def lines(kind: str, rows: Iterator[Row], shown: Sequence[str] = ()) -> Iterator[str]:
    """The rows as md, csv, json, jsonl or sql; yields each row as soon as it is measured.

    shown: additional columns of a Markdown table, such as n_batch if it is not the default.
    """
    if kind == "md":
        return markdown(rows, shown)
    return {"csv": _csv, "json": _json, "jsonl": _jsonl, "sql": _sql}[kind](rows)


def _csv(rows: Iterator[Row]) -> Iterator[str]:
    yield ",".join(FIELDS)
    for row in rows:
        out = io.StringIO()
        values = [_plain(row[name]) for name in FIELDS]
        csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow(values)
        yield out.getvalue()


def _json(rows: Iterator[Row]) -> Iterator[str]:
    separator = "["
    for row in rows:
        yield separator + "\n" + json.dumps(row, indent=2, ensure_ascii=False)
        separator = ","
    yield "[]" if separator == "[" else "]"


def _jsonl(rows: Iterator[Row]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False)


def _sql(rows: Iterator[Row]) -> Iterator[str]:
    columns = ",\n".join(f"  {name} {SQL_TYPES[kind]}" for name, kind in FIELDS.items())
    yield f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n"
    for row in rows:
        values = ", ".join(_quoted(row[name]) for name in FIELDS)
        yield f"INSERT INTO llama_bench ({', '.join(FIELDS)}) VALUES ({values});"


def _plain(value: Any) -> Any:
    return "" if value is None else int(value) if isinstance(value, bool) else value


def _quoted(value: Any) -> str:
    if value is None:
        return "NULL"
    return "'" + str(_plain(value)).replace("'", "''") + "'"


# Markdown

WIDTHS = {
    **{"model": -30, "size": 10, "params": 10, "backend": -10, "ngl": 3, "threads": 7},
    **{"n_batch": 7, "n_ubatch": 8, "type_k": 6, "type_v": 6, "test": 15},
    **{"n_cpu_moe": 9, "activations": 11},
    **{"t/s": 20, "limit": 9, "% of limit": 10},
}


def markdown(rows: Iterator[Row], shown: Sequence[str] = ()) -> Iterator[str]:
    """The table of llama-bench with two columns of ggpy; below it the notes."""
    columns: list[str] = []
    seen: list[Row] = []
    for row in rows:
        if not columns:
            device = "threads" if row["backends"] == "CPU" else "ngl"
            columns = ["model", "size", "params", "backend", device, *shown]
            columns += ["test", "t/s", "limit", "% of limit"]
            yield _line({name: name for name in columns})
            yield "|" + "".join(f" {_rule(WIDTHS[name])} |" for name in columns)
        seen.append(row)
        cells = _cells(row)
        yield _line({name: cells[name] for name in columns})
    yield from notes(seen)


def _line(cells: Mapping[str, str]) -> str:
    parts = (
        f" {text:{'<' if WIDTHS[name] < 0 else '>'}{abs(WIDTHS[name])}} |"
        for name, text in cells.items()
    )
    return "|" + "".join(parts)


def _rule(width: int) -> str:
    return "-" * (abs(width) - 1) + ("-" if width < 0 else ":")


def _cells(row: Row) -> dict[str, str]:
    size, n = row["model_size"], row["model_n_params"]
    busy = " !" if (row["spread"] or 0) > BUSY else ""
    speed = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}{busy}" if row["avg_ts"] else "failed"
    percent, limit = row["percent_of_limit"], row["limit_ts"]
    return {
        "model": row["model_type"],
        "size": f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
        "params": f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M",
        "backend": row["backends"],
        "ngl": str(row["n_gpu_layers"]),
        "threads": str(row["n_threads"]),
        "n_batch": str(row["n_batch"]),
        "n_ubatch": str(row["n_ubatch"]),
        "type_k": row["type_k"],
        "type_v": row["type_v"],
        "n_cpu_moe": str(row["n_cpu_moe"]),
        "activations": row["activations"],
        "test": row["test"],
        "t/s": speed,
        "limit": f"{limit:.0f}" if limit else "",
        "% of limit": f"{percent:.1f}" if percent else "",
    }


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The notes: load time, memory, time to first token, errors, the limit, a busy machine."""
    if not rows:
        return
    yield ""
    for name in dict.fromkeys(row["model_filename"] for row in rows):
        yield from _model_notes([row for row in rows if row["model_filename"] == name])
    first = rows[0]
    by_threads = {row["n_threads"]: row for row in rows if row["bandwidth"]}
    for n_threads, row in by_threads.items():
        threads = f" with {n_threads} threads" if len(by_threads) > 1 else ""
        yield (
            f"limit: {rate(row['bandwidth'], 'B/s')} read, "
            f"{rate(row['matrix_rate'], 'FLOP/s')}, "
            f"measured on {row['gpu_info'] or row['cpu_info']}{threads}"
        )
    if any((row["percent_of_limit"] or 0) > ABOVE for row in rows):
        yield ABOVE_NOTE if first["gpu_info"] else ABOVE_CPU_NOTE
    if any((row["spread"] or 0) > BUSY for row in rows):
        yield BUSY_NOTE
    yield f"build: ggpy {first['build_commit']}"


def rate(value: float, unit: str) -> str:
    """A value in three digits, with a prefix: 4.8 TB/s, 21.7 GB/s."""
    size, prefix = (1e12, "T") if value >= 0.9995e12 else (1e9, "G")
    return f"{value / size:.3g} {prefix}{unit}"


def _model_notes(rows: Sequence[Row]) -> Iterator[str]:
    parts = []
    loads = [row["load_s"] for row in rows if row["load_s"] is not None]
    if loads:
        parts.append(f"loaded in {loads[0]:.2f} s")
    memory = max((row["device_bytes"] or 0 for row in rows), default=0)
    if memory:
        parts.append(f"{memory / 2**30:.2f} GiB of GPU memory")
    first = [f"{r['first_token_ms']:.1f} ms ({r['test']})" for r in rows if r["first_token_ms"]]
    if first:
        parts.append("first token after " + ", ".join(first))
    if parts:
        yield f"{rows[0]['model_filename']}: {', '.join(parts)}"
    for row in rows:
        if row["error"]:
            yield f"{row['model_filename']}: {row['test']} failed: {row['error']}"
