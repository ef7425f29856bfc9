"""The gated delta net: a convolution over the last tokens, and a matrix for each value head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...backends.interface import GatedDeltaNet, Norm, Recurrent, StateSpec
from ...cache_types import CacheTypes
from ...gguf import GGUFError
from ..config import Config, Dimensions, LayerSizes, UnsupportedModel, short
from .weights import LayerWeights

# Sized by Dimensions.letters.
TENSORS = {
    "attn_norm.weight": "D",
    "attn_qkv.weight": "K D",
    "attn_gate.weight": "HvS D",
    "ssm_beta.weight": "Hv D",
    "ssm_alpha.weight": "Hv D",
    "ssm_conv1d.weight": "K taps",
    "ssm_a": "Hv",
    "ssm_dt.bias": "Hv",
    "ssm_norm.weight": "S",
    "ssm_out.weight": "D HvS",
}
LAYERS, INTERVAL = "attention.recurrent_layers", "full_attention_interval"
USUAL_INTERVAL = 4  # every fourth layer attends
MAX_TAPS, MAX_SIZE, MAX_HEADS = 64, 1024, 4096


@dataclass(frozen=True)
class DeltaSettings:
    """The settings of one layer's gated delta net."""

    tiled: bool  # see GatedDeltaNet
    residual_scale: float = 1.0

    def state(self, sizes: LayerSizes, types: CacheTypes) -> Recurrent:
        """The state that the layer keeps of a sequence; types of keys and values do not matter."""
        assert sizes.recurrent is not None
        return sizes.recurrent

    def build(self, w: LayerWeights, spec: StateSpec, group: int, slot: int) -> GatedDeltaNet:
        """The mixer; its states are at a slot of a group of the cache."""
        assert isinstance(spec, Recurrent)
        return GatedDeltaNet(
            spec=spec,
            group=group,
            slot=slot,
            norm=w.norm("attn_norm"),
            w_qkv=w["attn_qkv.weight"],
            w_gate=w["attn_gate.weight"],
            w_beta=w["ssm_beta.weight"],
            w_alpha=w["ssm_alpha.weight"],
            conv=w["ssm_conv1d.weight"],
            a=w["ssm_a"],
            dt=w["ssm_dt.bias"],
            out_norm=Norm(w["ssm_norm.weight"], w.eps),
            wo=w["ssm_out.weight"],
            tiled=self.tiled,
        )


def read_sizes(config: Config, sizes: Dimensions) -> Dimensions:
    """Adds the states of recurrent layers to the sizes; GGUFError for impossible settings."""
    state = read_state(config)
    recurrent = _read_layers(config, sizes.n_layer, sizes.n_nextn)
    pairs = zip(sizes.layers, recurrent, strict=True)
    layers = tuple(replace(size, recurrent=state) if has else size for size, has in pairs)
    return replace(sizes, layers=layers)


def read_state(config: Config) -> Recurrent:
    """The state, which is the same in all recurrent layers."""
    size = config.integer("ssm.state_size", high=MAX_SIZE)
    n_k_head = config.integer("ssm.group_count", high=MAX_HEADS)
    n_v_head = config.integer("ssm.time_step_rank", high=MAX_HEADS)
    at = f"{config.path}: {config.architecture}"
    if n_v_head % n_k_head:
        raise GGUFError(
            f"{at}.ssm.time_step_rank = {n_v_head}: value heads, which {n_k_head} key heads "
            "(ssm.group_count) cannot share evenly"
        )
    inner = config.integer("ssm.inner_size")
    if inner != size * n_v_head:
        raise UnsupportedModel(
            f"{at}.ssm.inner_size = {inner}: {n_v_head} value heads of {size} (ssm.state_size) are "
            f"{size * n_v_head}"
        )
    taps = config.integer("ssm.conv_kernel", low=2, high=MAX_TAPS)
    return Recurrent(n_k_head, n_v_head, size, taps)


def _read_layers(config: Config, n_layer: int, n_nextn: int) -> list[bool]:
    """Which layers have a recurrent state. The file has one bool for each layer, possibly with the
    n_nextn blocks after the layers; if it has none, every INTERVAL-th layer attends.
    """
    interval = config.integer(INTERVAL, USUAL_INTERVAL, high=n_layer + n_nextn)
    given = config.raw(LAYERS)
    if given is None:
        found = [(i + 1) % interval != 0 for i in range(n_layer)]
    else:
        lengths = (n_layer, n_layer + n_nextn)
        good = isinstance(given, np.ndarray) and given.dtype == np.bool_
        if not good or given.shape not in [(n,) for n in lengths]:
            raise GGUFError(
                f"{config.path}: {config.architecture}.{LAYERS} = {short(given)}: expected "
                f"{n_layer} bools, one for each layer"
            )
        found = [bool(x) for x in given[:n_layer]]
    if all(found):
        raise UnsupportedModel(
            f"{config.path}: none of {n_layer} layers attends: {config.architecture}.{LAYERS} or "
            f"{INTERVAL} leaves none out"
        )
    return found
