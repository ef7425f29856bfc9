"""Rope's settings: base, scaling, and the factors that Llama 3's scaling divides frequencies by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import MAX_CONTEXT
from .checkpoint import Metadata
from .settings import CheckpointSettings
from .size_settings import head_size

ROTATED_SHARE = "partial_rotary_factor"


def rope_part(
    s: CheckpointSettings, theta: float, kind: str = "full_attention"
) -> CheckpointSettings:
    """The settings of rope in one form. transformers 5 has rope_parameters, in some models for
    each type of layer; older versions have rope_scaling beside rope_theta. UnsupportedModel for
    several types of layers.
    """
    if not s.has("rope_parameters"):
        return s.part("rope_scaling", {"rope_theta": s.real("rope_theta", theta, low=1.000001)})
    parts = s.part("rope_parameters", {"rope_theta": s.real("rope_theta", theta, low=1.000001)})
    return parts.part(kind, {"rope_theta": theta}) if parts.has(kind) else parts


def rotated_share(s: CheckpointSettings, part: CheckpointSettings, usual: float = 1.0) -> float:
    """The share of a head that is rotated: ROTATED_SHARE in rope's settings `part`, or beside them
    in older files. Callers pass ROTATED_SHARE to `rope` as known.
    """
    return part.real(ROTATED_SHARE, s.real(ROTATED_SHARE, usual, high=1.0), high=1.0)


def rope_kind(rope: CheckpointSettings) -> str:
    """rope_type by its current name; "default" means no scaling, and so do sections ("mrope")."""
    old = rope.text("type", "default")
    kind = rope.text("rope_type", old)
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def rope(
    s: CheckpointSettings,
    theta: float = 10000.0,
    known: Iterable[str] = (),
    usual: Mapping[str, Any] | None = None,
) -> Metadata:
    """Base and scaling: none, linear, YaRN, and Llama 3's, whose factors `rope_freqs` makes.

    known: settings among those of rope that the caller understands. usual: all of them, where
    config.json says none.
    """
    said = usual is None or s.has("rope_parameters") or s.has("rope_scaling")
    part = rope_part(s, theta) if said else s.part("rope_parameters", usual)
    found: Metadata = {"rope.freq_base": ("f32", part.real("rope_theta", low=1.000001))}
    kind = rope_kind(part)
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise part.refuse("rope_type" if part.has("rope_type") else "type", f"{known} are")
    found |= _SCALINGS[kind](part, s)
    known = set(known)
    for key, value in ((ROTATED_SHARE, 1), ("truncate", True)):
        if key not in known:
            part.only(key, value)
    for key in known:
        part.raw(key)
    part.refuse_unread()
    return found


def partial_rope(
    s: CheckpointSettings, theta: float, usual: float, known: Iterable[str] = ()
) -> Metadata:
    """Rope on a part of each head; see `rotated_share` and `rope`."""
    n_rot = int(rotated_share(s, rope_part(s, theta), usual) * head_size(s))
    return {**rope(s, theta, (*known, ROTATED_SHARE)), "rope.dimension_count": ("u32", n_rot)}


def _linear(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    factor = part.real("factor", low=1e-6)
    return {"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", factor)}


def _yarn(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    """Source: Peng et al. 2023, whose magnitude is implied."""
    factor = part.real("factor", low=1e-6)
    usual = 0.1 * log(max(factor, 1.0)) + 1
    if abs(part.real("attention_factor", usual) - usual) > 1e-6:
        raise part.refuse("attention_factor", f"only the usual {usual:.7g} is")
    n_ctx = s.integer("max_position_embeddings", high=MAX_CONTEXT)
    original = part.integer("original_max_position_embeddings", n_ctx, high=MAX_CONTEXT)
    found: Metadata = {
        "rope.scaling.type": ("str", "yarn"),
        "rope.scaling.factor": ("f32", factor),
        "rope.scaling.original_context_length": ("u32", original),
    }
    for key in ("beta_fast", "beta_slow"):
        if part.has(key):
            found[f"rope.scaling.yarn_{key}"] = ("f32", part.real(key, low=1e-6))
    return found


def _llama3(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    llama3_factors(part, 2)  # checks the settings
    return {}


_SCALINGS: dict[str, Callable[[CheckpointSettings, CheckpointSettings], Metadata]] = {
    "default": lambda part, s: {},
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}


def rope_freqs(s: CheckpointSettings) -> dict[str, NDArray[np.float32]]:
    """rope_freqs.weight of models with Llama 3's scaling."""
    part = rope_part(s, 10000.0)
    if rope_kind(part) != "llama3":
        return {}
    return {"rope_freqs.weight": llama3_factors(part, head_size(s))}


def llama3_factors(rope: CheckpointSettings, n_rot: int) -> NDArray[np.float32]:
    """factors[n_rot / 2] that divide frequencies: 1 for fast pairs, `factor` for slow ones, and a
    ramp between, or a step (Llama 4). Source: transformers' _compute_llama3_parameters.
    """
    factor = rope.real("factor", 8.0, low=1e-6)
    low = rope.real("low_freq_factor", 1.0, low=1e-6)
    high = rope.real("high_freq_factor", 4.0, low=1e-6)
    n_ctx = rope.integer("original_max_position_embeddings", 8192, high=MAX_CONTEXT)
    if high < low:
        raise rope.refuse("high_freq_factor", f"low_freq_factor is {low:g}")
    base = rope.real("rope_theta", low=1.000001)
    turns = n_ctx / (2 * pi) * base ** (-np.arange(0, n_rot, 2) / n_rot)  # in that context
    smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
