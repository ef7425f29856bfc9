"""How well a model predicts a text: perplexity, and KL divergence from another run's logits.

The method is llama-perplexity's: the text is cut into chunks of n_ctx tokens, each begins with the
model's beginning token where it has one, and the tokens of a chunk's second half are scored, so
that each has some context. Divergences are computed from float32 logits in float64; llama.cpp
stores 16 bits of each log probability instead. Nothing here prints or knows a command line.

Letters: N chunks of C tokens, K scored tokens in a chunk, R rows, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..formats import Format, all_formats, by_name
from ..gguf import File, Tensor
from ..quantization.workers import Workers, slabs
from ..runtime.evaluator import first_scored, n_scored
from ..util.disk import NoRoom, check_room
from ..util.messages import escaped
from ..util.output_file import OutputFile

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.int32]

ROWS = 16  # rows of logits that are converted to float64 at a time

# A record for each scored token when two models are compared; p is the token's probability.
COMPARISON = np.dtype(
    [("nll", "f8"), ("nll_base", "f8"), ("kl", "f8"), ("p_diff", "f8"), ("same_top", "?")]
)


# Text


def text_of(path: str) -> str:
    """The text of a file, or of stdin if it is named -; OSError. Bytes that are not UTF-8 become
    U+FFFD.
    """
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return raw.decode("utf-8", errors="replace")


def chunks_of(text: str, tokenizer: Tokenizer, n_ctx: int, limit: int | None = None) -> Ids:
    """ids[N, C] of a text, cut into chunks; ValueError for fewer than 2 C tokens.

    limit: the most chunks. A newline at the end of the text is dropped, as in llama.cpp.
    """
    if n_ctx < 3:
        raise ValueError(f"a context of {n_ctx} tokens has none to score: give -c 3 or more")
    ids = tokenizer.encode(text.removesuffix("\n"))
    ids = ids[: len(ids) - tokenizer.add_eos]
    if len(ids) < 2 * n_ctx:
        shorter = f" or -c {len(ids) // 2}" if len(ids) >= 6 else ""
        raise ValueError(
            f"a context of {n_ctx} tokens needs a text of {2 * n_ctx}, it has {len(ids)}: "
            f"give a longer text{shorter}"
        )
    n = len(ids) // n_ctx if limit is None else min(limit, len(ids) // n_ctx)
    chunks = np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        chunks[:, 0] = tokenizer.bos_id  # replaces a token that is not scored
    return chunks


def targets(chunk: Ids) -> Ids:
    """ids[K] that the scored logits should have predicted."""
    return chunk[first_scored(len(chunk)) + 1 :]


# Logits of another run, in a file


def base_dtype(n_ctx: int, n_vocab: int) -> np.dtype[Any]:
    """The dtype of a chunk's record in a file of logits; ValueError if it is too large for numpy.

    The file is a .npy of N such records, which `numpy.load(path, mmap_mode="r")` reads.
    """
    if 4 * (n_ctx + n_scored(n_ctx) * n_vocab) > np.iinfo(np.int32).max:
        raise ValueError(
            f"logits of {n_scored(n_ctx)} tokens and {n_vocab} ids are more than 2 GB a chunk: "
            "lower -c"
        )
    return np.dtype([("ids", "<i4", (n_ctx,)), ("logits", "<f4", (n_scored(n_ctx), n_vocab))])


def saved(path: Path, chunks: Ids, n_vocab: int, logits: Iterable[F32]) -> Iterator[F32]:
    """Yields the logits [K, V] of each of chunks[N, C], and writes them to a file.

    The file appears when the iterator is exhausted. ValueError if the disk lacks space for it.
    """
    dtype = base_dtype(chunks.shape[1], n_vocab)
    try:
        check_room(path, dtype.itemsize * len(chunks))
    except NoRoom as error:
        raise ValueError(f"{error}: lower --chunks or name a file elsewhere") from None
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with OutputFile(path) as out:
        np.lib.format.write_array_header_2_0(out.stream, {**header, "shape": (len(chunks),)})
        for chunk, values in zip(chunks, logits, strict=True):
            out.write(np.ascontiguousarray(chunk, "<i4").data)
            out.write(np.ascontiguousarray(values, "<f4").data)
            yield values


def open_base(path: Path) -> NDArray[Any]:
    """The records[N] of a file that `saved` wrote, memory-mapped; ValueError for any other file."""
    wrong = f"{path}: holds no logits: write it with --kl-divergence-base and without"
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{wrong} --kl-divergence ({escaped(error)})") from None
    names = getattr(found, "dtype", np.dtype("u1")).names
    if names != ("ids", "logits") or found.ndim != 1 or found["logits"].ndim != 3:
        raise ValueError(f"{wrong} --kl-divergence")
    n_ctx, n_vocab = found["ids"].shape[-1], found["logits"].shape[-1]
    if not len(found) or n_ctx < 3 or found.dtype != base_dtype(n_ctx, n_vocab):
        raise ValueError(f"{wrong} --kl-divergence")
    return found


# Scores


def score(logits: F32, wanted: Ids) -> F64:
    """-ln p[R] of ids wanted[R] by logits[R, V]."""
    parts = _parts(logits, wanted)
    return np.concatenate([-_log_softmax(x)[np.arange(len(w)), w] for x, w in parts])


def compare(logits: F32, base: F32, wanted: Ids) -> NDArray[Any]:
    """COMPARISON[R] of logits[R, V] with base[R, V], for ids wanted[R]."""
    return np.concatenate([_compare(*part) for part in _parts(logits, base, wanted)])


def _compare(logits: F32, base: F32, wanted: Ids) -> NDArray[Any]:
    out = np.empty(len(wanted), COMPARISON)
    log_p, log_base = _log_softmax(logits), _log_softmax(base)
    at = np.arange(len(wanted)), wanted
    out["nll"], out["nll_base"] = -log_p[at], -log_base[at]
    out["p_diff"] = np.exp(log_p[at]) - np.exp(log_base[at])
    kl = (np.exp(log_base) * (log_base - log_p)).sum(axis=1)
    out["kl"] = np.maximum(kl, 0)  # rounding can make it negative
    out["same_top"] = logits.argmax(axis=1) == base.argmax(axis=1)
    return out


def _parts(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """The arrays, ROWS rows at a time."""
    for start in range(0, len(arrays[0]), ROWS):
        yield tuple(a[start : start + ROWS] for a in arrays)


def _log_softmax(logits: F32) -> F64:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def mean(values: NDArray[Any]) -> Estimate:
    """The mean of independent values and its error, which is 0 for fewer than two."""
    error = float(np.sqrt(values.var() / (len(values) - 1))) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def perplexity(nll: F64) -> Estimate:
    """exp(mean(-ln p))."""
    found = mean(nll)
    value = float(np.exp(found.value))
    return Estimate(value, value * found.error)


def running(parts: Iterable[F64]) -> Iterator[str]:
    """The text that llama-perplexity writes: the perplexity after each chunk's -ln p[K], then the
    final one.
    """
    nll = np.empty(0)
    for i, part in enumerate(parts, 1):
        nll = np.concatenate([nll, part])
        yield f"[{i}]{perplexity(nll).value:.4f},"
    found = perplexity(nll)
    yield f"\nFinal estimate: PPL = {found.value:.4f} +/- {found.error:.5f}\n"


def log_ratio(tokens: NDArray[Any]) -> Estimate:
    """ln(PPL / PPL of the base), as a mean of differences, because both scored the same tokens."""
    return mean(tokens["nll"] - tokens["nll_base"])


def difference(tokens: NDArray[Any]) -> Estimate:
    """PPL - PPL of the base; the error is that of its linear approximation."""
    here, base = perplexity(tokens["nll"]).value, perplexity(tokens["nll_base"]).value
    error = mean(here * tokens["nll"] - base * tokens["nll_base"]).error
    return Estimate(here - base, error)


def correlation(a: F64, b: F64) -> float:
    """The correlation of two lists of values, -1 to 1; NaN if one of them does not vary."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(a, b)[0, 1])


def rms(values: F64) -> Estimate:
    """Root of the mean square."""
    found = mean(values**2)
    root = float(np.sqrt(found.value))
    return Estimate(root, found.error / (2 * root) if root else 0.0)


# The same model in another type


class Requantized:
    """A file whose matrices were quantised to a format; use it where an open `File` is expected.

    Vectors are not changed, nor matrices whose rows are no whole number of blocks.
    """

    def __init__(self, file: File, format: Format, n_workers: int | None = None) -> None:
        """n_workers: cores that quantise; None is all."""
        self.path, self.metadata, self.architecture = file.path, file.metadata, file.architecture
        self.tensors = dict(file.tensors)
        fit = matrices_that_fit(file, format)
        self.n_matrices = sum(len(t.shape) == 2 for t in file.tensors.values())
        self.n_quantized = len(fit)
        with Workers(n_workers) as workers:
            for tensor in fit:
                self.tensors[tensor.name] = _quantized(tensor, format, workers)


def matrices_that_fit(file: File, format: Format) -> list[Tensor]:
    """The matrices that can be quantised to a format; ValueError if there are none."""
    block = format.block_size
    if any(t.format.name == "I8" and len(t.shape) == 2 for t in file.tensors.values()):
        raise ValueError(
            f"{file.path}: matrices have a scale for each row, which --types leaves aside: take the"
            " file that it was made of"
        )
    fit = [t for t in file.tensors.values() if len(t.shape) == 2 and t.shape[1] % block == 0]
    if not fit:
        raise ValueError(
            f"{file.path}: no matrix has rows that are a multiple of {block} weights: "
            f"{format.name} cannot be used"
        )
    return fit


def _quantized(tensor: Tensor, format: Format, workers: Workers) -> Tensor:
    """A matrix in another format; ValueError names the tensor if its weights do not fit."""
    if tensor.format is format:
        return tensor
    rows, columns = tensor.shape
    data, at = np.empty((rows, format.row_bytes(columns)), np.uint8), 0
    tasks = slabs(tensor.data, columns, tensor.format, format, tensor=tensor.name)
    try:
        for part in workers.run(tasks):
            data[at : at + len(part)] = part
            at += len(part)
    except ValueError as error:
        raise ValueError(f"{tensor.path}: {error}") from None
    return Tensor(tensor.name, tensor.shape, format, data, tensor.path, tensor.offset)


def find_format(name: str) -> Format:
    """The format of this name that weights can be quantised to; ValueError lists them."""
    can = [f for f in all_formats() if f.quantize_blocks and f.scales(np.zeros(1, f.dtype)).size]
    can = [f for f in can if not f.is_private]  # they would need scales of rows
    if name.lower() not in {f.name.lower() for f in can}:
        known = ", ".join(f.name.lower() for f in can)
        raise ValueError(f"cannot quantise to {name!r}: --types knows {known}")
    return by_name(name)
