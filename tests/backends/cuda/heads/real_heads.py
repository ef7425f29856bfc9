"""The tiny models of make_tiny.py with heads as large as those of published models.

What a GPU rounds counts for less, the more numbers a head adds up: a divergence of 1e-4 from the
reference is asked for at these sizes. Widths and numbers of heads stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import make_tiny
from tools.make_tiny import MODELS, Tiny

USUAL = 128
SIZES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding"), 256),
    **{"gpt-oss": 64, "granite": 64, "granitemoe": 64},
}
HYBRIDS = tuple(name for name, model in MODELS.items() if model.delta)
SCALED = ("rope.dimension_count", "rope.dimension_sections")  # with the size of a head
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"attention.scale": 1 / 64} for name in ("granite", "granitemoe")},
    "gemma4": {
        **{f"attention.{x}_length{kind}": n for x in ("key", "value")
           for kind, n in (("", 512), ("_swa", 256))},
        **{"rope.dimension_count": 512, "rope.dimension_count_swa": 256},
    },
}  # fmt: skip


def write_real_heads(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the tiny model of an architecture with such heads."""
    model = _hybrid(MODELS[name]) if name in HYBRIDS else _attention(name)
    monkeypatch.setitem(MODELS, name, model)
    return make_tiny.write(path, name, tensors=_tensors(name, model))


def _attention(name: str) -> Tiny:
    model, size = MODELS[name], SIZES.get(name, USUAL)
    times, found = size // model.E, dict(model.settings)
    for key in (key for key in SCALED if key in found):
        x = found[key]
        found[key] = [n * times for n in x] if isinstance(x, list) else x * times
    return replace(model, E=size, settings={**found, **SETTINGS.get(name, {})})


def _hybrid(model: Tiny) -> Tiny:
    """A gated delta net with two value heads for one key head, and attention after it."""
    settings = {
        **{"ssm.state_size": 128, "ssm.inner_size": 256, "ssm.group_count": 1},
        **{"ssm.time_step_rank": 2, "full_attention_interval": 2, "rope.dimension_count": 64},
    }
    if "rope.dimension_sections" in model.settings:
        settings |= {"rope.dimension_sections": [11, 11, 10, 0]}
    found = {**model.settings, **settings}
    return replace(model, H=2, G=1, E=256, n_layer=2, delta=(1, 2, 128, 4), settings=found)


def _tensors(name: str, model: Tiny) -> dict[str, np.ndarray | None]:
    """What depends on the size of a head. Gemma 4 does not scale scores: norms of its heads are
    trained to be small.
    """
    if name == "gemma4":
        sizes = {f"blk.{i}": 512 if i % 2 else 256 for i in range(model.n_layer)}
        return {f"{at}.attn_q_norm.weight": np.full(n, 0.1, np.float32) for at, n in sizes.items()}
    if model.rope_factors:
        n = model.settings["rope.dimension_count"] // 2
        ends = {"long": (2, 6), "short": (1, 1.5)}
        return {f"rope_factors_{x}.weight": np.linspace(*ends[x], n, dtype=np.float32)
                for x in ends}  # fmt: skip
    return {}
