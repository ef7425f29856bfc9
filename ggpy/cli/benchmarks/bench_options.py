"""The command line of `ggpy bench`: llama-bench's options, and the tests that they ask for.

Everything here is text and numbers, so that --help costs nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import product

from ...bench.workload import Test
from ...cache_types import AUTO, CACHE_TYPES
from .. import llama_cpp, simulated
from ..options import ALL_LAYERS, CPU_MOE, N_CPU_MOE, add_products
from ..parser import MODEL, Parser, add_threads, positive

FORMATS = ("md", "csv", "json", "jsonl", "sql")
DEFAULT_PROMPT, DEFAULT_GEN = 512, 128


def combinations(options: argparse.Namespace) -> Iterator[Test]:
    """All combinations, in llama-bench's order: prompts, generation, then both; by depth; and all
    of that by the types of keys and values, and by layers with experts in host memory.
    """
    types = product(options.cache_type_k, options.cache_type_v, options.n_cpu_moe)
    sizes = product(types, options.n_depth, options.batch_size, options.ubatch_size)
    for kinds, depth, n_batch, n_ubatch in sizes:
        rest = depth, n_batch, n_ubatch
        yield from (Test(p, 0, *rest, 1, *kinds) for p in options.n_prompt if p)
        for n_seq in options.batch:
            yield from (Test(0, n, *rest, n_seq, *kinds) for n in options.n_gen if n)
            yield from (Test(p, n, *rest, n_seq, *kinds) for p, n in options.pg)


def parser() -> Parser:
    """All options."""
    p = Parser(
        "bench",
        "Measure tokens a second, beside the most that this machine could do.",
        epilog="N may be a list or a range: 1,2,4 or 128-512+128 or 1-64*2. The limit is the speed "
        "at which the weights and the context could be read once, or multiplied, at the bandwidth "
        "and matrix rate that were measured on this machine.\n\nOptions that llama-bench has mean "
        "the same here. Those that have no effect here (-ngl, -fa, -mmp, ...) are accepted; -ngl 0 "
        "means the CPU.",
    )
    _add_models(p)
    _add_tests(p)
    _add_output(p)
    llama_cpp.add_bench_options(p)
    return p


def _add_models(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("models; several are separated by commas")
    group.add_argument(
        "-m", "--model", metavar="MODEL", dest="models", action=_Add, default=[], help=MODEL
    )
    group.add_argument(
        "--synthetic", metavar="SHAPE:TYPE", dest="models", action=_Add,
        help="random weights in the shape of a model, as Llama-3.1-8B:Q4_K_M or tiny:Q8_0; "
        "SHAPE:TYPE/OUTPUT also sets the type of the output matrix",
    )  # fmt: skip
    group.add_argument("--device", default="auto", help="auto, cpu, numpy, cuda or cuda:N (auto)")
    simulated.add_option(group)
    add_products(group)
    add_threads(group, type=thread_counts, default=[None])


def _add_tests(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("tests: all combinations of these (defaults in brackets)")

    def numbers(*names: str, default: list[int], low: int, text: str) -> None:
        group.add_argument(
            *names, metavar="N", action=_Numbers, default=default, low=low,
            help=f"{text} ({','.join(map(str, default))})",
        )  # fmt: skip

    numbers("-p", "--n-prompt", default=[DEFAULT_PROMPT], low=0, text="prompt tokens; 0 is none")
    numbers("-n", "--n-gen", default=[DEFAULT_GEN], low=0, text="generated tokens; 0 is none")
    group.add_argument(
        "-pg", metavar="P,N", action=_PromptAndGen, default=[],
        help="a test of P prompt tokens and N generated tokens",
    )  # fmt: skip
    numbers("-d", "--n-depth", default=[0], low=0, text="tokens in the context before the test")
    numbers("-b", "--batch-size", default=[2048], low=1, text="tokens given to the engine together")
    numbers("-ub", "--ubatch-size", default=[512], low=1, text="tokens of a step, at most -b")
    numbers("--batch", default=[1], low=1, text="sequences that are generated together")
    for letter, name in (("k", "keys"), ("v", "values")):
        group.add_argument(
            f"-ct{letter}", f"--cache-type-{letter}", metavar="TYPE", action=_Types, default=[AUTO],
            help=f"type of the KV cache's {name}: {', '.join(CACHE_TYPES)} (f16; f32 on the CPU)",
        )  # fmt: skip
    numbers(
        *N_CPU_MOE, default=[0], low=0,
        text="layers, from the first on, whose experts stay in the memory of the host",
    )  # fmt: skip
    group.add_argument(
        *CPU_MOE, dest="n_cpu_moe", action="store_const", const=[ALL_LAYERS],
        help=f"the experts of all layers, as -ncmoe {ALL_LAYERS}",
    )  # fmt: skip
    group.add_argument(
        "-r", "--repetitions", type=positive, default=5, metavar="N", help="runs of each test (5)"
    )
    group.add_argument("--no-warmup", action="store_true", help="no run before those that count")
    group.add_argument(
        "--delay", type=float, default=0, metavar="S", help="seconds to wait before each test (0)"
    )


def _add_output(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("output")
    group.add_argument("-o", "--output", choices=FORMATS, default="md", help="to stdout (md)")
    group.add_argument("-oe", "--output-err", choices=FORMATS, help="to stderr as well")
    group.add_argument("--plot", metavar="FILE", help="draw the results (needs matplotlib)")
    group.add_argument(
        "--profile", action="store_true",
        help="print the microseconds of each op in the last decode step of every test of -n, -d "
        "and --batch, instead of speeds (on a GPU; -o md or json)",
    )  # fmt: skip
    group.add_argument(
        "--plan", metavar="MODEL", action="append", default=[],
        help="measure nothing; print the kernels of the steps of -p and --batch: of a file, a "
        "known model or a SHAPE:TYPE, on this GPU or that of --as",
    )  # fmt: skip
    group.add_argument("--progress", action="store_true", help="print what runs on stderr")
    group.add_argument("--fresh", action="store_true", help="measure the GPU's limits again")
    group.add_argument(
        "--report", metavar="FOLDER", nargs="?", const="benchmarks",
        help="measure nothing; write BENCHMARKS.md beside FOLDER (benchmarks) from its JSON files",
    )  # fmt: skip


def numbers(text: str) -> list[int]:
    """The integers of "1,2,4", "128-512+128" or "1-64*2"; ValueError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part)
        if not match:
            raise ValueError(f"{text!r} is no list of numbers: use 1,2,4 or 128-512+128 or 1-64*2")
        first = int(match[1])
        found += _range(first, int(match[2] or first), match[3] or "+", int(match[4] or 1))
    return found


def thread_counts(text: str) -> list[int | None]:
    """Numbers of threads, None for the program's own choice; ArgumentTypeError."""
    if text == "-1":
        return [None]
    try:
        return [n or None for n in numbers(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _range(first: int, last: int, operator: str, step: int) -> Iterator[int]:
    while first <= last:
        yield first
        following = first + step if operator == "+" else first * step
        if following <= first:
            raise ValueError(f"a range that goes on by {operator}{step} never ends")
        first = following


class _Numbers(argparse.Action):
    """Lists of numbers; given again, it adds to the list."""

    def __init__(self, *args, low: int, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self.low = low

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        try:
            found = numbers(values)
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        if min(found, default=self.low) < self.low:
            parser.error(f"{option_string}: {values}: the least is {self.low}")
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, found if before is self.default else before + found)


class _Types(argparse.Action):
    """Lists of types; given again, it adds to the list."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        found = values.split(",")
        for name in found:
            if name not in CACHE_TYPES:
                parser.error(f"{option_string}: {name!r} is none of {', '.join(CACHE_TYPES)}")
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, found if before is self.default else before + found)


class _PromptAndGen(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        match = re.fullmatch(r"([1-9]\d*),([1-9]\d*)", values)
        if match is None:
            return parser.error(f"{option_string}: {values!r} is no pair like 512,128")
        pair = int(match[1]), int(match[2])
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), pair])


class _Add(argparse.Action):
    """(whether it is synthetic, name), in the order of the command line."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        found = [(option_string == "--synthetic", name) for name in values.split(",") if name]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *found])
