"""Layers of rarer kinds against the reference: layer norms, halves in parallel, biases before
norms, norms after RoPE, queries that grow, attention in chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import nmse
from counting_device import LaunchesOnHopper
from random_decoder import (
    BIASED,
    BOTH_SIDES,
    EVERYTHING,
    LATE,
    PARALLEL,
    TWO_NORMS,
    Shape,
    Variation,
    decode_step,
    random_decoder,
    steps_of_two,
)

from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.steps import upload
from ggpy.backends.cuda.steps.upload import PLACES
from ggpy.backends.interface import PAGE_SIZE, Step
from ggpy.backends.numpy.backend import Reference
from ggpy.cache_types import USUAL, CacheTypes
from ggpy.gguf import File
from ggpy.kernels.attention.prefill_attention import PrefillAttention
from ggpy.model import load as load_model

SHAPES = (Shape(window=40), Shape(has_rope=False), Shape(window=70, soft_cap=3.0))
VARIATIONS = {
    "parallel": PARALLEL,
    "late": LATE,
    "biased": BIASED,
    "both sides": BOTH_SIDES,
    "all": replace(EVERYTHING, layers=SHAPES),
}
TOLERANCE = 2e-5  # of activations that are rounded to f16


def for_groups(decoder: Any, step: Step) -> Step:
    groups = len(decoder.cache_shape(32, PAGE_SIZE, PAGE_SIZE).groups)
    return replace(step, page_tables=step.page_tables * groups)


@pytest.mark.parametrize(
    ("name", "types"),
    [*((name, USUAL) for name in VARIATIONS), ("late", CacheTypes("q8_0", "q8_0"))],
)
def test_steps_of_two_sequences(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, types: CacheTypes
) -> None:
    """Prompts by the attention that is made for them, and decode in graphs."""
    monkeypatch.setattr(PrefillAttention, "min_tokens", 16)
    counted, capture = [], machine.capture
    monkeypatch.setattr(machine, "capture", lambda: (counted.append(1), capture())[1])
    monkeypatch.setattr(upload, "OFTEN", 1)  # decode steps are recorded for each place
    gpu, cpu = Cuda(machine), Reference(1)
    options = {"variation": VARIATIONS[name], "types": {"attn_v": "Q6_K", "ffn_down": "Q4_0"}}
    options["cache_types"] = types
    ours, theirs = (random_decoder(ops, **options) for ops in (gpu, cpu))
    for step in steps_of_two():
        step = for_groups(ours, step)
        wanted = theirs.run(step)
        assert wanted.std() > 0.1
        # numbers that a rounding tips go to the next code of a type in blocks
        tolerance = TOLERANCE if types is USUAL else 4 * TOLERANCE
        assert nmse(gpu.read(ours.run(step)), wanted) <= tolerance
    assert len(counted) == PLACES, "decode steps are graphs"


@pytest.mark.parametrize("variation", [TWO_NORMS, BIASED], ids=["two norms", "biased"])
def test_a_probe_is_told_what_the_reference_tells(emulator: Any, variation: Variation) -> None:
    """In the same order."""
    told: list[list[tuple[str, np.ndarray]]] = []
    for ops in (Cuda(emulator), Reference(1)):
        decoder, found = random_decoder(ops, variation=variation), []
        step = for_groups(decoder, steps_of_two()[0])
        ops.run(
            step,
            decoder.forward,
            lambda i, what, x, ops=ops, found=found: found.append(
                (f"{i} {what}", np.array(ops.read(x), np.float32).ravel())
            ),
        )
        told.append(found)
    assert [what for what, _ in told[0]] == [what for what, _ in told[1]]
    for (what, ours), (_, theirs) in zip(*told, strict=True):
        assert nmse(ours, theirs) <= TOLERANCE, what


def test_embeddings_of_texts(machine: Any, tiny_path: Any) -> None:
    """Texts of several lengths in one step, and of one token alone, whose tokens see later ones."""
    texts = [list(range(5, 5 + n)) for n in (1, 40, 9)]
    found = []
    for ops in (Cuda(machine), Reference(1)):
        with load_model(File(tiny_path("gemma-embedding")), ops, n_ctx=64, n_seq=3) as model:
            found.append([model.embed(texts), model.embed(texts[:1])])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


@pytest.mark.parametrize(("variation", "norms"), [(PARALLEL, 3 + 1), (TWO_NORMS, 6 + 1)])
def test_parallel_halves_of_one_norm_share_its_kernel(variation: Variation, norms: int) -> None:
    device = LaunchesOnHopper()
    ops = Cuda(device)
    decoder = random_decoder(ops, variation=variation)
    ops.run(for_groups(decoder, decode_step(1)), decoder.forward)
    assert device.times("rms_norm") == norms
