"""The contract between a decoder and the machine that runs it: an op is what is worth one launch.

The decoder (ggpy/arch) is written once in these ops. `reference.py` computes them in float32 numpy
and is their specification; `cuda.py` may fuse, split or reorder inside one of them. Nothing here
knows a model file's names, sampling policy, or which machine it is.

Letters: T tokens in the batch (of all sequences together), S sequences, R rows whose logits are
wanted, D width, H query heads, G key/value heads, E head size, F feed-forward width, V vocabulary,
P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cache_types import USUAL, CacheTypes
from ..gguf import Tensor
from ..sampling import Sampler

Array = Any  # an activation where the backend keeps it: numpy float32, or device memory
Weight = Any  # what `Ops.weight` returned: opaque to the decoder

Activation = Literal["silu", "gelu_tanh"]
ActivationType = Literal["f16", "int8", "e4m3"]  # what a product rounds its input to: Ops.weight

PAGE_SIZE = 64  # positions in a page of keys and values


def pages_for(n_positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-n_positions // PAGE_SIZE)


@dataclass(frozen=True)
class Step:
    """One ragged batch. Prompt, decode and a mix of both are the same call.

    Tokens of one sequence are adjacent and in rising position. A negative id, ~r, stands for the
    token that the previous step sampled at its row r: it may still be on the device.
    """

    ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    sequences: NDArray[np.int32]  # [T], rows of page_tables
    page_tables: NDArray[np.int32]  # [S, P], page numbers; unused entries are 0
    rows: NDArray[np.int32]  # [R], indices into the T tokens

    @property
    def pages(self) -> NDArray[np.int32]:
        """[T], where the tokens' own positions are."""
        return self.page_tables[self.sequences, self.positions // PAGE_SIZE]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2 * len(inv_freq) elements of a head; the rest pass through.

    Pair i is rotated by position * inv_freq[i] radians and scaled by `magnitude`. Style "norm"
    pairs elements 2i and 2i+1, "neox" pairs i and i + len(inv_freq) (ggml's names).
    """

    style: Literal["norm", "neox"]
    inv_freq: NDArray[np.float64]
    magnitude: float = 1.0


@dataclass(frozen=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight."""

    weight: Weight
    eps: float


@dataclass(frozen=True)
class Attention:
    """What one layer's `qkv` and `attend` need."""

    layer: int  # which keys and values
    n_head: int  # H
    n_head_kv: int  # G
    head_size: int  # E
    norm: Norm  # of x, before the projections
    wq: Weight  # [H*E, D]
    wk: Weight  # [G*E, D]
    wv: Weight  # [G*E, D]
    rope: Rope
    scale: float  # of q.k, before the soft cap
    bq: Weight | None = None  # [H*E]
    bk: Weight | None = None
    bv: Weight | None = None
    q_norm: Norm | None = None  # over E, per head, before rope
    k_norm: Norm | None = None
    window: int = 0  # positions seen, itself included; 0 is all
    soft_cap: float = 0.0  # c * tanh(s / c); 0 is none
    sinks: Weight | None = None  # [H], one logit per head that takes weight and gives nothing
    wo: Weight | None = None  # [D, H*E], what o goes to: a backend may lay o out for it

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x."""
        return [self.wq, self.wk, self.wv]


@dataclass(frozen=True)
class FeedForward:
    """What one layer's `ffn` needs: act(gate(x)) * up(x)."""

    norm: Norm
    w_gate: Weight  # [F, D]
    w_up: Weight  # [F, D]
    activation: Activation
    w_down: Weight | None = None  # [D, F], what h goes to: a backend may lay h out for it

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x."""
        return [self.w_gate, self.w_up]


@dataclass(frozen=True)
class Head:
    """From the last layer to logits."""

    norm: Norm
    weight: Weight  # [V, D]
    soft_cap: float = 0.0


@dataclass(frozen=True)
class CacheShape:
    """Keys and values: n_layer * n_pages pages of PAGE_SIZE positions, G heads of E."""

    n_layer: int
    n_pages: int
    n_head_kv: int
    head_size: int
    n_head: int  # H query heads that read them
    types: CacheTypes = USUAL

    def too_large(self, page_bytes: int, free: int) -> MemoryError:
        """Where pages that take page_bytes in all layers do not go into free bytes."""
        return MemoryError(
            f"{self.n_pages * PAGE_SIZE} positions of keys and values need "
            f"{self.n_pages * page_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: "
            f"an n_ctx of {free // page_bytes * PAGE_SIZE} would fit"
        )


@dataclass(frozen=True)
class Demand:
    """What a model is going to ask of a backend, known before any of it is handed over."""

    # And whether it is only looked up: see Ops.weight. Scales of rows stand here as vectors.
    weights: Sequence[tuple[Tensor, bool]]
    cache: CacheShape
    n_seq: int  # sequences that share the cache evenly
    n_batch: int  # tokens of a step at most
    least_batch: int  # of a step where room is short, or more tokens are not faster
    n_embd: int  # D
    n_ff: int  # F
    n_vocab: int  # V


class Ops(Protocol):
    """A backend. Arrays and weights are its own; only `read` brings something back to numpy."""

    name: str  # "cpu", "cuda:0": what the user sees
    reason: str  # why this one was chosen, one clause
    asynchronous: bool  # run and sample return before they are done: running ahead pays

    def check_room(self, demand: Demand) -> int:
        """Tokens of a step, of what the demand leaves open. MemoryError, before anything is handed
        over, if it will not fit: see allocate_cache.
        """

    def weight(
        self,
        tensor: Tensor,
        lookup: bool = False,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        """Take over a tensor of the file: upload it and repack it for this machine, once.

        lookup: only rows of it are ever used, by `embed`; it is never multiplied with.
        scale: F32 [N] for a matrix w[N, K], whose weights are value[n, k] * scale[n].
        activations: "int8" or "e4m3" multiply the values, which are I8 or F8_E4M3, with input x
        that is rounded to the same, with a scale for each token: s[t] = max |x[t]| / 127 or 448,
        q = x / s[t] rounded to nearest, ties to even. Sums of whole numbers are exact:
        y[t, n] = sum_k q[t, k] value[n, k] * s[t] * scale[n]. "f16" rounds to halves at most.
        """

    def weights_ready(self) -> None:
        """All weights were handed over: wait for uploads, free staging memory."""

    def allocate_cache(self, shape: CacheShape) -> None:
        """Make room for keys and values; MemoryError says what is needed, free, and would fit."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Before pages are used again that may hold NaN or infinity: no position that is written
        to them later may come to depend on what was there.
        """

    def run(self, step: Step, forward: Callable[[Step], Array], repeat: bool = True) -> Array:
        """What forward(step) returns, computed in whatever way repeats it fastest.

        repeat: False where the outputs of single ops are going to be read, so that each op must be
        computed as it is called.
        """

    def embed(self, step: Step, table: Weight, scale: float = 1.0) -> Array:
        """x[T, D] = table[ids] * scale."""

    def qkv(self, x: Array, attention: Attention, step: Step) -> Array:
        """q[T, H, E]; k and v go to their pages.

        Normalises x, projects, adds bias, normalises heads, rotates q and k; where keys are kept in
        blocks of 32, spreads both (numpy/kv_pages.py spread).
        """

    def attend(self, q: Array, attention: Attention, step: Step) -> Array:
        """o[T, H*E] = softmax(mask(cap(q k^T * scale))) v over a sequence's pages."""

    def linear_add(
        self,
        h: Array,
        w: Weight,
        x: Array,
        post_norm: Norm | None = None,
        then: Attention | FeedForward | None = None,
    ) -> Array:
        """x[T, D] + post_norm(h w^T); h[T, K], w[D, K]. The old x may be overwritten.

        then: what the result goes to next, if it does: a backend may have its norm made here.
        """

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        """h[T, F] = activation(n w_gate^T) * (n w_up^T) with n = norm(x)."""

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """l[R, V] of the rows that the step asks for."""

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        """ids[R]: row r through samplers[r], whose n_drawn goes up; accepting is the caller's.

        A row from which no token can be chosen gives NO_TOKEN and leaves the other rows alone;
        where numpy draws, samplers[r].error is why. The next step may name the ids as ~r before
        anyone reads them, and so may a sampler's history: ~r of a row without a token stands for
        some id.
        """

    def read(self, array: Array) -> NDArray[Any]:
        """The array on the host, once it is computed."""

    def device_bytes(self) -> int:
        """Bytes of a memory of its own that it holds now; 0 where that is the process's memory."""
