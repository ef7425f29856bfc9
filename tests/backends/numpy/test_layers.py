"""What the kinds of layers compute, against plain float64 formulas: field by field, then together.

Attention runs over pages that are no neighbours, and in several blocks of queries.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plain_layers
import pytest
from numpy_ops import random, shape_of, step, tensor
from random_decoder import BEHIND, DIFFERING, EVERYTHING, USUAL, V, random_decoder

from ggpy.backends.interface import (
    INNER,
    PAGE_SIZE,
    Attention,
    AttentionTemperature,
    Dense,
    Layer,
    Norm,
    PagedKV,
    Role,
    Rope,
)
from ggpy.backends.numpy import attention, delta
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.runtime.engine import Engine

H, G, E, D, F = 4, 2, 8, 32, 48
ROPE = Rope("neox", 10000.0 ** (-np.arange(E // 2) / (E // 2)))
SPEC = PagedKV(H, G, E, E)
NORM = Norm(np.ones(D, np.float32), 1e-5)
N = 2 * PAGE_SIZE + 7
OPS = Reference(1)


def matrix(rows: int, columns: int, seed: int = 0):
    w = random(rows, columns, seed=seed) / np.float32(columns**0.5)
    return OPS.weight(tensor(w), Role("F D"))


def mixer(**changes) -> Attention:
    s = changes.pop("spec", SPEC)
    sizes = {"wq": s.n_head * s.key_size, "wk": s.n_head_kv * s.key_size}
    sizes["wv"] = s.n_head_kv * s.value_size
    weights = {name: matrix(rows, D, i) for i, (name, rows) in enumerate(sizes.items())}
    weights["wo"] = matrix(D, s.n_head * s.value_size, 3)
    values = dict(spec=s, group=0, slot=0, norm=NORM, rope=ROPE, scale=1.5)
    return Attention(**{**values, **weights, **changes})


BIASES = {"bq": H * E, "bk": G * E, "bv": G * E, "bo": D}
MIXERS = {
    "usual": {},
    **{f"window {w}": {"spec": replace(SPEC, window=w)} for w in (1, 5, 64, 65, 100, 1000)},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": random(H)},
    "sinks in a window": {"sinks": random(H), "spec": replace(SPEC, window=5)},
    "values are smaller": {"spec": replace(SPEC, value_size=3)},
    "values are larger": {"spec": replace(SPEC, value_size=12)},
    "one head of keys": {"spec": PagedKV(6, 1, E, 5)},
    "no positions": {"rope": None},
    "pairs of neighbours": {"rope": replace(ROPE, style="norm", magnitude=1.2)},
    "a part is rotated": {"rope": Rope("neox", ROPE.inv_freq[:2])},
    **{name: {name: random(n, seed=9)} for name, n in BIASES.items()},
    "norms of heads": {"q_norm": Norm(random(E) + 2, 1e-6), "k_norm": Norm(random(E, seed=1), 0.1)},
    "layer norms of heads": {"q_norm": Norm(random(E) + 2, 1e-6, random(E, seed=4), True)},
    "layer norm": {"norm": Norm(random(D), 1e-3, random(D, seed=5), True)},
    "post norm": {"post_norm": Norm(random(D), 1e-3)},
    "residual scale": {"residual_scale": 0.3, "bo": random(D)},
    "no norm": {"norm": None},
    "norms of all heads": {
        **{"q_norm": Norm(random(H * E) + 2, 1e-6), "k_norm": Norm(random(G * E) + 1, 0.1)},
        "norm_whole": True,
    },
    "norms after rope": {
        **{"q_norm": Norm(random(E) + 2, 1e-6), "k_norm": Norm(random(E, seed=1), 0.1)},
        "norm_after_rope": True,
    },
    "temperature": {"temperature": AttentionTemperature(0.5, 40)},
    "all of it": {
        **{name: random(n, seed=9) for name, n in BIASES.items()},
        **{"soft_cap": 3.0, "sinks": random(H), "spec": replace(SPEC, window=40)},
        **{"post_norm": Norm(random(D), 1e-3, random(D, seed=3), True), "residual_scale": 2.0},
    },
}


@pytest.mark.parametrize("changes", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("table", [[0, 1, 2], [4, 1, 3]])
def test_attention(monkeypatch, changes, table):
    monkeypatch.setattr(attention, "CHUNK_SCORES", 5000)  # several blocks of queries
    a, ops, x = mixer(**changes), Reference(1), random(N, D)
    ops.allocate_cache(shape_of(6, a.spec))
    got = ops.mix(x, Layer(0, a, None), step(list(range(N)), [0] * N, [table]))
    expected = plain_layers.mixed(x.astype(float), a)
    assert np.abs(expected - x).max() > 0.1, "it adds nothing"
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_every_variation_of_attention_differs():
    """Else a field could be ignored on both sides."""
    seen = {
        name: plain_layers.mixed(random(N, D).astype(float), mixer(**c))
        for name, c in MIXERS.items()
    }
    last = {name: y[-1].round(5).tobytes() for name, y in seen.items()}
    same = {"window 1000": "usual"}  # more than there are positions
    assert all(last[a] == last[b] for a, b in same.items())
    assert len(set(last.values())) == len(last) - len(same)


def test_pages_before_the_window_are_not_read():
    """Their entries are 0, where another sequence may be."""
    a, x = mixer(spec=replace(SPEC, window=70)), random(3 * PAGE_SIZE, D)
    layer, ops = Layer(0, a, None), Reference(1)
    ops.allocate_cache(shape_of(6, a.spec))
    n = len(x)
    ops.mix(x[:-1], layer, step(list(range(n - 1)), [0] * (n - 1), [[3, 1, 5]]))
    ops._cache[0].keys.array[0, 0] = np.nan
    ops._cache[0].values.array[0, 0] = np.nan
    got = ops.mix(x[-1:], layer, step([n - 1], [0], [[0, 1, 5]]))
    expected = plain_layers.mixed(x.astype(float), a)[-1:]
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_keys_and_values_go_to_their_slot_and_pages():
    a, ops = mixer(slot=1, rope=None), Reference(1)
    shape = shape_of(4, a.spec)
    ops.allocate_cache(replace(shape, groups=(replace(shape.groups[0], layers=(3, 7)),)))
    x = random(3, D)
    ops.mix(x, Layer(7, a, None), step([7, 8, 9], [0, 0, 0], [[2]]))
    normed = plain_layers.norm(x.astype(float), a.norm)
    keys, values = ops._cache[0].keys.array, ops._cache[0].values.array
    for array, w in ((keys, a.wk), (values, a.wv)):
        expected = (normed @ w.array.T).reshape(3, G, E)
        np.testing.assert_allclose(array[1, 2, 7:10], expected, atol=1e-5)
        array[1, 2, 7:10] = 0
        assert not array.any(), "nothing else is written"


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": Norm(random(D), 1e-3, random(D, seed=5), True)},
        {"post_norm": Norm(random(D), 1e-3)},
        {"residual_scale": 0.3},
        {"norm": None},
    ],
    ids=["usual", "layer norm", "post norm", "residual scale", "no norm"],
)
def test_dense(name, changes):
    weights = {"w_gate": matrix(F, D, 1), "w_up": matrix(F, D, 2), "w_down": matrix(D, F, 3)}
    ffn = Dense(**{"norm": NORM, "activation": name, **weights, **changes})
    x = random(5, D) * 3
    got = OPS.feed_forward(x, Layer(0, mixer(), ffn), step([0] * 5, [0] * 5, [[0]]))
    np.testing.assert_allclose(got, plain_layers.fed_forward(x.astype(float), ffn), atol=1e-4)


def test_parallel_halves_take_the_same_x():
    weights = {"w_gate": matrix(F, D, 1), "w_up": matrix(F, D, 2), "w_down": matrix(D, F, 3)}
    ffn = Dense(norm=NORM, activation="silu", **weights)
    a, ops, x = mixer(), Reference(1), random(5, D)
    ops.allocate_cache(shape_of(1, a.spec))
    given = step(list(range(5)), [0] * 5, [[0]])
    got = ops.mix(x, Layer(0, a, ffn, parallel=True), given)
    both = plain_layers.mixed(x.astype(float), a) + plain_layers.fed_forward(x.astype(float), ffn)
    np.testing.assert_allclose(got, both - x, atol=1e-4, rtol=1e-4)
    told = []
    layer = Layer(0, a, ffn, parallel=True)
    ops.run(given, lambda s: ops.mix(x, layer, s), lambda *seen: told.append(seen[1]))
    assert told == list(INNER)


def test_a_probe_is_told_what_layers_compute_inside():
    told: list[tuple[int, str]] = []
    seen = {}

    def probe(layer, name, array):
        told.append((layer, name))
        seen[layer, name] = array

    decoder = random_decoder(OPS, variation=DIFFERING)
    one = step([0], [0], *[[[0]]] * 3, rows=[0])
    plain = OPS.run(one, decoder.forward)
    np.testing.assert_array_equal(OPS.run(one, decoder.forward, probe), plain)
    assert told == [(layer, name) for layer in range(4) for name in INNER]
    assert seen[1, "qkv"].shape == (1, 8, 32) and seen[1, "attention"].shape == (1, 8 * 64)
    assert seen[2, "ffn_act"].shape == (1, 256)
    np.testing.assert_array_equal(OPS.logits(seen[3, "ffn_out"], decoder.head, one), plain)
    told.clear()
    OPS.run(one, decoder.forward)
    assert not told


@pytest.mark.parametrize(
    "variation",
    [USUAL, BEHIND, DIFFERING, EVERYTHING],
    ids=["usual", "behind", "differing", "everything"],
)
@pytest.mark.parametrize("n_batch", [16, 512])
def test_a_decoder_whose_layers_differ(variation, n_batch):
    """In the engine, prompts in chunks, with pages of windows given back."""
    ops, n = Reference(1), 300
    decoder = random_decoder(ops, {"attn_q": "F32", "ffn_down": "Q4_0"}, variation=variation)
    groups = decoder.cache_shape(1, n, n_batch).groups
    assert [group.layers for group in groups] == (
        [(0, 1, 2)] if variation in (USUAL, BEHIND) else [(0, 3), (1,), (2,)]
    )
    ids = np.random.default_rng(5).integers(0, V, n).tolist()
    got = Engine(decoder, ops, NoText(), n, n_batch).logits(ids)
    expected = plain_layers.logits(decoder, ids)
    assert expected.std() > 0.1
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("n", [1, 9, 64])
def test_chunks_of_a_gated_delta_net_are_the_recurrence(n):
    """Also where a state decays to nothing within a few tokens."""
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((3, n, 8)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.random((3, n)).astype(np.float32)
    decay = -(np.array([[0.01], [1], [200]]) * rng.random((3, n))).astype(np.float32)
    m = rng.standard_normal((3, 8, 8)).astype(np.float32)
    for found, expected in zip(
        delta.scan_chunk(q, k, v, beta, decay, m),
        delta.recur(q, k, v, beta, decay, m),
        strict=True,
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5)
