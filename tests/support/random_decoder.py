"""A small decoder with random weights on any ops. Its layers can differ in every property."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
from cases import random_rows

from ggpy.arch.architecture import (
    LAYER,
    LAYER_NORM_BIAS,
    NORM_BIAS,
    POST_NORM,
    Architecture,
    LayerSettings,
    ModelSettings,
)
from ggpy.arch.config import Dimensions, LayerSizes
from ggpy.arch.decoder import Decoder
from ggpy.arch.layers.attention import (
    OUTPUT_BIAS,
    QK_NORM,
    QK_NORM_BY_HEAD,
    QKV_BIAS,
    SINKS,
    WHOLE_QK_NORM,
    AttentionSettings,
)
from ggpy.arch.layers.dense import DenseSettings
from ggpy.backends.interface import (
    PAGE_SIZE,
    Activation,
    AttentionTemperature,
    Role,
    Rope,
    Step,
)
from ggpy.cache_types import USUAL as USUAL_TYPES
from ggpy.cache_types import CacheTypes
from ggpy.formats import by_name
from ggpy.gguf import Tensor

LAYERS, D, H, G, E, F, V = 3, 256, 4, 2, 64, 384, 320
SIZES = LayerSizes(H, G, E, E, F)
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """The properties of a layer."""

    sizes: LayerSizes = SIZES
    window: int = 0
    has_rope: bool = True
    soft_cap: float = 0.0
    causal: bool = True
    chunked: bool = False
    v_norm: bool = False
    norm_after_rope: bool = False
    temperature: AttentionTemperature | None = None


@dataclass(frozen=True)
class Variation:
    """The properties of a decoder; `tensors` are optional tensors that each layer has."""

    layers: tuple[Shape, ...] = (Shape(),) * LAYERS
    tensors: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()  # usual tensors that no layer has
    norm_whole: bool = False
    norm_by_head: bool = False
    layer_norm: bool = False
    parallel: bool = False  # with one norm, where "ffn_norm.weight" is no tensor
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float = 0.0


USUAL = Variation()
# Layers with different heads, widths and windows, with values of another size than keys, and one
# without RoPE. The first and the last layer are in one cache group.
DIFFERING = Variation(
    layers=(
        Shape(LayerSizes(4, 2, 64, 32, 384), window=40),
        Shape(LayerSizes(8, 1, 32, 64, 128), has_rope=False),
        Shape(LayerSizes(2, 2, 96, 64, 256), window=70, soft_cap=3.0),
        Shape(LayerSizes(4, 2, 64, 32, 256), window=40),
    )
)
# Chunks shorter and longer than a page; attention to both sides, with windows of odd widths.
CHUNKS = Variation(
    layers=(Shape(window=24, chunked=True), Shape(), Shape(window=70, chunked=True, soft_cap=3.0))
)
BOTH_SIDES = Variation(
    layers=(Shape(window=9, causal=False), Shape(causal=False), Shape(window=75, causal=False))
)
# Heads wider than a panel of products, and values that are keys before norm and rotation.
WIDE_HEADS = Variation(
    (Shape(LayerSizes(2, 1, 512, 512, 128)), Shape(LayerSizes(4, 2, 320, 272, 128), window=40))
)
KEYS_AS_VALUES = Variation(
    layers=(Shape(v_norm=True), Shape(), Shape(LayerSizes(4, 1, 32, 32, 128), v_norm=True)),
    without=("attn_v.weight",),
)
# Norms after attention and feed-forward only, and of all heads of q and k together.
BEHIND = Variation(
    tensors=tuple({**POST_NORM, **WHOLE_QK_NORM}.items()),
    without=("attn_norm.weight", "ffn_norm.weight"),
    norm_whole=True,
    logit_scale=0.25,
)
# Attention and feed-forward in parallel, of one layer norm and of two; layer norms of heads;
# attention in chunks.
PARALLEL = Variation(
    layers=(CHUNKS.layers[0], Shape(has_rope=False), CHUNKS.layers[2]),
    tensors=tuple(QK_NORM_BY_HEAD.items()),
    without=("ffn_norm.weight",),
    norm_by_head=True,
    layer_norm=True,
    parallel=True,
    logit_scale=0.25,
)
TWO_NORMS = replace(
    PARALLEL, without=(), tensors=tuple(LAYER_NORM_BIAS.items()), norm_by_head=False
)
# Late operations on heads: norms after RoPE, queries that grow with their position.
GROWING = AttentionTemperature(0.5, 7, offset=1)
LATE = Variation(
    layers=(
        Shape(norm_after_rope=True, temperature=GROWING),
        Shape(norm_after_rope=True, window=40),
        Shape(has_rope=False, temperature=replace(GROWING, offset=0)),
    ),
    tensors=tuple({**QKV_BIAS, **QK_NORM}.items()),
)
# Biases before norms, of all heads together and of what is added to the residual stream.
BIASED = Variation(
    tensors=tuple({**QKV_BIAS, **OUTPUT_BIAS, **POST_NORM, **WHOLE_QK_NORM}.items()),
    norm_whole=True,
    residual_scale=0.4,
)
# All optional parts of a layer, with layer norms.
EVERYTHING = Variation(
    layers=DIFFERING.layers,
    tensors=tuple(
        {**QKV_BIAS, **OUTPUT_BIAS, **QK_NORM, **SINKS, **POST_NORM, **LAYER_NORM_BIAS}.items()
    ),
    layer_norm=True,
    activation="gelu_tanh",
    embedding_scale=3.0,
    residual_scale=0.4,
    logit_scale=0.25,
    soft_cap=8.0,
)


def random_decoder(
    ops: Any,
    types: dict[str, str] | None = None,
    style: Literal["norm", "neox"] = "norm",
    norms: bool = False,
    post_norms: bool = False,
    variation: Variation = USUAL,
    cache_types: CacheTypes = USUAL_TYPES,
) -> Decoder:
    """A decoder with random weights.

    Weights are Q8_0, or the type that `types` gives for the last part of a tensor name; I8 selects
    integer GEMMs. norms: norms of q and k heads. post_norms: norms of the values added to x.
    """
    extra = dict(variation.tensors)
    extra |= (QK_NORM if norms else {}) | (POST_NORM if post_norms else {})
    outside = NORM_BIAS if variation.layer_norm else {}
    sizes = Dimensions(
        D, V, 32, 1024, EPS, tuple(x.sizes for x in variation.layers), variation.layer_norm
    )
    settings = _settings(variation, style)
    architecture = Architecture(
        "random",
        lambda context: settings,
        layer={k: v for k, v in {**LAYER, **extra}.items() if k not in variation.without},
        optional=outside,
    )
    needed, allowed = architecture.tensors(sizes)
    rng = np.random.default_rng(1)
    weights = {}
    for name, (axes, shape) in {**needed, **allowed}.items():
        format = by_name((types or {}).get(name.split(".")[-2], "Q8_0"))
        is_vector = len(shape) == 1 or axes.endswith(" E")  # with weights for each head
        tensor = _vector(name, prod(shape), rng) if is_vector else _matrix(name, shape, format, rng)
        weights[name] = _loaded(ops, tensor, Role(axes), rng)
    ops.weights_ready()
    decoder = Decoder(sizes, settings, ops, weights, 512, cache_types)
    ops.allocate_cache(decoder.cache_shape(32, PAGE_SIZE, PAGE_SIZE))
    return decoder


def _settings(v: Variation, style: Literal["norm", "neox"]) -> ModelSettings:
    layers = []
    for x in v.layers:
        size = x.sizes.key_size
        rope = Rope(style, 100.0 ** (-np.arange(0, size, 2) / size)) if x.has_rope else None
        mixer = AttentionSettings(
            *(size**-0.5, rope, x.window, x.soft_cap, v.residual_scale),
            norm_whole=v.norm_whole,
            causal=x.causal,
            chunked=x.chunked,
            norm_by_head=v.norm_by_head,
            norm_after_rope=x.norm_after_rope,
            temperature=x.temperature,
            v_norm_eps=EPS if x.v_norm else None,
        )
        one_norm = v.parallel and "ffn_norm.weight" in v.without
        ffn = DenseSettings(v.activation, v.residual_scale, "attn_norm" if one_norm else "ffn_norm")
        layers.append(LayerSettings(mixer, ffn, v.parallel))
    return ModelSettings(layers, v.embedding_scale, v.soft_cap, v.logit_scale)


def _matrix(name: str, shape: tuple[int, ...], format: Any, rng: np.random.Generator) -> Tensor:
    return Tensor(name, shape, format, random_rows(format, *shape, rng, rms=0.05))


def _vector(name: str, n: int, rng: np.random.Generator, size: float = 1.0) -> Tensor:
    middle = 0.0 if name.endswith("bias") else 1.0
    values = (size * (middle + rng.uniform(-0.5, 0.5, n))).astype(np.float32)
    return Tensor(name, (n,), by_name("F32"), values.view(np.uint8))


def _loaded(ops: Any, t: Tensor, role: Role, rng: np.random.Generator) -> Any:
    if t.format.name != "I8":
        return ops.weight(t, role)
    scale = _vector(t.name.replace("weight", "scale"), t.shape[0], rng, 1e-3)
    return ops.weight(t, role, scale=scale, activations="int8")


def decode_step(n: int, position: int = 0, n_groups: int = 1) -> Step:
    """A decode step of n sequences with one page each."""
    every = np.arange(n, dtype=np.int32)
    ids = (every * 7 + position * 3) % V
    tables = (every[:, None].copy(),) * n_groups
    return Step(ids, np.full(n, position, np.int32), every, tables, every)


def steps_of_two() -> list[Step]:
    """A prompt of 90 tokens in two parts, the second beside another prompt, then tokens of both:
    three each alone, which is enough to record them and to replay them.
    """
    tables = np.array([[3, 1], [0, 2]], np.int32)
    parts = [
        [(0, 0, 70)],
        [(0, 70, 20), (1, 0, 9)],
        [(0, 90, 1), (1, 9, 3)],
        *([(0, 91 + i, 1), (1, 12 + i, 1)] for i in range(5)),
    ]
    found = []
    for step in parts:
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in step])
        sequences = np.repeat([s for s, _, _ in step], [n for _, _, n in step])
        every = np.arange(len(positions))
        arrays = ((positions * 7 + 3) % V, positions, sequences, every)
        ids, positions, sequences, rows = (a.astype(np.int32) for a in arrays)
        found.append(Step(ids, positions, sequences, (tables,), rows))
    return found
