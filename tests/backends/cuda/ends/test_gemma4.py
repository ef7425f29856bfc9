"""Gemma 4 on a GPU against the reference, op by op: inputs and scales of layers, norms of values,
keys as values, keys of other layers, heads of 512.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import nmse
from counting_device import CountingDevice
from tiny_gemma4 import EXPERTS, WIDE, write_tiny_gemma4

from ggpy import arch, model
from ggpy.backends.cuda import backend as cuda
from ggpy.backends.cuda import memory
from ggpy.backends.cuda.kv_pages import f16_page_bytes, heads_of
from ggpy.backends.interface import Demand
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.trace import Trace
from ggpy.cache_types import CacheTypes
from ggpy.gguf import File
from ggpy.kernels.attention import prefill_attention
from ggpy.kernels.gemm.hopper import has_wgmma
from ggpy.tokenizer import Tokenizer

from ..heads.real_heads import write_real_heads
from ..moe.test_moe import MoEPair
from ..test_backend import PAGES, Model, Pair, ids_of, step_of

NMSE = 1.5e-4  # of an op's output: scores are not scaled, so that what was rounded before counts
SCALES = {  # of what layers return, and whether kernels multiply by them
    "folded": (0.5, 1.25, 0.75, 2.0),
    "too small": (2e-4, 3e-4, 2.0, 1e3),
    "negative": (0.5, -1.5, 0.75, 1.0),
}


def check_ops(machine: Any, path: Path) -> None:
    """A prompt beside a token, and a token of each of two sequences."""
    gpu, reference = (Model(Trace(ops), path) for ops in (cuda.Cuda(machine), Reference(1)))
    for chunks in (
        [(ids_of(20), 0, PAGES[0]), (ids_of(1, 1), 0, PAGES[1])],
        [([7], 20, PAGES[0]), ([8], 1, PAGES[1])],
    ):
        step = step_of(chunks)
        assert np.isfinite(gpu.logits(step)).all()
        reference.logits(step)
        for a, b in zip(gpu.ops.records, reference.ops.records, strict=True):
            assert (a.layer, a.op, a.output.shape) == (b.layer, b.op, b.output.shape)
            if a.op == "experts" and a.layer > 1 and (a.output != b.output).any():
                break  # liked nearly alike
            assert nmse(a.output, b.output) <= NMSE, (a.layer, a.op)
    ops = {r.op for r in gpu.ops.records}
    assert ops >= {"input_act", "input_out"} or ops >= {"experts", "shared_act", "ffn_act"}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_every_op(machine, tmp_path, monkeypatch, scales) -> None:
    check_ops(machine, write_tiny_gemma4(tmp_path, monkeypatch, {}, scales))


@pytest.mark.parametrize("settings", [WIDE, EXPERTS], ids=["heads of 512", "experts"])
def test_every_op_of_others(machine, tmp_path, monkeypatch, settings) -> None:
    check_ops(machine, write_tiny_gemma4(tmp_path, monkeypatch, settings))


@pytest.mark.parametrize("scales", ["too small", "negative"])
def test_steps_whose_scales_are_not_folded(machine, tmp_path, monkeypatch, scales) -> None:
    """What follows such a layer adds nothing that is pending."""
    pair = Pair(machine, write_tiny_gemma4(tmp_path, monkeypatch, {}, SCALES[scales]))
    pair.step([(ids_of(5), 0, PAGES[0])])
    for i in range(3):
        pair.step([([7 + i], 5 + i, PAGES[0])])


@pytest.mark.parametrize("settings", [{}, WIDE], ids=["heads of 32", "heads of 512"])
def test_texts_that_part_and_are_taken_back(machine, tmp_path, monkeypatch, settings) -> None:
    """Two sequences share the first page, from which both go on; then one goes back. Layers that
    read another layer's keys find those of their own sequence.
    """
    pair = Pair(machine, write_tiny_gemma4(tmp_path, monkeypatch, settings))
    pair.step([(ids_of(66), 0, [3, 7])])
    pair.step([(ids_of(4, 1), 64, [3, 5]), ([9], 66, [3, 7])])
    for i in range(3):  # directly, and recorded
        pair.step([([20 + i], 67 + i, [3, 7]), ([30 + i], 68 + i, [3, 5])])
    pair.step([([50], 65, [3, 7])])
    for i in range(3):
        pair.step([([60 + i], 66 + i, [3, 7]), ([40 + i], 71 + i, [3, 5])])


@pytest.mark.parametrize("kind", ["emulator", "gpu"])
def test_prompts_of_wide_heads(request, kind, tmp_path, monkeypatch) -> None:
    """By the prefill kernel that Hopper has for them, also in the emulator."""
    machine = request.getfixturevalue(kind)
    wide = kind == "emulator" or has_wgmma(machine.arch)
    monkeypatch.setattr(prefill_attention, "has_wgmma", lambda _: wide)
    monkeypatch.setattr(prefill_attention.PrefillAttention, "min_tokens", 16)
    pair = Pair(machine, write_tiny_gemma4(tmp_path, monkeypatch, WIDE))
    pair.step([(ids_of(66), 0, [3, 7]), (ids_of(20, 1), 0, [5])])
    pair.step([(ids_of(30, 2), 66, [3, 7]), ([9], 20, [5])])
    tiles = [tiling.n_prefill_tiles for tiling in pair.gpu.ops.context.batch.tilings]
    assert len(tiles) == 2 and (min(tiles) > 0) == wide


def test_wide_heads_in_blocks_become_f16_in_planned_memory(tmp_path, monkeypatch) -> None:
    """On Hopper, whose prefill attention reads f16."""
    demands: list[Demand] = []

    class Noting(cuda.Cuda):
        def plan_memory(self, demand: Demand) -> int:
            demands.append(demand)
            return super().plan_memory(demand)

    device, types = CountingDevice(), CacheTypes("q8_0", "q8_0")
    monkeypatch.setattr(device, "arch", "sm_90a")
    with File(write_real_heads(tmp_path / "wide.gguf", "gemma4", monkeypatch)) as file:
        sizes = {"n_ctx": 256, "n_batch": 64, "n_seq": 3, "cache_types": types}
        model.Model(file, Tokenizer.from_gguf(file), Noting(device), **sizes)
    (demand,) = demands
    need = memory.needed(demand, cuda.SPLIT_TOKENS, converts=lambda heads: True)
    groups = demand.cache(demand.n_batch).groups
    (wide,) = [g for g in groups if heads_of(g.spec).head_size == 512]
    f16 = [device.allocated[f"{name} as f16"] for name in ("keys", "values")]
    assert sum(f16) == wide.n_pages * f16_page_bytes(heads_of(wide.spec))
    assert sum(f16) + device.allocated["keys"] + device.allocated["values"] == need.cache
    assert device.most_bytes <= need.total


def test_a_hidden_state_has_its_scale(machine, tmp_path, monkeypatch) -> None:
    path = write_tiny_gemma4(tmp_path, monkeypatch, {}, SCALES["folded"])
    step = step_of([(ids_of(9), 0, PAGES[0])])
    found, expected = (Model(ops, path).hidden(step) for ops in (cuda.Cuda(machine), Reference(1)))
    assert nmse(found, expected) <= NMSE


def test_the_table_of_inputs_stays_on_the_host(tiny_path) -> None:
    device = CountingDevice()
    with File(tiny_path("gemma4")) as file:
        table = file.tensors["per_layer_token_embd.weight"]
        decoder = arch.load(file, cuda.Cuda(device), 64)
        assert device.host_bytes == device.allocated[table.name] == table.nbytes
    assert decoder.inputs is not None


def test_experts_beside_a_feed_forward(machine, tmp_path, monkeypatch) -> None:
    """Steps of every kind, and each op; of few pairs, and of many that are sorted."""
    path = write_tiny_gemma4(tmp_path, monkeypatch, EXPERTS, SCALES["folded"])
    pair = MoEPair(machine, path, monkeypatch)
    pair.step([(ids_of(n, n), 0, t) for n, t in ((5, PAGES[0]), (66, PAGES[1]))], list(range(71)))
    for i in range(4):
        pair.step([([40 + i], 5 + i, PAGES[0]), ([50 + i], 66 + i, PAGES[1])])
    for i in range(4):
        pair.step([([60 + i], 9 + i, PAGES[0])])
