"""Cases of the kernels over tiles: random matrices, their tiles on a device, and exact products.

The counterpart of cases.py, which is about kernels over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from kernel_buffers import Output, upload

from ggpy.formats import Format, by_name
from ggpy.formats.random_blocks import random_blocks
from ggpy.kernels.blocks.block_kernel import supported_formats
from ggpy.kernels.gemm.gemm import STATIC_SHARED
from ggpy.kernels.gemm.gemm_decode import COLUMNS, NORM_TOKENS, GemmDecode, Limits, warps_for
from ggpy.kernels.layout.tile import Layout, TiledMatrix, grows, layout_of, repack

EXACT = 1e-10  # normalised mean square error of float sums of some thousand products
FIXED_POINT = 1e-8  # of activations with 16 bits for the largest of their group
HALF = 2e-7  # of what is rounded to half
TILED = [f.name for f in supported_formats() if f.tile is not None]
IN_BLOCKS = [f for f in supported_formats() if f.tile is None or grows(f)]  # always, or sometimes


@dataclass(frozen=True)
class Weights:
    """A random matrix [rows, columns] in blocks of `name`."""

    name: str
    rows: int
    columns: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.rows}-{self.columns}"

    @property
    def format(self) -> Format:
        """The block format."""
        return by_name(self.name)

    @property
    def layout(self) -> Layout:
        """How it is tiled."""
        layout = layout_of(self.format, self.columns)
        assert layout is not None
        return layout

    @cached_property
    def blocks(self) -> np.ndarray:
        """bytes[rows, row_bytes]."""
        rng = np.random.default_rng([self.seed, self.rows, self.columns, self.format.type_id])
        n_blocks = self.rows * self.columns // self.format.block_size
        if self.format.quantize_blocks and self.format.block_size == 1:  # exact as halves
            values = rng.integers(-255, 256, n_blocks).astype(np.float32) / 128
            return self.format.quantize(values.reshape(self.rows, -1))
        return random_blocks(self.format, n_blocks, rng).view(np.uint8).reshape(self.rows, -1)

    @cached_property
    def values(self) -> np.ndarray:
        """float32[rows, columns]."""
        return self.format.dequantize(self.blocks)

    @cached_property
    def row_scales(self) -> np.ndarray:
        """float32[rows], of either sign: not part of `values`."""
        rng = np.random.default_rng([self.seed, self.rows])
        return (rng.uniform(0.5, 2, self.rows) * rng.choice([-1, 1], self.rows)).astype(np.float32)

    def scaled(self, device: Any) -> TiledMatrix:
        """The matrix in tiles, whose rows have `row_scales`."""
        return replace(self.tiled(device), row_scale=upload(device, self.row_scales))

    def tiled(self, device: Any) -> TiledMatrix:
        """The matrix in tiles; every byte of them was written, and none after them."""
        nbytes = self.layout.nbytes(self.rows, self.columns)
        out, raw = Output(device, nbytes), upload(device, self.blocks)
        tiles = repack(device, self.format, raw, self.rows, self.columns, out.buffer)
        out.read(np.uint8, (nbytes,))
        return tiles


def layouts() -> dict[str, Weights]:
    """A matrix of each layout that there is, by its C++ name; 37 ragged rows, ragged columns."""
    found = {}
    for name in TILED:
        size, looked_up = by_name(name).block_size, len(by_name(name).tile_values) == 16
        ragged = 9 * size if size > 32 else 33 * size if size > 1 else 1064
        for columns in (1280,) if size == 32 and looked_up else (ragged, 1280):
            w = Weights(name, 37, columns)
            found.setdefault(w.layout.type_name, w)
    return found


def tile_types(*names: str, columns: int = 256) -> list[str]:
    """The C++ names of the layouts that formats have with so many columns."""
    return [Weights(name, 1, columns).layout.type_name for name in names]


def bound(w: Weights) -> float:
    """What a product's normalised mean square error may be."""
    return FIXED_POINT if w.layout.is_scaled else EXACT


def f16_activations(n_tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    """float16 x[n_tokens, columns]: normal, with a few large channels as models have them."""
    rng = np.random.default_rng([seed, columns])
    x = rng.standard_normal((16, columns))
    x[:, rng.random(columns) < 0.01] *= 20
    return x.astype(np.float16)[:n_tokens]


def tokens(n: int, columns: int) -> np.ndarray:
    """float16 x[n, columns], no two rows alike."""
    scale = 1 + np.arange(n)[:, None] / n
    return (np.resize(f16_activations(16, columns), (n, columns)) * scale).astype(np.float16)


def energy(w: Weights, x: np.ndarray) -> float:
    """The sum of squares to expect of x w^T: that of one output may be small by chance."""
    squares = np.square(x.astype(np.float64)) @ np.square(w.values.astype(np.float64)).T
    return float(squares.sum())


def exact(w: Weights, x: np.ndarray) -> np.ndarray:
    """float64 y[tokens, rows]."""
    return x.astype(np.float64) @ w.values.astype(np.float64).T


def limits(device: Any, n_sms: int = 3, **changes: int) -> Limits:
    """What a launch may take, on few SMs; with all warps that the device has memory
    for, however few chunks a block has, and however little shared memory is asked for.
    """
    there = device.shared_bytes - STATIC_SHARED
    changes["shared"] = min(there, changes.get("shared", there))
    usual = Limits(there, n_sms, warps=warps_for(there))
    return replace(usual, **ALL_WARPS | changes)


MANY = ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "F16", "I8", "F8_E4M3"]
MANY += ["IQ4_XS", "MXFP4", "NVFP4", "Q3_K", "Q2_K", "TQ2_0", "IQ2_XS"]  # one of each kind
TWO, TWO_NORMED = ("Q8_0", "Q6_K"), ("Q4_K", "Q6_K")  # that are multiplied together
NORMED = [c for c in COLUMNS if c <= NORM_TOKENS]
PRODUCT = {"WARPS": 16, "STAGES": 3, "NORM_PIECES": 1}
ALL_WARPS, HALF_OF_THEM = ({"few_chunks": n, "few_chunks_with_norm": n} for n in (0, 1 << 30))


def product_names() -> list[str]:
    """The instances that tests on the emulator take: every layout plainly, some in all ways."""
    some = tile_types("Q8_0", "Q4_0", "F16", columns=64)
    names = [f"{t}, {c}, PLAIN, STORE" for t in layouts() for c in COLUMNS]
    gated = [*some[:2], *tile_types("I8", columns=64)]
    names += [f"{t}, {c}, PLAIN, {e}" for t in gated for c in COLUMNS for e in ("ADD", "GLU")]
    names += [f"{t}, {c}, NORM, {e}" for t in some[:2] for c in NORMED for e in ("STORE", "GLU")]
    names += [f"{some[0]}, {c}, POST_NORM, STORE" for c in NORMED]
    names += [f"{some[2]}, {c}, PLAIN, ADD" for c in COLUMNS]
    one = [f"gemm_decode<{name}, true>" for name in dict.fromkeys(names)]
    plain, normed = (", ".join(tile_types(*pair)) for pair in (TWO, TWO_NORMED))
    two = [
        f"{plain}, 1, PLAIN",
        f"{plain}, 4, PLAIN",
        f"{normed}, 1, NORM",
        f"{normed}, 1, POST_NORM",
    ]
    return one + [f"gemm_decode_two<{name}>" for name in two]


def products_for_many() -> list[list[str]]:
    """The same of the product for many tokens, in two halves."""
    some = tile_types(*MANY)
    names = [f"gemm_prefill<{t}, STORE>" for t in some]
    bytes_too = some[0], *tile_types("I8")
    names += [f"gemm_prefill<{t}, {e}>" for t in bytes_too for e in ("ADD", "GLU")]
    return [names[::2], names[1::2]]


def product_variants() -> list[tuple[list[str], dict[str, int]]]:
    """Instances for rows of more than 4096 columns, and for little shared memory."""
    q8, q4, q6 = *tile_types("Q8_0", "Q4_0", columns=64), *tile_types("Q6_K")
    return [
        (
            [
                *(f"gemm_decode<{t}, {c}, NORM, STORE, true>" for t in (q8, q4) for c in NORMED),
                *(f"gemm_decode<{q8}, {c}, POST_NORM, STORE, true>" for c in NORMED),
            ],
            {"NORM_PIECES": 2},
        ),
        ([f"gemm_decode<{q8}, 1, PLAIN, STORE, false>"], {"STAGES": 1}),
        (
            [
                *(f"gemm_decode<{t}, {c}, PLAIN, ADD, true>" for t in (q8, q6) for c in (1, 8)),
                *(f"gemm_decode<{t}, {c}, NORM, GLU, true>" for t in (q8, q6) for c in NORMED),
                f"gemm_decode_two<{q8}, {q6}, 1, NORM>",
            ],
            {"WARPS": 8},
        ),
        (
            [f"gemm_decode<{t}, PLAIN, STORE, true>" for t in (f"{q8}, 1", f"{q6}, 8")],
            {"STAGES": 2},
        ),
    ]


def multiply(
    device: Any,
    weights: list[TiledMatrix],
    x: np.ndarray,
    *,
    bounds: Limits | None = None,
    residual: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """The outputs of one product: float, or of GLU and INPUT half, as float32 [tokens, rows]."""
    glu = options.get("epilogue") == "GLU"
    dtype = np.dtype(np.float16 if glu or options.get("epilogue") == "INPUT" else np.float32)
    shapes = [(len(x), w.n_rows) for w in (weights[:1] if glu else weights)]
    outs = [Output(device, n * rows * dtype.itemsize) for n, rows in shapes]
    if residual is not None:
        options["residual"] = upload(device, residual.astype(np.float32))
    if "bias" in options:
        options["bias"] = upload(device, options["bias"])
    if norm is not None:
        options["norm"] = upload(device, norm.astype(np.float32))
    product = GemmDecode(device, bounds or limits(device))
    product.launch(weights, upload(device, x), [o.buffer for o in outs], len(x), **options)
    return [o.read(dtype, s).astype(np.float32) for o, s in zip(outs, shapes, strict=True)]
