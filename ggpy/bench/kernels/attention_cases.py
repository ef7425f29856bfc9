"""Benchmark cases of attention at several depths, and of the kernels that prefill runs before
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...arch.config import LayerSizes
from ...backends.interface import PAGE_SIZE
from ...cache_types import CacheTypes
from ...evaluate.synthetic import dimensions, shapes
from ...kernels.attention.paged_attention import AttentionParams, PagedAttention, plan_tiles
from ...kernels.attention.pages_to_f16 import PagesToF16, as_f16
from ...kernels.attention.prefill_attention import PrefillAttention, plan_prefill_tiles
from ...kernels.attention.rope_kv import AttentionMetadata, Heads, RopeKv, Rotation, angles
from .case import DEPTHS, MODELS, PROMPT, Enqueue, KernelCase
from .operands import Operands


def attention_cases() -> Iterator[KernelCase]:
    """Decode attention at several depths, of one sequence and of eight, and prefill attention."""
    for model in MODELS:
        whole = dimensions(shapes()[model])
        sizes = whole.layer
        for depth in DEPTHS:
            if depth < whole.n_ctx_train:
                yield attend_case(model, sizes, 1, depth, 1)
                yield attend_case(model, sizes, 1, depth, 1, "q8_0")
        yield attend_case(model, sizes, 8, DEPTHS[1], 1)
        yield attend_case(model, sizes, 1, 0, PROMPT)
        for type in ("f16", "q8_0"):
            yield attend_case(model, sizes, 1, DEPTHS[1], PROMPT, type)
        yield pages_to_f16_case(model, sizes, DEPTHS[1] + PROMPT, "q8_0")
        yield from (rope_case(model, sizes, n) for n in (8, PROMPT))


def attend_case(
    model: str, s: LayerSizes, n_seq: int, depth: int, n: int, type: str = "f16"
) -> KernelCase:
    """Attention of n_seq sequences with n tokens each at context length `depth`. With a single
    token the attention kernel also applies RoPE.

    type: of the KV cache; prefill converts types other than f16 to f16.
    """
    heads = Heads(s.n_head, s.n_head_kv, s.key_size, PAGE_SIZE, CacheTypes(type, type))
    seen = sum(range(depth + 1, depth + n + 1))
    kv = (depth + n) * (heads.key_bytes + heads.value_bytes) // PAGE_SIZE
    q = n * s.n_head * s.key_size * (4 if n == 1 else 2)
    return KernelCase(
        what="attend" if n == 1 else "prompt attend",
        where=f"{model} @ d{depth}",
        format=type.upper(),
        shape=f"{s.n_head}/{s.n_head_kv}x{s.key_size}",
        tokens=n_seq * n,
        nbytes=n_seq * (kv + q + n * s.n_head * s.key_size * 2),
        flops=n_seq * 4 * s.n_head * s.key_size * seen,
        prepare=lambda operands: _attend(operands, heads, n_seq, depth, n),
    )


def _step(
    o: Operands, n_seq: int, depth: int, n: int
) -> tuple[AttentionMetadata, np.ndarray, np.ndarray, int]:
    """The integers of a step, its positions and sequences, and its number of pages."""
    positions = np.tile(np.arange(depth, depth + n, dtype=np.int32), n_seq)
    sequences = np.repeat(np.arange(n_seq, dtype=np.int32), n)
    per = -(-(depth + n) // PAGE_SIZE)
    tables = np.arange(n_seq * per, dtype=np.int32)
    batch = AttentionMetadata(
        positions=o.integers("positions", positions),
        pages=o.integers("pages", sequences * per + positions // PAGE_SIZE),
        sequences=o.integers("sequences", sequences),
        page_tables=o.integers("page tables", tables),
        stride=per,
    )
    return batch, positions, sequences, n_seq * per


def _attend(o: Operands, heads: Heads, n_seq: int, depth: int, n: int) -> Enqueue:
    batch, positions, sequences, n_pages = _step(o, n_seq, depth, n)
    prompt = n > 1 and PrefillAttention.fits(o.device, heads)
    tokens = positions, sequences, heads
    paged = o.cached(
        (heads, n_seq), lambda: PagedAttention(o.device, heads, n_seq, o.device.shared_bytes)
    )
    resident_splits = paged.resident_splits(n_seq) if n == 1 else None
    plan = (
        plan_prefill_tiles(*tokens, n)
        if prompt
        else plan_tiles(*tokens, resident_splits=resident_splits)
    )
    prefill_attention = (
        o.cached((heads, "prompt"), lambda: PrefillAttention(paged)) if prompt else None
    )
    pages = _pages(o, heads, n_pages)
    if prompt and not heads.is_f16:
        pages = _f16_pages(o, heads, n_pages, pages)
    tiles = o.integers("tiles", plan)
    out = o.scratch("attended", 2 * n_seq * n * heads.n_head * heads.head_size)
    params: dict[str, Any] = {"batch": batch, "out": out, "scale": heads.head_size**-0.5, "q": None}
    if n == 1:
        params |= {"projected": _projected(o, heads, n_seq), "rotation": _rotation(o, heads)}
    else:
        params["q"] = o.f16("q", n_seq * n * heads.n_head, heads.row).data

    def enqueue() -> None:
        now = AttentionParams(pages=pages(), **params)
        if prefill_attention:
            prefill_attention.launch(now, tiles, len(plan))
        else:
            paged.launch(now, tiles, len(plan), int(plan[:, 2].max()))

    return enqueue


Pages = Callable[[], tuple[Any, Any]]  # returns keys and values for the next launch


def _pages(o: Operands, heads: Heads, n: int) -> Pages:
    window = o.numbers(np.float16, n * heads.key_bytes // 2)
    return lambda: (window(), window())


def _f16_pages(o: Operands, heads: Heads, n: int, pages: Pages) -> Pages:
    """The f16 copies of n pages; each call enqueues the conversion."""
    kernel = o.cached((heads, "convert"), lambda: PagesToF16(o.device, heads))
    listed = o.integers("listed pages", np.column_stack([np.arange(n), np.zeros(n)]).astype("i4"))
    f16_heads = as_f16(heads)
    f16_pages = (
        o.scratch("k as f16", n * f16_heads.key_bytes),
        o.scratch("v as f16", n * f16_heads.value_bytes),
    )

    def convert() -> tuple[Any, Any]:
        kernel.launch(pages(), f16_pages, listed, n)
        return f16_pages

    return convert


def _projected(o: Operands, heads: Heads, n: int) -> list[Any]:
    counts = (heads.n_head, heads.n_head_kv, heads.n_head_kv)
    names = ("q", "new k", "new v")
    return [
        o.floats(name, n * count, heads.head_size).data
        for name, count in zip(names, counts, strict=True)
    ]


def _rotation(o: Operands, heads: Heads) -> Rotation:
    def upload() -> Any:
        values = angles(500000.0 ** (-np.arange(0, heads.head_size, 2) / heads.head_size))
        buffer = o.device.alloc(values.nbytes, "rope")
        o.device.upload(buffer, values)
        return buffer

    size = heads.head_size
    return Rotation(angles=o.cached(("angles", size), upload), n_pairs=size // 2, neox=False)


def pages_to_f16_case(model: str, s: LayerSizes, n: int, type: str) -> KernelCase:
    """The conversion of n positions of a KV cache to f16, as prefill runs it."""
    heads = Heads(s.n_head, s.n_head_kv, s.key_size, PAGE_SIZE, CacheTypes(type, type))
    n_pages, f16_heads = -(-n // PAGE_SIZE), as_f16(heads)

    def prepare(o: Operands) -> Enqueue:
        f16_pages = _f16_pages(o, heads, n_pages, _pages(o, heads, n_pages))

        def enqueue() -> None:
            f16_pages()

        return enqueue

    sizes = (heads.key_bytes, heads.value_bytes, f16_heads.key_bytes, f16_heads.value_bytes)
    shape = f"{s.n_head_kv}x{s.key_size}"
    nbytes = n_pages * sum(sizes)
    return KernelCase("halve pages", model, type.upper(), shape, n, nbytes, 0, prepare)


def rope_case(model: str, s: LayerSizes, n: int) -> KernelCase:
    """RoPE of n prefill tokens, with the writes to the KV pages."""
    heads = Heads(s.n_head, s.n_head_kv, s.key_size, PAGE_SIZE)

    def prepare(o: Operands) -> Enqueue:
        kernel = o.cached(("rope", heads), lambda: RopeKv(o.device, heads))
        batch, _, _, n_pages = _step(o, 1, 0, n)
        projected, rotation = _projected(o, heads, n), _rotation(o, heads)
        pages, q = _pages(o, heads, n_pages), o.scratch("rotated", 2 * n * heads.n_head * heads.row)
        return lambda: kernel.launch(projected, rotation, batch, n, pages(), q)

    count = s.n_head + 2 * s.n_head_kv
    shape = f"{s.n_head}/{s.n_head_kv}x{s.key_size}"
    nbytes = n * count * (4 * s.key_size + 2 * heads.row)
    return KernelCase("rope_kv", model, "F16", shape, n, nbytes, 0, prepare)
