"""Attention, and what a prompt needs before it, at several depths, as cases to be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...arch.config import Dimensions
from ...backends.interface import PAGE_SIZE
from ...cache_types import CacheTypes
from ...evaluate.synthetic import dimensions, shapes
from ...kernels.attention.paged_attention import Asked, Attend, plan_tiles
from ...kernels.attention.pages_to_f16 import HalvePages, as_halves
from ...kernels.attention.prefill_attention import AttendPrompt, plan_prompts
from ...kernels.attention.rope_kv import Batch, Heads, RopeKv, Rotation, turns
from .case import DEPTHS, MODELS, PROMPT, Enqueue, KernelCase
from .operands import Operands


def attention_cases() -> Iterator[KernelCase]:
    """Decode at several depths, of one sequence and of eight, and prompts."""
    for model in MODELS:
        sizes = dimensions(shapes()[model])
        for depth in DEPTHS:
            if depth < sizes.n_ctx_train:
                yield attend_case(model, sizes, 1, depth, 1)
                yield attend_case(model, sizes, 1, depth, 1, "q8_0")
        yield attend_case(model, sizes, 8, DEPTHS[1], 1)
        yield attend_case(model, sizes, 1, 0, PROMPT)
        for type in ("f16", "q8_0"):
            yield attend_case(model, sizes, 1, DEPTHS[1], PROMPT, type)
        yield halve_case(model, sizes, DEPTHS[1] + PROMPT, "q8_0")
        yield from (rope_case(model, sizes, n) for n in (8, PROMPT))


def attend_case(
    model: str, s: Dimensions, n_seq: int, depth: int, n: int, type: str = "f16"
) -> KernelCase:
    """Each of n_seq sequences has n tokens after `depth` others; a single one is rotated here.

    type: of keys and values, which for several tokens become halves on the way.
    """
    heads = Heads(s.n_head, s.n_head_kv, s.head_size, PAGE_SIZE, CacheTypes(type, type))
    seen = sum(range(depth + 1, depth + n + 1))
    kv = (depth + n) * (heads.key_bytes + heads.value_bytes) // PAGE_SIZE
    q = n * s.n_head * s.head_size * (4 if n == 1 else 2)
    return KernelCase(
        what="attend" if n == 1 else "prompt attend",
        where=f"{model} @ d{depth}",
        format=type.upper(),
        shape=f"{s.n_head}/{s.n_head_kv}x{s.head_size}",
        tokens=n_seq * n,
        nbytes=n_seq * (kv + q + n * s.n_head * s.head_size * 2),
        flops=n_seq * 4 * s.n_head * s.head_size * seen,
        prepare=lambda operands: _attend(operands, heads, n_seq, depth, n),
    )


def _step(o: Operands, n_seq: int, depth: int, n: int) -> tuple[Batch, np.ndarray, np.ndarray, int]:
    """The integers of a step, positions and sequences, and its pages."""
    positions = np.tile(np.arange(depth, depth + n, dtype=np.int32), n_seq)
    sequences = np.repeat(np.arange(n_seq, dtype=np.int32), n)
    per = -(-(depth + n) // PAGE_SIZE)
    tables = np.arange(n_seq * per, dtype=np.int32)
    batch = Batch(
        positions=o.integers("positions", positions),
        pages=o.integers("pages", sequences * per + positions // PAGE_SIZE),
        sequences=o.integers("sequences", sequences),
        page_tables=o.integers("page tables", tables),
        stride=per,
    )
    return batch, positions, sequences, n_seq * per


def _attend(o: Operands, heads: Heads, n_seq: int, depth: int, n: int) -> Enqueue:
    batch, positions, sequences, n_pages = _step(o, n_seq, depth, n)
    prompt = n > 1 and AttendPrompt.fits(o.device, heads)
    tokens = positions, sequences, heads
    attend = o.made((heads, n_seq), lambda: Attend(o.device, heads, n_seq, o.device.shared_bytes))
    places = attend.places(n_seq) if n == 1 else None
    plan = plan_prompts(*tokens, n) if prompt else plan_tiles(*tokens, places=places)
    prefill_attention = o.made((heads, "prompt"), lambda: AttendPrompt(attend)) if prompt else None
    pages = _pages(o, heads, n_pages)
    if prompt and not heads.has_halves:
        pages = _halves(o, heads, n_pages, pages)
    tiles = o.integers("tiles", plan)
    out = o.room("attended", 2 * n_seq * n * heads.n_head * heads.head_size)
    asked: dict[str, Any] = {"batch": batch, "out": out, "scale": heads.head_size**-0.5, "q": None}
    if n == 1:
        asked |= {"projected": _projected(o, heads, n_seq), "rotation": _rotation(o, heads)}
    else:
        asked["q"] = o.halves("q", n_seq * n * heads.n_head, heads.row).data

    def enqueue() -> None:
        now = Asked(pages=pages(), **asked)
        if prefill_attention:
            prefill_attention.launch(now, tiles, len(plan))
        else:
            attend.launch(now, tiles, len(plan), int(plan[:, 2].max()))

    return enqueue


Pages = Callable[[], tuple[Any, Any]]  # keys and values of the next launch


def _pages(o: Operands, heads: Heads, n: int) -> Pages:
    window = o.numbers(np.float16, n * heads.key_bytes // 2)
    return lambda: (window(), window())


def _halves(o: Operands, heads: Heads, n: int, pages: Pages) -> Pages:
    """What n pages become, which a call enqueues."""
    kernel = o.made((heads, "halve"), lambda: HalvePages(o.device, heads))
    listed = o.integers("listed pages", np.column_stack([np.arange(n), np.zeros(n)]).astype("i4"))
    made = as_halves(heads)
    halves = o.room("k as halves", n * made.key_bytes), o.room("v as halves", n * made.value_bytes)

    def halve() -> tuple[Any, Any]:
        kernel.launch(pages(), halves, listed, n)
        return halves

    return halve


def _projected(o: Operands, heads: Heads, n: int) -> list[Any]:
    counts = (heads.n_head, heads.n_head_kv, heads.n_head_kv)
    names = ("q", "new k", "new v")
    return [
        o.floats(name, n * count, heads.head_size).data
        for name, count in zip(names, counts, strict=True)
    ]


def _rotation(o: Operands, heads: Heads) -> Rotation:
    def upload() -> Any:
        values = turns(500000.0 ** (-np.arange(0, heads.head_size, 2) / heads.head_size))
        buffer = o.device.alloc(values.nbytes, "rope")
        o.device.upload(buffer, values)
        return buffer

    size = heads.head_size
    return Rotation(turns=o.made(("turns", size), upload), n_pairs=size // 2, neox=False)


def halve_case(model: str, s: Dimensions, n: int, type: str) -> KernelCase:
    """Keys and values of n positions, which a prompt sees, to halves."""
    heads = Heads(s.n_head, s.n_head_kv, s.head_size, PAGE_SIZE, CacheTypes(type, type))
    n_pages, made = -(-n // PAGE_SIZE), as_halves(heads)

    def prepare(o: Operands) -> Enqueue:
        halves = _halves(o, heads, n_pages, _pages(o, heads, n_pages))

        def enqueue() -> None:
            halves()

        return enqueue

    sizes = (heads.key_bytes, heads.value_bytes, made.key_bytes, made.value_bytes)
    shape = f"{s.n_head_kv}x{s.head_size}"
    nbytes = n_pages * sum(sizes)
    return KernelCase("halve pages", model, type.upper(), shape, n, nbytes, 0, prepare)


def rope_case(model: str, s: Dimensions, n: int) -> KernelCase:
    """A prompt's heads, rotated and written to pages."""
    heads = Heads(s.n_head, s.n_head_kv, s.head_size, PAGE_SIZE)

    def prepare(o: Operands) -> Enqueue:
        kernel = o.made(("rope", heads), lambda: RopeKv(o.device, heads))
        batch, _, _, n_pages = _step(o, 1, 0, n)
        projected, rotation = _projected(o, heads, n), _rotation(o, heads)
        pages, q = _pages(o, heads, n_pages), o.room("rotated", 2 * n * heads.n_head * heads.row)
        return lambda: kernel.launch(projected, rotation, batch, n, pages(), q)

    count = s.n_head + 2 * s.n_head_kv
    shape = f"{s.n_head}/{s.n_head_kv}x{s.head_size}"
    nbytes = n * count * (4 * s.head_size + 2 * heads.row)
    return KernelCase("rope_kv", model, "F16", shape, n, nbytes, 0, prepare)
