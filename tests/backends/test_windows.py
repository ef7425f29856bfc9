"""A model whose layers see a window, beyond it, on both backends: pages are given back in between,
and what the table says of them is 0, where another sequence's NaN may be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import nmse

from ggpy import arch
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import PAGE_SIZE
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.sampling import SamplingParams

N_CTX, N_BATCH = 320, 48
GREEDY = SamplingParams(temperature=0)
IDS = np.random.default_rng(0).integers(5, 450, N_CTX).tolist()


def engine_on(path: Path, ops: Any) -> Engine:
    with File(path) as file:
        decoder = arch.load(file, ops, N_CTX, n_seq=2, n_batch=N_BATCH)
    return Engine(decoder, ops, NoText(), N_CTX, N_BATCH, n_seq=2)


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()
    assert engine.cache.n_free == engine.cache.n_pages


@pytest.mark.parametrize("model", ["gemma2", "gemma3"])
def test_both_backends_agree_beyond_the_window(
    machine: Any, tiny_path: Callable[[str], Path], model: str
) -> None:
    engines = [engine_on(tiny_path(model), ops) for ops in (Cuda(machine), Reference(1))]
    pool = next(pool for pool in engines[0].cache.pools if pool.window)
    assert pool.n_pages < 2 * N_CTX // PAGE_SIZE
    got, wanted = (engine.logits(IDS[:200]) for engine in engines)
    assert nmse(got, wanted) < 1e-4
    texts = []
    for engine in engines:
        answers = [engine.add(IDS[:n], GREEDY, max_tokens=4) for n in (190, 126)]  # over a page
        finish(engine)
        texts.append([[p.id for p in s.pieces] for s in answers])
    assert texts[0] == texts[1]


def spoil_first_pages(ops: Cuda) -> None:
    """Page 0 of every layer is NaN."""
    memory = ops.attention.pages
    for g in memory._groups:
        parts = [(g.keys, g.heads.key_bytes), (g.values, g.heads.value_bytes)]
        for layer in range(g.n_layer):
            for buffer, page in parts:
                ops.device.fill(buffer.part(layer * g.n_pages * page, page), 0xFF)


@pytest.mark.parametrize("n_prompt", [1, 40], ids=["decode", "prefill"])
def test_the_page_that_stands_for_none_is_not_seen(
    machine: Any, tiny_path: Callable[[str], Path], n_prompt: int
) -> None:
    """Another sequence has page 0, and it is full of NaN."""
    path, texts = tiny_path("gemma3"), []
    for is_nan in (False, True):
        engine = engine_on(path, Cuda(machine))
        other = engine.add(IDS[:20], GREEDY, max_tokens=1, keep=True)
        while engine.busy:
            engine.step()
        assert all(0 in table.pages for table in other.pages.tables)
        first = engine.add(IDS[3:200], GREEDY, max_tokens=1, keep=True)
        while engine.busy:
            engine.step()
        table = next(table for table in first.pages.tables if table.pool.window)
        assert table.first > 0
        if is_nan:
            spoil_first_pages(engine.ops)
        longer = [*first.ids[:-1], *IDS[:n_prompt]]
        second = engine.add(longer, GREEDY, max_tokens=2, previous=first)
        while engine.busy:
            engine.step()
        assert second.finish == "length" and second.n_reused > 190
        texts.append([p.id for p in second.pieces])
    assert texts[0] == texts[1]
