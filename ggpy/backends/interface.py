"""The contract between a decoder and a backend: each op computes one large part of a layer.

The decoder (ggpy/arch) is written once in these ops. `numpy/` computes them in float32 and is their
specification. `cuda/` may fuse, split or reorder inside an op and across two ops, because it gets a
whole layer and knows the next one. Nothing here knows the names in a model file, the sampling
policy, or the machine.

Letters: T tokens in the batch (of all sequences together), S sequences, R rows whose logits are
wanted, D width, H query heads, G key/value heads, E key size (of a query or key head), Ev value
size, F feed-forward width, V vocabulary, X experts, J experts that a token chooses, P pages of a
sequence, L layers, I size of a layer's input. In a gated delta net: Hk key heads, Hv value heads,
S size of a head, C channels of its convolution, 2*Hk*S + Hv*S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..gguf import Tensor
from ..sampling import Sampler
from .inputs import LayerInputs
from .layers import Activation as Activation
from .layers import Attention as Attention
from .layers import AttentionTemperature as AttentionTemperature
from .layers import Dense as Dense
from .layers import FeedForward as FeedForward
from .layers import GatedDeltaNet as GatedDeltaNet
from .layers import Head as Head
from .layers import Layer as Layer
from .layers import Mixer as Mixer
from .layers import MoE as MoE
from .layers import Norm as Norm
from .layers import Rope as Rope
from .layers import Weight as Weight
from .states import PAGE_SIZE as PAGE_SIZE
from .states import CacheGroup as CacheGroup
from .states import CacheShape as CacheShape
from .states import PagedKV as PagedKV
from .states import Recurrent as Recurrent
from .states import StateSpec as StateSpec
from .states import pages_for as pages_for

Array = Any  # an activation where the backend keeps it: numpy float32, or device memory

ActivationType = Literal["f16", "int8", "e4m3"]  # what a product rounds its input to: Ops.weight
Probe = Callable[[int, str, Array], None]  # gets a layer's index, a name of INNER, and the array

# What a Probe gets from each layer: q[T, H, E] as it is multiplied with the keys; o[T, H*Ev];
# x[T, D] after the mixer; h[T, F], the input of w_down; x[T, D] after the feed-forward.
INNER = ("qkv", "attention", "attn_out", "ffn_act", "ffn_out")
# What a Probe gets from a MoE before "ffn_act" (which is h[T, J, F] there): ids[T, J] of the chosen
# experts, and h[T, F] of the shared expert or of the dense feed-forward beside the experts.
INNER_OF_MOE = ("experts", "shared_act")
# What a Probe also gets from a layer with an input of its own: i[T, I], which is multiplied with
# LayerInput.w; x[T, D] after the layer's input was added.
INNER_OF_INPUT = ("input_act", "input_out")


@dataclass(frozen=True)
class Step:
    """One ragged batch. Prefill, decode and a mix of both are the same call.

    Tokens of one sequence are adjacent and in rising position. A negative id ~r stands for the
    token that the previous step sampled at its row r: it may still be on the device. hidden: the
    step returns the hidden state x[T, D] after the last layer instead of logits.
    """

    ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    sequences: NDArray[np.int32]  # [T], rows of the page tables
    # One table for each group of the cache. Attention layers: page numbers [S, P]; entries that no
    # token of the step sees (after the last position, or before the window) are 0. Recurrent
    # layers: [S, 2], the page of the state before the step (NO_STATE for a new sequence) and the
    # page that the step writes the new state to.
    page_tables: tuple[NDArray[np.int32], ...]
    rows: NDArray[np.int32]  # [R], indices into the T tokens
    hidden: bool = False

    def pages(self, group: int = 0) -> NDArray[np.int32]:
        """The page of each token's own position in a group, [T]."""
        return self.page_tables[group][self.sequences, self.positions // PAGE_SIZE]


@dataclass(frozen=True)
class Role:
    """What a weight is for: its axes in letters, outermost first ("HE D", "D F", "X F D").

    The letters tell a device that holds a shard of a model which part to keep. lookup: only rows of
    the matrix are read; it is never multiplied with. on_host: a device need not hold the weight;
    experts stay in host memory. layer: the index of the layer, None outside of all layers.
    """

    axes: str
    lookup: bool = False
    on_host: bool = False
    layer: int | None = None


@dataclass(frozen=True)
class Demand:
    """What a model will need of a backend, known before the first weight is uploaded."""

    weights: Sequence[tuple[Tensor, Role]]  # with the row scales, as vectors
    n_seq: int  # sequences that share the cache evenly
    n_batch: int  # most tokens of a step
    least_batch: int  # tokens of a step if memory is short, or if larger steps are not faster
    n_embd: int  # D
    n_ff: int  # F of the widest layer
    n_vocab: int  # V
    cache: Callable[[int], CacheShape]  # returns the KV cache for steps of so many tokens
    n_used: int = 0  # J, experts that a token chooses; 0: the model has no experts
    n_ff_expert: int = 0  # F of the widest experts
    n_inputs: int = 0  # L*I, the width of all layers' inputs; 0: layers have none
    n_expert: int = 0  # X, of which a token chooses J


class Ops(Protocol):
    """A backend. Arrays and weights are opaque to others; `read` alone copies one to numpy."""

    name: str  # "cpu", "cuda:0": what the user sees
    reason: str  # why this backend was chosen, one clause
    activations: str  # quantised weights' input: "f16", "q8_1"; on the CPU "q16", "q8", "f32"
    asynchronous: bool  # run and sample return before they are done: running ahead pays

    def plan_memory(self, demand: Demand) -> int:
        """Returns the batch size (tokens per step) to use. Raises MemoryError before anything is
        uploaded if not even `least_batch` fits.
        """

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        """Take over a tensor of the file: upload it and repack it for this machine, once.

        scale: F32 [N] for a matrix w[N, K], whose weights are value[n, k] * scale[n]; [X] for
        experts.
        activations: "int8" or "e4m3" is for values of type I8 or F8_E4M3. The input x is rounded to
        the same type, with a scale for each token: s[t] = max |x[t]| / 127 or 448, q = x / s[t]
        rounded to nearest, ties to even. y[t, n] = sum_k q[t, k] value[n, k] * s[t] * scale[n];
        sums of whole numbers are exact. "f16" rounds x to f16 at most.
        """

    def weights_ready(self) -> None:
        """All weights were handed over: wait for uploads, free staging memory."""

    def allocate_cache(self, shape: CacheShape) -> None:
        """Allocate the KV cache. A MemoryError says what is needed, what is free and what fits."""

    def clear_pages(self, group: int, pages: Sequence[int]) -> None:
        """Clear pages of a group that may hold NaN or infinity, before they are used again, so that
        no position that is written to them later depends on the old contents.
        """

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        """Returns what forward(step) returns; the backend may record and replay it for speed.

        probe: gets what each layer computes inside, by the names of INNER. Each op is then computed
        when it is called, and nothing is fused across two ops.
        """

    def embed(
        self, step: Step, table: Weight, scale: float = 1.0, norm: Norm | None = None
    ) -> Array:
        """x[T, D] = norm(table[ids] * scale)."""

    def mix(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] plus the output of layer.mixer, and of layer.ffn if the layer is parallel; the
        old x may be overwritten.

        Attention normalises x, projects, adds bias, normalises heads, rotates q and k, writes k and
        v to their pages, and attends over the pages of each token's sequence. If the cache stores
        keys in blocks of 32, q and k are spread first (numpy/kv_pages.py spread).

        A gated delta net reads the state of each sequence from one page and writes the new state to
        another, so that a step can be repeated with the same result.
        """

    def feed_forward(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] plus the output of layer.ffn; the old x may be overwritten. Not called for a
        parallel layer, whose ffn `mix` computes.
        """

    def layer_inputs(self, x: Array, inputs: LayerInputs, step: Step) -> Array:
        """p[T, L, I], the inputs of all layers, made from what `embed` returned."""

    def end_layer(self, x: Array, layer: Layer, inputs: Array | None, step: Step) -> Array:
        """(x[T, D] plus the output of layer.input) * layer.scale, for a layer that has an input or
        a scale. inputs: p[T, L, I] of all layers. The old x may be overwritten.
        """

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """l[R, V] of step.rows."""

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        """ids[R]: samplers[r] draws from row r and counts the draw in n_drawn; the caller accepts
        the token.

        A row from which no token can be chosen gives NO_TOKEN and leaves the other rows alone; if
        numpy draws, samplers[r].error says why. The next step may refer to the ids as ~r before
        anyone reads them, and so may a sampler's history: ~r of a row without a token stands for
        some id.
        """

    def read(self, array: Array, row: int | None = None) -> NDArray[Any]:
        """The array, or one row of logits, on the host, once it is computed; or a vector that
        `weight` returned.
        """

    def rehearsal(self) -> AbstractContextManager[None]:
        """Steps inside it stand for many later ones: the backend prepares now what speeds those."""

    def device_bytes(self) -> int:
        """Bytes of device memory in use now; 0 for a backend in the process's own memory."""
