"""Attention of every even head size against float64: a single token, a chunk of tokens, a prefill.

Buffers end with the last head, so that a write past the end of a head shows in the next head or in
the guard bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import (
    Attention,
    PromptAttention,
    Sequences,
    Turn,
    expected,
    fill,
    frequencies,
    heads,
    random,
)
from cache_cases import fill as fill_typed
from cache_cases import typed
from cases import nmse

from ggpy.kernels.attention.prefill_attention import PrefillAttention
from ggpy.kernels.attention.rope_kv import MAX_HEAD, USUAL_HEAD, Heads
from ggpy.kernels.gemm.hopper import has_wgmma

NMSE = 5e-6
# elements of a head in memory; each row is an instance of the kernel
ROWS = (*range(32, USUAL_HEAD + 1, 32), MAX_HEAD)
STEPS = {
    "decode": Sequences([70], [1]),
    "chunk": Sequences([70], [5]),
    "two chunks": Sequences([9, 67], [3, 4]),
}
PROMPT = Sequences([75], [40])
KINDS = ["emulator", "gpu"]


def sizes(row: int) -> range:
    """The even head sizes whose row has this many elements; of wide heads some."""
    return range(row - 30, row + 1, 2 if row <= USUAL_HEAD else 30)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def check(run: Any, h: Heads, s: Sequences, filled: Any) -> None:
    pages, q, contents = filled
    options = {"scale": h.head_size**-0.5}
    o = run(s, pages, q=q, **options)
    assert nmse(o, expected(h, s, q, contents, **options)) <= NMSE, f"heads of {h.head_size}"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("row", ROWS)
def test_tokens(device: Any, row: int, step: str) -> None:
    for size in sizes(row):
        h, s = heads(2, 1, size), STEPS[step]
        check(Attention(device, h).run, h, s, fill(device, h, s))


@pytest.mark.parametrize("row", ROWS)
def test_a_token_rotated_inside(device: Any, row: int) -> None:
    """The FUSED kernel of decode rotates q, k and v and stores k and v."""
    for size in sizes(row):
        h, s = heads(2, 1, size), STEPS["decode"]
        turn = Turn(frequencies(size // 2))
        pages, _, [(k, v)] = fill(device, h, s)
        parts = [random(1, n, size, seed=i) for i, n in enumerate((2, 1, 1))]
        o = Attention(device, h).run(s, pages, turn=turn, parts=parts, scale=size**-0.5)
        q, k[-1:], v[-1:] = (turn.apply(i, x, s.positions) for i, x in enumerate(parts))
        e = expected(h, s, q.astype(np.float16), [(k, v)], scale=size**-0.5)
        assert nmse(o, e) <= NMSE, f"heads of {size}"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q8_0", "q5_1")], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_tokens_with_blocks(device: Any, row: int, types: tuple[str, str], step: str) -> None:
    """A KV cache in block formats, whose rows are multiples of 32 elements."""
    h, s = typed(*types, 2, 1, row), STEPS[step]
    check(Attention(device, h).run, h, s, fill_typed(device, h, s))


def prompt_kernels(device: Any, row: int) -> list[bool]:
    """The prefill kernels that the device supports for such heads, as values of PrefillAttention's
    wgmma.
    """
    h = heads(2, 1, row)
    return [wgmma for wgmma in (False, True) if PrefillAttention.is_supported(device, h, wgmma)]


@pytest.mark.parametrize("row", ROWS)
def test_prompts(device: Any, row: int) -> None:
    for wgmma in prompt_kernels(device, row):
        for size in sizes(row):
            h = heads(2, 1, size)
            run = PromptAttention(device, h, wgmma).run
            check(run, h, PROMPT, fill(device, h, PROMPT))


@pytest.mark.parametrize("row", ROWS)
def test_prompts_with_blocks(device: Any, row: int) -> None:
    for wgmma in prompt_kernels(device, row):
        h = typed("q8_0", "q5_1", 2, 1, row)
        run = PromptAttention(device, h, wgmma).run
        check(run, h, PROMPT, fill_typed(device, h, PROMPT))


def test_which_kernels_are_for_prompts(gpu: Any) -> None:
    """On Hopper the tests above run both kernels."""
    found = {row: prompt_kernels(gpu, row) for row in ROWS}
    assert found[128] == ([False, True] if has_wgmma(gpu.arch) else [False])


@pytest.mark.parametrize("size", [0, 1, 63, 101, 255, 514, 576])
def test_other_sizes_are_refused_by_name_and_value(size: int) -> None:
    with pytest.raises(ValueError, match=f"attention.key_length is {size}: .* --device cpu$"):
        heads(2, 1, size)
