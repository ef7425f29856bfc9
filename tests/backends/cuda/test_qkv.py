"""Prompts whose q, k and v are rotated by the product that makes them: where that is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting_device import LaunchesOnHopper
from random_decoder import LAYERS, V, random_decoder

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import layers
from ggpy.backends.interface import Step
from ggpy.kernels.attention.rope_kv import RopeKv
from ggpy.kernels.gemm.hopper import has_wgmma


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ROPE_EPILOGUE_TOKENS", 65)


def in_all(name: str) -> dict[str, str]:
    """Types of q, k and v."""
    return dict.fromkeys(("attn_q", "attn_k", "attn_v"), name)


def prompt(n: int, position: int = 0) -> Step:
    """n tokens of a sequence, whose last one's logits are wanted, and one of another."""
    ids = (np.arange(n + 1, dtype=np.int32) * 7) % V
    positions = np.append(np.arange(position, position + n), 3).astype(np.int32)
    sequences = np.append(np.zeros(n), 1).astype(np.int32)
    tables = np.array([[0, 2, 4, 6], [1, 3, 5, 7]], np.int32)
    return Step(ids, positions, sequences, (tables,), np.array([n - 1, n], np.int32))


@pytest.mark.parametrize(
    ("n", "options", "rotated"),
    [
        (90, {}, True),
        (64, {}, True),  # and one
        (63, {}, False),
        (90, {"types": {"attn_v": "Q6_K"}}, False),
        (90, {"types": in_all("Q4_K")}, True),
        (90, {"types": in_all("I8")}, True),
        (90, {"style": "neox"}, True),
        (90, {"norms": True}, False),
    ],
)
def test_who_rotates(n: int, options: Any, rotated: bool) -> None:
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, **options)
    for probe in (None, lambda *_: None):
        device.launched.clear()
        ops.run(prompt(n), decoder.forward, probe)
        assert device.times("compute_angles") == rotated, "once in a step"
        assert device.times("rope_kv") == (0 if rotated else LAYERS)


def test_not_where_bits_must_not_depend_on_the_batch() -> None:
    device = LaunchesOnHopper()
    random_decoder(Cuda(device, batch_invariant=True)).run(prompt(90))
    assert device.times("rope_kv") == LAYERS and device.times("compute_angles") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F16", "I8"])
@pytest.mark.parametrize("n", [70, 120])
def test_the_bits_are_the_same(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, n: int, style: str
) -> None:
    """As with a kernel of its own; of a prompt, its second part, and tokens after it."""
    if not has_wgmma(gpu.arch):
        pytest.skip("this GPU has no wgmma")
    found = []
    for rotated in (True, False):
        if not rotated:
            monkeypatch.setattr(RopeKv, "supports_rope_epilogue", lambda *_: False)
        ops = Cuda(gpu)
        decoder = random_decoder(ops, in_all(name), style)
        steps = [prompt(n), prompt(n, n), prompt(1, 2 * n)]
        found.append([ops.read(decoder.run(step)) for step in steps])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b) and np.isfinite(a).all()
