"""How much memory of a GPU a model takes, worked out before any of it is uploaded.

Arithmetic over sizes alone: no device is asked here and no file is read. It has to be no less than
what cuda.py then allocates, and not much more, because a model that would fit must not be refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ...cache_types import ON_GPU
from ...formats import Format
from ...gguf import Tensor
from ...kernels.attention.paged_attention import MAX_SPLIT
from ...kernels.attention.paged_attention import ROWS as ATTEND_ROWS
from ...kernels.attention.rope_kv import Heads
from ...kernels.layout.tile import grows, layout_of
from ..interface import PAGE_SIZE, CacheShape, Demand
from .kv_pages import page_bytes

LARGE = 1 << 20  # bytes from which on the driver rounds an allocation up to whole pages
PAGE = 2 << 20  # bytes of a page of GPU memory
STAGING = 64 << 20  # blocks on their way into tiles; free again before keys and values come
KERNELS = 128 << 20  # machine code, graphs, and what the driver keeps for them


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes on a GPU."""

    weights: int
    cache_page: int  # a page of keys and values of all layers, and of one as halves for prompts
    n_pages: int
    work: int  # activations, attention's partial sums, kernels

    @property
    def cache(self) -> int:
        """Keys and values."""
        return self.cache_page * self.n_pages

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.weights + max(self.cache + self.work, STAGING)


class Layouts(Protocol):
    """Who knows which weights lie in tiles."""

    compact: bool  # blocks stay blocks where tiles take much more

    def keeps_blocks(self, format: Format) -> bool:
        """Whether weights of the format do not become tiles."""
        ...

    def scratch_bytes(self, demand: Demand) -> int:
        """Bytes at most of weights that become halves for a product."""
        ...


def needed(demand: Demand, most_split: int, scratch: int = 0, halved: bool = False) -> Need:
    """What the demand takes; most_split: sequences at most whose attention is split; scratch:
    bytes of weights that become halves for a product; halved: keys and values do, for prompts.
    """
    heads = heads_of(demand.cache)
    return Need(
        weights=sum(allocated(weight_bytes(*weight)) for weight in demand.weights),
        cache_page=page_bytes(heads, demand.cache.n_layer, halved),
        n_pages=demand.cache.n_pages,
        work=step_bytes(demand, heads)
        + attention_bytes(heads, most_split)
        + allocated(scratch)
        + KERNELS,
    )


def check_room(need: Need, demand: Demand, free: int, device: str) -> None:
    """MemoryError when the demand takes more than `free` bytes; it says which context would fit."""
    if need.total <= free:
        return
    raise MemoryError(
        f"the model needs {_gigabytes(need.total)} ({need.total} bytes) of GPU memory: "
        f"{_gigabytes(need.weights)} for weights, {_gigabytes(need.cache)} for "
        f"{need.n_pages * PAGE_SIZE} positions of keys and values, {_gigabytes(need.work)} to "
        f"work in; {_gigabytes(free)} ({free} bytes) are free on {device}: "
        + _remedy(need, free, demand)
    )


def settle(
    products: Layouts, demand: Demand, most_split: int, halved: bool, free: int, device: str
) -> tuple[int, str]:
    """(tokens of a step, what to tell a user, or nothing). Where `free` bytes are not enough for
    all, steps become smaller first; then weights stay in blocks that as tiles take much more.
    MemoryError as of check_room.
    """
    least = demand.least_batch

    def need(n_batch: int) -> Need:
        weights = [(w, lookup or products.keeps_blocks(w.format)) for w, lookup in demand.weights]
        scratch = products.scratch_bytes(replace(demand, n_batch=n_batch))
        asked = replace(demand, weights=weights, n_batch=n_batch)
        return needed(asked, most_split, scratch, halved)

    products.compact = False
    for n_batch in (demand.n_batch, least):
        missing = need(n_batch).total - free
        if missing <= 0:
            return n_batch, ""
    products.compact = True
    check_room(need(least), demand, free, device)
    names = sorted(
        {w.format.name for w, lookup in demand.weights if not lookup and grows(w.format)}
    )
    return least, (
        f"weights in {', '.join(names)} stay in their file's blocks, at about a quarter of the "
        f"speed: as tiles they would take {_gigabytes(missing)} more than is free"
    )


def fitting_context(need: Need, free: int, n_seq: int) -> int:
    """Tokens of context of each of n_seq sequences that would fit; 0 if not even one page each."""
    room = free - need.weights - need.work
    return max(0, room // need.cache_page // n_seq * PAGE_SIZE)


def weight_bytes(tensor: Tensor, lookup: bool) -> int:
    """A vector is kept as float32, a matrix in tiles, or in its blocks where it has none."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    n_rows, k = tensor.shape
    layout = None if lookup else layout_of(tensor.format, k)
    return tensor.nbytes if layout is None else layout.nbytes(n_rows, k)


def step_bytes(demand: Demand, heads: Heads) -> int:
    """Activations of a step: every op's output, and the logits of the rows that are sampled."""
    d, f = demand.n_embd, demand.n_ff
    projected = 4 * (heads.n_head + 2 * heads.n_head_kv) * heads.head_size
    rotated = 2 * heads.n_head * heads.row
    attended = 2 * 2 * heads.n_head * heads.head_size  # and packed for the next product
    stream = (4 + 4 + 2) * d  # x, what is added to it, and x normalised
    gated = (4 + 4 + 2) * f  # gate and up where they are apart, and their product
    turns = 2 * (4 * heads.head_size) + 4  # of two ropes
    per_token = stream + projected + rotated + attended + gated + turns
    return demand.n_batch * per_token + 4 * demand.n_seq * demand.n_vocab


def attention_bytes(heads: Heads, most_split: int) -> int:
    """Partial sums of so many contexts that are split over blocks of threads."""
    group = heads.n_head // heads.n_head_kv
    head_tiles = heads.n_head_kv * -(-group // min(ATTEND_ROWS, group))
    return 4 * most_split * head_tiles * MAX_SPLIT * ATTEND_ROWS * (heads.row + 2)


def heads_of(cache: CacheShape) -> Heads:
    """The heads whose keys and values the cache keeps, in halves unless something else is asked
    for; ValueError where they do not fit a type.
    """
    types = cache.types.resolved(ON_GPU)
    types.check_head(cache.head_size)
    return Heads(cache.n_head, cache.n_head_kv, cache.head_size, PAGE_SIZE, types)


def allocated(nbytes: int) -> int:
    """What an allocation takes: large ones are whole pages, small ones share them."""
    unit = 512 if nbytes < LARGE else PAGE
    return -(-nbytes // unit) * unit


def _remedy(need: Need, free: int, demand: Demand) -> str:
    n_ctx = fitting_context(need, free, demand.n_seq)
    if n_ctx:
        return f"a context of {n_ctx} tokens would fit (-c {n_ctx})"
    return "no context would fit: take a smaller model or --device cpu"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
