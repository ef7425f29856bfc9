"""Models whose weights and activations have 8 bits, on a GPU against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import nmse
from steps import for_groups

from ggpy import arch
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import Step
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.numpy.matrix import ROUNDED
from ggpy.formats import by_name
from ggpy.formats.rows import encode_rows, row_scales
from ggpy.gguf import File, Tensor
from ggpy.kernels.w8a8.w8a8_prefill import runs_on

KINDS = ("int8", "e4m3")
# Normalised mean square error of logits. Keys and values in f16 move some codes of later
# activations to a neighbour; a token that sees only itself has nearly the same bits.
TOLERANCE, ALONE = {"int8": 2e-3, "e4m3": 1e-2}, 1e-9


def rounded(matrix):
    """A matrix of the reference whose input becomes halves, as on a GPU, before it is quantised."""
    if hasattr(matrix, "multiply"):
        multiply = matrix.multiply
        matrix.multiply = lambda x: multiply(x.astype(np.float16).astype(np.float32))
    return matrix


def with_bytes(ops, kind, activations=None):
    """The ops, with every matrix that is multiplied in bytes of the kind, and with activations."""
    weight, format = ops.weight, ROUNDED[kind]

    def take(tensor, role, *_):
        if role.lookup or len(tensor.shape) == 1:
            return weight(tensor, role)
        values = np.ascontiguousarray(tensor.dequantize(), np.float32)
        scales = row_scales(values, format)
        data = encode_rows(values, scales, format)
        numbers = scales.view(np.uint8)
        scale = Tensor(f"{tensor.name}.scale", (len(values),), by_name("F32"), numbers)
        tensor = replace(tensor, format=format, data=data)
        return rounded(weight(tensor, role, scale, activations or kind))

    ops.weight = take
    return ops


def steps_of(n_prompt):
    """A prompt of one sequence, and four of its tokens one by one, of which one is recorded."""
    ids = np.random.default_rng(n_prompt).integers(5, 350, n_prompt + 4)
    for first, count in [(0, n_prompt), *((n_prompt + i, 1) for i in range(4))]:
        n = np.arange(count, dtype=np.int32)
        some, table = ids[first : first + count].astype(np.int32), np.array([[1, 2]], np.int32)
        yield Step(some, n + first, 0 * n, (table,), n)


def logits(ops, path, n_prompt):
    with File(path) as file:
        decoder = arch.load(file, ops, 128)
    shape = decoder.cache_shape(2, 128, 128)
    ops.allocate_cache(shape)
    steps = (for_groups(step, shape) for step in steps_of(n_prompt))
    return np.concatenate([ops.read(decoder.run(step)) for step in steps])


@pytest.mark.parametrize("n_prompt", [6, 40])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", KINDS)
def test_models(machine, tiny_path, architecture, kind, n_prompt, monkeypatch):
    """Few tokens and many, tied and untied outputs, with and without soft caps."""
    if not runs_on(kind, machine.arch):
        if not hasattr(machine, "unprepared"):
            pytest.skip(f"{machine.arch} has no tensor cores for {kind}")
        monkeypatch.setattr(machine.unprepared, "arch", "sm_89")
    path, ops = tiny_path(architecture), with_bytes(Cuda(machine), kind)
    found = logits(ops, path, n_prompt)
    expected = logits(with_bytes(Reference(1), kind), path, n_prompt)
    halves = logits(Cuda(machine), path, n_prompt)
    assert nmse(found, expected) <= TOLERANCE[kind]
    # Hopper's product of many tokens sums E4M3 in another order: more codes go to a neighbour.
    if kind == "int8" or n_prompt <= 8 or machine.arch != "sm_90a":
        assert nmse(found[0], expected[0]) <= ALONE < 1e-5 < nmse(halves[0], expected[0])


def test_gpus_without_such_products_take_halves(emulator, tiny_path):
    """The weights are still those of the file."""
    assert not runs_on("e4m3", emulator.arch)
    path = tiny_path("llama")
    found = logits(with_bytes(Cuda(emulator), "e4m3"), path, 6)
    expected = logits(with_bytes(Reference(1), "e4m3", "f16"), path, 6)
    assert nmse(found, expected) <= 4e-5
