"""Variants of the tiny Gemma 4 of make_tiny.py: other heads, other scales of layers, experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import make_tiny

WIDE = {
    **{"attention.key_length": 512, "attention.value_length": 512, "rope.dimension_count": 512},
}
EXPERTS = {
    **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    **{"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0},
}


def write_tiny_gemma4(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    scales: Any = None,
    together: bool = False,
) -> Path:
    """The tiny model with other settings, or other scales of its layers. Long queries and keys
    would have scores that enlarge what was rounded before: norms of wide ones have small weights.
    together: gate and up of experts are one tensor.
    """
    model = make_tiny.MODELS["gemma4"]
    declared = tuple(x for x in model.declared if "attn_k" not in x or settings is not EXPERTS)
    changed = replace(model, settings={**model.settings, **settings}, declared=declared)
    monkeypatch.setitem(make_tiny.MODELS, "gemma4", changed)
    names = [f"blk.{i}.layer_output_scale.weight" for i in range(4)]
    arrays = [np.array([x], np.float32) for x in scales or ()]
    tensors: dict[str, Any] = dict(zip(names, arrays, strict=False))
    if settings is WIDE:
        tensors |= {f"blk.{i}.attn_q_norm.weight": np.full(512, 0.1, np.float32) for i in (1, 3)}
    if together:
        tensors |= _together(make_tiny.tensors_of(changed, 350))
    return make_tiny.write(folder / "gemma4.gguf", "gemma4", tensors=tensors)


def _together(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i in range(4):
        gate, up, both = (f"blk.{i}.ffn_{x}_exps.weight" for x in ("gate", "up", "gate_up"))
        found |= {gate: None, up: None, both: np.concatenate([arrays[gate], arrays[up]], axis=1)}
    return found
