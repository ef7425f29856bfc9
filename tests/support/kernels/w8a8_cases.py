"""Cases of the W8A8 GEMMs: matrices, exact products, and the tile layout and packed layout of
activations (cuda/w8a8/w8a8.cuh) in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from kernel_buffers import Output, upload
from numpy.typing import NDArray

from ggpy.formats import by_name
from ggpy.formats.rows import encode_rows, row_scales
from ggpy.kernels.layout.tile import Layout, TiledMatrix
from ggpy.kernels.w8a8.quantize_rows import Kind, QuantizedRows, QuantizeRows, codes_bytes, steps_of
from ggpy.kernels.w8a8.w8a8_decode import Row

KINDS: tuple[Kind, ...] = ("int8", "e4m3")
FORMATS = {"int8": by_name("I8"), "e4m3": by_name("F8_E4M3")}
LAYOUTS = {
    "int8": Layout(8, 32, "NONE", 128),
    "e4m3": Layout(8, 32, "NONE", 128, "E4M3"),
}


@dataclass(frozen=True)
class ByteMatrix:
    """Random codes [rows, columns] of a kind, and a scale for each row."""

    kind: Kind
    rows: int
    columns: int
    seed: int = 0

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """bytes[rows, columns]. Integers take all values, including -128."""
        rng = np.random.default_rng([self.seed, self.rows, self.columns])
        if self.kind == "int8":
            return rng.integers(0, 256, (self.rows, self.columns)).astype(np.uint8)
        weights = rng.standard_normal((self.rows, self.columns)) * 100
        return FORMATS["e4m3"].quantize(weights.astype(np.float32))

    @cached_property
    def scale(self) -> NDArray[np.float32]:
        """[rows]."""
        rng = np.random.default_rng([self.seed, self.rows])
        return rng.uniform(1e-4, 1e-2, self.rows).astype(np.float32)

    @property
    def values(self) -> NDArray[np.float32]:
        """float32[rows, columns], without the scales."""
        return FORMATS[self.kind].dequantize(self.codes)

    def tiled(self, device: Any) -> TiledMatrix:
        """The matrix on a device."""
        tiles, scale = upload(device, tiles_of(self.codes, self.kind)), upload(device, self.scale)
        return TiledMatrix(LAYOUTS[self.kind], self.rows, self.columns, tiles, scale)


def tiles_of(codes: NDArray[np.uint8], kind: Kind) -> NDArray[np.uint8]:
    """bytes[rows, columns] in the order of cuda/layout/tile.cuh."""
    rows, columns = codes.shape
    padded = np.zeros((-(-rows // 16) * 16, steps_of(columns) * 128), np.uint8)
    padded[:rows, :columns] = codes
    if kind == "int8":
        padded ^= 0x80
    # tile row, row half h, g, chunk, 32 columns j, t, step s, element e
    split = padded.reshape(-1, 2, 8, steps_of(columns), 4, 4, 2, 4)
    return split.transpose(0, 3, 4, 2, 5, 1, 6, 7)


def unpacked(packed: NDArray[np.uint8], n_tokens: int, columns: int) -> NDArray[np.uint8]:
    """Rows [tokens up to a multiple of 8, columns up to a multiple of 128] of packed codes."""
    steps, tokens = steps_of(columns), -(-n_tokens // 8) * 8
    pieces = packed.reshape(steps, tokens, 8, 16)
    straight = np.empty_like(pieces)
    for token in range(tokens):
        for piece in range(8):
            straight[:, token, piece] = pieces[:, token, piece ^ token % 8]
    split = straight.reshape(steps, tokens, 4, 2, 4, 4)  # j, s, t, e
    return split.transpose(1, 0, 2, 4, 3, 5).reshape(tokens, steps * 128)


def activations(n_tokens: int, columns: int, seed: int = 0) -> NDArray[np.float16]:
    """x[n_tokens, columns], no two rows alike, with a few large channels as models have them."""
    rng = np.random.default_rng([seed, columns])
    x = rng.standard_normal((16, columns))
    x[:, rng.random(columns) < 0.01] *= 20
    scale = 1 + np.arange(n_tokens)[:, None] / n_tokens
    return (np.resize(x, (n_tokens, columns)) * scale).astype(np.float16)


def quantized(x: NDArray, kind: Kind) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(codes[T, K] as bytes, scales[T]) of x[T, K], from the numpy reference."""
    numbers = x.astype(np.float32)
    scales = row_scales(numbers, FORMATS[kind])
    return encode_rows(numbers, scales, FORMATS[kind]), scales


def quantize(device: Any, x: NDArray, kind: Kind, **options: Any) -> QuantizedRows:
    """Quantise x[T, K] on a device. Checks that the kernel wrote every byte and no other."""
    n, k = x.shape
    codes, scales = Output(device, codes_bytes(n, k)), Output(device, 4 * n)
    rows = QuantizedRows(kind, n, k, codes.buffer, scales.buffer)
    x_type = "half" if x.dtype == np.float16 else "float"
    QuantizeRows(device).launch(upload(device, x), rows, x_type=x_type, **options)
    codes.read(np.uint8, (codes.nbytes,))
    scales.read(np.float32, (n,))
    return rows


def exact(w: ByteMatrix, x: NDArray) -> NDArray[np.float32]:
    """y[T, N]: exact bits for integers; for floats the sums in float64, rounded."""
    codes, scales = quantized(x, w.kind)
    values = FORMATS[w.kind].dequantize(codes).astype(np.float64)
    sums = (values @ w.values.astype(np.float64).T).astype(np.float32)
    y: NDArray[np.float32] = sums * scales[:, None] * w.scale
    return y


def agrees(w: ByteMatrix, x: NDArray, y: NDArray, tolerance: float = 1e-10) -> bool:
    """Whether y equals x w^T: integers bit by bit, floats to a normalised mean square error."""
    expected = exact(w, x)
    if w.kind == "int8":
        return np.array_equal(y, expected)
    error = np.square(y.astype(np.float64) - expected).sum()
    return bool(error <= tolerance * np.square(expected.astype(np.float64)).sum())


def multiply(
    product: Any,
    weights: list[TiledMatrix],
    x: QuantizedRows | Row,
    *,
    residual: NDArray | None = None,
    **options: Any,
) -> list[NDArray[np.float32]]:
    """The outputs of a GEMM as float32 [tokens, rows]; the kernel writes float, for GLU f16."""
    glu, device = options.get("epilogue") == "GLU", product.device
    dtype = np.dtype(np.float16 if glu else np.float32)
    n_tokens = 1 if isinstance(x, Row) else x.n_tokens
    shapes = [(n_tokens, w.n_rows) for w in (weights[:1] if glu else weights)]
    outs = [Output(device, n * rows * dtype.itemsize) for n, rows in shapes]
    if residual is not None:
        options["residual"] = upload(device, residual.astype(np.float32))
    product.launch(weights, x, [o.buffer for o in outs], **options)
    return [o.read(dtype, s).astype(np.float32) for o, s in zip(outs, shapes, strict=True)]
