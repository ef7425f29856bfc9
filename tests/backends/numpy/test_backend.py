"""The reference ops before and after the layers, and the promises about the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_ops import random, shape_of, step, tensor

from ggpy.backends import host
from ggpy.backends.interface import CacheGroup, CacheShape, Head, Norm, PagedKV, Role
from ggpy.backends.numpy.backend import Reference
from ggpy.sampling import Sampler, SamplingParams

D = 32
TABLE = Role("V D")


@pytest.fixture
def ops() -> Reference:
    return Reference(1)


def test_logits(ops):
    x, norm, table = random(3, D), Norm(random(D), 1e-5), ops.weight(tensor(random(100, D)), TABLE)
    s = step([0, 1, 2], [0] * 3, [[0]], rows=[2, 0])
    n = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm.weight
    plain = (n @ table.array.T)[[2, 0]]
    np.testing.assert_allclose(ops.logits(x, Head(norm, table), s), plain, atol=1e-4)
    capped = ops.logits(x, Head(norm, table, soft_cap=2.0, scale=0.3), s)
    np.testing.assert_allclose(capped, 2 * np.tanh(plain * 0.3 / 2), atol=1e-4)


def test_embed_takes_ids_and_what_was_sampled_last(ops):
    table = ops.weight(tensor(random(100, D)), TABLE)
    samplers = [Sampler(SamplingParams(temperature=0), 100) for _ in range(2)]
    ops.sample(np.eye(2, 100, 40, dtype=np.float32), samplers)
    s = step([0, 1, 2], [0] * 3, [[0]])
    s.ids[:] = [5, ~1, ~0]
    np.testing.assert_allclose(ops.embed(s, table, 2.0), 2 * table.array[[5, 41, 40]])
    assert s.ids.tolist() == [5, -2, -1], "the step is the caller's"


def test_a_step_before_the_cache_is_refused(ops):
    from random_decoder import decode_step, random_decoder

    decoder = random_decoder(Reference(1))
    with pytest.raises(RuntimeError, match="allocate_cache comes before the first step"):
        ops.run(decode_step(1), lambda s: ops.mix(random(1, 256), decoder.layers[0], s))


def test_cache_that_does_not_fit_says_which_would(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 10_000_000)
    group = CacheGroup(PagedKV(8, 8, 64, 64), tuple(range(10)), 100)  # 2.6 MB a page
    expected = "6400 positions needs 0.3 GB, 0.0 GB are free: a context of 192 tokens would fit"
    with pytest.raises(MemoryError, match=expected):
        Reference(1).allocate_cache(CacheShape((group,)))


def test_a_window_that_does_not_fit_leaves_less_for_the_context(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 10_000_000)
    window = CacheGroup(PagedKV(8, 8, 64, 64, window=100), (0, 1), 10)  # 0.5 MB a page
    whole = CacheGroup(PagedKV(8, 8, 64, 64), (2, 3), 100)
    with pytest.raises(MemoryError, match="a context of 576 tokens would fit"):
        Reference(1).allocate_cache(CacheShape((window, whole)))


def test_groups_have_their_own_sizes_and_types(ops):
    specs = [PagedKV(4, 2, 8, 16), PagedKV(4, 1, 64, 32, window=64)]
    ops.allocate_cache(shape_of(5, *specs))
    arrays = [(g.keys.array, g.values.array) for g in ops._cache]
    assert [[a.shape for a in pair] for pair in arrays] == [
        [(1, 5, 64, 2, 8), (1, 5, 64, 2, 16)],
        [(1, 5, 64, 1, 64), (1, 5, 64, 1, 32)],
    ]
