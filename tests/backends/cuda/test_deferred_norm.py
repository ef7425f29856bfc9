"""Norms that are deferred from product to product: when, and that answers stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import nmse
from counting_device import CountingDevice, LaunchesOnHopper
from random_decoder import LAYERS, D, decode_step, random_decoder

from ggpy.backends.cuda.arrays import Array
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.norm import Norms
from ggpy.backends.cuda.plan import products
from ggpy.backends.interface import Norm
from ggpy.backends.numpy.backend import Reference
from ggpy.kernels.gemm.gemm_decode import WARPS
from ggpy.kernels.gemm.hopper import has_wgmma
from ggpy.kernels.layout.pack import CODES
from ggpy.kernels.norm.rms_norm import RmsNorm


@pytest.fixture(autouse=True)
def _few_columns(monkeypatch):
    """What products of thousands of columns take is taken by these, too."""
    monkeypatch.setattr(products, "SKINNY_COLUMNS", 256)
    monkeypatch.setattr(products, "PAIR_SIZE", 256)


OTHER_ORDER = {"attn_v": "Q6_K"}  # wants activations in another order than Q8_0
FOUR_BITS = {"ffn_gate": "Q4_0", "ffn_up": "Q4_0"}
LOOKED_UP = {"ffn_gate": "IQ4_NL", "ffn_up": "IQ4_NL"}  # of which four tokens come in rows
SOME_FOUR_BITS = [FOUR_BITS, LOOKED_UP, {"attn_output": "IQ4_NL"}, {"ffn_down": "Q4_0"}]


@pytest.mark.parametrize(
    ("n", "types", "norms"),
    [
        (1, {}, 0),
        (2, {}, 2),
        (2, FOUR_BITS, 2),
        (3, {}, 2),
        (8, {}, 2),
        (8, OTHER_ORDER, 4),
        (16, {}, 2),
        (17, {}, 7),
        (16, {"ffn_down": "Q4_0"}, 4),  # whose product does not hand so many on
        (9, FOUR_BITS, 5),
        (4, FOUR_BITS, 2),
        (4, LOOKED_UP, 5),
        (5, LOOKED_UP, 2),
    ],
)
def test_which_norms_have_a_kernel(n, types, norms):
    """The first and the last; and those whose halves products want in different orders."""
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, types)
    for probe in (None, lambda *_: None):  # op by op gives the same bits
        device.launched.clear()
        ops.run(decode_step(n, 0), decoder.forward, probe)
        assert device.times("rms_norm") == norms


def test_two_tokens_of_small_matrices(monkeypatch):
    """They are normalised by the products themselves."""
    monkeypatch.setattr(products, "PAIR_SIZE", 257)
    device = LaunchesOnHopper()
    random_decoder(Cuda(device)).run(decode_step(2, 0))
    assert device.times("rms_norm") == 0 and device.times("gemm_decode_rope") == LAYERS
    assert device.times("gemm_decode") == 3 * LAYERS + 1


def test_not_where_bits_must_not_depend_on_the_batch():
    device = LaunchesOnHopper()
    decoder = random_decoder(Cuda(device, batch_invariant=True))
    decoder.run(decode_step(8, 0))
    assert device.times("rms_norm") == 2 * LAYERS + 1


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("types", [{}, OTHER_ORDER, *SOME_FOUR_BITS], ids=str)
def test_answers(gpu, types, n):
    """Some steps of some sequences, recorded and replayed; x grows from layer to layer."""
    if not has_wgmma(gpu.arch):
        pytest.skip(f"{gpu.arch} has no wgmma")
    backends = Cuda(gpu), Reference(1)
    decoders = [random_decoder(ops, types) for ops in backends]
    for position in range(5):
        found, expected = (
            ops.read(decoder.run(decode_step(n, position)))
            for ops, decoder in zip(backends, decoders, strict=True)
        )
        assert nmse(found, expected) <= 1e-5


def test_a_deferred_norm_is_taken_once():
    device = CountingDevice()
    memory: dict = {}

    def scratch(name: str, nbytes: int) -> Any:
        return memory.setdefault(name, device.alloc(nbytes, name))

    def f16(name: str, rows: int, columns: int, layout: int) -> Array:
        return Array(scratch(name, 1 << 12), np.float16, (rows, columns), columns, layout)

    norms = Norms(device, RmsNorm(device, WARPS), f16, scratch)
    norm = Norm(device.alloc(4 * D), 1e-5)
    x = Array(device.alloc(1 << 14), np.float32, (8, D), D)
    norms.compute(x, norm, 8, CODES, None, True)
    first = memory["factors 1"]
    given = norms.defer(norm, x, CODES, 16)
    assert (given.prescale, given.weight, given.normed) == (first, norm.weight, memory["normed"])
    taken, deferred = norms.take(norm)
    assert taken.data is memory["normed"] and deferred.squares == given.squares
    assert deferred.prescale == first and deferred.next_prescale == memory["factors 0"]
    with pytest.raises(RuntimeError, match="no product has left a norm"):
        norms.take(norm)
    assert norms.defer(norm, x, CODES, 128).prescale == deferred.next_prescale
    norms.begin()
    with pytest.raises(RuntimeError, match="no product has left a norm"):
        norms.take(norm)
