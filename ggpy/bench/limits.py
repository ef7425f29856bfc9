"""The time that a step cannot go below: bytes that must be read, operations that must be done.

A step reads every weight once, except a table that is only looked up, and the keys and values that
its tokens see; it multiplies each weight with each token, and the output only with the rows whose
logits are wanted. Whichever of memory and arithmetic takes longer is the limit. Everything is
counted from the file, as it would be for any runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .kernels.ceilings import Ceilings

if TYPE_CHECKING:
    from ..arch.decoder import Decoder
    from ..cache_types import CacheTypes
    from ..gguf import Tensor

TABLE, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Work:
    """What a model's steps cost."""

    weight_bytes: int  # of one step, whatever its tokens
    layer_flops: int  # of one token, without attention
    output_flops: int  # of one row of logits
    kv_bytes: int  # of one position in one layer
    attention_flops: int  # of one query with one position in one layer
    windows: Sequence[int]  # of each layer; 0 sees everything

    def step_seconds(
        self, positions: NDArray[np.int64], n_rows: int, n_sequences: int, ceilings: Ceilings
    ) -> float:
        """Of a step of n_sequences, each with tokens at positions[T], and n_rows logits in all."""
        seen = read = 0
        for window in self.windows:
            full = positions + 1
            seen += int((np.minimum(full, window) if window else full).sum())
            last, first = int(positions[-1]) + 1, int(positions[0])
            read += min(last, window + last - first - 1) if window else last
        nbytes = self.weight_bytes + n_sequences * read * self.kv_bytes
        flops = n_sequences * (len(positions) * self.layer_flops + seen * self.attention_flops)
        flops += n_rows * self.output_flops
        return max(nbytes / ceilings.bandwidth, flops / ceilings.matrix_rate)

    def generation_seconds(self, depth: int, n: int, n_sequences: int, ceilings: Ceilings) -> float:
        """Of n steps that each give every sequence a token, from position `depth` on."""
        steps = (np.array([depth + i]) for i in range(n))
        return sum(self.step_seconds(p, n_sequences, n_sequences, ceilings) for p in steps)

    def prompt_seconds(self, depth: int, n: int, chunk: int, ceilings: Ceilings) -> float:
        """Of n tokens of one sequence from position `depth` on, `chunk` of them in a step."""
        total = 0.0
        for start in range(depth, depth + n, chunk):
            stop = min(start + chunk, depth + n)
            n_rows = int(stop == depth + n)
            total += self.step_seconds(np.arange(start, stop), n_rows, 1, ceilings)
        return total


def work_of(tensors: Mapping[str, Tensor], decoder: Decoder, types: CacheTypes) -> Work:
    """Of a loaded model, with these types of keys and values."""
    sizes = decoder.sizes
    head = OUTPUT if OUTPUT in tensors else TABLE
    layers = [t for name, t in tensors.items() if name not in (TABLE, OUTPUT)]
    return Work(
        weight_bytes=sum(t.nbytes for t in layers) + tensors[head].nbytes,
        layer_flops=2 * n_weights(t for t in layers if len(t.shape) > 1),
        output_flops=2 * n_weights([tensors[head]]),
        kv_bytes=sizes.n_head_kv * types.nbytes(sizes.head_size),
        attention_flops=4 * sizes.n_head * sizes.head_size,
        windows=decoder.plan.windows,
    )


def n_weights(tensors: Iterable[Tensor]) -> int:
    """Weights of all of them."""
    return sum(prod(t.shape) for t in tensors)
