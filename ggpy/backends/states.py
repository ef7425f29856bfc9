"""What layers keep of the sequences, and the cache that holds it: pages of keys and values, or
recurrent states.

Knows sizes; the storage is a backend's, and which page is whose is the runtime's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cache_types import USUAL, CacheTypes

PAGE_SIZE = 64  # positions in a page of the KV cache
NO_STATE = -1  # in the table of a sequence that begins
# States of a sequence: behind its last step, before it, and one to which it can be taken back.
STATES = 3
SPARE_STATES = 8  # at most, for texts whose sequences have ended


def pages_for(n_positions: int) -> int:
    """Pages that hold so many positions."""
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
        """Whether a sequence stops needing more at some length."""
        return self.window > 0

    def pages(self, n_ctx: int, n_batch: int) -> int:
        """Pages that a sequence of n_ctx positions holds at most, in steps of n_batch tokens: with
        a window, those of the step and of what its first token sees.
        """
        whole = pages_for(n_ctx)
        return min(whole, pages_for(self.window + n_batch) + 1) if self.window else whole


@dataclass(frozen=True)
class Recurrent:
    """The state of one layer of gated delta net, in float32: the last taps - 1 inputs of its
    convolution, and a matrix for each value head.

    It has one size whatever the length of the text, and cannot be cut back to a position before:
    a sequence keeps those of some positions instead. Layers with equal specs are one group.
    """

    n_k_head: int  # Hk
    n_v_head: int  # Hv
    size: int  # S, of a head
    taps: int  # tokens that the convolution sees

    is_bounded = True
    window = 0

    @property
    def channels(self) -> int:
        """C, of the convolution."""
        return (2 * self.n_k_head + self.n_v_head) * self.size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """[taps - 1, C]."""
        return self.taps - 1, self.channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """[Hv, S, S], of each head first the axis of keys."""
        return self.n_v_head, self.size, self.size

    @property
    def nbytes(self) -> int:
        """Bytes of one state of one layer."""
        return 4 * ((self.taps - 1) * self.channels + self.n_v_head * self.size**2)

    def pages(self, n_ctx: int, n_batch: int) -> int:
        """States that a sequence has at most."""
        return STATES


StateSpec = PagedKV | Recurrent


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one spec: for each of them n_pages pages, and a page table per sequence.

    A page of recurrent states is the state of one sequence behind one position.
    """

    spec: StateSpec
    layers: tuple[int, ...]  # indices of layers, in the order of Attention.slot
    n_pages: int  # that all sequences share
    limit: int = 0  # pages that one sequence holds at most; 0 is all of them

    @property
    def n_layer(self) -> int:
        """Layers that the group holds."""
        return len(self.layers)


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a model: its groups, in the order of Attention.group."""

    groups: tuple[CacheGroup, ...]

    def too_large(self, page_bytes: Sequence[int], free: int) -> MemoryError:
        """Where pages that take so many bytes in all layers of each group exceed free bytes."""
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
