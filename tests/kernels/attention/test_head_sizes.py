"""Attention of every even head size: one token, a chunk of tokens, and a prompt, against float64.

Buffers end where the last head does, so that a write behind a head is seen: in the next head, or in
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

from ggpy.kernels.attention.prefill_attention import AttendPrompt
from ggpy.kernels.attention.rope_kv import MAX_HEAD, Heads
from ggpy.kernels.gemm.hopper import has_wgmma

NMSE = 5e-6
ROWS = range(32, MAX_HEAD + 1, 32)  # elements of a head in memory: an instance each
STEPS = {
    "decode": Sequences([70], [1]),
    "chunk": Sequences([70], [5]),
    "two chunks": Sequences([9, 67], [3, 4]),
}
PROMPT = Sequences([75], [40])
KINDS = ["emulator", "gpu"]


def sizes(row: int) -> range:
    """The even head sizes that lie in rows of so many elements."""
    return range(row - 30, row + 1, 2)


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
    """What decode launches: q, k and v are rotated and stored by attention itself."""
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
    """Keys and values in blocks of 32, of which heads are a multiple."""
    h, s = typed(*types, 2, 1, row), STEPS[step]
    check(Attention(device, h).run, h, s, fill_typed(device, h, s))


def prompt_kernels(device: Any, row: int) -> list[bool]:
    """Which kernels for prompts the device has for such heads, as AttendPrompt's wgmma."""
    h = heads(2, 1, row)
    return [wgmma for wgmma in (False, True) if AttendPrompt.is_supported(device, h, wgmma)]


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
    """On Hopper both are among the tests above."""
    found = {row: prompt_kernels(gpu, row) for row in ROWS}
    assert found[128] == ([False, True] if has_wgmma(gpu.arch) else [False])


@pytest.mark.parametrize("size", [0, 1, 63, 101, 255, 258, 320])
def test_other_sizes_are_refused_by_name_and_value(size: int) -> None:
    with pytest.raises(ValueError, match=f"attention.key_length is {size}: .* --device cpu$"):
        heads(2, 1, size)
