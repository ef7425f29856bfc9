"""Keys and values of every type from end to end: both backends, memory, and command lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import nmse

import ggpy
from ggpy import arch
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import CacheGroup, CacheShape, PagedKV, Step
from ggpy.backends.numpy import kv_pages
from ggpy.backends.numpy.backend import Reference
from ggpy.cache_types import CACHE_TYPES, USUAL, CacheTypes
from ggpy.cli import run
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.kernels.attention.prefill_attention import PrefillAttention

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"
# Of single rows of logits, whatever the types; beyond that, a number that rounding sends to the
# next code is off by as much as the type is coarse.
BETWEEN_BACKENDS = 4e-5
GROUP = CacheGroup(PagedKV(4, 2, 64, 64), layers=(0, 1), n_pages=3)
SHAPE = CacheShape((GROUP,))
IDS = np.random.default_rng(0).integers(5, 350, 80).tolist()


def logits_of(ops: Any, model: str, types: CacheTypes) -> list[np.ndarray]:
    """Of a prompt of 70 tokens, of the same in one step with a second sequence, and of 3 steps."""
    with File(TINY / f"{model}.gguf") as file:
        decoder = arch.load(file, ops, 128, n_seq=2, cache_types=types)
    shape = decoder.cache_shape(2, 128, 128)
    ops.allocate_cache(shape)
    tables = (np.array([[3, 1], [0, 2]], np.int32),) * len(shape.groups)

    def logits(parts: list[tuple[int, int, int]]) -> np.ndarray:
        """parts: sequence, first position, tokens."""
        spans = [np.arange(first, first + n) for _, first, n in parts]
        positions = np.concatenate(spans).astype(np.int32)
        sequences = np.repeat([s for s, _, _ in parts], [n for _, _, n in parts]).astype(np.int32)
        ids = np.array([IDS[p] for p in positions], np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        return ops.read(decoder.run(Step(ids, positions, sequences, tables, rows))).copy()

    steps = [[(0, 0, 70)], [(0, 70, 2), (1, 0, 9)]]
    steps += [[(0, 72 + i, 1), (1, 9 + i, 1)] for i in range(3)]  # directly, recorded, replayed
    return [logits(parts) for parts in steps]


@pytest.mark.parametrize(
    "model, k, v",
    [
        ("qwen3", "q8_0", "q8_0"),
        ("gemma2", "q5_1", "q4_0"),
        ("gemma3", "q4_1", "q5_0"),
        ("llama", "bf16", "f32"),
    ],
)
@pytest.mark.parametrize("prompts_from", [8, 1000])
def test_both_backends_keep_the_same(machine, monkeypatch, model, k, v, prompts_from):
    """A GPU is much nearer to numpy with the same types than numpy is to itself without them;
    whether prompts have attention of their own, or not.
    """
    monkeypatch.setattr(PrefillAttention, "min_tokens", prompts_from)
    types = CacheTypes(k, v)
    got = logits_of(Cuda(machine), model, types)
    wanted, exact = (logits_of(Reference(1), model, t) for t in (types, USUAL))
    for mine, same, other in zip(got, wanted, exact, strict=True):
        cost = nmse(same, other)
        assert cost > 1e-5, "nothing was rounded"
        assert nmse(mine, same) <= BETWEEN_BACKENDS + cost / 5


def test_numpy_keeps_float32_unless_asked():
    exact = logits_of(Reference(1), "qwen3", USUAL)
    for types, tolerance in (("f32", 0), ("f16", 1e-5), ("q8_0", 1e-3), ("q4_0", 0.1)):
        kept = logits_of(Reference(1), "qwen3", CacheTypes(types, types))
        errors = [nmse(a, b) for a, b in zip(kept, exact, strict=True)]
        assert max(errors) <= tolerance


@pytest.mark.parametrize("type", CACHE_TYPES)
def test_pages_of_numpy(type):
    """What is read is what the format makes of what was written, position by position."""
    pages = kv_pages.Pages(GROUP, 64, type)
    x = np.random.default_rng(1).standard_normal((70, 2, 64)).astype(np.float32)
    places = np.arange(70)
    pages.write(1, np.array([2, 0])[places // 64], places % 64, x)
    format = by_name(type)
    wanted = format.dequantize(format.quantize(x[3:68]))
    np.testing.assert_array_equal(pages.read(1, np.array([2, 0]), 3, 68), wanted)
    assert not pages.read(0, np.array([2, 0]), 0, 64).any()


@pytest.mark.parametrize("type, limit", [("f16", 65504), ("q8_0", 65500), ("q4_1", 65500)])
def test_pages_of_numpy_saturate(type, limit):
    pages = kv_pages.Pages(GROUP, 64, type)
    x = np.full((1, 2, 64), 1e6, np.float32)
    x[0, 0, 0], x[0, 1, 40] = -np.inf, np.nan
    pages.write(0, np.zeros(1, int), np.zeros(1, int), x)
    got = pages.read(0, np.zeros(1, int), 0, 1)[0]
    assert np.isnan(got[1, 40]) and np.isfinite(got[0]).all()
    np.testing.assert_allclose(got[0], [-limit, *[limit] * 63], rtol=2e-3)


def test_spreading_keeps_products_and_shares_out_what_is_large():
    x, y = np.random.default_rng(2).standard_normal((2, 5, 3, 96)).astype(np.float32)
    spread = kv_pages.spread
    np.testing.assert_allclose((spread(x) * spread(y)).sum(-1), (x * y).sum(-1), atol=1e-4)
    np.testing.assert_allclose(spread(spread(x)), x, atol=1e-5)
    alone = np.zeros((1, 64), np.float32)
    alone[0, 40] = 8
    np.testing.assert_allclose(np.abs(spread(alone)[0]), [0.0] * 32 + [8 / 32**0.5] * 32, rtol=1e-6)
    assert np.isfinite(spread(np.full((1, 32), np.inf, np.float32))).all()


# Memory


def shape_of(types: CacheTypes) -> CacheShape:
    return CacheShape((replace(GROUP, spec=replace(GROUP.spec, types=types)),))


def test_sizes_follow_the_types_of_keys_and_of_values():
    types = CacheTypes("q8_0", "q4_1")
    assert types.nbytes(64) == 2 * (34 + 20)
    assert types.nbytes(96, 32) == 3 * 34 + 20
    types.check_head(32, 64)
    with pytest.raises(ValueError, match=r"-ctv q4_1 keeps 32 elements .* heads have 48: choose"):
        types.check_head(32, 48)


def test_a_full_machine_says_what_fits_in_the_type(monkeypatch):
    free = 64 * 2 * 2 * 2 * (34 + 34) * 2  # two pages
    monkeypatch.setattr(kv_pages.host, "available_memory", lambda: free)
    with pytest.raises(MemoryError, match=r"192 positions .* a context of 128 tokens would fit"):
        kv_pages.check_memory(shape_of(CacheTypes("q8_0", "q8_0")))
    with pytest.raises(MemoryError, match="no context would fit"):
        kv_pages.check_memory(SHAPE)


# What cannot be


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_heads_of_no_whole_blocks_are_refused_before_weights_are_read(request, device):
    ops = Reference(1) if device == "cpu" else Cuda(request.getfixturevalue("emulator"))
    ops.weight = None  # type: ignore[method-assign, assignment]
    with (
        File(TINY / "llama.gguf") as file,
        pytest.raises(ValueError, match=r"-ctv q5_0 keeps 32 elements .* heads have 16"),
    ):
        arch.load(file, ops, 64, cache_types=CacheTypes("f16", "q5_0"))


def test_unknown_types_are_refused():
    with pytest.raises(ValueError, match="'q2_k'; known: f32, f16, bf16, q8_0"):
        ggpy.load(TINY / "qwen3.gguf", "cpu", cache_type_k="q2_k")


# Programs


def test_a_library_user_may_choose():
    with ggpy.load(TINY / "qwen3.gguf", "cpu", n_ctx=64, cache_type_k="q8_0") as model:
        (group,) = model.engine.cache.shape.groups
        assert group.spec.types == CacheTypes("q8_0", "auto")
        assert len(list(model.generate("hello", max_tokens=3, temperature=0))) == 3


def test_run_takes_the_options_and_tells_with_v(capsys):
    words = [str(TINY / "qwen3.gguf"), "--device", "cpu", "--no-chat", "-p", "hello", "-n", "2"]
    assert run.main([*words, "-v", "-ctk", "q8_0"]) == 0
    said = f"KV cache: q8_0 and f32, {2 * 2 * (34 + 128)} bytes a position, 256 positions for 2"
    assert f"{said} layers\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [(["-ctk", "q4_0"], "-ctk q4_0 keeps 32"), (["--cache-type-v", "q6_k"], "invalid choice")],
)
def test_run_refuses_in_one_line(capsys, words, message):
    try:
        status = run.main([str(TINY / "llama.gguf"), "--device", "cpu", "-p", "x", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
