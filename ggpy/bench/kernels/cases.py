"""Benchmark cases of all kernels of decode and prefill in the shapes of known models. This file has
the small kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...evaluate.synthetic import dimensions, shapes
from ...kernels.blocks.block_kernel import supported_formats
from ...kernels.blocks.quantize_q8_1 import q8_1_bytes, quantize_q8_1
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.norm.rms_norm import RmsNorm
from ...kernels.quantize.quantize import has_kernel
from ...kernels.sampling.argmax import Argmax
from ...kernels.sampling.sample import ROW as SAMPLE_ROW
from ...kernels.sampling.sample import Sample, best_bytes
from .attention_cases import attention_cases
from .block_cases import to_blocks_case
from .case import DECODED, EPS, LARGE, PROMPT, Enqueue, KernelCase
from .gemm_cases import tiled_cases, untiled_cases
from .operands import Operands

TOP_K = 40
SAMPLED = {"top_k": TOP_K, "top_p": 0.95, "min_p": -3.0, "temperature": 0.8, "repeat": 1.0}


def model_cases() -> Iterator[KernelCase]:
    """All cases, by format, so that the operands of a format are made once."""
    yield from small_cases()
    yield from attention_cases()
    for format in supported_formats():
        yield from (tiled_cases if format.tile is not None else untiled_cases)(format)
        if has_kernel(format):
            yield from (to_blocks_case(format, weighted) for weighted in (False, True))


# The small kernels of a step


def small_cases() -> Iterator[KernelCase]:
    """Norms, activations and sampling in the sizes of the large model."""
    sizes = dimensions(shapes()[LARGE])
    d, f, v = sizes.n_embd, sizes.layer.n_ff, sizes.n_vocab
    for n in (1, 8, PROMPT):
        yield norm_case(d, n)
        yield add_norm_case(d, n)
        yield glu_case(f, n)
        yield quantize_case(d, n)
    yield soft_cap_case(v, 1)
    for n in DECODED:
        yield argmax_case(v, n)
        yield sample_case(v, n)


def norm_case(k: int, n: int) -> KernelCase:
    """The norm before a GEMM of several tokens."""

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached("rms_norm", lambda: RmsNorm(o.device))
        window, w = o.numbers(np.float32, n * k), o.floats("norm", 1, k).data
        out = o.scratch("normed", 2 * n * k)
        return lambda: kernel.to_f16(window(), None, w, out, n, k, EPS)

    return KernelCase("rms_norm", LARGE, "F32", str(k), n, k * (6 * n + 4), 0, prepare)


def add_norm_case(k: int, n: int) -> KernelCase:
    """The post-norm after a GEMM, which some architectures have."""

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached("rms_norm", lambda: RmsNorm(o.device))
        window, w = o.numbers(np.float32, n * k), o.floats("norm", 1, k).data
        return lambda: kernel.add(window(), window(), w, n, k, EPS)

    return KernelCase("add_rms_norm", LARGE, "F32", str(k), n, k * (12 * n + 4), 0, prepare)


def _elementwise(o: Operands) -> Elementwise:
    found: Elementwise = o.cached("elementwise", lambda: Elementwise(o.device))
    return found


def glu_case(k: int, n: int) -> KernelCase:
    """The GLU kernel, for gate and up from separate GEMMs."""

    def prepare(o: Operands) -> Enqueue:
        window, out = o.numbers(np.float32, n * k), o.scratch("h", 2 * n * k)
        kernel = _elementwise(o)
        return lambda: kernel.glu(window(), window(), out, n * k, "silu")

    return KernelCase("glu", LARGE, "F32", str(k), n, 10 * n * k, 0, prepare)


def soft_cap_case(k: int, n: int) -> KernelCase:
    """The soft cap of logits."""

    def prepare(o: Operands) -> Enqueue:
        kernel, window = _elementwise(o), o.numbers(np.float32, n * k)
        return lambda: kernel.soft_cap(window(), n * k, 30.0)

    return KernelCase("soft_cap", LARGE, "F32", str(k), n, 8 * n * k, 0, prepare)


def argmax_case(k: int, n: int) -> KernelCase:
    """The argmax of logits."""

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached("argmax", lambda: Argmax(o.device, max(DECODED)))
        window = o.numbers(np.float32, n * k)
        ids, results = o.scratch("sampled", 4 * n), o.scratch("results", 4 * n)
        return lambda: kernel.launch(window(), n, k, ids, results)

    return KernelCase("argmax", LARGE, "F32", str(k), n, n * (4 * k + 4), 0, prepare)


def sample_case(k: int, n: int) -> KernelCase:
    """Sampling from the 40 best tokens of each row, with llama.cpp's default parameters."""
    rows = np.zeros(n, SAMPLE_ROW)
    for name, value in SAMPLED.items():
        rows[name] = value
    rows["seed"] = np.arange(n)

    def prepare(o: Operands) -> Enqueue:
        kernel, window = o.cached("sample", lambda: Sample(o.device)), o.numbers(np.float32, n * k)
        parameters = o.integers("rows", rows.view(np.int32))
        best = o.scratch("best", best_bytes(n, k, TOP_K))
        ids, results = o.scratch("sampled", 4 * n), o.scratch("results", 4 * n)
        common = (parameters, parameters, TOP_K, best, ids, results)
        return lambda: kernel.launch(window(), n, k, *common)

    return KernelCase("sample", LARGE, "F32", str(k), n, n * (4 * k + 4), 0, prepare)


def quantize_case(k: int, n: int) -> KernelCase:
    """Quantises activations to q8_1."""

    def prepare(o: Operands) -> Enqueue:
        window, out = o.numbers(np.float32, n * k), o.scratch("quantized", q8_1_bytes(n, k))
        return lambda: quantize_q8_1(o.device, window(), out, n, k)

    nbytes = 4 * n * k + q8_1_bytes(n, k)
    return KernelCase("quantize_q8_1", LARGE, "F32", str(k), n, nbytes, 0, prepare)
