"""The roofline of a step: the minimum time to read its bytes and to do its operations.

A step reads every weight once (but of tables a row for each token, so the embedding table counts
only where it is the output matrix; and only the experts that its tokens choose, on average), and
the part of the KV cache that its tokens attend to. It multiplies each of these weights with each
token, and the output matrix only with the rows whose logits are needed. The limit is the larger of
the memory time and the arithmetic time. All numbers are counted from the model file, so they are
the same for every runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..arch.layers.inputs import INPUT_TABLE
from ..backends.interface import MoE
from ..backends.states import PagedKV
from .kernels.ceilings import Ceilings

if TYPE_CHECKING:
    from ..arch.decoder import Decoder
    from ..backends.interface import StateSpec
    from ..cache_types import CacheTypes
    from ..gguf import Tensor

TABLE, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class LayerWork:
    """The work of attention in one layer."""

    kv_bytes: int  # bytes of the KV cache per position
    flops: int  # operations per pair of a query and a position
    window: int  # positions that a token attends to; 0: all
    state_bytes: int = 0  # of a recurrent state, which a step reads and writes once

    def seen(self, n: int) -> int:
        """The number of positions that the last of n tokens attends to."""
        return min(n, self.window) if self.window else n


@dataclass(frozen=True)
class Work:
    """The work of a model's steps."""

    weight_bytes: int  # bytes of weights per step, for any number of tokens
    layer_flops: int  # operations per token, without attention
    output_flops: int  # operations per row of logits
    layers: Sequence[LayerWork]
    expert_bytes: int = 0  # of all experts, which weight_bytes does not count
    share: float = 0.0  # experts that a token chooses / all experts

    def step_seconds(
        self, positions: NDArray[np.int64], n_rows: int, n_sequences: int, ceilings: Ceilings
    ) -> float:
        """The minimum seconds of a step.

        The step has n_sequences sequences, each with tokens at positions[T], and n_rows rows of
        logits in total.
        """
        kv_bytes = attention_flops = 0
        for layer in self.layers:
            window, full = layer.window, positions + 1
            attention_flops += layer.flops * int(
                (np.minimum(full, window) if window else full).sum()
            )
            last, first = int(positions[-1]) + 1, int(positions[0])
            read = min(last, window + last - first - 1) if window else last
            kv_bytes += layer.kv_bytes * read + 2 * layer.state_bytes
        # The share of experts that no token chooses, if all choices are equally likely
        missed = (1 - self.share) ** (n_sequences * len(positions))
        nbytes = self.weight_bytes + int(self.expert_bytes * (1 - missed)) + n_sequences * kv_bytes
        flops = n_sequences * (len(positions) * self.layer_flops + attention_flops)
        flops += n_rows * self.output_flops
        return max(nbytes / ceilings.bandwidth, flops / ceilings.matrix_rate)

    def generation_seconds(self, depth: int, n: int, n_sequences: int, ceilings: Ceilings) -> float:
        """The minimum seconds of n decode steps of n_sequences sequences from position `depth`."""
        steps = (np.array([depth + i]) for i in range(n))
        return sum(self.step_seconds(p, n_sequences, n_sequences, ceilings) for p in steps)

    def prompt_seconds(self, depth: int, n: int, chunk: int, ceilings: Ceilings) -> float:
        """The minimum seconds of the prefill of n tokens of one sequence, `chunk` tokens per step.

        The first token has position `depth`.
        """
        total = 0.0
        for start in range(depth, depth + n, chunk):
            stop = min(start + chunk, depth + n)
            n_rows = int(stop == depth + n)
            total += self.step_seconds(np.arange(start, stop), n_rows, 1, ceilings)
        return total


def work_of(tensors: Mapping[str, Tensor], decoder: Decoder, types: CacheTypes) -> Work:
    """The work of a loaded model with these KV cache types. tensors: those that it uses."""
    head = OUTPUT if OUTPUT in tensors else TABLE
    apart = (TABLE, OUTPUT, INPUT_TABLE)
    layers = [t for name, t in tensors.items() if name not in apart]
    experts = [t for t in layers if len(t.shape) == 3]
    shared = [t for t in layers if len(t.shape) < 3]
    share = _share_of(decoder)
    matrices = n_weights(t for t in shared if len(t.shape) > 1)
    return Work(
        weight_bytes=sum(t.nbytes for t in shared) + tensors[head].nbytes,
        layer_flops=2 * (matrices + round(share * n_weights(experts))),
        output_flops=2 * n_weights([tensors[head]]),
        layers=[_layer_work(layer.mixer.spec, types) for layer in decoder.layers],
        expert_bytes=sum(t.nbytes for t in experts),
        share=share,
    )


def _share_of(decoder: Decoder) -> float:
    """The share of experts that a token chooses; 0 without experts."""
    pairs = zip(decoder.layers, decoder.sizes.layers, strict=True)
    found = [x.ffn.router.n_used / n.n_expert for x, n in pairs if isinstance(x.ffn, MoE)]
    return max(found, default=0.0)


def _layer_work(spec: StateSpec, types: CacheTypes) -> LayerWork:
    if not isinstance(spec, PagedKV):  # a token decays, reads, changes and reads each matrix
        flops = 7 * spec.n_v_head * spec.size**2 + 2 * spec.channels * spec.taps
        return LayerWork(0, flops, 1, spec.nbytes)
    e, ev = spec.key_size, spec.value_size
    return LayerWork(spec.n_head_kv * types.nbytes(e, ev), 2 * spec.n_head * (e + ev), spec.window)


def n_weights(tensors: Iterable[Tensor]) -> int:
    """The number of weights of all tensors."""
    return sum(prod(t.shape) for t in tensors)
