"""`ggpy imatrix MODEL -f TEXT`: collect an importance matrix from a text, for `ggpy quantize`.

    ggpy imatrix model-f16.gguf -f text.txt -o imatrix.gguf
    ggpy imatrix --in-file a.gguf --in-file b.gguf -o both.gguf

Method, options, printed lines and files are llama-imatrix's: the text is evaluated in chunks of 512
tokens, and the squares of the activations that each matrix of a layer is multiplied with are summed
by column. `ggpy quantize --imatrix FILE` and llama-quantize read the file, and this program reads
files of llama-imatrix.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli import llama_cpp
from ggpy.cli.options import add_reading
from ggpy.cli.parser import Parser
from ggpy.util.messages import utf8
from ggpy.util.outcome import ended, tell

if TYPE_CHECKING:
    from ggpy.gguf import File
    from ggpy.quantization.importance import Collector, ImportanceMatrix


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if the device fails, 2 for what cannot be done."""
    options = llama_cpp.parse(parser(), argv)
    return ended(lambda: run(options), program="ggpy imatrix")


def run(options: argparse.Namespace) -> int:
    from ggpy.util.output_file import lines_aside

    check(options)
    with lines_aside(Path(options.output)):
        save(make(options), options)
    return 0


def parser() -> Parser:
    found = Parser("imatrix", "Collect an importance matrix from a text, for `ggpy quantize`.")
    add_reading(found)
    add = found.add_argument
    add("-o", "--output", "--output-file", default="imatrix.gguf", metavar="FILE",
        help="the file to write (imatrix.gguf)")  # fmt: skip
    add("--output-format", choices=("gguf", "dat"), default="gguf",
        help="dat is llama.cpp's older format (gguf)")  # fmt: skip
    add("--in-file", action="append", default=[], metavar="FILE",
        help="add the sums of this matrix; may be repeated; without -f only these")  # fmt: skip
    add("--process-output", action="store_true", help="collect for output.weight too")
    return found


def check(options: argparse.Namespace) -> None:
    """ValueError for options that do not go together."""
    options.model = options.model_option or options.model
    if not options.file and not options.in_file:
        raise ValueError(
            "no text: name a file with -f FILE (- is stdin), or matrices to combine with --in-file"
        )
    if options.file and not options.model:
        raise ValueError("no model: name one with -m MODEL")
    if options.chunks == 0 or options.chunks < -1:
        raise ValueError(f"--chunks {options.chunks}: give 1 or more, or -1 for all")
    output = Path(options.output)
    if not output.parent.is_dir():  # before an hour is spent
        raise ValueError(f"{output}: there is no folder {output.parent}")
    if output.is_dir():
        raise ValueError(f"{output}: is a directory: name a file in it")


def say(message: str) -> None:
    print(f"ggpy imatrix: {message}", file=sys.stderr, flush=True)


def make(options: argparse.Namespace) -> ImportanceMatrix:
    """What is read, and what is collected, together."""
    from ggpy.quantization.importance import ImportanceMatrix, read

    found = ImportanceMatrix(chunk_size=options.ctx_size if options.file else 0)
    for path in options.in_file:
        say(f"loading imatrix from '{path}'")
        found.add(read(path, options.ctx_size))
    if options.file:
        found.add(collect(options))
    return found


def save(matrix: ImportanceMatrix, options: argparse.Namespace) -> None:
    from ggpy.quantization.importance import write_dat, write_gguf

    write = write_dat if options.output_format == "dat" else write_gguf
    write(options.output, matrix)
    say(f"stored {len(matrix.entries)} entries of {matrix.n_chunks} chunks in {options.output}")


def collect(options: argparse.Namespace) -> ImportanceMatrix:
    """Run the text through the model; prints the perplexity so far after each chunk."""
    from ggpy import arch, hub
    from ggpy.evaluate.perplexity import running
    from ggpy.gguf import File
    from ggpy.quantization.importance import Collector

    collector = Collector(options.process_output)
    with File(hub.resolve(options.model)) as file:
        arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
        for text in running(scores(file, options, collector)):
            tell(text)
    dataset = "stdin" if options.file == "-" else utf8(options.file)
    return collector.matrix([dataset], options.ctx_size)


def scores(file: File, options: argparse.Namespace, collector: Collector) -> Iterator[Any]:
    """-ln p[K] of each chunk's scored tokens."""
    from ggpy.backends import choose
    from ggpy.backends.observe import ObservedOps
    from ggpy.evaluate.perplexity import score, targets
    from ggpy.runtime.evaluator import Evaluator

    chunks = read_chunks(file, options)
    ops = choose(options.device, options.threads, say)
    observed = ObservedOps(ops, collector.see, collector.see_experts)
    n_ctx, n_batch = options.ctx_size, options.batch_size
    model = Evaluator(file, observed, n_ctx, n_batch, whole=True)
    say(f"on {ops.name} ({ops.reason}), n_ctx={n_ctx}, chunks of a step: {model.n_seq}")
    start, n_groups = time.monotonic(), -(-len(chunks) // model.n_seq)
    for i, logits in enumerate(model.logits(chunks)):
        if i == 0:
            seconds = time.monotonic() - start
            say(f"{seconds:.2f} seconds per pass - ETA {seconds * n_groups / 60:.2f} minutes")
        yield score(logits, targets(chunks[i]))


def read_chunks(file: File, options: argparse.Namespace) -> Any:
    """ids[N, C] of the text."""
    from ggpy.evaluate.perplexity import chunks_of, text_of
    from ggpy.tokenizer import Tokenizer

    limit = None if options.chunks < 0 else options.chunks
    chunks = chunks_of(text_of(options.file), Tokenizer.from_gguf(file), options.ctx_size, limit)
    say(f"computing over {len(chunks)} chunks of {options.ctx_size} tokens")
    return chunks


if __name__ == "__main__":
    sys.exit(main())
