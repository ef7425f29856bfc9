"""`ggpy perplexity MODEL -f TEXT`: measure how well a model predicts a text.

    ggpy perplexity model.gguf -f text.txt
    ggpy perplexity big.gguf -f text.txt --kl-divergence-base logits.npy
    ggpy perplexity small.gguf --kl-divergence-base logits.npy --kl-divergence
    ggpy perplexity model.gguf -f text.txt --types q8_0,q4_k,q2_k --plot types.png

Method, options and printed lines are llama-perplexity's. The file of logits is a .npy of one record
for each chunk: the ids that were evaluated and the float32 logits of the scored half, which
`numpy.load(path, mmap_mode="r")` reads.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli import llama_cpp
from ggpy.cli.options import add_cache_types, add_products, add_reading
from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.bench.kernels.plot_types import Quality
    from ggpy.evaluate.perplexity import Requantized
    from ggpy.gguf import File
    from ggpy.runtime.evaluator import Evaluator

FEWEST = 100  # tokens that statistics are made of
MB = 1e6
QUANTILES = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001)


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if the device fails, 2 for what cannot be done."""
    options = llama_cpp.parse(parser(), argv)
    return ended(lambda: run(options), program="ggpy perplexity")


def run(options: argparse.Namespace) -> int:
    check(options)
    if options.types:
        return table(options)
    return divergence(options) if options.kl_divergence else measure(options)


def parser() -> Parser:
    found = Parser("perplexity", "Measure how well a model predicts a text.")
    add_reading(found)
    add = found.add_argument
    add_cache_types(found)
    add_products(found)
    add(
        *("--kl-divergence-base", "--save-all-logits"), dest="base", metavar="FILE",
        help="save the logits to FILE; with --kl-divergence: compare with the logits in FILE",
    )  # fmt: skip
    add("--kl-divergence", action="store_true", help="compare with the run that saved FILE")
    add("--types", metavar="T,T,...", help="compare the model with itself, quantised to each type")
    add("--plot", metavar="FILE", help="with --types: draw quality over size (needs matplotlib)")
    return found


def check(options: argparse.Namespace) -> None:
    """ValueError for options that do not go together."""
    options.model = options.model_option or options.model
    if not options.model:
        raise ValueError("no model: name one with -m MODEL")
    if options.kl_divergence and (options.types or not options.base):
        raise ValueError(
            "--kl-divergence compares with a file of logits: name it with --kl-divergence-base "
            "FILE, and leave --types away"
        )
    if not options.file and not options.kl_divergence:
        raise ValueError("no text: name a file with -f FILE (- is stdin)")
    if options.plot:
        from ggpy.bench import plot

        if not options.types:
            raise ValueError("--plot draws a table over types: name them with --types T,T,...")
        plot.require(options.plot)
    if options.chunks == 0 or options.chunks < -1:
        raise ValueError(f"--chunks {options.chunks}: give 1 or more, or -1 for all")


def say(message: str) -> None:
    print(f"ggpy perplexity: {message}", file=sys.stderr, flush=True)


# Parts of every run


def open_model(options: argparse.Namespace) -> File:
    from ggpy import arch, hub
    from ggpy.gguf import File

    file = File(hub.resolve(options.model))
    arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
    return file


def evaluator(file: File | Requantized, options: argparse.Namespace, n_ctx: int) -> Evaluator:
    from ggpy.backends import choose
    from ggpy.cache_types import CacheTypes
    from ggpy.runtime.evaluator import Evaluator

    kinds = {"activations": options.activations, "gemm": options.gemm}
    ops = choose(options.device, options.threads, say, **kinds)
    types = CacheTypes(options.cache_type_k, options.cache_type_v)
    found = Evaluator(file, ops, n_ctx, options.batch_size, cache_types=types)
    say(f"on {ops.name} ({ops.reason}), n_ctx={n_ctx}, chunks of a step: {found.n_seq}")
    return found


def read_chunks(file: File, options: argparse.Namespace) -> Any:
    """ids[N, C] of the text."""
    from ggpy import arch
    from ggpy.evaluate.perplexity import chunks_of, text_of
    from ggpy.tokenizer import Tokenizer

    limit = None if options.chunks < 0 else options.chunks
    chunks = chunks_of(text_of(options.file), Tokenizer.from_gguf(file), options.ctx_size, limit)
    trained = arch.context_length(file)
    if trained and options.ctx_size > trained:
        say(f"the model was trained for {trained} tokens, not {options.ctx_size}")
    say(f"{len(chunks)} chunks of {options.ctx_size} tokens")
    return chunks


# Perplexity


def measure(options: argparse.Namespace) -> int:
    """The perplexity after each chunk and of all; saves the logits where they are wanted."""
    from ggpy.evaluate.perplexity import running

    with open_model(options) as file:
        chunks = read_chunks(file, options)
        model = evaluator(file, options, options.ctx_size)
        for text in running(scores(model, chunks, options.base)):
            print(text, end="", flush=True)
    return 0


def scores(model: Evaluator, chunks: Any, base: str | None) -> Iterator[Any]:
    """-ln p[K] of each chunk."""
    from ggpy.evaluate.perplexity import saved, score, targets

    logits = model.logits(chunks)
    if base:
        logits = saved(Path(base), chunks, model.n_vocab, logits)
    for chunk, values in zip(chunks, logits, strict=True):
        yield score(values, targets(chunk))


# Divergence


def divergence(options: argparse.Namespace) -> int:
    """A line for each chunk, and statistics of all."""
    from ggpy.evaluate.perplexity import open_base

    base = open_base(Path(options.base))
    base = base[: None if options.chunks < 0 else options.chunks]
    with open_model(options) as file:
        model = evaluator(file, options, base["ids"].shape[1])
        tokens = None
        print(
            "chunk             PPL               ln(PPL(Q)/PPL(base))          "
            "KL Divergence              Δp RMS            Same top p"
        )
        for i, tokens in enumerate(compared(model, base), 1):
            print(chunk_line(i, tokens), flush=True)
    if tokens is not None and len(tokens) >= FEWEST:
        print(*statistics(tokens), sep="\n")
    return 0


def compared(model: Evaluator, base: Any) -> Iterator[Any]:
    """COMPARISON of all scored tokens so far, after each chunk; ValueError for another vocabulary.

    The ids in the file are looked at before any of them is evaluated.
    """
    import numpy as np

    from ggpy.evaluate.perplexity import COMPARISON, compare, targets

    n_vocab, ids = base["logits"].shape[-1], np.array(base["ids"])
    if n_vocab != model.n_vocab or ids.min() < 0 or ids.max() >= n_vocab:
        raise ValueError(
            f"the logits are of a vocabulary of {n_vocab} ids, the model has {model.n_vocab}: "
            "compare models with the same tokenizer"
        )
    tokens = np.empty(0, COMPARISON)
    for record, logits in zip(base, model.logits(ids), strict=True):
        part = compare(logits, record["logits"], targets(record["ids"]))
        tokens = np.concatenate([tokens, part])
        yield tokens


def chunk_line(i: int, tokens: Any) -> str:
    """As llama-perplexity writes it."""
    from ggpy.evaluate.perplexity import log_ratio, mean, perplexity, rms

    ppl, ratio, kl = perplexity(tokens["nll"]), log_ratio(tokens), mean(tokens["kl"])
    dp, top = rms(tokens["p_diff"]), mean(tokens["same_top"].astype(float))
    found = [f"{i:4}", f"{ppl.value:9.4f} ± {ppl.error:9.4f}"]
    found += [f"{x.value:10.5f} ± {x.error:10.5f}" for x in (ratio, kl)]
    found += [f"{100 * x.value:6.3f} ± {100 * x.error:6.3f} %" for x in (dp, top)]
    return "    ".join(found)


def statistics(tokens: Any) -> Iterator[str]:
    """The three blocks of llama-perplexity."""
    from ggpy.evaluate import perplexity as p

    def line(name: str, found: p.Estimate) -> str:
        return f"{name:30}: {found.value:10.6f} ± {found.error:10.6f}"

    ratio = p.log_ratio(tokens)
    size = p.np.exp(ratio.value)
    yield "\n====== Perplexity statistics ======"
    yield line("Mean PPL(Q)", p.perplexity(tokens["nll"]))
    yield line("Mean PPL(base)", p.perplexity(tokens["nll_base"]))
    together = 100 * p.correlation(tokens["nll"], tokens["nll_base"])
    yield f"Cor(ln(PPL(Q)), ln(PPL(base))): {together:6.2f}%"
    yield line("Mean ln(PPL(Q)/PPL(base))", ratio)
    yield line("Mean PPL(Q)/PPL(base)", p.Estimate(size, size * ratio.error))
    yield line("Mean PPL(Q)-PPL(base)", p.difference(tokens))
    kl, dp = p.mean(tokens["kl"]), p.mean(tokens["p_diff"])
    yield "\n====== KL divergence statistics ======"
    yield f"Mean    KLD: {kl.value:10.6f} ± {kl.error:10.6f}"
    yield from (f"{name} KLD: {x:10.6f}" for name, x in quantiles(tokens["kl"], QUANTILES))
    yield "\n====== Token probability statistics ======"
    yield f"Mean    Δp: {100 * dp.value:6.3f} ± {100 * dp.error:5.3f} %"
    by = sorted((*QUANTILES, 0.75, 0.25), reverse=True)
    yield from (f"{name} Δp: {100 * x:6.3f}%" for name, x in quantiles(tokens["p_diff"], by))
    found, top = p.rms(tokens["p_diff"]), p.mean(tokens["same_top"].astype(float))
    yield f"RMS Δp    : {100 * found.value:6.3f} ± {100 * found.error:5.3f} %"
    yield f"Same top p: {100 * top.value:6.3f} ± {100 * top.error:5.3f} %"


def quantiles(values: Any, fractions: Any) -> Iterator[tuple[str, float]]:
    """Names, seven characters wide, and values, from the largest to the smallest."""
    import numpy as np

    names = {1.0: "Maximum", 0.5: "Median ", 0.0: "Minimum"}
    for fraction in (1.0, *fractions, 0.0):
        name = names.get(fraction, f"{100 * fraction:4.1f}%  ")
        yield name, float(np.quantile(values, fraction))


# Types


def table(options: argparse.Namespace) -> int:
    """A row for the model as it is, and for each type that its matrices are quantised to."""
    from ggpy.evaluate.perplexity import find_format, matrices_that_fit, open_base

    formats = [find_format(name.strip()) for name in options.types.split(",")]
    with open_model(options) as file, tempfile.TemporaryDirectory() as folder:
        for format in formats:
            matrices_that_fit(file, format)  # before anything is evaluated
        base = Path(options.base or Path(folder, "logits.npy"))
        chunks = read_chunks(file, options)
        print(row("type", "matrices", "bpw", "size", "PPL", "KL divergence", "same top p"))
        print(row("---", "--:", "--:", "--:", "--:", "--:", "--:"))
        found = [as_it_is(file, options, chunks, base)]
        print(cells(found[0]), flush=True)
        records = open_base(base)
        for format in formats:
            gc.collect()  # the next one needs the memory
            found.append(in_type(file, format, options, records))
            print(cells(found[-1]), flush=True)
        del records  # Windows removes no file that is mapped
    if options.plot:
        from ggpy.bench.kernels.plot_types import draw

        draw(found, options.plot)
    return 0


def as_it_is(file: File, options: argparse.Namespace, chunks: Any, base: Path) -> Quality:
    """The model itself, whose logits are kept."""
    import numpy as np

    from ggpy.bench.kernels.plot_types import Quality
    from ggpy.evaluate.perplexity import perplexity

    model = evaluator(file, options, options.ctx_size)
    found = perplexity(np.concatenate(list(scores(model, chunks, str(base)))))
    return Quality("as it is", "", *size_of(file), found)


def in_type(file: File, format: Any, options: argparse.Namespace, records: Any) -> Quality:
    """The model in a type, compared with the one that the records are of."""
    from ggpy.bench.kernels.plot_types import Quality
    from ggpy.evaluate.perplexity import Requantized, mean, perplexity

    say(f"quantising to {format.name}")
    changed = Requantized(file, format, options.threads)
    model = evaluator(changed, options, records["ids"].shape[1])
    for tokens in compared(model, records):
        last = tokens
    return Quality(
        format.name,
        f"{changed.n_quantized} of {changed.n_matrices}",
        *size_of(changed),
        ppl=perplexity(last["nll"]),
        kl=mean(last["kl"]),
        same_top=float(last["same_top"].mean()),
    )


def size_of(file: File | Requantized) -> tuple[float, int]:
    """Bits per weight, and bytes of all tensors."""
    tensors = file.tensors.values()
    nbytes = sum(t.nbytes for t in tensors)
    weights = sum(t.nbytes // t.format.nbytes * t.format.block_size for t in tensors)
    return 8 * nbytes / weights, nbytes


def cells(q: Quality) -> str:
    """Its row."""
    (ppl, error), (kl, kl_error) = q.ppl, q.kl or (0.0, 0.0)
    return row(
        q.name,
        q.matrices,
        f"{q.bits:.2f}",
        f"{q.nbytes / MB:.2f} MB",
        f"{ppl:.4f} ± {error:.4f}",
        "" if q.kl is None else f"{kl:.6f} ± {kl_error:.6f}",
        "" if q.same_top is None else f"{100 * q.same_top:.2f} %",
    )


def row(*cells: str) -> str:
    """A line of a markdown table, with columns of fixed widths."""
    widths = (8, 10, 6, 11, 20, 21, 10)
    first, *rest = zip(cells, widths, strict=True)
    return f"| {first[0]:{first[1]}} | " + " | ".join(f"{c:>{w}}" for c, w in rest) + " |"


if __name__ == "__main__":
    sys.exit(main())
