"""Norms of what is added to the residual stream: the next product adds it, where it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import nmse
from counting_device import LaunchesOnHopper
from random_decoder import BEHIND, LAYERS, decode_step, random_decoder

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import products
from ggpy.backends.numpy.backend import Reference
from ggpy.kernels.norm.rms_norm import RmsNorm


@pytest.mark.parametrize(
    ("n", "types", "apart"),
    [
        (1, {}, 1),  # after the last layer
        (2, {}, 1),
        (3, {}, 2 * LAYERS),
        (1, {"attn_v": "Q6_K", "ffn_up": "Q4_0"}, 1),
        (1, {"attn_k": "Q6_K"}, LAYERS),  # q, k and v are no one launch
        (1, {"attn_v": "TQ1_0", "attn_k": "Q6_K"}, LAYERS),
    ],
)
def test_who_adds(n: int, types: dict[str, str], apart: int) -> None:
    """A kernel that adds also computes the next norm, but for that of the logits."""
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, types, post_norms=True)
    ops.run(decode_step(n), decoder.forward)
    assert device.times("add_rms_norm_next") == apart - 1
    assert device.times("add_rms_norm") == 1
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


@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("types", [{}, {"attn_v": "Q6_K", "ffn_up": "F16"}])
def test_the_next_norm_has_the_bits_of_its_kernel(
    machine: Any, monkeypatch: pytest.MonkeyPatch, n: int, types: dict[str, str]
) -> None:
    """Step after step, with x in one order and in several."""
    found = []
    for joined in (True, False):
        monkeypatch.setattr(RmsNorm, "takes_next", lambda self, n, joined=joined: joined)
        ops = Cuda(machine)
        decoder = random_decoder(ops, types, post_norms=True)
        found.append([ops.read(decoder.run(decode_step(n, i))) for i in range(3)])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b) and np.isfinite(a).all()


@pytest.mark.parametrize(("n", "post_norms"), [(1, 1), (3, 2 * LAYERS), (32, 2 * LAYERS)])
def test_norms_of_all_heads_have_kernels_of_their_own(n: int, post_norms: int) -> None:
    """Two in each layer, besides post-norms that no product computes."""
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, variation=BEHIND)
    ops.run(decode_step(n), decoder.forward)
    norms = device.times("add_rms_norm") + device.times("add_rms_norm_rows")
    assert norms == 2 * LAYERS + post_norms
    assert device.times("rope_kv") + device.times("rope_kv_whole") == LAYERS


@pytest.mark.parametrize("n", [1, 9])
def test_layers_without_norms_are_those_of_the_reference(machine: Any, n: int) -> None:
    """Step after step, the later ones as graphs."""
    gpu, cpu = Cuda(machine), Reference(1)
    ours, theirs = (random_decoder(ops, variation=BEHIND) for ops in (gpu, cpu))
    for i in range(4):
        step = decode_step(n, i)
        wanted = theirs.run(step)
        assert wanted.std() > 0.1
        assert nmse(gpu.read(ours.run(step)), wanted) <= 4e-5
