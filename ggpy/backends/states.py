"""The state that layers keep for each sequence, and the shape of the cache that holds it: pages of
keys and values, or recurrent states.

This module knows sizes only. Backends own the storage; the runtime knows which sequence holds which
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cache_types import USUAL, CacheTypes

PAGE_SIZE = 64  # positions in a page of the KV cache
NO_STATE = -1  # stands in the table of a new sequence
# States of a sequence: after its last step, before that step, and one that it can return to.
STATES = 3
SPARE_STATES = 8  # most states that are kept for texts whose sequences have ended


def pages_for(n_positions: int) -> int:
    """The number of pages that n_positions need."""
    return -(-n_positions // PAGE_SIZE)


@dataclass(frozen=True)
class PagedKV:
    """The state of one attention layer: keys and values in pages of PAGE_SIZE positions.

    Layers with equal specs are one group: they share page tables.
    """

    n_head: int  # H, query heads that read it
    n_head_kv: int  # G
    key_size: int  # E
    value_size: int  # Ev
    window: int = 0  # positions seen by a token, itself included; 0 is all; see Attention.causal
    types: CacheTypes = USUAL

    @property
    def is_bounded(self) -> bool:
        """Whether the pages of a sequence stop growing at some length."""
        return self.window > 0

    def pages(self, n_ctx: int, n_batch: int) -> int:
        """The most pages that a sequence of n_ctx positions holds, in steps of n_batch tokens. With
        a window, these are the pages of the step and those that its first token sees.
        """
        whole = pages_for(n_ctx)
        return min(whole, pages_for(self.window + n_batch) + 1) if self.window else whole


@dataclass(frozen=True)
class Recurrent:
    """The state of one gated delta net layer, in float32: the last taps - 1 inputs of its
    convolution, and a matrix for each value head.

    Its size does not depend on the length of the text. It cannot be cut back to an earlier
    position, so a sequence keeps the states of some positions. Layers with equal specs are one
    group.
    """

    n_k_head: int  # Hk
    n_v_head: int  # Hv
    size: int  # S, of a head
    taps: int  # tokens that the convolution sees

    is_bounded = True
    window = 0

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return (2 * self.n_k_head + self.n_v_head) * self.size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of the convolution's inputs, [taps - 1, C]."""
        return self.taps - 1, self.channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape of the matrices, [Hv, S, S]; the axis of keys comes before that of values."""
        return self.n_v_head, self.size, self.size

    @property
    def nbytes(self) -> int:
        """Bytes of one state of one layer."""
        return 4 * ((self.taps - 1) * self.channels + self.n_v_head * self.size**2)

    def pages(self, n_ctx: int, n_batch: int) -> int:
        """The most states that a sequence holds."""
        return STATES


StateSpec = PagedKV | Recurrent


@dataclass(frozen=True)
class CacheGroup:
    """Layers with equal specs: n_pages pages in each layer, and one page table per sequence.

    A page of a recurrent group holds the state of one sequence after one position.
    """

    spec: StateSpec
    layers: tuple[int, ...]  # indices of layers, in the order of Attention.slot
    n_pages: int  # shared by all sequences
    limit: int = 0  # most pages that one sequence holds; 0: n_pages

    @property
    def n_layer(self) -> int:
        """The number of layers in the group."""
        return len(self.layers)


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a model: its groups, in the order of Attention.group."""

    groups: tuple[CacheGroup, ...]

    def too_large(self, page_bytes: Sequence[int], free: int) -> MemoryError:
        """The error for a cache that exceeds `free` bytes. page_bytes: of one page in all layers of
        each group.
        """
        sizes = [n * g.n_pages for n, g in zip(page_bytes, self.groups, strict=True)]
        pairs = list(zip(page_bytes, self.groups, strict=True))
        whole = [(n, g) for n, g in pairs if not g.spec.is_bounded]
        bounded = sum(sizes) - sum(n * g.n_pages for n, g in whole)
        paged = [g.n_pages for g in self.groups if isinstance(g.spec, PagedKV)]
        longest = max(paged, default=0) * PAGE_SIZE
        fit = max(0, free - bounded) // max(1, sum(n for n, _ in whole)) * PAGE_SIZE
        return MemoryError(
            f"the KV cache of {longest} positions needs {sum(sizes) / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: "
            + (f"a context of {fit} tokens would fit" if fit else "no context would fit")
        )
