"""A small decoder of random weights, on any ops."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from cases import random_rows

from ggpy.arch.config import Dimensions
from ggpy.arch.decoder import Decoder, Plan
from ggpy.backends.interface import Rope, Step
from ggpy.formats import by_name
from ggpy.gguf import Tensor

LAYERS, D, H, G, E, F, V = 3, 256, 4, 2, 64, 384, 320


def random_decoder(
    ops: Any,
    types: dict[str, str] | None = None,
    style: Literal["norm", "neox"] = "norm",
    norms: bool = False,
    post_norms: bool = False,
) -> Decoder:
    """A decoder of random weights, in Q8_0 or what `types` has for the last part of a name; I8 is
    multiplied with integers. norms: of q and k heads. post_norms: of what is added to x.
    """
    rng = np.random.default_rng(1)

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        format = by_name((types or {}).get(name.split(".")[-2], "Q8_0"))
        blocks = random_rows(format, rows, columns, rng, rms=0.05)
        return Tensor(name, (rows, columns), format, blocks)

    def vector(name: str, n: int = D, size: float = 1.0) -> Tensor:
        values = (size * rng.uniform(0.5, 1.5, n)).astype(np.float32)
        return Tensor(name, (n,), by_name("F32"), values.view(np.uint8))

    def loaded(t: Tensor) -> Any:
        if t.format.name != "I8":
            return ops.weight(t)
        scale = vector(t.name.replace("weight", "scale"), t.shape[0], 1e-3)
        return ops.weight(t, scale=scale, activations="int8")

    tensors = [matrix("token_embd.weight", V, D), vector("output_norm.weight")]
    for i in range(LAYERS):
        at = f"blk.{i}."
        tensors += [vector(at + "attn_norm.weight"), vector(at + "ffn_norm.weight")]
        tensors += [matrix(at + "attn_q.weight", H * E, D), matrix(at + "attn_k.weight", G * E, D)]
        tensors += [matrix(at + "attn_v.weight", G * E, D)]
        tensors += [matrix(at + "attn_output.weight", D, H * E), matrix(at + "ffn_up.weight", F, D)]
        tensors += [matrix(at + "ffn_gate.weight", F, D), matrix(at + "ffn_down.weight", D, F)]
        if norms:
            tensors += [vector(f"{at}attn_{part}_norm.weight", E) for part in "qk"]
        if post_norms:
            tensors += [vector(f"{at}post_{part}_norm.weight") for part in ("attention", "ffw")]
    weights = {t.name: loaded(t) for t in tensors}
    ops.weights_ready()
    rope = Rope(style, 100.0 ** (-np.arange(0, E, 2) / E))
    plan = Plan([rope] * LAYERS, [0] * LAYERS, E**-0.5, "silu")
    sizes = Dimensions(LAYERS, D, H, G, E, F, V, E, 1024, 1e-5)
    decoder = Decoder(sizes, plan, ops, weights)
    ops.allocate_cache(decoder.cache_shape(32))
    return decoder


def alone(n: int, position: int = 0) -> Step:
    """A token of each of n sequences, which have a page each."""
    every = np.arange(n, dtype=np.int32)
    ids = (every * 7 + position * 3) % V
    return Step(ids, np.full(n, position, np.int32), every, every[:, None].copy(), every)
