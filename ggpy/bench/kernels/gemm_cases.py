"""Benchmark cases of GEMMs with weights in tiles, and of the other kernels that make or read tiles.

GEMMs are planned by the backend's planner, so the measured kernels are those that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...arch.config import Dimensions
from ...backends.cuda.arrays import Array
from ...backends.cuda.context import StepContext
from ...backends.cuda.gemm import ProductOperands
from ...backends.cuda.plan import NormIn, StepClass
from ...backends.cuda.steps.graphs import Graphs
from ...backends.interface import Norm
from ...evaluate.synthetic import dimensions, shapes
from ...formats import Format
from ...kernels.layout.blocks_to_f16 import F16_TILES, blocks_to_f16_tiles
from ...kernels.layout.dequantize_tile import DequantizeTile
from ...kernels.layout.embed_tile import EmbedTile
from ...kernels.layout.pack import PLAIN, packed_bytes
from ...kernels.layout.tile import layout_of, repack
from .case import DECODED, EPS, LARGE, MODELS, PROMPT, Enqueue, KernelCase
from .operands import Operands, random_ids


@dataclass(frozen=True)
class ModelGemm:
    """A GEMM of a layer, or of the output: matrices with the same x in one launch."""

    name: str
    rows: tuple[int, ...]
    columns: int
    epilogue: Any
    normed: bool


def parts_of(sizes: Dimensions) -> list[ModelGemm]:
    """The GEMMs of a model."""
    d, s = sizes.n_embd, sizes.layer
    f, kv = s.n_ff, s.n_head_kv * s.key_size
    qkv = (s.n_head * s.key_size, kv, kv)
    return [
        ModelGemm("qkv", qkv, d, "STORE", True),
        ModelGemm("attn_output", (d,), qkv[0], "ADD", False),
        ModelGemm("gate_up", (f, f), d, "GLU", True),
        ModelGemm("ffn_down", (d,), f, "ADD", False),
        ModelGemm("output", (sizes.n_vocab,), d, "STORE", True),
    ]


def tiled_cases(format: Format) -> Iterator[KernelCase]:
    """Decode in all models; prefill, embedding and dequantisation in the large model; and
    repacking.
    """
    for model in MODELS:
        for part in parts_of(dimensions(shapes()[model])):
            if part.columns % format.block_size == 0:
                yield from (product_case(format, model, part, n, False) for n in DECODED)
    sizes = dimensions(shapes()[LARGE])
    for part in parts_of(sizes)[:-1]:
        yield product_case(format, LARGE, part, PROMPT, True)
    yield from (embed_case(format, sizes, n) for n in (1, PROMPT))
    yield repack_case(format, sizes.layer.n_ff, sizes.n_embd)
    yield dequantize_tile_case(format, sizes.layer.n_ff, sizes.n_embd)


def untiled_cases(format: Format) -> Iterator[KernelCase]:
    """Prefill in the large model, and the conversion of a matrix to f16 tiles before it."""
    sizes = dimensions(shapes()[LARGE])
    for part in parts_of(sizes)[:-1]:
        yield product_case(format, LARGE, part, PROMPT, True)
    yield halves_case(format, sizes.layer.n_ff, sizes.n_embd)


def product_case(format: Format, model: str, part: ModelGemm, n: int, prompt: bool) -> KernelCase:
    """A GEMM of n tokens: of n sequences (decode), or of one (prompt: prefill)."""
    k = part.columns
    gated, norm = part.epilogue == "GLU", part.normed and n == 1
    n_out = part.rows[0] if gated else sum(part.rows)
    size = (2 if gated else 4) * (2 if part.epilogue == "ADD" else 1)  # ADD also reads the residual
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
    """Bytes of a matrix that a GEMM reads."""
    layout = layout_of(format, k)
    return layout.read_bytes(rows, k) if layout else rows * format.row_bytes(k)


def _product(
    o: Operands, format: Format, part: ModelGemm, n: int, prompt: bool, norm: bool
) -> Enqueue:
    context = o.cached("context", lambda: StepContext(o.device, Graphs(o.device)))
    weights = [o.matrix(format, rows, part.columns) for rows in part.rows]
    some, step = [w() for w in weights], StepClass(n, n, not prompt, True)
    # If one launch cannot compute gate and up, the GLU is a kernel of its own.
    gated = part.epilogue == "GLU" and context.planner.takes_glu(some, step)
    epilogue = "STORE" if part.epilogue == "GLU" and not gated else part.epilogue
    where = NormIn.PROLOGUE if norm else NormIn.NONE
    plan = context.planner.product(some, step, epilogue, where)
    x = _activations(o, plan.x_layout, n, part.columns, norm)
    outs = [_out(o, str(i), n, r, gated) for i, r in enumerate(part.rows[: 1 if gated else None])]
    normed = Norm(o.floats("norm", 1, part.columns).data, EPS) if norm else None

    def enqueue() -> None:
        context.gemms.run(plan, x, [w() for w in weights], outs, ProductOperands(norm=normed))

    return enqueue


def _activations(o: Operands, layout: int, n: int, k: int, norm: bool) -> Array:
    """x[n, k] as the previous op leaves it."""
    if norm or layout == PLAIN:
        return (o.floats if norm else o.f16)("x", n, k)
    return replace(o.f16("x", 1, packed_bytes(n, k) // 2), shape=(n, k), row=k, layout=layout)


def _out(o: Operands, name: str, n: int, rows: int, half: bool) -> Array:
    return (o.f16 if half else o.floats)(f"out {name}", n, rows)


def embed_case(format: Format, sizes: Dimensions, n: int) -> KernelCase:
    """The embedding from a table that is also the output matrix."""
    k, rows = sizes.n_embd, sizes.n_vocab
    layout = layout_of(format, k)
    assert layout is not None

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached("embed_tile", lambda: EmbedTile(o.device))
        table = o.matrix(format, rows, k)
        ids = o.integers("ids", random_ids(n, rows))
        out = o.scratch("rows", 4 * n * k)
        return lambda: kernel.launch(table().tiles, ids, ids, out, n, 1.0)

    nbytes = n * (layout.read_bytes(16, k) // 16 + 4 + 4 * k)
    shape = f"{rows}x{k}"
    return KernelCase("embed_tile", LARGE, format.name, shape, n, nbytes, 0, prepare)


def repack_case(format: Format, rows: int, k: int) -> KernelCase:
    """Repacks blocks to tiles, as at load."""
    layout = layout_of(format, k)
    assert layout is not None
    out_bytes = layout.nbytes(rows, k)

    def prepare(o: Operands) -> Enqueue:
        blocks, out = o.blocks(format, rows, k), o.scratch("tiles", out_bytes)

        def enqueue() -> None:
            repack(o.device, format, blocks().data, rows, k, out)

        return enqueue

    nbytes = rows * format.row_bytes(k) + out_bytes
    return KernelCase("repack", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)


def halves_case(format: Format, rows: int, k: int) -> KernelCase:
    """Converts blocks to f16 tiles for one GEMM."""
    out_bytes = F16_TILES.nbytes(rows, k)

    def prepare(o: Operands) -> Enqueue:
        blocks, out = o.blocks(format, rows, k), o.scratch("tiles", out_bytes)

        def enqueue() -> None:
            blocks_to_f16_tiles(o.device, blocks(), out)

        return enqueue

    nbytes = rows * format.row_bytes(k) + out_bytes
    return KernelCase("blocks_to_f16", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)


def dequantize_tile_case(format: Format, rows: int, k: int) -> KernelCase:
    """Converts tiles to f16 rows for cuBLAS."""
    layout = layout_of(format, k)
    assert layout is not None

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached("dequantize_tile", lambda: DequantizeTile(o.device))
        w, out = o.matrix(format, rows, k), o.scratch("f16 rows", 2 * rows * k)

        def enqueue() -> None:
            tiles = w().tiles
            assert tiles is not None
            kernel.launch(tiles, out)

        return enqueue

    nbytes = layout.read_bytes(rows, k) + 2 * rows * k
    return KernelCase("dequantize_tile", LARGE, format.name, f"{rows}x{k}", 1, nbytes, 0, prepare)
