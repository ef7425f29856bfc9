"""Norms that are handed from product to product: when, and that answers stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse
from counting_device import CountingDevice, LaunchesOnHopper
from random_decoder import LAYERS, D, alone, random_decoder

from ggpy.backends.cuda import gemm_hopper
from ggpy.backends.cuda.arrays import Array
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.deferred_norm import Handing
from ggpy.backends.interface import Norm
from ggpy.backends.numpy.backend import Reference
from ggpy.kernels.gemm.hopper import has_wgmma
from ggpy.kernels.layout.pack import CODES


@pytest.fixture(autouse=True)
def _few_columns(monkeypatch):
    """What products of thousands of columns take is taken by these, too."""
    monkeypatch.setattr(gemm_hopper, "FEW_COLUMNS", 256)
    monkeypatch.setattr(gemm_hopper, "PAIR_SIZE", 256)


OTHER_ORDER = {"attn_v": "Q6_K"}  # wants activations in another order than Q8_0
FOUR_BITS = {"ffn_gate": "Q4_0", "ffn_up": "Q4_0"}  # of which four tokens come in rows
FEW_IN_ROWS = [FOUR_BITS, {"attn_output": "Q4_0"}, {"ffn_down": "Q4_0"}]


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
        (4, FOUR_BITS, 5),
        (5, FOUR_BITS, 2),
    ],
)
def test_which_norms_have_a_kernel(n, types, norms):
    """The first and the last; and those whose halves products want in different orders."""
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, types)
    for repeat in (True, False):  # op by op gives the same bits
        device.launched.clear()
        ops.run(alone(n, 0), decoder.forward, repeat)
        assert device.times("rms_norm") == norms


def test_two_tokens_of_small_matrices(monkeypatch):
    """They are normalised by the products themselves."""
    monkeypatch.setattr(gemm_hopper, "PAIR_SIZE", 257)
    device = LaunchesOnHopper()
    random_decoder(Cuda(device)).run(alone(2, 0))
    assert device.times("rms_norm") == 0 and device.times("gemm_decode_heads") == LAYERS
    assert device.times("gemm_decode") == 3 * LAYERS + 1


def test_not_where_bits_must_not_depend_on_the_batch():
    device = LaunchesOnHopper()
    decoder = random_decoder(Cuda(device, batch_invariant=True))
    decoder.run(alone(8, 0))
    assert device.times("rms_norm") == 2 * LAYERS + 1


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("types", [{}, OTHER_ORDER, *FEW_IN_ROWS], ids=lambda t: "-".join(t))
def test_answers(gpu, types, n):
    """Some steps of some sequences, recorded and replayed; x grows from layer to layer."""
    if not has_wgmma(gpu.arch):
        pytest.skip(f"{gpu.arch} has no wgmma")
    backends = Cuda(gpu), Reference(1)
    decoders = [random_decoder(ops, types) for ops in backends]
    for position in range(5):
        found, expected = (
            ops.read(decoder.run(alone(n, position)))
            for ops, decoder in zip(backends, decoders, strict=True)
        )
        assert nmse(found, expected) <= 1e-5


def test_a_norm_is_taken_once_by_whom_it_was_given():
    device = CountingDevice()
    rooms: dict = {}
    handing = Handing(
        lambda n_tokens: n_tokens <= 8,
        lambda name, nbytes: rooms.setdefault(name, device.alloc(nbytes, name)),
    )
    norms = [Norm(device.alloc(4 * D), 1e-5) for _ in range(2)]
    normed = Array(device.alloc(1 << 12), np.float16, (8, D), D, CODES)
    assert handing.give(norms[0], normed, 16) is None, "no norm before has left its factors"
    first = handing.after(8)
    given = handing.give(norms[0], normed, 16)
    assert (given.before, given.weight, given.normed) == (first, norms[0].weight, normed.data)
    taken, handed = handing.take(norms[0])
    assert taken is normed and handed.squares == given.squares and handed.before == first
    assert handed.after not in (None, first)
    assert handing.take(norms[0]) is None
    assert handing.give(norms[1], normed, 128).before == handed.after
    assert handing.take(norms[0]) is None, "it was given for another"
    assert handing.after(9) is None and handing.give(norms[1], normed, 128) is None
