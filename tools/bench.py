"""`ggpy bench -m MODEL`: measure tokens a second, beside the most that this machine could do.

    ggpy bench -m model.gguf
    ggpy bench --synthetic Llama-3.1-8B:Q8_0,Llama-3.1-8B:Q4_K -p 512,2048 -n 128 -d 0,4096
    ggpy bench --synthetic Llama-3.1-8B:Q8_0 -p 0 -n 128 --batch 1-64*2 -o json > benchmarks/x.json
    ggpy bench --synthetic Llama-3.1-8B:Q8_0 --batch 1,8 --profile
    ggpy bench --plan Llama-3.1-8B:Q4_K_M --as sm_89 --batch 1,8
    ggpy bench --report

Options and columns are llama-bench's, with two more columns: the limit, and the share of it that
was reached.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cache_types import AUTO
from ggpy.cli import llama_cpp
from ggpy.cli.benchmarks.bench_options import combinations, parser
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.backends.interface import Ops
    from ggpy.bench.table import Machine, Row
    from ggpy.bench.workload import Test


# Columns of a Markdown table that are there only if a test has something else.
USUAL = (
    *(("n_batch", 2048), ("n_ubatch", 512), ("type_k", AUTO), ("type_v", AUTO)),
    ("n_cpu_moe", 0),
)


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if a test failed, 2 for bad usage, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    options = llama_cpp.parse(parser(), words)
    note.cache_clear()
    if options.report:
        return ended(lambda: report(Path(options.report)), program="ggpy bench")
    if options.plan:
        return ended(lambda: plan(options), program="ggpy bench")
    command = "ggpy bench " + shlex.join(words)
    return ended(lambda: bench(options, command), program="ggpy bench")


def report(folder: Path) -> int:
    """Write BENCHMARKS.md."""
    from ggpy.bench.report import write

    print(write(folder))
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print which kernels the steps of models take; a GPU is not needed."""
    from ggpy.backends import GPU_ACTIVATIONS, choose_gpu
    from ggpy.bench import plan_table, planned
    from ggpy.evaluate.synthetic import shapes

    gpu = None if options.simulated else choose_gpu(options.device)[0]
    if gpu is not None:
        device = planned.device_of(gpu.arch, gpu.sm_count)
    else:
        device = planned.device_of(options.simulated or plan_table.DEFAULT)
    steps = plan_table.steps_of(options.batch, [n for n in options.n_prompt if n])
    if options.activations not in GPU_ACTIVATIONS:
        raise ValueError(f"--plan is of a GPU: --activations {options.activations} is the CPU's")
    policy = {"activations": GPU_ACTIVATIONS[options.activations], "gemm": options.gemm}
    for name in options.plan:
        shape, _, kind = name.partition(":")
        synthetic = bool(kind) and shape in shapes()
        with open_model(synthetic, name, empty=True) as file:
            rows = plan_table.table(file, device, steps, **policy)
        print(f"{name} on {device.arch} with {device.sm_count} SMs\n")
        print("\n".join([*plan_table.lines(rows), ""]))
    return 0


def bench(options: argparse.Namespace, command: str) -> int:
    """Run all tests of all models; ValueError for what can be known to be wrong before."""
    tests = list(combinations(options))
    if not options.models or not tests:
        raise ValueError(
            "nothing to measure: name a model with -m MODEL or --synthetic SHAPE:TYPE, "
            "and tests with -p, -n or -pg"
        )
    if options.plot:
        from ggpy.bench import plot

        plot.require(options.plot)
    check_models(options.models)
    if options.profile:
        return profile(options, tests, command)
    machines = {n: describe(options, command, n) for n in options.threads}
    shown = [name for name, usual in USUAL if {getattr(t, name) for t in tests} != {usual}]
    if options.activations != AUTO:
        shown.append("activations")
    rows = write(options, results(options, tests, machines), shown)
    if options.plot:
        plot.draw(rows, options.plot)
    return 1 if any(row["error"] for row in rows) else 0


def check_models(models: Sequence[tuple[bool, str]]) -> None:
    """ValueError for a shape or type that is unknown, and where there is no file of any model;
    where others are there, the table says which one is missing.
    """
    from ggpy import hub
    from ggpy.evaluate.synthetic import parse

    missing: list[hub.HubError] = []
    for synthetic, name in models:
        try:
            parse(name) if synthetic else hub.find(name)
        except hub.HubError as error:
            missing.append(error)
    if len(missing) == len(models):
        raise missing[0]


def write(options: argparse.Namespace, rows: Iterator[Row], shown: Sequence[str]) -> list[Row]:
    """Print rows as they come; all of them."""
    from ggpy.bench.table import lines

    kept: list[Row] = []

    def keep() -> Iterator[Row]:
        for row in rows:
            kept.append(row)
            yield row

    printed, printed_too = tee(keep()) if options.output_err else (keep(), iter(()))
    also = lines(options.output_err or "jsonl", printed_too, shown)
    for line in lines(options.output, printed, shown):
        print(line, flush=True)
    for line in also:
        print(line, file=sys.stderr)
    return kept


def results(
    options: argparse.Namespace, tests: Sequence[Test], machines: Mapping[int | None, Machine]
) -> Iterator[Row]:
    """A row for each model, number of threads and test."""
    from ggpy.bench.kernels.ceilings import Ceilings
    from ggpy.bench.runs import Bench, run_model
    from ggpy.bench.table import row_of

    for (synthetic, name), (n_threads, machine) in product(options.models, machines.items()):
        ceilings = Ceilings(machine.bandwidth, machine.matrix_rate, machine.gpu)
        case = Bench(
            open=partial(open_model, synthetic, name),
            ops=partial(open_ops, options, n_threads),
            name=name,
            repetitions=options.repetitions,
            warm=not options.no_warmup,
            delay=options.delay,
            say=say if options.progress else lambda message: None,
        )
        for result in run_model(case, tests, ceilings):
            yield row_of(result, machine)
        gc.collect()  # the next model needs the memory


def profile(options: argparse.Namespace, tests: Sequence[Test], command: str) -> int:
    """Print where the time of each generating test's last step goes; ValueError without a GPU."""
    from ggpy.bench.profiling.table import KIND, lines

    steps = [t for t in tests if t.n_gen and not t.n_prompt]
    if not steps:
        raise ValueError("--profile is of steps that generate: give -n 1 or more")
    if options.output not in ("md", "json"):
        raise ValueError(f"-o {options.output}: a profile is printed as md or json")
    ops: Any = open_ops(options, options.threads[0])
    if getattr(ops, "device", None) is None:
        raise ValueError(f"--profile is of a GPU's kernels, and there is none: {ops.reason}")
    machine = describe(options, command, options.threads[0])
    facts = {
        "kind": KIND, "gpu": machine.gpu, "driver": machine.driver, "build": machine.commit,
        "command": command, "time": machine.time(),
        "bandwidth": machine.bandwidth, "matrix_rate": machine.matrix_rate,
    }  # fmt: skip
    failed: list[str] = []
    for line in lines(options.output, facts, profiled(options, steps, ops, machine, failed)):
        print(line, flush=True)
    return 1 if failed else 0


def profiled(
    options: argparse.Namespace, steps: Sequence[Test], ops: Any, machine: Machine, failed: list
) -> Iterator[Any]:
    """A row for each model and step; models that fail are said, and added to `failed`."""
    from ggpy.bench.kernels.ceilings import Ceilings
    from ggpy.bench.profiling.profile import profiles
    from ggpy.bench.profiling.table import row_of
    from ggpy.bench.runs import Bench, alike

    ceilings = Ceilings(machine.bandwidth, machine.matrix_rate, machine.gpu)
    progress = say if options.progress else lambda message: None
    for synthetic, name in options.models:
        case = Bench(partial(open_model, synthetic, name), lambda: ops, name, say=progress)
        try:
            for group in alike(steps):
                for found in profiles(case, group, ops, ceilings):
                    yield row_of(found, machine.bandwidth)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            failed.append(name)
            say(f"{name}: {error}")
        gc.collect()  # the next model needs the memory


def say(message: str) -> None:
    print(f"ggpy bench: {message}", file=sys.stderr, flush=True)


@cache
def note(message: str) -> None:
    """Say it once in a run: ops are opened for the machine and for each model."""
    say(message)


def open_model(synthetic: bool, name: str, empty: bool = False) -> Any:
    """The file, or what stands in for it, without values if `empty`; GGUFError, ValueError,
    OSError.
    """
    if synthetic:
        from ggpy.evaluate.synthetic import Synthetic

        return Synthetic(name, empty=empty)
    from ggpy import hub
    from ggpy.gguf import File

    return File(hub.resolve(name))


def open_ops(options: argparse.Namespace, n_threads: int | None) -> Ops:
    """The ops of --device; ValueError."""
    from ggpy.backends import choose

    kinds = {"activations": options.activations, "gemm": options.gemm}
    return choose(options.device, n_threads, note, **kinds)


# The machine


def describe(options: argparse.Namespace, command: str, n_threads: int | None) -> Machine:
    """What all rows say about the machine, its ceilings among it; ValueError for --device."""
    from ggpy.bench.kernels.ceilings import Ceilings, ceilings_of
    from ggpy.bench.machine import commit, cpu_name, now
    from ggpy.bench.table import Machine

    ops = open_ops(options, n_threads)
    gpu = getattr(getattr(ops, "device", None), "gpu", None)
    if options.progress:
        say("measuring the ceilings")
    try:
        ceilings = ceilings_of(ops, options.fresh)
    except RuntimeError as error:  # a full GPU, a compiler that fails: speeds need no limit
        say(f"no limits: the ceilings could not be measured: {error}")
        ceilings = Ceilings(0.0, 0.0, "")
    return Machine(
        backend="CPU" if gpu is None else "CUDA" if options.gemm == "auto" else "CUDA,BLAS",
        cpu=cpu_name(),
        gpu=gpu.name if gpu else "",
        driver=gpu.driver if gpu else "",
        activations=ops.activations,
        n_threads=getattr(ops, "n_threads", None) or n_threads or 1,
        ordinal=gpu.ordinal if gpu else 0,
        commit=commit(),
        command=command,
        time=now,
        bandwidth=ceilings.bandwidth,
        matrix_rate=ceilings.matrix_rate,
    )


if __name__ == "__main__":
    sys.exit(main())
