"""`ggpy compare`: compare the speed of ggpy with that of llama.cpp's llama-bench.

    ggpy compare --llama-bench ~/llama.cpp/build/bin/llama-bench -m model.gguf -p 512 -n 128
    ggpy compare -m model.gguf --device cpu             # llama.cpp of the wheel xllamacpp

The options -p, -n, -pg, -d, -b, -ub and -r mean the same to both programs and go to both. The
programs alternate, so that a machine that grows warmer or busier does so for both, and the figures
are medians of all runs together.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ggpy.bench.compare_table import KIND, markdown
from ggpy.bench.machine import now
from ggpy.cli.options import add_products
from ggpy.cli.parser import MODEL, Parser, number_or_auto, positive
from ggpy.util.outcome import ended

KEY = ("n_prompt", "n_gen", "n_depth", "n_batch", "n_ubatch")
OURS = [sys.executable, "-m", "ggpy", "bench"]
FROM_WHEEL = [sys.executable, "-m", "ggpy", "llama_bench"]
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if one of both failed, 2 for bad usage."""
    words = sys.argv[1:] if argv is None else argv
    options, tests = parser().parse_known_args(words)
    command = "ggpy compare " + shlex.join(words)
    return ended(lambda: compare(options, tests, command), program="ggpy compare")


def parser() -> Parser:
    found = Parser(
        "compare",
        "Compare the speed of ggpy with that of llama.cpp's llama-bench.",
        epilog="-p -n -pg -d -b -ub -r and their long names go to both programs.",
    )
    add = found.add_argument
    add(
        "--llama-bench", metavar="PATH",
        help="the program to compare with (on a CPU: llama.cpp of the wheel xllamacpp)",
    )  # fmt: skip
    add("-m", "--model", metavar="MODEL", action="append", default=[],
        help=f"{MODEL}; may be repeated")  # fmt: skip
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each program (2)")
    add("--device", default="auto", help="ggpy's device: auto, cpu, numpy, cuda or cuda:N (auto)")
    add(
        "-t",
        "--threads",
        type=number_or_auto,
        metavar="N",
        help="CPU threads of both (ggpy's default)",
    )
    add_products(found)
    add(
        "--llama-args", metavar="ARGS", default=None,
        help="options for llama-bench alone ('-ngl 99 -fa 1 -sm none -mg N' when ggpy runs on GPU "
        "N, else '-ngl 0 -dev none')",
    )  # fmt: skip
    add("-o", "--output", choices=("md", "json"), default="md", help="on stdout (md)")
    return found


def say(message: str) -> None:
    print(f"ggpy compare: {message}", file=sys.stderr, flush=True)


def check(options: argparse.Namespace, tests: Sequence[str]) -> None:
    """ValueError, OSError for what can be known to be wrong before anything runs."""
    from ggpy import hub
    from ggpy.cli.benchmarks.bench_options import parser as bench_parser

    if not options.model:
        raise ValueError("nothing to measure: name a file with -m FILE")
    check_program(options)
    common = ("-p", "-n", "-pg", "-d", "-b", "-ub", "-r")
    long = ("--n-prompt", "--n-gen", "--n-depth", "--batch-size", "--ubatch-size", "--repetitions")
    for word in tests:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in (*common, *long):
            raise ValueError(f"{name} is not an option of both programs: see --help")
    checker = bench_parser()
    checker.prog = "ggpy compare"
    checker.parse_args(list(tests))  # exits with 2 if they are wrong
    options.model = [os.fspath(hub.resolve(name)) for name in options.model]


def check_program(options: argparse.Namespace) -> None:
    """ValueError if there is no program to compare with."""
    from ggpy.bench import xllamacpp

    path = options.llama_bench
    if path is not None and (not os.access(path, os.X_OK) or Path(path).is_dir()):
        raise ValueError(f"--llama-bench {path}: there is no such program")
    if path is None and options.device != "cpu":
        raise ValueError("name llama.cpp's program with --llama-bench PATH, or add --device cpu")
    if path is None and not xllamacpp.is_installed():
        raise ValueError(f"name llama.cpp's program with --llama-bench PATH; {xllamacpp.MISSING}")


def compare(options: argparse.Namespace, tests: Sequence[str], command: str) -> int:
    """Run both on all models and print."""
    check(options, tests)
    rows: list[Row] = []
    for path in options.model:
        ours, theirs = alternate(options, tests, path)
        rows += joined(ours, theirs)
    if options.output == "json":
        head = {"kind": KIND, "command": command, "time": now()}
        print(json.dumps({**head, "rows": rows}, indent=1, ensure_ascii=False))
    else:
        print(*markdown(rows), sep="\n")
    return 0


# Running


def alternate(
    options: argparse.Namespace, tests: Sequence[str], path: str
) -> tuple[list[Row], list[Row]]:
    """(our rows, their rows) of one file, of all rounds."""
    ours: list[Row] = []
    theirs: list[Row] = []
    for n in range(options.rounds):
        say(f"{path}: round {n + 1} of {options.rounds}, ggpy")
        ours += run([*OURS, "-m", path, *our_options(options), *tests, "-o", "json"])
        say(f"{path}: round {n + 1} of {options.rounds}, llama-bench")
        program = [os.path.abspath(options.llama_bench)] if options.llama_bench else FROM_WHEEL
        theirs += run(
            [*program, "-m", path, *their_options(options, ours[-1]), *tests, "-o", "json"]
        )
    return ours, theirs


def our_options(options: argparse.Namespace) -> list[str]:
    """Options of ours alone."""
    threads = ["-t", str(options.threads)] if options.threads else []
    products = ["--activations", options.activations, "--gemm", options.gemm]
    return ["--device", options.device, *products, *threads]


def their_options(options: argparse.Namespace, ours: Row) -> list[str]:
    """Options of theirs alone: what makes them do the same work as a row of ours did."""
    usual = "-ngl 0 -dev none"  # a build for GPUs uses one for prompts if there is any
    if options.llama_bench is None:
        usual = ""  # the wheel has no GPU
    elif ours["backends"] != "CPU":  # without -sm none, all GPUs share the layers
        usual = f"-ngl 99 -fa 1 -sm none -mg {ours['main_gpu']}"
    words = shlex.split(usual if options.llama_args is None else options.llama_args)
    return [*words, "-t", str(ours["n_threads"])]


def run(command: list[str]) -> list[Row]:
    """The rows that a program prints; RuntimeError if it fails."""
    done = subprocess.run(command, capture_output=True)
    name = f"{shlex.join(command)} ended with {done.returncode}"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    try:
        rows = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"{name}: {(said or ['it printed no JSON'])[-1]}") from None
    if not isinstance(rows, list) or any("n_prompt" not in row for row in rows):
        raise RuntimeError(f"{name}: what it printed is no list of results")
    failed = [row["error"] for row in rows if row.get("error")]
    if done.returncode or failed or not rows:
        raise RuntimeError(f"{name}: {(failed or said or ['it printed no results'])[-1]}")
    return rows


# Joining


def joined(ours: Sequence[Row], theirs: Sequence[Row]) -> Iterator[Row]:
    """A row for each test that both ran, in our order; RuntimeError if there is none."""
    mine, other = by_test(ours), by_test(theirs)
    both = [key for key in mine if key in other]
    if not both:
        raise RuntimeError("the two programs ran no test that is the same")
    for key in both:
        a, b = mine[key], other[key]
        fast, slow = samples(a), samples(b)
        yield {
            "model": Path(a[0]["model_filename"]).name,
            "model_type": b[0].get("model_type", ""),
            "test": a[0]["test"],
            **dict(zip(KEY, key, strict=True)),
            "ggpy_ts": median(fast),
            "llama_ts": median(slow),
            "ratio": median(fast) / median(slow),
            "ggpy_spread": spread(fast),
            "llama_spread": spread(slow),
            "limit_ts": a[0].get("limit_ts"),
            "ggpy_build": a[0]["build_commit"],
            "llama_build": b[0].get("build_commit", ""),
            "ggpy_device": device_of(a[0]),
            "llama_device": device_of(b[0]),
        }


def by_test(rows: Sequence[Row]) -> dict[tuple[int, ...], list[Row]]:
    """The rows of all rounds, by what was run; an older llama-bench knows no depth."""
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name, 0) for name in KEY), []).append(row)
    return found


def samples(rows: Sequence[Row]) -> list[float]:
    """Tokens a second of every run."""
    return [ts for row in rows for ts in row.get("samples_ts") or [row["avg_ts"]]]


def spread(values: Sequence[float]) -> float:
    """(fastest - slowest) / median."""
    return (max(values) - min(values)) / median(values)


def device_of(row: Row) -> str:
    """What ran it."""
    return str(row.get("gpu_info") or row.get("cpu_info") or "")


if __name__ == "__main__":
    sys.exit(main())
