"""SmoothQuant: moves outliers of activations into weights, which suffer less from them.

A column of activations with large numbers is divided by a factor, and the matrix's column is
multiplied by it, which changes no product. The division is folded into the weights that make the
activations: those of the norm before the matrix, for ffn_down the rows of ffn_up, and for
attn_output the rows of attn_v, if each query head has its own KV head. Magnitudes of activations
are measured while the model reads a text. Source: Xiao et al. 2023, SmoothQuant.

Letters: K columns, D width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arch.scheme import scale_of
from ..backends.interface import Ops
from ..backends.observe import ObservedOps
from ..gguf import File, GGUFError, Tensor
from ..runtime.evaluator import Evaluator
from ..util.messages import escaped
from .requantize import Factors

F32 = NDArray[np.float32]

N_CTX, CHUNKS = 512, 64  # tokens of a chunk of the calibration text, and the most chunks
LEAST = 16  # tokens of a calibration text
SMALLEST = 1e-5  # factor
SLAB = 1 << 20  # weights whose magnitudes are computed at a time
# Norms, and the matrices that multiply their output
FIRST = "attn_norm.weight"
NORMS = {
    FIRST: (*(f"attn_{x}.weight" for x in ("q", "k", "v", "qkv")), "attn_gate.weight"),
    "ffn_norm.weight": ("ffn_gate.weight", "ffn_up.weight"),
}
OWN = ("ffn_norm.weight", "post_attention_norm.weight")  # norms that belong to a feed-forward
UP, DOWN = "ffn_up.weight", "ffn_down.weight"
VALUES, ALL, OUT = "attn_v.weight", "attn_qkv.weight", "attn_output.weight"


class Largest:
    """The largest magnitude in each column of a matrix's input: hand `see` to ObservedOps."""

    def __init__(self) -> None:
        self.found: dict[str, F32] = {}  # [K] by the name of the matrix

    def see(self, name: str, x: F32) -> None:
        """Takes x[T, K], the input of the tensor `name`; ArithmeticError for NaN or infinity."""
        largest = np.abs(x).max(axis=0, initial=0)
        if not np.isfinite(largest).all():
            raise ArithmeticError(
                f"what meets {name} is NaN or infinite: `ggpy run --check` finds where that begins"
            )
        self.found[name] = np.maximum(self.found.get(name, np.float32(0)), largest)


def calibrate(
    file: File, text: str, ops: Ops, done: Callable[[int, int], None] = lambda n, total: None
) -> dict[str, F32]:
    """The largest magnitudes [K] of the input of each matrix while the model reads `text`, by name.

    done(n, total): called after each chunk of the text. ValueError for a text that is too short.
    """
    chunks = _chunks(file, text)
    largest = Largest()
    n_ctx = chunks.shape[1]
    model = Evaluator(file, ObservedOps(ops, largest.see), n_ctx, n_ctx, whole=True)
    for i, _ in enumerate(model.logits(chunks), 1):
        done(i, len(chunks))
    return largest.found


def _chunks(file: File, text: str) -> NDArray[np.int32]:
    """ids[chunks, N_CTX] of the beginning of a text; one shorter chunk for a short text."""
    from ..tokenizer import Tokenizer

    ids = Tokenizer.from_gguf(file).encode(text)
    n_ctx = min(N_CTX, len(ids))
    if n_ctx < LEAST:
        raise ValueError(f"a calibration text of {len(ids)} tokens: give one of {LEAST} or more")
    n = min(CHUNKS, len(ids) // n_ctx)
    return np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx)


@dataclass(frozen=True)
class _NormPair:
    """Matrices that share an input, and the tensor that makes this input."""

    matrices: list[Tensor]
    maker: Tensor  # a norm's weights, or a matrix
    first_row: int = -1  # of a matrix, the first row that makes the input; -1: a norm


def factors(file: File, largest: Mapping[str, F32], alpha: float) -> Factors:
    """Factors by s = max |x|^alpha / max |w|^(1 - alpha) for each column that can be smoothed.

    largest: of `calibrate`. ValueError unless 0 <= alpha <= 1; GGUFError if it lacks a matrix.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha:g}: give one between 0 (nothing is moved) and 1 (all)")
    columns: dict[str, F32] = {}
    rows: dict[str, F32] = {}
    for pair in _pairs(file):
        for tensor in (pair.maker, *pair.matrices):
            if scale_of(tensor.name) in file.tensors:
                raise GGUFError(
                    f"{file.path}: tensor {tensor.name!r} has a scale for each row already: "
                    "smoothing starts from F16, BF16 or F32"
                )
        x = largest.get(pair.matrices[0].name)
        if x is None:
            raise GGUFError(
                f"{file.path}: {escaped(pair.matrices[0].name)} was never used: no calibration"
            )
        s = _smoothing(x, pair.matrices, alpha)
        for matrix in pair.matrices:
            columns[matrix.name] = s
        if pair.first_row < 0:
            columns[pair.maker.name] = np.reciprocal(s)
            continue
        factor = np.ones(pair.maker.shape[0], np.float32)
        factor[pair.first_row :] = np.reciprocal(s)
        rows[pair.maker.name] = factor
        if (bias := pair.maker.name.removesuffix("weight") + "bias") in file.tensors:
            columns[bias] = factor
    return Factors(columns, rows)


def _pairs(file: File) -> Iterator[_NormPair]:
    """All groups of matrices that can be smoothed."""
    layers = sorted({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    for layer in layers:
        at = f"blk.{layer}."
        own = any(at + norm in file.tensors for norm in OWN)
        for norm, names in NORMS.items():
            if norm == FIRST and not own:  # attention and feed-forward share this norm
                names += NORMS["ffn_norm.weight"]
            matrices = [file.tensors[at + name] for name in names if at + name in file.tensors]
            if matrices and at + norm in file.tensors:
                yield _NormPair(matrices, file.tensors[at + norm])
        up, down = file.tensors.get(at + UP), file.tensors.get(at + DOWN)
        if up is not None and down is not None:  # if gate and up are fused, up has the last rows
            yield _NormPair([down], up, up.shape[0] - down.shape[1])
        out, values = file.tensors.get(at + OUT), file.tensors.get(at + VALUES)
        if out is not None and values is not None and values.shape[0] == out.shape[1]:
            yield _NormPair([out], values, 0)
        fused = file.tensors.get(at + ALL)
        if out is not None and fused is not None and fused.shape[0] == 3 * out.shape[1]:
            yield _NormPair([out], fused, 2 * out.shape[1])


def _smoothing(x: F32, matrices: list[Tensor], alpha: float) -> F32:
    """s[K] for an input whose largest magnitudes are x[K]; 1 for columns of zeros."""
    w = np.max([_largest_of_columns(matrix) for matrix in matrices], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        s: F32 = (x**alpha / w ** (1 - alpha)).astype(np.float32)
    s[(x == 0) | (w == 0)] = 1
    return np.maximum(s, np.float32(SMALLEST))


def _largest_of_columns(tensor: Tensor) -> F32:
    """max |w| of each column, [K]."""
    n_rows, columns = tensor.shape
    found: F32 = np.zeros(columns, np.float32)
    step = max(1, SLAB // columns)
    for start in range(0, n_rows, step):
        part = tensor.rows(start, min(start + step, n_rows)).dequantize()
        np.maximum(found, np.abs(part).max(axis=0), out=found)
    return found
