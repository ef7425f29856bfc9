"""`ggpy quantize MODEL [OUT] TYPE`: write a GGUF file again in another type.

    ggpy quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M
    ggpy quantize --imatrix imatrix.gguf model-f16.gguf small.gguf IQ4_XS
    ggpy quantize --dry-run model-f16.gguf Q5_K_M
    ggpy quantize --allow-requantize smollm2 small.gguf Q4_0
    ggpy quantize --bench q8_0,q4_k --device cuda

Types, options, printed lines and the bytes of the file are llama-quantize's. OUT gets its name only
when the whole file is written; before that it is OUT.xxxxxxxx.part, which is removed when the
program fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy import hub
from ggpy.cli.parser import MODEL, Parser
from ggpy.quantization.names import TABLE
from ggpy.util.messages import escaped, utf8
from ggpy.util.outcome import ended, tell

if TYPE_CHECKING:
    from ggpy.gguf import File
    from ggpy.quantization.importance import ImportanceMatrix
    from ggpy.quantization.mix import Mix
    from ggpy.quantization.requantize import Choice, RequantizationPlan

USAGE = "ggpy quantize [options] MODEL [OUT] TYPE [THREADS]"
MIB = 1 << 20
LONGEST = 127  # bytes of a string that llama.cpp overrides metadata with
BENCH_WEIGHTS = 1 << 22
BENCH_SECONDS = 2.0


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for what cannot be done."""
    options = parser().parse_intermixed_args(argv)
    work = bench if options.bench else run
    return ended(lambda: work(options), program="ggpy quantize")


def parser() -> Parser:
    found = Parser(
        "quantize",
        "Write a GGUF file again in another type.",
        usage=USAGE,
        epilog=f"MODEL is {MODEL}. OUT is ggml-model-TYPE.gguf if it is not given. "
        f"TYPE is {', '.join(TABLE)}, or COPY, which joins the parts of a split file and changes "
        "nothing else. THREADS is the number of CPU cores to use (all).",
    )
    add = found.add_argument
    add("words", nargs="*", metavar="MODEL [OUT] TYPE [THREADS]", help=argparse.SUPPRESS)
    add("--allow-requantize", action="store_true", help="also change quantised tensors")
    add("--leave-output-tensor", action="store_true", help="do not change output.weight")
    add("--pure", action="store_true", help="one type for all tensors instead of a mix")
    add("--imatrix", metavar="FILE", help="weigh errors with this importance matrix")
    add("--include-weights", action="append", default=[], metavar="NAME",
        help="use the importance matrix only for tensors with NAME in their names")  # fmt: skip
    add("--exclude-weights", action="append", default=[], metavar="NAME",
        help="do not use the importance matrix for tensors with NAME in their names")  # fmt: skip
    add("--output-tensor-type", metavar="TYPE", help="the type of output.weight")
    add("--token-embedding-type", metavar="TYPE", help="the type of the embedding table")
    add("--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="the type of tensors whose name matches REGEX; may be repeated")  # fmt: skip
    add("--tensor-type-file", metavar="FILE", help="a file of REGEX=TYPE, separated by white space")
    add("--keep-split", action="store_true", help="write as many parts as MODEL has")
    add("--override-kv", action="append", default=[], metavar="KEY=TYPE:VALUE",
        help="set metadata; TYPE is int, float, bool or str; may be repeated")  # fmt: skip
    add("--smoothquant", type=float, metavar="ALPHA",
        help="with W8A8: the share, 0 to 1, of the activations' outliers that moves into the "
        "weights (0.5 is usual)")  # fmt: skip
    add("--calibration", metavar="FILE", help="text that --smoothquant measures activations on")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--dry-run", action="store_true", help="print types and sizes, and write nothing")
    add("--bench", metavar="T,T,...",
        help="measure how many weights a second are quantised to these types")  # fmt: skip
    return found


def say(message: str) -> None:
    tell(f"ggpy quantize: {message}\n")


def remark(message: str) -> None:
    """What llama-quantize does not say."""
    print(f"ggpy quantize: {message}", file=sys.stderr, flush=True)


# What is asked for


def read_words(options: argparse.Namespace) -> None:
    """MODEL [OUT] TYPE [THREADS]; ValueError if they are something else."""
    words = options.words
    if len(words) < 2:
        raise ValueError(f"a model and a type are needed: {USAGE}; --help tells more")
    if (options.smoothquant is None) != (options.calibration is None):
        raise ValueError("--smoothquant ALPHA and --calibration FILE belong together")
    model = hub.find(words[0])
    has_output = not is_type(words[1])
    rest = words[2:] if has_output else words[1:]
    if not rest:
        from ggpy.quantization.mix import find_mix

        if words[1].endswith(".gguf"):
            raise ValueError(f"no type follows the output {words[1]}: {USAGE}; --help tells more")
        find_mix(words[1])  # says which types there are
    options.mix, threads = type_name(rest[0]), rest[1:]
    if len(threads) > 1 or not all(t.isdigit() for t in threads):
        raise ValueError(f"{' '.join(threads)!r}: what follows the type is a number of threads")
    options.threads = int(threads[0]) if threads else 0
    if options.smoothquant is not None and (options.mix != "W8A8" or options.dry_run):
        raise ValueError("--smoothquant is for W8A8, and not for --dry-run")
    name = f"ggml-model-{options.mix}.gguf"
    # A known model's file is in the cache, and what is made of it goes to the current folder.
    folder = model.parent if isinstance(model, Path) else Path()
    options.target = Path(words[1]) if has_output else folder / name
    options.source = hub.resolve(words[0])  # last, because it may take a while


def is_type(word: str) -> bool:
    try:
        type_name(word)
    except ValueError:
        return False
    return True


def type_name(word: str) -> str:
    from ggpy.quantization.mix import find_mix

    return "COPY" if word.upper() == "COPY" else find_mix(word)


def tensor_types(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """(pattern, format) of --tensor-type and the file; ValueError for what is no such."""
    from ggpy.quantization.mix import tensor_type

    words = list(options.tensor_type)
    if options.tensor_type_file:
        words += Path(options.tensor_type_file).read_text(encoding="utf-8").split()
    return [(pattern.lower(), format) for pattern, format in map(tensor_type, words)]


def overrides(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """(key, type, value) of --override-kv, in the types that llama.cpp gives them."""
    for word in options.override_kv:
        key, _, rest = word.partition("=")
        kind, colon, text = rest.partition(":")
        try:
            if not key or not colon:
                raise ValueError
            if kind == "int":
                yield key, "u32", abs(int(text))
            elif kind == "float":
                yield key, "f32", float(text)
            elif kind == "bool":
                yield key, "bool", {"true": True, "false": False}[text]
            elif kind == "str":
                yield key, "str", text
            else:
                raise ValueError
        except (ValueError, KeyError):
            raise ValueError(
                f"--override-kv {word!r} is not like general.name=str:Mine; types are int, float, "
                "bool (true or false) and str"
            ) from None


def importance(options: argparse.Namespace) -> tuple[ImportanceMatrix, dict[str, Any]] | None:
    """The matrix and its weights by tensor, of those that are to be used."""
    if options.include_weights and options.exclude_weights:
        raise ValueError("--include-weights and --exclude-weights cannot be used together")
    if not options.imatrix:
        return None
    from ggpy.quantization.importance import read

    matrix = read(options.imatrix)
    include, exclude = options.include_weights, options.exclude_weights
    weights = {
        name: values
        for name, values in matrix.weights().items()
        if not any(part in name for part in exclude)
        and (not include or any(part in name for part in include))
    }
    say(f"loaded {len(matrix.entries)} importance matrix entries from {options.imatrix} computed "
        f"on {matrix.n_chunks} chunks; {len(weights)} are used")  # fmt: skip
    return matrix, weights


# The work


def run(options: argparse.Namespace) -> int:
    from ggpy.gguf import File
    from ggpy.util.output_file import lines_aside

    read_words(options)
    start = time.monotonic()
    with lines_aside(options.target), File(options.source) as file:
        found = importance(options)
        mix = None if options.mix == "COPY" else make_mix(file, options, bool(found))
        plan = make_plan(file, mix, options, found)
        unused = mix.unused(list(file.tensors)) if mix else []
        others = [f"--tensor-type {pattern}: no tensor has such a name" for pattern in unused]
        for remark in [*(mix.remarks if mix else []), *plan.notes, *others]:
            say(f"warning: {remark}")
        if options.dry_run:
            say(f"calculating quantization size for '{options.source}' as {options.mix}")
            for i, choice in enumerate(plan.choices):
                print(line(i, plan, choice, dry=True))
        else:
            write(plan, file, options)
        sizes(plan, mix)
        if not options.dry_run:
            say(f"total time = {1000 * (time.monotonic() - start):10.2f} ms")
    return 0


def make_mix(file: File, options: argparse.Namespace, has_imatrix: bool) -> Mix:
    from ggpy.quantization.mix import find_type
    from ggpy.quantization.requantize import mix_for

    output, table = options.output_tensor_type, options.token_embedding_type
    return mix_for(
        file,
        options.mix,
        pure=options.pure,
        leave_output=options.leave_output_tensor,
        output_type=find_type(output) if output else None,
        token_embd_type=find_type(table) if table else None,
        tensor_types=tensor_types(options),
        has_imatrix=has_imatrix,
    )


def make_plan(
    file: File,
    mix: Mix | None,
    options: argparse.Namespace,
    found: tuple[ImportanceMatrix, dict[str, Any]] | None,
) -> RequantizationPlan:
    """The plan with all metadata."""
    from ggpy.quantization.requantize import override, plan

    made = plan(
        file,
        mix,
        found[1] if found else None,
        allow_requantize=options.allow_requantize,
        keep_order=options.keep_split,
        factors=smoothing(file, options),
    )
    if options.smoothquant is not None:
        override(made.metadata, "quantize.smoothquant.alpha", "f32", options.smoothquant)
    for key, kind, value in overrides(options):
        override(made.metadata, key, kind, short(value) if kind == "str" else value)
    if found:
        matrix, weights = found
        override(made.metadata, "quantize.imatrix.file", "str", short(options.imatrix))
        if matrix.datasets:
            override(made.metadata, "quantize.imatrix.dataset", "str", short(matrix.datasets[0]))
        override(made.metadata, "quantize.imatrix.entries_count", "u32", len(weights))
        if matrix.n_chunks > 0:
            override(made.metadata, "quantize.imatrix.chunks_count", "u32", matrix.n_chunks)
    return made


def smoothing(file: File, options: argparse.Namespace) -> Any:
    """What is moved from activations into weights; None if nothing is asked for."""
    if options.smoothquant is None:
        return None
    from ggpy.backends import choose
    from ggpy.quantization.smoothquant import calibrate, factors

    text = Path(options.calibration).read_text(encoding="utf-8", errors="replace")
    ops = choose(options.device, options.threads or None, say)
    return factors(file, calibrate(file, text, ops), options.smoothquant)


def short(text: str) -> str:
    """As much of a string as llama.cpp keeps."""
    return utf8(text).encode()[:LONGEST].decode(errors="ignore")


def write(plan: RequantizationPlan, file: File, options: argparse.Namespace) -> None:
    """Write the file or its parts, with a line for each tensor as it is done."""
    from ggpy.quantization import requantize
    from ggpy.quantization.device_workers import open_workers
    from ggpy.util.progress import Bar

    parts = {tensor.path for tensor in file.tensors.values()} | {str(options.source)}
    if options.target.exists() and any(os.path.samefile(options.target, p) for p in parts):
        raise ValueError(f"input and output files are the same: {options.target}")
    function = requantize.write_parts if options.keep_split else requantize.write
    targets = [choice.format for choice in plan.choices if choice.changes]
    with (
        open_workers(options.device, options.threads, remark, targets) as workers,
        Bar("quantizing", plan.nbytes / MIB, "MiB") as bar,
    ):
        say(f"quantizing '{options.source}' to '{options.target}' as {options.mix} "
            f"using {workers.n} threads")  # fmt: skip
        before = 0
        for i, done in function(plan, options.target, workers):
            bar.update((before + done) / MIB)
            choice = plan.choices[i]
            if done == choice.slot.nbytes:
                before += done
                bar.close()
                tell(line(i, plan, choice) + "\n")


def line(i: int, plan: RequantizationPlan, choice: Choice, dry: bool = False) -> str:
    """What llama-quantize says of a tensor."""
    tensor, n = choice.tensor, len(plan.choices)
    dims = ", ".join(f"{size:6}" for size in (*tensor.shape[::-1], 1, 1, 1)[:4])
    name = escaped(tensor.name)
    head = f"[{i + 1:4}/{n:4}] {name:36} - [{dims}], type = {ggml_name(tensor.format):>6}, "
    if not choice.changes:
        return f"{head}size = {tensor.nbytes / MIB:8.3f} MiB"
    sizes = f"size = {tensor.nbytes / MIB:8.2f} MiB -> {choice.slot.nbytes / MIB:8.2f} MiB"
    name = ggml_name(choice.format)
    return f"{head}{sizes} ({name})" if dry else f"{head}converting to {name} .. {sizes}"


def ggml_name(format: Any) -> str:
    return format.name.lower().replace("_k", "_K")


def sizes(plan: RequantizationPlan, mix: Mix | None) -> None:
    """Sizes before and after, and how many tensors could not have what the mix wanted."""
    import math

    tensors = [choice.tensor for choice in plan.choices]
    n = max(1, sum(math.prod(tensor.shape) for tensor in tensors))
    before = sum(tensor.nbytes for tensor in tensors)
    say(f"model size  = {before / MIB:8.2f} MiB ({8 * before / n:.2f} BPW)")
    say(f"quant size  = {plan.nbytes / MIB:8.2f} MiB ({8 * plan.nbytes / n:.2f} BPW)")
    if mix and mix.n_fallback:
        say(f"WARNING: {mix.n_fallback} of {len(tensors)} tensor(s) required fallback quantization")


# Speed


def bench(options: argparse.Namespace) -> int:
    """Weights a second of each type, from float32 in memory to blocks in memory."""
    from ggpy.quantization.device_workers import DeviceWorkers, open_workers
    from ggpy.quantization.mix import find_type

    if len(options.words) > 1 or not all(word.isdigit() for word in options.words):
        raise ValueError("--bench takes a number of threads, and neither files nor a type")
    formats = [find_type(name) for name in options.bench.split(",")]
    threads = int(options.words[0]) if options.words else 0
    with open_workers(options.device, threads, remark, formats) as workers:
        where = "a GPU and " if isinstance(workers, DeviceWorkers) else ""
        print(f"million weights a second on {where}{workers.n} cores (random, float32)")
        print(f"{'type':8} {'plain':>8} {'imatrix':>8}")
        for format in formats:
            plain, weighted = speed(workers, format, False), speed(workers, format, True)
            print(f"{ggml_name(format):8} {plain / 1e6:8.1f} {weighted / 1e6:8.1f}", flush=True)
    return 0


def speed(workers: Any, format: Any, weighted: bool) -> float:
    """Weights a second: passes over the same weights, the median of some seconds of them."""
    import numpy as np

    from ggpy.formats import by_name
    from ggpy.quantization.workers import slabs

    rng, columns = np.random.default_rng(0), 4096
    weights = rng.standard_normal((BENCH_WEIGHTS // columns, columns), np.float32)
    importance = rng.chisquare(1, columns).astype(np.float32) if weighted else None
    data, source = weights.view(np.uint8), by_name("F32")
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 2 or time.monotonic() - begin < BENCH_SECONDS:
        start = time.monotonic()
        tasks = slabs(data, columns, source, format, importance, search_slab=workers.search_slab)
        for _ in workers.run(tasks):
            pass
        times.append(time.monotonic() - start)
    return weights.size / sorted(times[1:])[len(times[1:]) // 2]  # the first may start processes


if __name__ == "__main__":
    sys.exit(main())
