"""The kernels of experts beside a dense feed-forward against float64: the router, which has a norm
of its own, and the sum of both.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse
from kernel_buffers import Output, upload

from ggpy.device.compile import compile_cubin
from ggpy.kernels.moe import join, route
from ggpy.kernels.moe.join import Beside, Join
from ggpy.kernels.moe.route import Route, RouterChoice, RouterWeights, Routes

X, J, D, EPS = 40, 3, 264, 0.2


def vector(n: int, seed: int) -> np.ndarray:
    return (1 + 0.3 * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("n_tokens", [1, 35, 515])
def test_router_with_a_norm_of_its_own(machine, n_tokens: int) -> None:
    rng = np.random.default_rng(n_tokens)
    x = rng.standard_normal((n_tokens, D)).astype(np.float32)
    w = rng.standard_normal((X, D)).astype(np.float32)
    own, taken, scale = vector(D, 1), vector(D, 2), vector(X, 3)
    weights = RouterWeights(
        *(upload(machine, own), EPS, upload(machine, w)),
        taken_norm=upload(machine, taken),
        expert_scale=upload(machine, scale),
    )
    sizes = 2 * D, 4 * J, 4 * J, 4 * X
    outs = [Output(machine, n_tokens * size) for size in sizes]
    choice = RouterChoice(X, J, normalise=True)
    routes = Routes(*(out.buffer for out in outs))
    Route(machine).launch(upload(machine, x), weights, choice, routes, n_tokens, D)
    found, ids, strengths = (
        out.read(kind, (n_tokens, n))
        for out, kind, n in zip(outs, (np.float16, np.int32, np.float32), (D, J, J), strict=False)
    )
    assert nmse(found, normed(x, taken)) <= 1e-6
    p = np.exp(normed(x, own) @ w.T)
    expected = np.argsort(-p, axis=-1, kind="stable")[:, :J]
    assert np.array_equal(ids, expected)
    chosen = np.take_along_axis(p, expected, axis=-1)
    chosen = chosen / chosen.sum(-1, keepdims=True) * scale[expected]
    np.testing.assert_allclose(strengths, chosen, rtol=1e-4)


@pytest.mark.parametrize("is_sorted", [False, True], ids=["pairs", "sorted"])
@pytest.mark.parametrize(("n_tokens", "n_used", "k"), [(1, 8, 2816), (5, 3, 264), (2, 1, 8)])
def test_join(machine, n_tokens: int, n_used: int, k: int, is_sorted: bool) -> None:
    rng, n = np.random.default_rng(k), n_tokens * n_used
    dense, y = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (n_tokens, n))
    weights, norms = rng.random((n_tokens, n_used), np.float32), (vector(k, 4), vector(k, 5))
    row_of = rng.permutation(n).astype(np.int32) if is_sorted else np.arange(n, dtype=np.int32)
    out = Output(machine, 4 * n_tokens * k)
    arrays = [upload(machine, array) for array in (dense, y, weights)]
    parts = Beside(*arrays, upload(machine, row_of) if is_sorted else None)
    first, second = ((upload(machine, norm), EPS) for norm in norms)
    Join(machine).launch(parts, (first, second), out.buffer, n_tokens, n_used, k)
    pairs = y[row_of].reshape(n_tokens, n_used, k).astype(np.float64)
    total = (weights[..., None] * pairs).sum(axis=1)
    expected = normed(dense, norms[0]) + normed(total, norms[1])
    assert nmse(out.read(np.float32, (n_tokens, k)), expected) <= 1e-12


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_they_compile_without_spilling(nvrtc, arch: str) -> None:
    defines = {"WARPS": join.WARPS, "NORM_PIECES": 2}
    found = compile_cubin("moe/join.cu", arch, defines=defines, extra_source=join.ASSERTS).resources
    names = [f"route<{n}, {rows}>" for n, rows in route.SHAPES]
    options = {"expressions": names, "extra_source": route.ASSERTS}
    found |= compile_cubin(
        "moe/route.cu", arch, defines=defines | {"BESIDE": 1}, **options
    ).resources
    assert len(found) == 1 + len(names)
    for name, r in found.items():
        assert max(r.spill_loads, r.spill_stores) == 0, f"{name} for {arch} spills: {r}"
