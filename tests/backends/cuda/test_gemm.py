"""Products on a GPU with activations of 8 bits: which kernels run, and how far logits are off."""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse
from counting_device import LaunchesOnHopper
from random_decoder import LAYERS, alone, random_decoder

from ggpy import arch
from ggpy.backends.cuda.arrays import Matrix
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import Step
from ggpy.backends.numpy.backend import Reference
from ggpy.device import Ptr
from ggpy.formats import all_formats, by_name
from ggpy.gguf import File
from ggpy.kernels.gemm.gemm_decode import NORM_TOKENS
from ggpy.kernels.layout.tile import TiledMatrix, layout_of

PROMPT = [7, 300, 22, 150, 9, 41, 88, 200, 301, 5, 60]


def one(ids: list[int], position: int) -> Step:
    """A step of one sequence, in page 1, of which all logits are wanted."""
    n = np.arange(len(ids), dtype=np.int32)
    arrays = [np.array(ids), n + position, 0 * n, np.array([[1]]), n]
    return Step(*(a.astype(np.int32) for a in arrays))


def logits(ops, path) -> np.ndarray:
    """Of a prompt, and of four tokens one by one: directly, recorded, replayed twice."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64)
    ops.allocate_cache(decoder.cache_shape(2))
    steps = [one(PROMPT, 0), *(one([30 + i], len(PROMPT) + i) for i in range(4))]
    return np.concatenate([ops.read(decoder.run(step)) for step in steps])


@pytest.fixture
def launched(machine, monkeypatch):
    """The names of all kernels that were asked for."""
    names, kernel = [], machine.kernel
    monkeypatch.setattr(
        machine,
        "kernel",
        lambda source, name, **o: (names.append(name), kernel(source, name, **o))[1],
    )
    return names


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_activations_of_8_bits(machine, launched, tiny_path, architecture):
    path = tiny_path(architecture)
    exact = logits(Reference(1), path)
    halves = logits(Cuda(machine), path)
    assert not any("mul_mat_vec_q" in name or "quantize" in name for name in launched)
    launched.clear()
    bytes_ = logits(Cuda(machine, activations="q8_1"), path)
    assert "quantize_q8_1<half>" in launched
    assert nmse(halves, exact) < 2e-5 < nmse(bytes_, exact) < 3e-3


@pytest.mark.parametrize(("n_tokens", "k"), [(1, 16384), (2, 12288), (2, 16384)])
def test_what_registers_hold_is_normalised_inside(n_tokens, k):
    tiles = TiledMatrix(layout_of(by_name("Q8_0"), k), 16, k, Ptr(0))
    products = Cuda(LaunchesOnHopper())._products
    inside = products.normalises([Matrix(16, k, tiles, None)], n_tokens, True)
    assert inside is (n_tokens * k < 32768)


def test_only_quantised_weights_stay_in_blocks(emulator):
    products = Cuda(emulator, activations="q8_1")._products
    kept = {format.name for format in all_formats() if products.keeps_blocks(format)}
    assert {"Q4_0", "Q8_0", "Q4_K", "IQ2_XS", "TQ2_0", "MXFP4"} <= kept
    assert not kept & {"F32", "F16", "BF16"}
    assert not Cuda(emulator)._products.keeps_blocks(by_name("Q4_0"))


def test_a_token_does_not_depend_on_the_step(machine, tiny_path):
    """The same bits in a prompt and by itself: products take tokens apart."""
    with File(tiny_path("llama")) as file:
        ops = Cuda(machine, activations="q8_1")
        decoder = arch.load(file, ops, 64)
    ops.allocate_cache(decoder.cache_shape(2))
    together = ops.read(decoder.run(one(PROMPT, 0)))
    alone = [ops.read(decoder.run(one([id], i)))[0] for i, id in enumerate(PROMPT)]
    assert nmse(np.array(alone), together) < 1e-3
    assert np.array_equal(alone[0], together[0])


@pytest.mark.parametrize(
    ("n", "types", "together"),
    [
        (1, {}, False),  # as ever
        (1, {"attn_v": "Q6_K"}, True),
        (4, {"attn_k": "Q6_K", "attn_v": "Q6_K"}, True),
        (9, {"attn_v": "Q6_K"}, False),
        (1, {"attn_k": "Q6_K"}, False),
        (1, {"attn_k": "Q6_K", "attn_v": "Q4_K"}, False),
    ],
)
def test_weights_of_two_layouts_share_a_launch(
    n: int, types: dict[str, str], together: bool
) -> None:
    """q, k and v; unless the number of tokens must not matter."""
    for invariant in (False, True):
        device = LaunchesOnHopper()
        random_decoder(Cuda(device, batch_invariant=invariant), types).run(alone(n))
        expected = LAYERS if together and not invariant else 0
        kernel = "gemm_decode_two_heads" if n <= NORM_TOKENS else "gemm_decode_two"
        assert device.times(kernel) == expected
