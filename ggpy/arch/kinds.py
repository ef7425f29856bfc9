"""Layers of different kinds in one model: layers with a window, whose heads have another size, and
layers that read the keys and values of others.

This module knows settings and sizes, but no tensors and no weights.
"""

from __future__ import annotations

from dataclasses import replace

from .config import MAX_HEAD_SIZE, Config, Dimensions

KEY_LENGTH_SWA, SHARED_LAYERS = "attention.key_length_swa", "attention.shared_kv_layers"
INPUT = "embedding_length_per_layer_input"
UNDERSTOOD = frozenset({KEY_LENGTH_SWA, SHARED_LAYERS, INPUT})


def read_kinds(config: Config, sizes: Dimensions) -> Dimensions:
    """Adds to the sizes: which layers have a window, and their head size; how many of the last
    layers share keys and values; the size of layers' own inputs.
    """
    n_layer = sizes.n_layer
    size = config.integer(KEY_LENGTH_SWA, high=MAX_HEAD_SIZE)
    config.only("attention.value_length_swa", size)
    own = n_layer - config.integer(SHARED_LAYERS, 0, low=0, high=n_layer - 1)
    layers = []
    for i, windowed in enumerate(config.windowed_layers(n_layer)):
        layer = replace(sizes.layers[i], windowed=windowed, shares_keys=i >= own)
        layers.append(replace(layer, key_size=size, value_size=size) if windowed else layer)
    return replace(sizes, layers=tuple(layers), n_input=config.integer(INPUT, 0, low=0))
