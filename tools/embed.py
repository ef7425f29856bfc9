"""`ggpy embed MODEL [TEXT ...]`: print the embeddings of texts, and how similar they are.

    ggpy embed model.gguf "The sky is blue" "The sea is"
    ggpy embed model.gguf -f texts.txt -o vectors.npy
    ggpy embed reranker.gguf --pooling rank -p "$(printf 'a bird\\ta crow\\na bird\\ta car')"

Options and printed lines are llama-embedding's. Each TEXT is one text; -p, -f and stdin have one in
each line, or between --embd-separator. -o writes a float32 [N, D] that `numpy.load` reads.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli import llama_cpp
from ggpy.cli.options import add_batch_size, unescape
from ggpy.cli.parser import MODEL, Parser, add_threads, natural
from ggpy.util.messages import escaped
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    import numpy as np

    from ggpy.gguf import File
    from ggpy.model import Model

NONE, RANK = "none", "rank"
FORMATS = ("array", "json", "json+", "raw")
TOGETHER = 8  # texts in a step at most
DEFAULT_CONTEXT = 4096
FIRST, ENDS, NAME = 16, 3, 10  # values that are printed of one of several vectors; letters of texts


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if the device fails, 2 for what cannot be done."""
    options = llama_cpp.parse(parser(), argv)
    return ended(lambda: run(options), program="ggpy embed")


class Words(Parser):
    """Options may stand between the texts."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, but for the order."""
        return self.parse_intermixed_args(args, namespace)


def parser() -> Parser:
    found = Words("embed", "Print the embeddings of texts, and how similar they are.")
    add = found.add_argument
    add("model", nargs="?", metavar="MODEL", help=MODEL)
    add("-m", "--model", dest="model_option", metavar="MODEL", help="the same")
    add("texts", metavar="TEXT", nargs="*", help="a text; none: -p, -f or stdin")
    add("-p", "--prompt", metavar="TEXT", help="texts, one in each line")
    add("-f", "--file", metavar="FILE", help="a file of texts, one in each line; - is stdin")
    add(
        "-o",
        "--output",
        metavar="FILE.npy",
        help="write a .npy of float32 [N, D] instead, or a file in the format below",
    )
    add("--embd-separator", default="\\n", metavar="TEXT", help=r"between texts (\n)")
    add("--cls-separator", default="\\t", metavar="TEXT",
        help=r"between query and document of --pooling rank (\t)")  # fmt: skip
    add(
        *("--pooling",), choices=[NONE, "mean", "cls", "last", RANK], metavar="KIND",
        help="none (a vector for each token), mean, cls (the first), last, or rank: the relevance "
        "of a document to a query (the model's)",
    )  # fmt: skip
    add(
        *("--embd-normalize",), type=int, default=2, metavar="N",
        help="-1: none; 0: the largest value is 32760; 1: the sum of absolute values is 1; 2: the "
        "length is 1; N: the N-norm is 1 (2)",
    )  # fmt: skip
    add("--embd-output-format", choices=FORMATS, metavar="FORMAT",
        help="array: [[...], ...]; json: OpenAI's; json+: with cosine similarities; raw: numbers "
        "with blanks between (a table for reading)")  # fmt: skip
    add("-c", "--ctx-size", type=natural, default=0, metavar="N",
        help="tokens of a text at most (the model's, up to 4096)")  # fmt: skip
    add_batch_size(found)
    add_threads(found)
    add("--device", default="auto", help="auto, cpu, numpy, cuda or cuda:N (auto)")
    llama_cpp.add_options(found)
    return found


def run(options: argparse.Namespace) -> int:
    from ggpy import hub
    from ggpy.gguf import File

    if options.model_option:  # then all words are texts
        options.texts = [x for x in (options.model, *options.texts) if x is not None]
        options.model = options.model_option
    if not options.model:
        raise ValueError("no model: name one, as `ggpy embed MODEL TEXT`")
    if options.embd_normalize < -1:
        raise ValueError(f"--embd-normalize is {options.embd_normalize}: give -1 or more")
    texts = read_texts(options)
    with File(hub.resolve(options.model)) as file, load(file, len(texts), options) as model:
        if options.pooling == RANK:
            return ranked(model, texts, options)
        vectors = embedded(model, texts, options)
    if options.output:
        lines = options.embd_output_format and list(shown(vectors, texts, options))
        return saved(vectors, options.output, lines)
    for line in shown(vectors, texts, options):
        print(line)
    return 0


def read_texts(options: argparse.Namespace) -> list[str]:
    """The texts of the command line, of a file or of stdin; ValueError for none."""
    from ggpy.cli.prompts import PromptSource, decode, read_prompt

    if options.texts:
        if options.prompt is not None or options.file is not None:
            raise ValueError("texts are given twice: as TEXT and with -p or -f")
        return [decode(text.encode("utf-8", "surrogateescape"), "TEXT") for text in options.texts]
    separator = unescape(options.embd_separator)
    if not separator:
        raise ValueError("--embd-separator is empty: give a text")
    whole = read_prompt(PromptSource(options.prompt, options.file))
    found = [text for text in (whole or "").split(separator) if text]
    if not found:
        raise ValueError("no text: give TEXT, -p, -f, or pipe texts in")
    return found


def load(file: File, n_texts: int, options: argparse.Namespace) -> Model:
    """The model, with room for several texts in a step."""
    from ggpy import arch, model
    from ggpy.backends import choose

    trained = arch.context_length(file)
    n_ctx = options.ctx_size or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    ops = choose(options.device, options.threads, say)
    n_seq = min(n_texts, TOGETHER)
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_positions": n_ctx, "n_seq": n_seq}
    found = model.load(file, ops, **sizes, n_batch=options.batch_size)
    say(f"on {ops.name} ({ops.reason}), n_ctx={n_ctx}, {n_texts} texts")
    return found


def say(message: str) -> None:
    print(f"ggpy embed: {message}", file=sys.stderr, flush=True)


def embedded(model: Model, texts: Sequence[str], options: argparse.Namespace) -> np.ndarray:
    """float32 [N, D], a row for each text, or for each token of all of them."""
    import numpy as np

    from ggpy.runtime import embedding

    prompts = [model.tokenizer.encode(text, parse_special=True) for text in texts]
    if options.pooling == NONE:
        states = embedding.token_states(model.engine, prompts)
        return embedding.scaled(np.concatenate(states), options.embd_normalize)
    pooling = options.pooling or embedding.pooling_of(model.metadata)
    pooled = embedding.pooled(model.engine, prompts, pooling)
    return embedding.scaled(pooled, options.embd_normalize)


def saved(vectors: np.ndarray, path: str, lines: list[str] | None) -> int:
    """Write lines, or a .npy; the file is complete or absent."""
    import numpy as np

    from ggpy.util.output_file import write_whole

    content = io.BytesIO()
    if lines:
        content.write("".join(f"{line}\n" for line in lines).encode())
    else:
        np.save(content, vectors)
    write_whole(Path(path), content.getvalue())
    say(f"{path}: {'text of' if lines else 'float32'} {list(vectors.shape)}")
    return 0


# Relevance


def ranked(model: Model, texts: Sequence[str], options: argparse.Namespace) -> int:
    """Print the relevance of each pair; ValueError for a text that is none."""
    from ggpy.runtime.embedding.relevance import relevance

    separator = unescape(options.cls_separator)
    if options.output or options.embd_output_format:
        raise ValueError("--pooling rank prints a score for each pair: leave -o and formats away")
    pairs = [text.split(separator) for text in texts]
    for i, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(
                f"text {i} is not a query and a document with "
                f"'{escaped(options.cls_separator)}' between, which --pooling rank needs"
            )
    scores: list[float] = []
    for query, group in groupby(pairs, lambda pair: pair[0]):
        documents = [document for _, document in group]
        scores += relevance(model.engine, model.tokenizer, model.metadata, query, documents)
    for i, score in enumerate(scores):
        print(f"rerank score {i}: {score:8.3f}")
    return 0


# What is printed


def shown(vectors: np.ndarray, texts: list[str], options: argparse.Namespace) -> Iterator[str]:
    """The lines of a format."""
    kind, norm = options.embd_output_format, options.embd_normalize
    plain = "%1.0f" if norm == 0 else "%1.7f"
    rows = [[plain % x for x in vector] for vector in vectors.tolist()]
    if kind == "raw":
        yield from (" ".join(row) for row in rows)
    elif kind == "array":
        yield "[" + ",".join(f"[{','.join(row)}]" for row in rows) + "]"
    elif kind:
        yield as_json([[float(x) for x in row] for row in rows], vectors, kind == "json+")
    else:
        wide = "%6.0f" if norm == 0 else "%9.6f"
        yield from as_table(vectors, [] if options.pooling == NONE else texts, wide)


def as_json(rows: list[list[float]], vectors: np.ndarray, similarity: bool) -> str:
    """OpenAI's list; similarity: with the cosines of all pairs, if there are several."""
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    found: dict[str, Any] = {"object": "list", "data": data}
    if similarity and len(rows) > 1:
        found["cosineSimilarity"] = [[round(x, 2) for x in row] for row in cosines(vectors)]
    return json.dumps(found, indent=2)


def as_table(vectors: np.ndarray, texts: Sequence[str], wide: str) -> Iterator[str]:
    """The beginnings of the vectors and the cosines of all pairs; of tokens (texts is empty), the
    ends.
    """
    for i, vector in enumerate(vectors.tolist()):
        parts = [vector] if len(texts) == 1 else [vector[:FIRST]]
        if not texts:
            parts = [vector[:ENDS], vector[-ENDS:]]
        yield f"embedding {i}: " + " ... ".join(" ".join(wide % x for x in part) for part in parts)
    if len(texts) > 1:
        names = [" ".join(text.split()) for text in texts]
        yield from ("", "cosine similarity matrix:", "")
        yield " ".join(f"{name[:6]:>6}" for name in names)
        for name, row in zip(names, cosines(vectors), strict=True):
            yield " ".join(f"{x:6.2f}" for x in row) + f" {name[:NAME]}"


def cosines(vectors: np.ndarray) -> list[list[float]]:
    """[N, N] of all pairs; 0 for a vector of zeros."""
    import numpy as np

    x = vectors.astype(np.float64)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    x = x / np.where(length > 0, length, 1)
    found: list[list[float]] = (x @ x.T).tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
