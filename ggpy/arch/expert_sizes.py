"""Which layers of a file have experts, and how many and how wide they are.

Nothing here knows how a setting is checked.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..gguf import GGUFError

if TYPE_CHECKING:
    from .config import Config

MAX_EXPERTS = 4096  # more is a damaged file
SHARED_COUNT, SHARED_WIDTH = "expert_shared_count", "expert_shared_feed_forward_length"


def expert_sizes(
    config: Config, widths: tuple[int, ...], understood: Collection[str]
) -> list[tuple[int, int, int]]:
    """(X, Fx, Fs) of each layer; zeros where the feed-forward is dense."""
    n_layer, dense = len(widths), (0, 0, 0)
    if "expert_count" not in understood:
        return [dense] * n_layer
    n_expert = config.integer("expert_count", 0, low=0, high=MAX_EXPERTS)
    if n_expert == 0:
        config.only("expert_used_count", 0)
        return [dense] * n_layer
    has_experts = _layers_with_experts(config, n_layer, understood)
    key = "expert_feed_forward_length"
    usual = None if config.has(key) else _usual_widths(config, widths)
    found = config.integers(key, n_layer, usual)
    shared = _shared_widths(config, found, widths, understood)
    sizes = zip([n_expert] * n_layer, found, shared, strict=True)
    return [x if has else dense for x, has in zip(sizes, has_experts, strict=True)]


def _layers_with_experts(config: Config, n_layer: int, understood: Collection[str]) -> list[bool]:
    """All but the first ones, or but those between; GGUFError if no layer has experts."""
    first, period = "leading_dense_block_count", "interleave_moe_layer_step"
    n_dense = config.integer(first, 0, low=0, high=n_layer) if first in understood else 0
    step = config.integer(period, 1, high=n_layer) if period in understood else 1
    found = [i >= n_dense and (i + 1) % step == 0 for i in range(n_layer)]
    if not any(found):
        raise GGUFError(
            f"{config.path}: none of {n_layer} layers has experts: {first} = {n_dense}, {period} ="
            f" {step}"
        )
    return found


def _usual_widths(config: Config, dense: tuple[int, ...]) -> tuple[int, ...] | None:
    """The widths of experts where a file says none: that of the feed-forward, which all experts of
    a token have together in the first files of Qwen's models, and in those of Ollama.
    """
    if not all(dense):
        return None
    if not config.architecture.startswith("qwen"):
        return dense
    n_used = config.integer("expert_used_count", high=MAX_EXPERTS)
    return tuple(max(1, width // n_used) for width in dense)


def _shared_widths(
    config: Config, of_experts: tuple[int, ...], dense: tuple[int, ...], understood: Collection[str]
) -> tuple[int, ...]:
    """Of the shared expert of each layer: its own, or that of so many experts; 0 without one."""
    n = 0
    if SHARED_COUNT in understood:
        n = config.integer(SHARED_COUNT, 0, low=0, high=MAX_EXPERTS)
    if SHARED_WIDTH in understood and (config.has(SHARED_WIDTH) or SHARED_COUNT not in understood):
        return config.integers(SHARED_WIDTH, len(dense), dense)
    return tuple(n * x for x in of_experts)
