"""Benchmark cases of the kernels on quant blocks, which tests/support/kernels/cases.py declares,
and of the kernels that quantise to blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...formats import Format, by_name
from ...kernels.blocks.block_kernel import BlockMatrix
from ...kernels.blocks.dequantize import SIZES, dequantize
from ...kernels.blocks.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ...kernels.blocks.get_rows import get_rows
from ...kernels.blocks.mul_mat_vec_q import mul_mat_vec_q
from ...kernels.blocks.quantize_q8_1 import q8_1_bytes
from ...kernels.quantize.quantize import FLAG_BYTES, Quantizer
from .case import Enqueue, KernelCase
from .operands import Operands, random_ids

ROWS, COLUMNS = 256, 4096  # the matrix that `ggpy quantize` passes to the device at a time


def block_case(case: Any, where: str = "") -> KernelCase:
    """A case of tests/support/kernels/cases.py, which has its bytes and operations."""
    return KernelCase(
        what=case.kernel,
        where=where,
        format=case.format,
        shape=f"{case.rows}x{case.columns}" + (f" {case.number}" if case.number else ""),
        tokens=case.tokens,
        nbytes=case.nbytes,
        flops=case.flops,
        prepare=lambda operands: BLOCK_KERNELS[case.kernel](operands, case),
    )


def to_blocks_case(target: Format, weighted: bool) -> KernelCase:
    """Quantises f16 to blocks, with or without an importance matrix."""
    source = by_name("F16")

    def prepare(o: Operands) -> Enqueue:
        quantizer = Quantizer(o.device, target, source, weighted)
        window, out = o.numbers(np.float16, ROWS * COLUMNS), o.scratch("made", nbytes)
        flag, squares = o.scratch("flag", FLAG_BYTES), o.scratch("squares", 4 * ROWS)
        importance = o.positive("importance", COLUMNS)
        return lambda: quantizer.launch(
            BlockMatrix(source, ROWS, COLUMNS, window()), out, flag, importance, squares
        )

    nbytes = ROWS * (2 * COLUMNS + target.row_bytes(COLUMNS))
    where = "by importance" if weighted else ""
    shape = f"{ROWS}x{COLUMNS}"
    return KernelCase("quantize", where, target.name, shape, 1, nbytes, 0, prepare)


def _dequantize(o: Operands, case: Any) -> Enqueue:
    w = o.blocks(case.block, case.rows, case.columns)
    out = o.scratch("numbers", case.rows * case.columns * SIZES[case.number])
    return lambda: dequantize(o.device, w(), out, case.number)


def _get_rows(o: Operands, case: Any) -> Enqueue:
    w = o.blocks(case.block, case.rows, case.columns)
    ids = o.integers("ids", random_ids(case.tokens, case.rows))
    out = o.scratch("rows", 4 * case.tokens * case.columns)
    return lambda: get_rows(o.device, w(), ids, out, case.tokens)


def _dequantize_mul_mat_vec(o: Operands, case: Any) -> Enqueue:
    w = o.blocks(case.block, case.rows, case.columns)
    x = (o.f16 if case.number == "half" else o.floats)("x", case.tokens, case.columns).data
    y = o.scratch("y", 4 * case.tokens * case.rows)
    n, x_type = case.tokens, case.number
    return lambda: dequantize_mul_mat_vec(o.device, w(), x, y, n, x_type=x_type)


def _mul_mat_vec_q(o: Operands, case: Any) -> Enqueue:
    w = o.blocks(case.block, case.rows, case.columns)
    x = o.q8_1(by_name("Q8_1"), q8_1_bytes(case.tokens, case.columns))
    y = o.scratch("y", 4 * case.tokens * case.rows)
    return lambda: mul_mat_vec_q(o.device, w(), x, y, case.tokens)


BLOCK_KERNELS: dict[str, Callable[[Operands, Any], Enqueue]] = {
    "dequantize": _dequantize,
    "get_rows": _get_rows,
    "dequantize_mul_mat_vec": _dequantize_mul_mat_vec,
    "mul_mat_vec_q": _mul_mat_vec_q,
}
