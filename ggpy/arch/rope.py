"""Rotary frequencies from settings: every context extension is folded into `Rope`.

Linear scaling, YaRN (Peng et al. 2023, as ggml's rope computes it), Llama 3's per-pair factors and
LongRoPE all change only the frequencies and one magnitude, so ops know none of them. Everything
here is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import Rope
from ..gguf import GGUFError, Tensor
from .config import Config, Dimensions, UnsupportedModel

Style = Literal["norm", "neox"]
SCALING_TYPES = ("none", "linear", "yarn", "longrope")
SECTIONS = "rope.dimension_sections"  # how many pairs each axis of an image has


@dataclass(frozen=True)
class RopeSettings:
    """The `rope.*` settings of a file; the context was stretched by `factor`."""

    style: Style
    n_rot: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def with_base(self, base: float) -> RopeSettings:
        """The same rotation with another base and no scaling, for layers with a window."""
        return replace(self, base=base, scaling="none", factor=1.0)


def read_rope(config: Config, sizes: Dimensions, style: Style) -> RopeSettings:
    """All `rope.*` settings; a scaling type that is not one of SCALING_TYPES is refused."""
    config.only("rope.scaling.type", *SCALING_TYPES)
    config.only("rope.scaling.yarn_ext_factor", 1)
    old_factor = config.real("rope.scale_linear", 0.0)
    _check_magnitude(config)
    return RopeSettings(
        style=style,
        n_rot=sizes.n_rot,
        base=config.real("rope.freq_base", 10000.0, low=1.000001),
        scaling=config.text("rope.scaling.type", "linear"),
        factor=config.real("rope.scaling.factor", old_factor) or 1.0,
        n_ctx_orig=config.integer(
            "rope.scaling.original_context_length", sizes.n_ctx_train, high=1 << 28
        ),
        attn_factor=config.real("rope.scaling.attn_factor", 1.0),
        beta_fast=config.real("rope.scaling.yarn_beta_fast", 32.0, low=1e-6),
        beta_slow=config.real("rope.scaling.yarn_beta_slow", 1.0, low=1e-6),
    )


def stored_sections(pairs: Sequence[int]) -> tuple[str, list[int]]:
    """The value of SECTIONS in files, which has a number for each of four axes."""
    return "arr[i32]", [*pairs, 0, 0, 0, 0][:4]


def has_sections(config: Config) -> bool:
    """Whether pairs are divided among the axes of images; in a text all have one position."""
    sections = config.raw(SECTIONS)
    return isinstance(sections, np.ndarray) and bool((sections[:2] > 0).all())


def _check_magnitude(config: Config) -> None:
    """Refuse another magnitude of YaRN than the usual one, which files need not say."""
    usual = yarn_magnitude(config.real("rope.scaling.factor", 1.0))
    said = config.real("rope.scaling.yarn_attn_factor", usual)
    if abs(said - usual) > 1e-4 * usual:
        raise UnsupportedModel(
            f"{config.path}: rope.scaling.yarn_attn_factor = {said:g} is not supported (only the"
            f" usual {usual:g} is)"
        )


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """The factor by which YaRN scales q and k: 1 + 0.1 * multiplier * ln(factor)."""
    return 1 + 0.1 * multiplier * log(max(factor, 1.0))


def choose_factors(
    settings: RopeSettings, tensors: Mapping[str, Tensor], n_ctx: int
) -> NDArray[np.float32] | None:
    """Llama 3's factors[n_rot / 2], or LongRoPE's: the long ones if n_ctx exceeds the original."""
    long = n_ctx > settings.n_ctx_orig
    for name in ("rope_freqs.weight", f"rope_factors_{'long' if long else 'short'}.weight"):
        if name in tensors:
            return _checked(tensors[name])
    return None


def _checked(tensor: Tensor) -> NDArray[np.float32]:
    factors = tensor.dequantize()
    if not (factors > 0).all():
        raise GGUFError(f"{tensor.path}: tensor {tensor.name!r} has a factor that is not positive")
    return factors


def build_rope(settings: RopeSettings, factors: NDArray | None = None) -> Rope:
    """The rope with frequencies base^(-2i / n_rot) / factors[n_rot / 2], scaled by the settings."""
    pairs = np.arange(settings.n_rot // 2, dtype=np.float64)
    inv_freq = settings.base ** (-2 * pairs / settings.n_rot)
    if factors is not None:
        inv_freq = inv_freq / factors.astype(np.float64)
    magnitude = settings.attn_factor
    if settings.scaling == "yarn":
        extrapolated = _yarn_ramp(settings)
        inv_freq = inv_freq * (extrapolated + (1 - extrapolated) / settings.factor)
        magnitude *= yarn_magnitude(settings.factor)
    elif settings.scaling != "none":
        inv_freq = inv_freq / settings.factor
    return Rope(settings.style, inv_freq, magnitude)


def build_local_rope(
    config: Config, settings: RopeSettings, factors: NDArray | None = None
) -> Rope:
    """The rope of layers with a window, scaled like the others; a file may give another base."""
    base = config.real("rope.freq_base_swa", settings.base, low=1.000001)
    return build_rope(replace(settings, base=base), factors)


def _yarn_ramp(settings: RopeSettings) -> NDArray[np.float64]:
    """The share of its frequency that each pair keeps: 1 for fast pairs, 0 for slow ones.

    Source: ggml_rope_yarn_corr_dims.
    """

    def pair_of(turns: float) -> float:  # the pair that turns so often in the original context
        return (
            settings.n_rot * log(settings.n_ctx_orig / (turns * 2 * pi)) / (2 * log(settings.base))
        )

    low = max(0, floor(pair_of(settings.beta_fast)))
    high = min(settings.n_rot - 1, ceil(pair_of(settings.beta_slow)))
    ramp = (np.arange(settings.n_rot // 2) - low) / max(0.001, high - low)
    return 1 - np.clip(ramp, 0, 1)
