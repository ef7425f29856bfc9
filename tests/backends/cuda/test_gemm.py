"""Products on a GPU with activations of 8 bits: which kernels run, and how far logits are off."""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse
from counting_device import LaunchesOnHopper
from random_decoder import LAYERS, decode_step, random_decoder, steps_of_two
from steps import for_groups

from ggpy import arch
from ggpy.backends.cuda.arrays import Matrix
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import StepClass
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
    i = np.int32
    table = np.array([[1]], i)
    return Step(np.array(ids, i), n + position, 0 * n, (table,), n)


def logits(ops, path) -> np.ndarray:
    """Of a prompt, and of four tokens one by one: directly, recorded, replayed twice."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64)
    shape = decoder.cache_shape(2, 64, 64)
    ops.allocate_cache(shape)
    steps = [one(PROMPT, 0), *(one([30 + i], len(PROMPT) + i) for i in range(4))]
    return np.concatenate([ops.read(decoder.run(for_groups(step, shape))) for step in steps])


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
    planner = Cuda(LaunchesOnHopper()).context.planner
    step = StepClass(n_tokens, n_tokens, True, True)
    inside = planner.normalises([Matrix(16, k, tiles, None)], step, n_tokens, True)
    assert inside is (n_tokens * k < 32768)


def test_only_quantised_weights_stay_in_blocks(emulator):
    planner = Cuda(emulator, activations="q8_1").context.planner
    kept = {format.name for format in all_formats() if planner.keeps_blocks(format)}
    assert {"Q4_0", "Q8_0", "Q4_K", "IQ2_XS", "TQ2_0", "MXFP4"} <= kept
    assert not kept & {"F32", "F16", "BF16"}
    assert not Cuda(emulator).context.planner.keeps_blocks(by_name("Q4_0"))


def test_a_token_does_not_depend_on_the_step(machine, tiny_path):
    """The same bits in a prompt and by itself: products take tokens apart."""
    with File(tiny_path("llama")) as file:
        ops = Cuda(machine, activations="q8_1")
        decoder = arch.load(file, ops, 64)
    ops.allocate_cache(decoder.cache_shape(2, 64, 64))
    together = ops.read(decoder.run(one(PROMPT, 0)))
    decode_step = [ops.read(decoder.run(one([id], i)))[0] for i, id in enumerate(PROMPT)]
    assert nmse(np.array(decode_step), together) < 1e-3
    assert np.array_equal(decode_step[0], together[0])


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
def test_weights_of_two_layouts_share_a_launch_of_decode(
    n: int, types: dict[str, str], together: bool
) -> None:
    """q, k and v; unless the number of tokens must not matter."""
    for invariant in (False, True):
        device = LaunchesOnHopper()
        random_decoder(Cuda(device, batch_invariant=invariant), types).run(decode_step(n))
        expected = LAYERS if together and not invariant else 0
        kernel = "gemm_decode_two_rope" if n <= NORM_TOKENS else "gemm_decode_two"
        assert device.times(kernel) == expected


@pytest.mark.parametrize(("n", "of_two"), [(9, LAYERS), (257, 0)])
def test_weights_of_two_orders_need_no_packing(n: int, of_two: int) -> None:
    """q, k in tiles of one order and v of another: the norm's kernel stores both."""
    device = LaunchesOnHopper()
    random_decoder(Cuda(device), {"attn_v": "Q6_K"}).run(decode_step(n))
    assert device.times("pack") == 0 and device.times("gemm_wgmma_two") == of_two


def test_logits_of_two_orders(machine) -> None:
    """Steps of few tokens, and prompts."""
    types = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K"}
    backends = [Cuda(machine), Reference(1)]
    decoders = [random_decoder(ops, types) for ops in backends]
    for step in (decode_step(9), decode_step(32), *steps_of_two()):
        pairs = zip(backends, decoders, strict=True)
        found, exact = (ops.read(decoder.run(step)) for ops, decoder in pairs)
        assert nmse(found, exact) < 2e-5
