"""SmoothQuant: outliers of activations moved into weights, where a scale for each row bears them.

A column that is large in what is multiplied with a matrix is divided by a factor, and the matrix's
column is multiplied with it, which changes no product. The division is folded into what makes the
activation: the weights of the norm before it, for ffn_down the rows of ffn_up, and for attn_output
those of attn_v, where each query head has values of its own. How large the activations are is seen
while the model reads a text. Source: Xiao et al. 2023, SmoothQuant.

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

N_CTX, CHUNKS = 512, 64  # tokens of a calibration text that are read together, and how often
LEAST = 16  # tokens
SMALLEST = 1e-5  # factor
SLAB = 1 << 20  # weights whose magnitudes are looked at together
# Norms, and the matrices that are multiplied with what they make
FIRST = "attn_norm.weight"
NORMS = {
    FIRST: (*(f"attn_{x}.weight" for x in ("q", "k", "v", "qkv")), "attn_gate.weight"),
    "ffn_norm.weight": ("ffn_gate.weight", "ffn_up.weight"),
}
OWN = ("ffn_norm.weight", "post_attention_norm.weight")  # what a feed-forward may have of its own
UP, DOWN = "ffn_up.weight", "ffn_down.weight"
VALUES, ALL, OUT = "attn_v.weight", "attn_qkv.weight", "attn_output.weight"


class Largest:
    """The largest magnitude in each column of what meets a matrix: hand `see` to ObservedOps."""

    def __init__(self) -> None:
        self.found: dict[str, F32] = {}  # [K] by the name of the matrix

    def see(self, name: str, x: F32) -> None:
        """x[T, K] meets the tensor `name`; ArithmeticError for NaN or infinity."""
        largest = np.abs(x).max(axis=0, initial=0)
        if not np.isfinite(largest).all():
            raise ArithmeticError(
                f"what meets {name} is NaN or infinite: `ggpy run --check` finds where that begins"
            )
        self.found[name] = np.maximum(self.found.get(name, np.float32(0)), largest)


def calibrate(
    file: File, text: str, ops: Ops, done: Callable[[int, int], None] = lambda n, total: None
) -> dict[str, F32]:
    """The largest magnitudes [K] of what meets each matrix while a text is read, by name.

    done(n, total): chunks of the text. ValueError for a text of no use.
    """
    chunks = _chunks(file, text)
    largest = Largest()
    n_ctx = chunks.shape[1]
    model = Evaluator(file, ObservedOps(ops, largest.see), n_ctx, n_ctx, whole=True)
    for i, _ in enumerate(model.logits(chunks), 1):
        done(i, len(chunks))
    return largest.found


def _chunks(file: File, text: str) -> NDArray[np.int32]:
    """ids[N, C] of a text's beginning."""
    from ..tokenizer import Tokenizer

    ids = Tokenizer.from_gguf(file).encode(text)
    n_ctx = min(N_CTX, len(ids))
    if n_ctx < LEAST:
        raise ValueError(f"a calibration text of {len(ids)} tokens: give one of {LEAST} or more")
    n = min(CHUNKS, len(ids) // n_ctx)
    return np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx)


@dataclass(frozen=True)
class _NormPair:
    """Matrices with one input, and what makes it: a norm's weights, or rows of a matrix."""

    matrices: list[Tensor]
    maker: Tensor
    first_row: int = -1  # of the maker's rows, if it is a matrix


def factors(file: File, largest: Mapping[str, F32], alpha: float) -> Factors:
    """s = max |x|^alpha / max |w|^(1 - alpha) for each column that can be smoothed.

    ValueError unless 0 <= alpha <= 1; GGUFError if a matrix was never met.
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
    """What can be smoothed in each layer."""
    layers = sorted({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    for layer in layers:
        at = f"blk.{layer}."
        own = any(at + norm in file.tensors for norm in OWN)
        for norm, names in NORMS.items():
            if norm == FIRST and not own:  # both halves of the layer take this norm
                names += NORMS["ffn_norm.weight"]
            matrices = [file.tensors[at + name] for name in names if at + name in file.tensors]
            if matrices and at + norm in file.tensors:
                yield _NormPair(matrices, file.tensors[at + norm])
        up, down = file.tensors.get(at + UP), file.tensors.get(at + DOWN)
        if up is not None and down is not None:  # where gate and up are one, up is the second
            yield _NormPair([down], up, up.shape[0] - down.shape[1])
        out, values = file.tensors.get(at + OUT), file.tensors.get(at + VALUES)
        if out is not None and values is not None and values.shape[0] == out.shape[1]:
            yield _NormPair([out], values, 0)
        fused = file.tensors.get(at + ALL)
        if out is not None and fused is not None and fused.shape[0] == 3 * out.shape[1]:
            yield _NormPair([out], fused, 2 * out.shape[1])


def _smoothing(x: F32, matrices: list[Tensor], alpha: float) -> F32:
    """s[K] of an input whose columns are x[K] at most; 1 for columns of zeros."""
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
