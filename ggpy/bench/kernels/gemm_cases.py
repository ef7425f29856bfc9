"""Products with weights in tiles, and what else makes or reads tiles, as cases to be measured.

Products go through ops' own choice (ggpy/backends/cuda/gemm.py), so that what is measured is what
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...arch.config import Dimensions
from ...backends.cuda.arrays import Array
from ...backends.cuda.gemm import Products
from ...backends.interface import Norm
from ...evaluate.synthetic import dimensions, shapes
from ...formats import Format
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.layout.blocks_to_f16 import TILES, halve_to_tiles
from ...kernels.layout.dequantize_tile import DequantizeTile
from ...kernels.layout.embed_tile import EmbedTile
from ...kernels.layout.pack import PLAIN, packed_bytes
from ...kernels.layout.tile import layout_of, repack
from .case import DECODED, EPS, LARGE, MODELS, PROMPT, Enqueue, KernelCase
from .operands import Operands, random_ids


@dataclass(frozen=True)
class Part:
    """A product of a layer, or the output: matrices of one x, as one launch takes them."""

    name: str
    rows: tuple[int, ...]
    columns: int
    epilogue: Any
    normed: bool


def parts_of(sizes: Dimensions) -> list[Part]:
    """The products of a model."""
    d, f, e = sizes.n_embd, sizes.n_ff, sizes.head_size
    qkv = (sizes.n_head * e, sizes.n_head_kv * e, sizes.n_head_kv * e)
    return [
        Part("qkv", qkv, d, "STORE", True),
        Part("attn_output", (d,), qkv[0], "ADD", False),
        Part("gate_up", (f, f), d, "GLU", True),
        Part("ffn_down", (d,), f, "ADD", False),
        Part("output", (sizes.n_vocab,), d, "STORE", True),
    ]


def tiled_cases(format: Format) -> Iterator[KernelCase]:
    """Decode in all models, prompts and lookups in the large one, and the repacking."""
    for model in MODELS:
        for part in parts_of(dimensions(shapes()[model])):
            if part.columns % format.block_size == 0:
                yield from (product_case(format, model, part, n, False) for n in DECODED)
    sizes = dimensions(shapes()[LARGE])
    for part in parts_of(sizes)[:-1]:
        yield product_case(format, LARGE, part, PROMPT, True)
    yield from (embed_case(format, sizes, n) for n in (1, PROMPT))
    yield repack_case(format, sizes.n_ff, sizes.n_embd)
    yield dequantize_tile_case(format, sizes.n_ff, sizes.n_embd)


def untiled_cases(format: Format) -> Iterator[KernelCase]:
    """Prompts in the large model, and what becomes of a matrix before."""
    sizes = dimensions(shapes()[LARGE])
    for part in parts_of(sizes)[:-1]:
        yield product_case(format, LARGE, part, PROMPT, True)
    yield halves_case(format, sizes.n_ff, sizes.n_embd)


def product_case(format: Format, model: str, part: Part, n: int, prompt: bool) -> KernelCase:
    """`n` tokens, of as many sequences or (prompt) of one."""
    k = part.columns
    gated, norm = part.epilogue == "GLU", part.normed and n == 1
    n_out = part.rows[0] if gated else sum(part.rows)
    size = (2 if gated else 4) * (2 if part.epilogue == "ADD" else 1)  # what is added to is read
    return KernelCase(
        what="prompt product" if prompt else "product",
        where=f"{model} {part.name}",
        format=format.name,
        shape=f"{'+'.join(map(str, part.rows))}x{k}",
        tokens=n,
        nbytes=sum(weight_bytes(format, r, k) for r in part.rows) + n * ((4 if norm else 2) * k)
        + n * n_out * size,
        flops=2 * sum(part.rows) * k * n,
        prepare=lambda operands: _product(operands, format, part, n, prompt, norm),
    )  # fmt: skip


def weight_bytes(format: Format, rows: int, k: int) -> int:
    """Bytes that are read of a matrix as ops keep it."""
    layout = layout_of(format, k)
    return layout.read_bytes(rows, k) if layout else rows * format.row_bytes(k)


def _product(o: Operands, format: Format, part: Part, n: int, prompt: bool, norm: bool) -> Enqueue:
    products = o.made("products", lambda: Products(o.device, Elementwise(o.device), room=o.room))
    weights = [o.matrix(format, rows, part.columns) for rows in part.rows]
    products.prompt = prompt
    some = [w() for w in weights]
    x = _activations(o, products.order(some, n), n, part.columns, norm)
    gated = part.epilogue == "GLU" and products.together(some, n)
    # What gates two products apart is a kernel of its own.
    epilogue = "STORE" if part.epilogue == "GLU" and not gated else part.epilogue
    outs = [_out(o, str(i), n, r, gated) for i, r in enumerate(part.rows[: 1 if gated else None])]
    normed = Norm(o.floats("norm", 1, part.columns).data, EPS) if norm else None

    def enqueue() -> None:
        products.prompt = prompt
        products.multiply(x, [w() for w in weights], outs, epilogue, normed)

    return enqueue


def _activations(o: Operands, order: int, n: int, k: int, norm: bool) -> Array:
    """x[n, k], as the ops before a product leave it."""
    if norm or order == PLAIN:
        return (o.floats if norm else o.halves)("x", n, k)
    return replace(o.halves("x", 1, packed_bytes(n, k) // 2), shape=(n, k), row=k, order=order)


def _out(o: Operands, name: str, n: int, rows: int, half: bool) -> Array:
    return (o.halves if half else o.floats)(f"out {name}", n, rows)


def embed_case(format: Format, sizes: Dimensions, n: int) -> KernelCase:
    """Rows of the embedding table, where it is the output too."""
    k, rows = sizes.n_embd, sizes.n_vocab
    layout = layout_of(format, k)
    assert layout is not None

    def prepare(o: Operands) -> Enqueue:
        kernel = o.made("embed_tile", lambda: EmbedTile(o.device))
        table = o.matrix(format, rows, k)
        ids = o.integers("ids", random_ids(n, rows))
        out = o.room("rows", 4 * n * k)
        return lambda: kernel.launch(table().tiles, ids, ids, out, n, 1.0)

    nbytes = n * (layout.read_bytes(16, k) // 16 + 4 + 4 * k)
    shape = f"{rows}x{k}"
    return KernelCase("embed_tile", LARGE, format.name, shape, n, nbytes, 0, prepare)


def repack_case(format: Format, rows: int, k: int) -> KernelCase:
    """Blocks to tiles, as at load."""
    layout = layout_of(format, k)
    assert layout is not None
    out_bytes = layout.nbytes(rows, k)

    def prepare(o: Operands) -> Enqueue:
        blocks, out = o.blocks(format, rows, k), o.room("tiles", out_bytes)

        def enqueue() -> None:
            repack(o.device, format, blocks().data, rows, k, out)

        return enqueue

    nbytes = rows * format.row_bytes(k) + out_bytes
    return KernelCase("repack", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)


def halves_case(format: Format, rows: int, k: int) -> KernelCase:
    """Blocks to tiles of halves, for one product."""
    out_bytes = TILES.nbytes(rows, k)

    def prepare(o: Operands) -> Enqueue:
        blocks, out = o.blocks(format, rows, k), o.room("tiles", out_bytes)

        def enqueue() -> None:
            halve_to_tiles(o.device, blocks(), out)

        return enqueue

    nbytes = rows * format.row_bytes(k) + out_bytes
    return KernelCase("blocks_to_f16", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)


def dequantize_tile_case(format: Format, rows: int, k: int) -> KernelCase:
    """Tiles to rows of halves, for cuBLAS."""
    layout = layout_of(format, k)
    assert layout is not None

    def prepare(o: Operands) -> Enqueue:
        kernel = o.made("dequantize_tile", lambda: DequantizeTile(o.device))
        w, out = o.matrix(format, rows, k), o.room("rows of halves", 2 * rows * k)

        def enqueue() -> None:
            tiles = w().tiles
            assert tiles is not None
            kernel.launch(tiles, out)

        return enqueue

    nbytes = layout.read_bytes(rows, k) + 2 * rows * k
    return KernelCase("dequantize_tile", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)
