"""The reference ops against their formulas, written out, and the promises about memory."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggpy.backends import host
from ggpy.backends.interface import (
    PAGE_SIZE,
    Attention,
    CacheShape,
    FeedForward,
    Head,
    Norm,
    Rope,
    Step,
)
from ggpy.backends.numpy import backend as reference
from ggpy.backends.numpy.backend import Reference
from ggpy.formats import by_name
from ggpy.gguf import Tensor
from ggpy.sampling import Sampler, SamplingParams

H, G, E, D = 4, 2, 8, 32
ROPE = Rope("neox", 10000.0 ** (-np.arange(E // 2) / (E // 2)))


def tensor(array: np.ndarray, kind: str = "F32") -> Tensor:
    format = by_name(kind)
    return Tensor("t", array.shape, format, format.quantize(array))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def step(positions: list[int], sequences: list[int], tables: list[list[int]], rows=()) -> Step:
    as_int = [np.array(x, np.int32) for x in (positions, sequences, tables, list(rows))]
    return Step(np.zeros(len(positions), np.int32), *as_int)


def attention(ops: Reference, **changes) -> Attention:
    names = {"wq": H * E, "wk": G * E, "wv": G * E}
    weights = {
        n: ops.weight(tensor(random(rows, D, seed=i))) for i, (n, rows) in enumerate(names.items())
    }
    norm = Norm(ops.weight(tensor(np.ones(D, np.float32))), 1e-5)
    values = dict(layer=0, n_head=H, n_head_kv=G, head_size=E, norm=norm, rope=ROPE, scale=0.3)
    return Attention(**{**values, **weights, **changes})


@pytest.fixture
def ops() -> Reference:
    ops = Reference(1)
    ops.allocate_cache(CacheShape(n_layer=1, n_pages=6, n_head_kv=G, head_size=E, n_head=H))
    return ops


def expected_attention(q, k, v, a: Attention, sinks=None) -> np.ndarray:
    """Head by head, position by position, in float64; q[n, H, E] of one whole sequence."""
    n, out = len(q), np.zeros(q.shape)
    for h in range(H):
        for p in range(n):
            first = max(0, p - a.window + 1) if a.window else 0
            s = (
                np.array([q[p, h].astype(float) @ k[j, h * G // H] for j in range(first, p + 1)])
                * a.scale
            )
            if a.soft_cap:
                s = a.soft_cap * np.tanh(s / a.soft_cap)
            e = np.exp(s)
            total = e.sum() + (np.exp(sinks[h]) if sinks is not None else 0)
            out[p, h] = (e / total) @ v[first : p + 1, h * G // H]
    return out.reshape(n, -1)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [None, random(H)])
@pytest.mark.parametrize("table", [[0, 1, 2], [4, 1, 3]])
def test_attend(ops, monkeypatch, window, soft_cap, sinks, table):
    monkeypatch.setattr(reference, "CHUNK_SCORES", 5000)  # several blocks of queries
    n = 2 * PAGE_SIZE + 7
    a = attention(ops, window=window, soft_cap=soft_cap, sinks=sinks)
    s = step(list(range(n)), [0] * n, [table])
    x = random(n, D)
    q = ops.qkv(x, a, s)
    pages = (ops._keys.array, ops._values.array)
    k, v = (storage[0][table].reshape(-1, G, E)[:n] for storage in pages)
    expected = expected_attention(q, k, v, a, sinks)
    np.testing.assert_allclose(ops.attend(q, a, s), expected, atol=1e-4, rtol=1e-4)


def test_qkv_projects_norms_biases_and_rotates(ops):
    b = [random(n, seed=9) for n in (H * E, G * E, G * E)]
    norms = [Norm(random(E, seed=i) + 2, 1e-6) for i in (3, 4)]
    a = attention(ops, bq=b[0], bk=b[1], bv=b[2], q_norm=norms[0], k_norm=norms[1])
    x, p = random(3, D), [7, 8, 9]
    q = ops.qkv(x, a, step(p, [0, 0, 0], [[2]]))
    n = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)

    def head_norm(y, norm):
        y = y.reshape(3, -1, E)
        return y / np.sqrt((y**2).mean(2, keepdims=True) + norm.eps) * norm.weight

    def turn(y):
        angle = np.array(p)[:, None, None] * ROPE.inv_freq
        left, right = y[..., : E // 2], y[..., E // 2 :]
        c, s = np.cos(angle), np.sin(angle)
        return np.concatenate([left * c - right * s, left * s + right * c], -1)

    np.testing.assert_allclose(q, turn(head_norm(n @ a.wq.array.T + b[0], norms[0])), atol=1e-5)
    stored = slice(7, 10)
    expected = turn(head_norm(n @ a.wk.array.T + b[1], norms[1]))
    np.testing.assert_allclose(ops._keys.array[0, 2, stored], expected, atol=1e-5)
    expected = (n @ a.wv.array.T + b[2]).reshape(3, G, E)
    np.testing.assert_allclose(ops._values.array[0, 2, stored], expected, atol=1e-5)


def test_rope_styles_and_passing_through():
    x = random(1, 1, 8)
    angle = np.array([0.5, 0.25])
    for style, pairs in (("norm", [(0, 1), (2, 3)]), ("neox", [(0, 2), (1, 3)])):
        rope = Rope(style, angle, magnitude=1.5)
        out = reference._rotate(x, rope, *reference._angles(rope, np.array([3])))
        for (i, j), t in zip(pairs, 3 * angle, strict=True):
            c, s = 1.5 * math.cos(t), 1.5 * math.sin(t)
            assert out[0, 0, i] == pytest.approx(x[0, 0, i] * c - x[0, 0, j] * s, abs=1e-5)
            assert out[0, 0, j] == pytest.approx(x[0, 0, i] * s + x[0, 0, j] * c, abs=1e-5)
        np.testing.assert_array_equal(out[..., 4:], x[..., 4:])


def test_rotation_is_exact_far_out():
    """At a million positions the angle still has its digits."""
    rope = Rope("norm", np.array([1.0]))
    cos, _ = reference._angles(rope, np.array([1_000_003], np.int32))
    assert cos[0, 0, 0] == pytest.approx(math.cos(1_000_003), abs=1e-7)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_ffn(ops, name):
    gate, up = (ops.weight(tensor(random(64, D, seed=i))) for i in (1, 2))
    norm = Norm(np.ones(D, np.float32), 0.0)
    x = random(5, D) * 3
    n = x / np.sqrt((x**2).mean(1, keepdims=True))
    z = (n @ gate.array.T).astype(float)
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    act = {"silu": z / (1 + np.exp(-z)), "gelu_tanh": z / 2 * (1 + np.tanh(inner))}[name]
    h = ops.ffn(x, FeedForward(norm, gate, up, name), step([0] * 5, [0] * 5, [[0]]))
    np.testing.assert_allclose(h, act * (n @ up.array.T), atol=1e-4)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations_survive_large_inputs(name):
    with np.errstate(all="raise", under="ignore"):
        y = reference.ACTIVATIONS[name](np.array([-1e4, -90, 0, 90, 1e4], np.float32))
    np.testing.assert_allclose(y, [0, 0, 0, 90, 1e4], atol=1e-30)


def test_linear_add_and_logits(ops):
    w, x, h = ops.weight(tensor(random(D, 64))), random(3, D), random(3, 64)
    norm = Norm(random(D), 1e-5)
    y = h @ w.array.T
    np.testing.assert_allclose(ops.linear_add(h, w, x), x + y, atol=1e-5)
    normed = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5) * norm.weight
    np.testing.assert_allclose(ops.linear_add(h, w, x, norm), x + normed, atol=1e-5)
    table = ops.weight(tensor(random(100, D)))
    s = step([0, 1, 2], [0] * 3, [[0]], rows=[2, 0])
    n = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm.weight
    plain = (n @ table.array.T)[[2, 0]]
    np.testing.assert_allclose(ops.logits(x, Head(norm, table), s), plain, atol=1e-4)
    capped = ops.logits(x, Head(norm, table, soft_cap=2.0), s)
    np.testing.assert_allclose(capped, 2 * np.tanh(plain / 2), atol=1e-4)


def test_embed_takes_ids_and_what_was_sampled_last(ops):
    table = ops.weight(tensor(random(100, D)))
    samplers = [Sampler(SamplingParams(temperature=0), 100) for _ in range(2)]
    ops.sample(np.eye(2, 100, 40, dtype=np.float32), samplers)
    s = step([0, 1, 2], [0] * 3, [[0]])
    s.ids[:] = [5, ~1, ~0]
    np.testing.assert_allclose(ops.embed(s, table, 2.0), 2 * table.array[[5, 41, 40]])
    assert s.ids.tolist() == [5, -2, -1], "the step is the caller's"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_weights_in_blocks_give_the_same(kind, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_WEIGHTS", 100)
    notes: list[str] = []
    w = tensor(random(50, 64), kind)
    roomy, full = Reference(1), Reference(1, note=notes.append, weight_memory=0)
    a, b, c = roomy.weight(w), full.weight(w), roomy.weight(w, lookup=True)
    full.weights_ready()
    assert a.array is not None and b.array is None and c.array is None
    assert "0.0 GB of the weights do not fit" in notes[0] and "in blocks" in notes[0]
    x = random(3, 64)
    np.testing.assert_allclose(b.multiply(x), a.multiply(x), atol=1e-5)
    for other in (b, c):
        np.testing.assert_array_equal(
            other.rows(np.array([3, 3, 49])), a.rows(np.array([3, 3, 49]))
        )


def test_weights_fill_the_memory_that_there_is():
    ops = Reference(1, weight_memory=4 * 100 * 32 + 10)
    w = tensor(random(100, 32))
    assert ops.weight(w).array is not None
    assert ops.weight(w).array is None, "the second one does not fit"


def test_all_fit_and_nobody_is_told():
    ops = Reference(1, note=pytest.fail)
    ops.weight(tensor(random(10, 32)))
    ops.weights_ready()


def test_cache_that_does_not_fit_says_which_would(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 10_000_000)
    shape = CacheShape(
        n_layer=10, n_pages=100, n_head_kv=8, head_size=64, n_head=8
    )  # 2.6 MB a page
    expected = "6400 positions .* need 0.3 GB, 0.0 GB are free: an n_ctx of 192 would fit"
    with pytest.raises(MemoryError, match=expected):
        Reference(1).allocate_cache(shape)
