"""The contract between a decoder and the machine that runs it: what one layer computes is one op.

The decoder (ggpy/arch) is written once in these ops. `numpy/` computes them in float32 and is their
specification; `cuda/` may fuse, split or reorder inside one of them, and across two of them, since
it sees a layer whole and knows the next one. Nothing here knows a model file's names, sampling
policy, or which machine it is.

Letters: T tokens in the batch (of all sequences together), S sequences, R rows whose logits are
wanted, D width, H query heads, G key/value heads, E key size (of a query or key head), Ev value
size, F feed-forward width, V vocabulary, X experts, J experts that a token chooses, P pages of a
sequence, L layers, I size of a layer's input. Of a gated delta net: Hk key heads, Hv value heads,
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
Probe = Callable[[int, str, Array], None]  # is told a layer's index, a name of INNER, and the array

# What a Probe is told of a layer: q[T, H, E] as it meets the keys; o[T, H*Ev]; x[T, D] with the
# output of the mixer; h[T, F], which meets w_down; x[T, D] with the output of the feed-forward.
INNER = ("qkv", "attention", "attn_out", "ffn_act", "ffn_out")
# Of a MoE besides, before "ffn_act", which is h[T, J, F] there: ids[T, J] of the chosen experts,
# and h[T, F] of the shared one, or of the dense feed-forward beside them.
INNER_OF_MOE = ("experts", "shared_act")
# Of a layer with an input besides: i[T, I], which meets LayerInput.w; x[T, D] with its output.
INNER_OF_INPUT = ("input_act", "input_out")


@dataclass(frozen=True)
class Step:
    """One ragged batch. Prefill, decode and a mix of both are the same call.

    Tokens of one sequence are adjacent and in rising position. A negative id, ~r, stands for the
    token that the previous step sampled at its row r: it may still be on the device. hidden: it
    ends with the hidden state x[T, D] behind the last layer, not with logits.
    """

    ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    sequences: NDArray[np.int32]  # [T], rows of the page tables
    # Of each group of the cache [S, P], page numbers. Entries that no token of the step sees
    # (behind the last position, or before the window) are 0. Of a group of recurrent states [S, 2]:
    # the state that a sequence begins with, NO_STATE for none, and the one that it leaves behind.
    page_tables: tuple[NDArray[np.int32], ...]
    rows: NDArray[np.int32]  # [R], indices into the T tokens
    hidden: bool = False

    def pages(self, group: int = 0) -> NDArray[np.int32]:
        """[T], the pages of a group that hold the tokens' own positions."""
        return self.page_tables[group][self.sequences, self.positions // PAGE_SIZE]


@dataclass(frozen=True)
class Role:
    """What a weight is for: its axes in letters, outermost first ("HE D", "D F", "X F D").

    A device that holds a shard of a model knows from the letters what to keep. lookup: only rows of
    the matrix are ever used; it is never multiplied with. on_host: a device need not hold it, and
    leaves experts in the host's memory. layer: whose weight it is, None for one of no layer.
    """

    axes: str
    lookup: bool = False
    on_host: bool = False
    layer: int | None = None


@dataclass(frozen=True)
class Demand:
    """What a model is going to ask of a backend, known before any of it is handed over."""

    weights: Sequence[tuple[Tensor, Role]]  # scales of rows stand here as vectors
    n_seq: int  # sequences that share the cache evenly
    n_batch: int  # tokens of a step at most
    least_batch: int  # of a step where memory is short, or more tokens are not faster
    n_embd: int  # D
    n_ff: int  # F, of the widest layer
    n_vocab: int  # V
    cache: Callable[[int], CacheShape]  # of the KV cache, by the tokens of a step
    n_used: int = 0  # J, experts of a token; 0: none has experts
    n_ff_expert: int = 0  # F, of the widest experts
    n_inputs: int = 0  # L*I, of the inputs of layers; 0: they have none
    n_expert: int = 0  # X, of which a token has J


class Ops(Protocol):
    """A backend. Arrays and weights are its own; only `read` brings something back to numpy."""

    name: str  # "cpu", "cuda:0": what the user sees
    reason: str  # why this one was chosen, one clause
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
        those of experts.
        activations: "int8" or "e4m3" multiply the values, which are I8 or F8_E4M3, with input x
        that is rounded to the same, with a scale for each token: s[t] = max |x[t]| / 127 or 448,
        q = x / s[t] rounded to nearest, ties to even. Sums of whole numbers are exact:
        y[t, n] = sum_k q[t, k] value[n, k] * s[t] * scale[n]. "f16" rounds to f16 at most.
        """

    def weights_ready(self) -> None:
        """All weights were handed over: wait for uploads, free staging memory."""

    def allocate_cache(self, shape: CacheShape) -> None:
        """Allocate the KV cache; MemoryError says what is needed, free, and would fit."""

    def clear_pages(self, group: int, pages: Sequence[int]) -> None:
        """Before pages of a group are used again that may hold NaN or infinity: no position that is
        written to them later may come to depend on what was there.
        """

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        """What forward(step) returns, computed in whatever way repeats it fastest.

        probe: is told what each layer computes inside, by the names of INNER; then each op is
        computed as it is called, and nothing is fused across two of them.
        """

    def embed(
        self, step: Step, table: Weight, scale: float = 1.0, norm: Norm | None = None
    ) -> Array:
        """x[T, D] = norm(table[ids] * scale)."""

    def mix(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] with the output of layer.mixer added, and that of layer.ffn if the layer is
        parallel; the old x may be overwritten.

        Attention normalises x, projects, adds bias, normalises heads, rotates q and k, writes k and
        v to their pages, and attends over the pages of each token's sequence. Where keys are kept
        in blocks of 32, q and k are spread before (numpy/kv_pages.py spread).

        A gated delta net takes the state of each sequence from one place and writes the new one to
        another, so that a step that is run twice does the same twice.
        """

    def feed_forward(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] with the output of layer.ffn added; the old x may be overwritten. Parallel layers
        do not come here.
        """

    def layer_inputs(self, x: Array, inputs: LayerInputs, step: Step) -> Array:
        """p[T, L, I], the inputs of all layers, of what `embed` returned."""

    def end_layer(self, x: Array, layer: Layer, inputs: Array | None, step: Step) -> Array:
        """(x[T, D] with the output of layer.input added) * layer.scale, if a layer has one of them;
        inputs: of all layers. The old x may be overwritten.
        """

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """l[R, V] of the rows that the step asks for."""

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        """ids[R]: row r through samplers[r], whose n_drawn goes up; accepting is the caller's.

        A row from which no token can be chosen gives NO_TOKEN and leaves the other rows alone;
        where numpy draws, samplers[r].error is why. The next step may name the ids as ~r before
        anyone reads them, and so may a sampler's history: ~r of a row without a token stands for
        some id.
        """

    def read(self, array: Array, row: int | None = None) -> NDArray[Any]:
        """The array, or one row of logits, on the host, once it is computed; or a vector that
        `weight` returned.
        """

    def rehearsal(self) -> AbstractContextManager[None]:
        """Steps inside it stand for many that come later: what makes those fast is prepared now."""

    def device_bytes(self) -> int:
        """Bytes of a memory of its own that it holds now; 0 where that is the process's memory."""
