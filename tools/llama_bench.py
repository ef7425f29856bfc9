"""`ggpy llama_bench`: measure llama.cpp on the CPU from a wheel, with llama-bench's options.

    pip install xllamacpp
    ggpy llama_bench -m model.gguf -p 512 -n 128 -t 2

What llama-bench prints with -o json, for who has not built it: `ggpy compare` calls this program if
it is given no llama-bench. Exit status: 0, 1 if llama.cpp failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli import llama_cpp
from ggpy.cli.benchmarks import bench_options
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.bench.workload import Test

NOT_TAKEN = {  # options of `ggpy bench` that llama.cpp's library is not asked for
    **{f"cache_type_{x}": f"--cache-type-{x}" for x in "kv"},
    **{name: f"--{name}" for name in ("plot", "profile", "plan", "report", "gemm", "fresh")},
    "simulated": "--as",
    "output_err": "--output-err",
}
NOT_SHOWN = ("device", "output", "batch", "n_cpu_moe", "cpu_moe")  # of one value only


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = llama_cpp.parse(parser(), argv)
    return ended(lambda: measure(options), program="ggpy llama_bench")


def parser() -> argparse.ArgumentParser:
    """The options of `ggpy bench`; `measure` refuses those that are not llama-bench's."""
    found = bench_options.parser()
    found.prog = "ggpy llama_bench"
    found.description = "Measure llama.cpp on the CPU from a wheel, with llama-bench's options."
    found.epilog = "Prints rows of JSON. The other options of `ggpy bench` are refused."
    found.set_defaults(output="json")
    for action in found._actions:
        if action.dest in (*NOT_TAKEN, *NOT_SHOWN) or "--synthetic" in action.option_strings:
            action.help = argparse.SUPPRESS
    return found


def measure(options: argparse.Namespace) -> int:
    """Run all tests on all models and print; ValueError, RuntimeError."""
    from ggpy import hub
    from ggpy.bench import xllamacpp
    from ggpy.bench.machine import cpu_name, now
    from ggpy.util.cores import usable_cores

    tests = checked(options)
    if not xllamacpp.is_installed():
        raise ValueError(xllamacpp.MISSING)
    rows: list[dict[str, Any]] = []
    for (_, name), n_threads in product(options.models, options.threads):
        path = Path(os.fspath(hub.resolve(name)))
        found = xllamacpp.run(path, tests, options.repetitions, n_threads or usable_cores())
        rows += ({**row, "cpu_info": cpu_name(), "test_time": now()} for row in found)
    print(json.dumps(rows, indent=1))
    return 0


def checked(options: argparse.Namespace) -> list[Test]:
    """The tests; ValueError for what this program does not measure."""
    tests = list(bench_options.combinations(options))
    if not options.models or any(synthetic for synthetic, _ in options.models):
        raise ValueError("name a file with -m FILE; `ggpy make_synthetic` writes one")
    if options.device not in ("auto", "cpu") or options.output != "json":
        raise ValueError("llama.cpp is measured on the CPU, and its rows are printed as JSON")
    if any(test.n_seq > 1 or test.n_cpu_moe for test in tests):
        raise ValueError("one sequence is measured, with all weights on the CPU")
    usual = parser()
    for name, shown in NOT_TAKEN.items():
        if getattr(options, name) != usual.get_default(name):
            raise ValueError(f"{shown} is of `ggpy bench` and has no effect here")
    return tests


if __name__ == "__main__":
    sys.exit(main())
