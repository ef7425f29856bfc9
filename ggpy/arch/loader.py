"""Makes a decoder from an open file: checks everything in the file, then hands its weights to a
backend.

Nothing here knows the needs of a single architecture, or how a backend stores a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import Demand, Ops, Role, Weight
from ..cache_types import USUAL, CacheTypes
from ..gguf import File, GGUFError, Tensor
from ..gguf.names import layer_of
from .architecture import (
    CLASSIFIER,
    DENSE,
    ROPE_FACTORS,
    ROPE_FREQS,
    Architecture,
    Context,
    Declared,
    LayerSettings,
    ModelSettings,
)
from .collect import check_vocabulary, collect, of_texts
from .config import Config, Dimensions, UnsupportedModel
from .decoder import Decoder, cache_groups
from .layers import inputs
from .layers.moe import MoESettings
from .placement import stays_on_host
from .scheme import SCALE, Given, Scheme, read_scheme, scale_of

Progress = Callable[[int, int], None]  # gets the bytes of weights handed over so far, and of all
MOST_BATCH, LEAST_BATCH = 2048, 512  # tokens of a step: prefill on a GPU is 14 % faster with 2048
IN_SETTINGS = (SCALE, *inputs.SCALE)  # ends of names
BIAS = ".bias"
FLOATS = ("F64", "F32", "F16", "BF16")
READERS = 8  # threads that check scales: a single one reads a mapped file slower than the bus


class Understood(NamedTuple):
    """The checked contents of a file."""

    sizes: Dimensions
    settings: ModelSettings
    collected: dict[str, tuple[Tensor, Declared]]  # tensors by name, with fused ones split
    scheme: Scheme


def build(
    architecture: Architecture,
    file: File,
    ops: Ops,
    n_ctx: int,
    progress: Progress | None = None,
    n_batch: int | None = None,
    n_seq: int = 1,
    cache_types: CacheTypes = USUAL,
    n_positions: int | None = None,
    n_cpu_moe: int = 0,
) -> Decoder:
    """Check the file, then hand its weights to `ops`; GGUFError says what is wrong with the file.

    The decoder is for n_seq sequences of n_ctx tokens, which share n_positions of the KV cache if
    that is given, with n_batch tokens in a step (None: as many as are fast). MemoryError if they do
    not fit. ValueError if the heads are too small for the types of the KV cache. n_cpu_moe: see
    placement.py.
    """
    sizes, settings, collected, scheme = understood(architecture, file, n_ctx)
    tensors = {name: tensor for name, (tensor, _) in collected.items()}
    weights = _weights(collected, scheme, n_cpu_moe)
    steps = _steps(n_batch, n_ctx, settings.causal)
    most, least = (min(n, n_seq * n_ctx) for n in steps)
    groups = cache_groups(sizes, settings, cache_types)
    demand = Demand(
        weights=_parts(weights),
        n_seq=n_seq,
        n_batch=most,
        least_batch=least,
        n_embd=sizes.n_embd,
        n_ff=max(max(layer.n_ff, layer.n_ff_shared) for layer in sizes.layers),
        n_vocab=sizes.n_vocab,
        cache=lambda n_batch: groups.shape(n_seq, n_ctx, n_batch, n_positions),
        n_used=max(map(_n_used, settings.layers)),
        n_ff_expert=max(layer.n_ff_expert for layer in sizes.layers),
        n_inputs=sizes.letters()["LI"],
        n_expert=max(layer.n_expert for layer in sizes.layers),
    )
    n_batch = ops.plan_memory(demand)
    read = [weights[name].tensor if name in weights else x for name, x in tensors.items()]
    with ThreadPoolExecutor(READERS) as pool:  # the first error in the file's order is raised
        list(pool.map(lambda tensor: tensor.check_scales(), read))
    handed = _hand_over(weights, ops, progress)
    classifier = next(iter(_on_host(tensors, CLASSIFIER)), None)
    dense = _on_host(tensors, DENSE)
    return Decoder(sizes, settings, ops, handed, n_batch, cache_types, classifier, dense)


def _steps(n_batch: int | None, n_ctx: int, causal: bool) -> tuple[int, int]:
    """(most, least) tokens of a step; without causal attention, a step contains the whole text."""
    if n_batch is not None:
        return n_batch, n_batch
    return (MOST_BATCH, LEAST_BATCH) if causal else (n_ctx, n_ctx)


def understood(architecture: Architecture, file: File, n_ctx: int) -> Understood:
    """Check the settings and tensors of a file, without reading weights; GGUFError."""
    config = Config(file.metadata, architecture.name, file.path)
    found = of_texts(file)
    architecture.adapt(config, found)
    sizes = architecture.dimensions(config, _n_vocab(file))
    check_vocabulary(file, sizes.n_vocab)
    scheme = read_scheme(file.metadata, file.path)
    collected = collect(architecture, file, found, sizes)
    tensors = {name: tensor for name, (tensor, _) in collected.items()}
    for name, rows in zip(DENSE, sizes.dense, strict=True):
        if rows != sizes.n_embd and name not in tensors:
            raise GGUFError(f"{file.path}: the settings give {name!r} {rows} rows, it is missing")
    settings = architecture.settings(Context(config, sizes, tensors, n_ctx))
    return Understood(sizes, settings, collected, scheme)


def _n_used(layer: LayerSettings) -> int:
    """J, the experts that a token chooses."""
    return layer.ffn.router.n_used if isinstance(layer.ffn, MoESettings) else 0


def _n_vocab(file: File) -> int:
    """Rows of the embedding table."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GGUFError(
            f"{file.path}: token_embd.weight, the embedding table, is missing or no matrix"
        )
    return table.shape[0]


def _on_host(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[NDArray[np.float32]]:
    """The existing tensors among `names`, for small products that the host computes."""
    return [np.array(tensors[x].dequantize(), np.float32) for x in names if x in tensors]


def _weights(
    collected: Mapping[str, tuple[Tensor, Declared]], scheme: Scheme, n_cpu_moe: int
) -> dict[str, Given]:
    """The tensors that become weights, with their row scales."""
    found = {}
    for name, (tensor, declared) in collected.items():
        if name in {**ROPE_FREQS, **ROPE_FACTORS, **CLASSIFIER, **DENSE}:
            continue  # these are in the settings, or on the host
        if name.endswith(IN_SETTINGS):
            continue  # these are in the settings, on the host, or with their matrix
        on_host = name == inputs.INPUT_TABLE
        lookup = on_host or (name == "token_embd.weight" and "output.weight" in collected)
        lookup = lookup or (name.endswith(BIAS) and len(tensor.shape) == 2)  # a row for each expert
        scale, _ = collected.get(scale_of(name), (None, None))
        if declared.axes.endswith((" taps", " E")):  # small tables: no product multiplies them
            tensor = _flat(tensor)
        layer = layer_of(name)
        on_host = on_host or stays_on_host(tensor, layer, n_cpu_moe)
        found[name] = scheme.given(tensor, Role(declared.axes, lookup, on_host, layer), scale)
    return found


def _flat(tensor: Tensor) -> Tensor:
    """A matrix of floats as a vector; UnsupportedModel for blocks."""
    if tensor.format.name not in FLOATS:
        raise UnsupportedModel(
            f"{tensor.path}: tensor {tensor.name!r} is {tensor.format.name}: only floats are"
            " supported there"
        )
    return replace(tensor, shape=(prod(tensor.shape),), data=tensor.data.reshape(-1))


def _parts(weights: Mapping[str, Given]) -> list[tuple[Tensor, Role]]:
    """All tensors that are handed over, row scales included, with their roles."""
    given = weights.values()
    scales = [(x.scale, Role(x.role.axes.split()[0])) for x in given if x.scale is not None]
    return [(x.tensor, x.role) for x in given] + scales


def _hand_over(
    tensors: Mapping[str, Given], ops: Ops, progress: Progress | None
) -> dict[str, Weight]:
    total, done = sum(t.nbytes for t, _ in _parts(tensors)), 0
    weights = {}
    for name, given in tensors.items():
        tensor, scale = given.tensor, given.scale
        weights[name] = ops.weight(tensor, given.role, scale, given.activations)
        done += tensor.nbytes + (0 if scale is None else scale.nbytes)
        if progress:
            progress(done, total)
    ops.weights_ready()
    return weights
