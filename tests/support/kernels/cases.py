"""The cases of the kernels over GGUF quant blocks: shapes, tolerances, bytes, operations.

Unit tests and benchmarks read them.

A case does not specify how a kernel is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggpy.formats import Format, by_name
from ggpy.formats.random_blocks import random_blocks
from ggpy.kernels.blocks.block_kernel import supported_formats

EXACT = 1e-10  # bound of the normalised mean square error of float sums of about 10,000 products


@dataclass(frozen=True)
class Case:
    """One launch of `kernel`: w[rows, columns] of `format`, for `tokens` tokens."""

    kernel: str
    format: str
    rows: int
    columns: int
    tokens: int = 1
    number: str = ""  # the type of x or of the output, if the kernel has several types

    def __str__(self) -> str:
        return "-".join(
            str(part)
            for part in (self.format, self.rows, self.columns, self.tokens, self.number)
            if part
        )

    @property
    def block(self) -> Format:
        """The block format."""
        return by_name(self.format)

    @property
    def tolerance(self) -> float:
        """The bound of the normalised mean square error against float64."""
        if self.kernel == "mul_mat_vec_q":
            return 5e-4
        if self.kernel == "dequantize_mul_mat_vec":
            return 1e-6 if self.number == "half" else EXACT
        return 0.0 if self.number in ("", "float") else 1e-5

    @property
    def flops(self) -> int:
        """Multiplications plus additions of a GEMV; 0 for kernels that only convert."""
        return 2 * self.rows * self.columns * self.tokens if "mul_mat" in self.kernel else 0

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel must read and write."""
        row = self.block.row_bytes(self.columns)
        if self.kernel == "dequantize":
            return self.rows * (row + self.columns * (4 if self.number == "float" else 2))
        if self.kernel == "get_rows":
            return self.tokens * (4 + row + 4 * self.columns)
        x = {"float": 4.0, "half": 2.0}.get(self.number, 36 / 32) * self.columns
        return self.rows * row + self.tokens * (int(x) + 4 * self.rows)

    @property
    def arguments(self) -> list[tuple[str | int, ...]]:
        """The template arguments after the block type, for each launch of up to 8 tokens."""
        number = {"bfloat16": "__nv_bfloat16"}.get(self.number, self.number)
        if "mul_mat" not in self.kernel:
            return [(number,) if number else ()]
        tokens = {min(self.tokens, 8), self.tokens % 8 or 8}
        return [(number, t) if number else (t,) for t in sorted(tokens)]


NUMBERS = {"dequantize": ("float", "half", "bfloat16"), "dequantize_mul_mat_vec": ("half", "float")}
KERNELS = ("dequantize", "get_rows", "dequantize_mul_mat_vec", "mul_mat_vec_q")


def columns_of(kernel: str, format: Format, blocks: int) -> int:
    """Columns of a row of so many blocks, a multiple of 32 for q8_1 activations."""
    return blocks * max(format.block_size, 32 if kernel == "mul_mat_vec_q" else 1)


def emulator_cases(kernel: str) -> list[Case]:
    """Small cases: every format once; for some formats, every number of tokens and odd shapes."""
    numbers = NUMBERS.get(kernel, ("",))
    tokens = 1 if kernel == "dequantize" else 2
    cases = [
        Case(kernel, f.name, 7, columns_of(kernel, f, 3), tokens, numbers[0])
        for f in supported_formats()
    ]
    for name in ("F16", "Q4_1"):
        one, many = (columns_of(kernel, by_name(name), n) for n in (1, 33))
        for number in numbers:
            cases += [Case(kernel, name, 1, one, tokens, number)]
            cases += [Case(kernel, name, 9, many, tokens, number)]
    if "mul_mat" in kernel:
        cases += [Case(kernel, "Q8_0", 3, 64, t, numbers[0]) for t in (1, 3, 4, 5, 6, 7, 8, 11)]
        cases += [Case(kernel, "Q8_0", 3, 32 * n, 2, numbers[0]) for n in (17, 33, 65, 1024)]
    return list(dict.fromkeys(cases))


def gpu_cases(kernel: str) -> list[Case]:
    """Every format in every shape that the kernel must support."""
    numbers = NUMBERS.get(kernel, ("",))
    cases = []
    for f in supported_formats():
        one, many = (columns_of(kernel, f, n) for n in (1, 33))
        shapes = [(1, one, 1), (4097, one, 2), (7, many, 3), (4097, many, 1)]
        shapes += [(1, 14336, 64), (7, 14336, 9), (4097, 14336, 8)]
        for rows, columns, tokens in shapes:
            tokens = 1 if kernel == "dequantize" else tokens
            cases += [Case(kernel, f.name, rows, columns, tokens, number) for number in numbers]
    return list(dict.fromkeys(cases))


def random_rows(
    format: Format, rows: int, columns: int, rng: np.random.Generator, rms: float = 1.0
) -> np.ndarray:
    """bytes[rows, row_bytes]: any codes, or of floats normal numbers."""
    if format.block_size == 1 and format.quantize_blocks:
        return format.quantize((rms * rng.standard_normal((rows, columns))).astype(np.float32))
    blocks = random_blocks(format, rows * columns // format.block_size, rng, rms)
    return blocks.view(np.uint8).reshape(rows, -1)


UNIQUE_ROWS = 97  # large matrices repeat their rows after so many, which keeps references cheap


def random_matrix(case: Case, seed: int = 0) -> np.ndarray:
    """bytes[min(rows, UNIQUE_ROWS), row_bytes] of valid blocks."""
    rng = np.random.default_rng([seed, case.rows, case.columns, case.block.type_id])
    rows = min(case.rows, UNIQUE_ROWS)
    row_blocks = case.columns // case.block.block_size
    blocks = random_blocks(case.block, rows * row_blocks, rng)
    return blocks.view(np.uint8).reshape(rows, -1)


def repeated(array: np.ndarray, rows: int) -> np.ndarray:
    """Repeats the first axis up to `rows`."""
    return array[np.arange(rows) % len(array)]


def random_activations(case: Case, seed: int = 0) -> np.ndarray:
    """float32 x[tokens, columns]: normal, with a few large channels as models have them."""
    rng = np.random.default_rng([seed, case.tokens, case.columns])
    x = rng.standard_normal((case.tokens, case.columns))
    x[:, rng.random(case.columns) < 0.002] *= 20
    return x.astype(np.float32)


def energy(case: Case, blocks: np.ndarray, x: np.ndarray) -> float:
    """The expected sum of squares of the outputs over random signs.

    It normalises errors. Unlike the actual sum, it is never near zero, even with a single output.
    """
    weights = case.block.dequantize(blocks).astype(np.float64)
    squares = np.square(weights) @ np.square(x.astype(np.float64)).T
    return float(repeated(squares, case.rows).sum())


def product(case: Case, blocks: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float64 y[tokens, rows] = x[tokens, columns] W^T, of a matrix from random_matrix."""
    weights = case.block.dequantize(blocks).astype(np.float64)
    return repeated(weights @ x.astype(np.float64).T, case.rows).T


def nmse(result: np.ndarray, reference: np.ndarray, scale: float = 0.0) -> float:
    """Sum of squared errors over the sum of squares, or over `scale` if that is more; NaN in the
    result is NaN.
    """
    error = result.astype(np.float64) - reference
    squares = np.sum(np.square(reference, dtype=np.float64))
    return float(np.sum(error * error) / max(squares, scale))


def kl_divergence(result: np.ndarray, reference: np.ndarray) -> float:
    """Of the softmax of the reference's logits from that of the result's, the mean of all rows."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    q, p = log_softmax(result), log_softmax(reference)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def silu(x: np.ndarray) -> np.ndarray:
    """Of float64, as gelu_tanh is."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
