"""Layers with experts: blocks after them, and experts in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggpy import arch
from ggpy.backends.interface import Demand
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.gguf.names import layer_of
from tools import make_tiny

from .test_forward import IDS, our_logits

NEXTN = {"block_count": 3, "nextn_predict_layers": 1}


def block_behind() -> dict[str, np.ndarray]:
    """What predicts the token after the next: a layer, with a head of its own."""
    m = make_tiny.MODELS["glm4moe"]
    tensors = make_tiny.tensors_of(m, 445)
    found = {k.replace("blk.1.", "blk.2."): x for k, x in tensors.items() if "blk.1." in k}
    head = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    return found | {f"blk.2.nextn.{k}.weight": np.ones(x, np.float32) for k, x in head.items()}


@pytest.mark.parametrize("together", [False, True], ids=["apart", "gate and up together"])
def test_blocks_that_predict_further_tokens_change_nothing(tmp_path: Path, together: bool) -> None:
    plain = make_tiny.write(tmp_path / "plain.gguf", "glm4moe")
    block = block_behind()
    if together:
        parts = [block.pop(f"blk.2.ffn_{part}_exps.weight") for part in ("gate", "up")]
        block["blk.2.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    more = make_tiny.write(tmp_path / "more.gguf", "glm4moe", NEXTN, block)
    with File(more) as file:
        sizes = arch.load(file, Reference(1), 64).sizes
    assert (sizes.n_layer, sizes.n_nextn) == (2, 1)
    np.testing.assert_array_equal(our_logits(plain, 64, IDS), our_logits(more, 64, IDS))


@pytest.mark.parametrize(
    ("name", "n_cpu_moe", "layers"),
    [
        *(("qwen2moe", 0, set()), ("qwen2moe", 1, {0}), ("qwen2moe", 999, {0, 1})),
        *(("glm4moe", 1, set()), ("glm4moe", 2, {1}), ("llama", 999, set())),
    ],
)
def test_experts_of_the_first_layers_stay_on_the_host(
    tiny_path: Any, name: str, n_cpu_moe: int, layers: set[int]
) -> None:
    """Not the shared expert, the router, or biases; the first layer of glm4moe is dense."""
    demands: list[Demand] = []

    class Asked(Reference):
        def plan_memory(self, demand: Demand) -> int:
            demands.append(demand)
            return super().plan_memory(demand)

    with File(tiny_path(name)) as file:
        arch.load(file, Asked(1), 64, n_cpu_moe=n_cpu_moe)
    found = {tensor.name for tensor, role in demands[0].weights if role.on_host}
    parts = ("gate", "up", "down")
    assert found == {f"blk.{i}.ffn_{part}_exps.weight" for i in layers for part in parts}
    for tensor, role in demands[0].weights:
        assert role.layer == layer_of(tensor.name)


def test_layers_of_names() -> None:
    names = ("blk.12.ffn_up_exps.weight", "blk.0.attn_q.weight", "output.weight", "blk.x.weight")
    assert [layer_of(name) for name in names] == [12, 0, None, None]
