"""`ggpy bench_kernels` (for developers): measure every kernel, beside the most a GPU could do.

    ggpy bench_kernels -k 'product Llama-3.1-8B .* Q8_0'
    ggpy bench_kernels -o json > before.json
    ggpy bench_kernels --compare before.json --plot roofline.png

A figure is the median of several runs, in microseconds, of one case with all its launches, which
follow each other in a CUDA graph. Each launch has other operands, so that none is in a cache. In a
checkout, the cases of tests/support/kernels/cases.py are measured too.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import Parser, positive
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.bench.kernels.case import KernelCase
    from ggpy.bench.kernels.table import Document

CASES = Path(__file__).resolve().parent.parent / "tests" / "support" / "kernels" / "cases.py"
LONG = (4096, 14336)  # a matrix of Llama-3.1-8B, for kernels over blocks


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if a kernel failed or is slower, 2 for bad usage."""
    words = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(words)
    command = "ggpy bench_kernels " + shlex.join(words)
    return ended(lambda: run(options, command), program="ggpy bench_kernels")


def parser() -> Parser:
    found = Parser("bench_kernels", "Measure every kernel, beside the most a GPU could do.")
    add = found.add_argument
    add("-k", metavar="REGEX", help="only cases whose name matches; --list prints the names")
    add("--list", action="store_true", help="only print the names of the cases")
    add(
        "-o",
        "--output",
        choices=("md", "csv", "json"),
        default="md",
        help="output format (md)",
    )
    add("-r", "--runs", type=int, default=9, metavar="N", help="runs of each case, 5 or more (9)")
    add("--compare", metavar="OLD.json", help="mark kernels that are slower than in this file")
    add("--load", metavar="NEW.json", help="take the results from this file, and measure nothing")
    add("--plot", metavar="FILE", help="draw the roofline (needs matplotlib)")
    add("--device", default="cuda", help="cuda or cuda:N (cuda)")
    add("--fresh", action="store_true", help="measure the GPU's ceilings again")
    add("--schedules", metavar="FORMAT", help="only the tile schedules of this block format")
    add("--processes", type=positive, metavar="N", help="processes that compile kernels (all CPUs)")
    return found


def say(message: str) -> None:
    print(f"ggpy bench_kernels: {message}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure or load, compare, print and draw."""
    if options.list:
        print("\n".join(case.name for case in chosen(options.k)))
        return 0
    if options.schedules:
        return schedules(options)
    check(options)
    from ggpy.bench.kernels.table import compare, lines, read, verdicts

    old = read(Path(options.compare)) if options.compare else None  # before anything runs
    found = read(Path(options.load)) if options.load else measured(options, command)
    rows = found["rows"]
    if options.load:
        rows = [row for row in rows if re.search(options.k or "", row["name"], re.IGNORECASE)]
    if old is not None:
        if old["gpu"] != found["gpu"]:
            say(f"{options.compare} was measured on {old['gpu']}, this is {found['gpu']}")
        rows = compare(found | {"rows": rows}, old)
        say(verdicts(rows))
    for line in lines(options.output, found, rows):
        print(line, flush=True)
    if options.plot:
        from ggpy.bench.kernels.plot import draw

        draw(found | {"rows": rows}, options.plot)
    return 1 if any(r["error"] or r.get("verdict") == "slower" for r in rows) else 0


def schedules(options: argparse.Namespace) -> int:
    """Print what each schedule of a product of tiles gives; ValueError."""
    from ggpy.bench.kernels.tile_schedules import measured
    from ggpy.formats import by_name

    format, device = by_name(options.schedules.upper()), open_gpu(options.device)
    for line in measured(device, format, options.processes, say):
        print(line, flush=True)
    return 0


def check(options: argparse.Namespace) -> None:
    """ValueError for what can be known to be wrong before anything runs."""
    if options.runs < 5:
        raise ValueError(f"-r {options.runs}: a median needs 5 runs or more")
    if options.plot:
        from ggpy.bench import plot

        plot.require(options.plot)


def chosen(pattern: str | None) -> list[KernelCase]:
    """The cases whose names have the pattern; ValueError if there are none."""
    from ggpy.bench.kernels.case import by_format
    from ggpy.bench.kernels.cases import model_cases

    try:
        wanted = re.compile(pattern or "", re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"-k {pattern!r}: {error}") from None
    every = by_format([*model_cases(), *declared()])
    found = [case for case in every if wanted.search(case.name)]
    if not found:
        raise ValueError(f"-k {pattern!r}: none of {len(every)} cases: --list shows their names")
    return found


def declared() -> Iterator[KernelCase]:
    """The cases of the tests, and their kernels in the shape of a large model's matrix."""
    if not CASES.is_file():
        say("this installation has no tests: kernels over blocks are left out")
        return
    from ggpy.bench.kernels.block_cases import block_case
    from ggpy.kernels.blocks.block_kernel import supported_formats

    cases = load_cases()
    for kernel in cases.KERNELS:
        yield from (
            block_case(case, "tests/support/kernels/cases.py") for case in cases.gpu_cases(kernel)
        )
        for number in cases.NUMBERS.get(kernel, ("",)):
            for format in supported_formats():
                large = cases.Case(kernel, format.name, *LONG, 1, number)
                yield block_case(large, "Llama-3.1-8B")


def load_cases() -> Any:
    """The module tests/support/kernels/cases.py."""
    spec = importlib.util.spec_from_file_location("cases", CASES)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured(options: argparse.Namespace, command: str) -> Document:
    """Measure all cases; ValueError without a GPU."""
    from ggpy.bench.kernels.ceilings import ceilings_of
    from ggpy.bench.kernels.runs import compile_all, measure
    from ggpy.bench.kernels.table import document

    cases = chosen(options.k)
    device = open_gpu(options.device)
    compile_all(cases, device, options.processes, say)
    ops: Any = SimpleNamespace(device=device)
    ceilings = ceilings_of(ops, options.fresh)
    rows = list(measure(cases, device, ceilings, say, options.runs))
    return document(machine(device.gpu, ceilings, command), rows)


def open_gpu(name: str) -> Any:
    """The GPU; ValueError says why there is none."""
    match = re.fullmatch(r"cuda(?::(\d{1,9}))?", name)
    if not match:
        raise ValueError(f"--device {name}: kernels run on a GPU, cuda or cuda:N")
    from ggpy.device import NoGpu, probe
    from ggpy.device.gpu import CudaDevice

    ordinal = int(match[1] or 0)
    found = probe(ordinal)
    if isinstance(found, NoGpu):
        raise ValueError(f"no GPU to measure: {found.reason}")
    return CudaDevice(ordinal)


def machine(gpu: Any, ceilings: Any, command: str) -> dict[str, Any]:
    """What all rows have in common."""
    from ggpy.bench.kernels.table import KIND
    from ggpy.bench.machine import commit, now
    from ggpy.device import toolkit

    return {
        "kind": KIND,
        "gpu": gpu.name,
        "driver": gpu.driver,
        "compiler": toolkit.nvrtc_version(),
        "build": commit(),
        "command": command,
        "time": now(),
        "bandwidth": ceilings.bandwidth,
        "matrix_rate": ceilings.matrix_rate,
    }


if __name__ == "__main__":
    sys.exit(main())
