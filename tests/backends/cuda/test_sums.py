"""Norms of what is added to the residual stream: the next product adds it, where it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting_device import LaunchesOnHopper
from random_decoder import LAYERS, decode_step, random_decoder

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import products


@pytest.mark.parametrize(
    ("n", "types", "apart"),
    [
        (1, {}, 1),  # behind the last layer
        (2, {}, 1),
        (3, {}, 2 * LAYERS),
        (1, {"attn_v": "Q6_K", "ffn_up": "Q4_0"}, 1),
        (1, {"attn_k": "Q6_K"}, LAYERS),  # q, k and v are no one launch
        (1, {"attn_v": "TQ1_0", "attn_k": "Q6_K"}, LAYERS),
    ],
)
def test_who_adds(n: int, types: dict[str, str], apart: int) -> None:
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, types, post_norms=True)
    ops.run(decode_step(n), decoder.forward)
    assert device.times("add_rms_norm") == apart
    device.launched.clear()
    ops.run(decode_step(n), decoder.forward, lambda *_: None)
    assert device.times("add_rms_norm") == 2 * LAYERS, "where outputs of ops will be read"


@pytest.mark.parametrize("n", [1, 2])
def test_the_bits_are_the_same(machine: Any, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """As with a kernel of its own, step after step."""
    found = []
    for most in (products.MOST_ADDED, 0):
        monkeypatch.setattr(products, "MOST_ADDED", most)
        ops = Cuda(machine)
        decoder = random_decoder(ops, post_norms=True)
        found.append([ops.read(decoder.run(decode_step(n, i))) for i in range(4)])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b) and np.isfinite(a).all()
