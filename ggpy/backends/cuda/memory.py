"""The GPU memory that a model needs, computed before anything is uploaded.

This module is arithmetic: it queries no device and reads no file. The result must not be smaller
than what the backend then allocates, and not much larger, because a model that fits must not be
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Protocol

from ...formats import Format
from ...gguf import Tensor
from ...kernels.attention.paged_attention import workspace_bytes as attention_bytes
from ...kernels.attention.rope_kv import Heads
from ...kernels.layout.pack import packed_bytes
from ...kernels.layout.tile import grows, layout_of
from ...kernels.moe.sort import PACKED_UNIT
from ..interface import PAGE_SIZE, CacheShape, Demand, PagedKV, Recurrent, Role, StateSpec
from .delta.states import state_bytes
from .kv_pages import f16_page_bytes, heads_of, page_bytes
from .moe.staging import SLOTS

LARGE = 1 << 20  # allocations from this size on are rounded up to whole pages by the driver
PAGE = 2 << 20  # bytes of a page of GPU memory
# Blocks that are being repacked, and tiles that are copied to the host; freed before the KV cache
# is allocated.
STAGING = 96 << 20
KERNELS = 128 << 20  # machine code, graphs, and the driver's memory for both


@dataclass(frozen=True)
class Need:
    """Bytes of GPU memory that a model needs.

    cache: the whole KV cache. page: one page in all groups without a window, which are the only
    ones that grow with the context.
    """

    weights: int
    cache: int
    page: int
    windowed: int  # part of `cache` that does not grow with the context: windows, states, spare
    work: int  # activations, partial sums of attention, experts that are copied, kernels

    @property
    def total(self) -> int:
        """The peak of memory use."""
        return self.weights + max(self.cache + self.work, STAGING)


class WeightLayouts(Protocol):
    """The part of the planner that knows which weights are in tiles."""

    compact: bool  # keep blocks if the tiles of their format take much more memory

    def keeps_blocks(self, format: Format) -> bool:
        """Whether weights of the format stay in blocks."""
        ...

    def scratch_bytes(self, demand: Demand) -> int:
        """The most bytes of weights that a product converts to f16."""
        ...


def needed(
    demand: Demand,
    max_split_tokens: int,
    scratch: int = 0,
    converts: Callable[[Heads], bool] = lambda heads: False,
    keeps_blocks: Callable[[Format], bool] = lambda format: False,
) -> Need:
    """Memory for the demand with steps of n_batch tokens.

    max_split_tokens: the most sequences whose contexts are split over CTAs. scratch: bytes of
    weights that a product converts to f16. converts: whether pages of such heads are converted to
    f16 for prefill attention.
    """
    groups = demand.cache(demand.n_batch).groups
    paged = [group for group in groups if isinstance(group.spec, PagedKV)]
    shapes = [heads_of(group.spec) for group in paged]
    pairs = list(zip(paged, shapes, strict=True))
    sizes = zip(groups, page_sizes(CacheShape(groups)), strict=True)
    # each group has a spare state, for tokens that pad a step
    states = sum((g.n_pages + 1) * n for g, n in sizes if isinstance(g.spec, Recurrent))
    f16 = max((g.n_pages * f16_page_bytes(h) for g, h in pairs if converts(h)), default=0)
    windowed = sum(g.n_pages * page_bytes(h, g.n_layer) for g, h in pairs if g.spec.window)
    whole = [(g, h) for g, h in pairs if not g.spec.window]
    page = sum(page_bytes(h, g.n_layer) for g, h in whole)
    if whole and f16:
        page += max(f16_page_bytes(h) for _, h in whole)
    kept = sum(g.n_pages * page_bytes(h, g.n_layer) for g, h in whole)
    fixed = windowed + states + sum(page_bytes(h, g.n_layer) for g, h in pairs)  # a spare page each
    return Need(
        weights=sum(
            allocated(weight_bytes(w, role.lookup or (len(w.shape) < 3 and keeps_blocks(w.format))))
            for w, role in demand.weights
            if not is_on_host(w, role)
        ),
        cache=fixed + kept + f16,
        page=page,
        windowed=fixed,
        work=step_bytes(demand, shapes, [g.spec for g in groups])
        + sum(attention_bytes(heads, max_split_tokens) for heads in dict.fromkeys(shapes))
        + allocated(scratch)
        + copied_bytes(demand)
        + KERNELS,
    )


def is_offloaded(tensor: Tensor, role: Role) -> bool:
    """Whether a weight has experts that stay in host memory."""
    return role.on_host and len(tensor.shape) == 3


def is_on_host(tensor: Tensor, role: Role) -> bool:
    """Whether a weight stays in host memory: offloaded experts, or a table of rows on the host."""
    return is_offloaded(tensor, role) or (role.on_host and role.lookup)


def has_offloaded_experts(demand: Demand) -> bool:
    """Whether some experts stay in host memory."""
    return any(is_offloaded(w, role) for w, role in demand.weights)


def copied_bytes(demand: Demand) -> int:
    """Bytes of the buffers for experts that are copied from host memory. There are none if the
    largest step has fewer pairs (token, expert) than the model has experts.
    """
    if demand.n_batch * demand.n_used < demand.n_expert:
        return 0
    sizes = (weight_bytes(w, False) for w, role in demand.weights if is_offloaded(w, role))
    return SLOTS * allocated(max(sizes, default=0))


def page_sizes(shape: CacheShape) -> list[int]:
    """Bytes of a page, or of a recurrent state, in all layers of each group."""
    found = []
    for g in shape.groups:
        if isinstance(g.spec, Recurrent):
            found.append(g.n_layer * state_bytes(g.spec))
        else:
            found.append(page_bytes(heads_of(g.spec), g.n_layer))
    return found


def check(need: Need, demand: Demand, free: int, device: str, fast: Need | None = None) -> None:
    """Raises MemoryError if the demand needs more than `free` bytes. The message says which context
    would fit, or the experts of how many layers would have to stay in host memory. fast: the need
    with larger steps, which make copying experts worthwhile.
    """
    if need.total <= free:
        return
    groups = demand.cache(demand.n_batch).groups
    longest = max(group.n_pages for group in groups if isinstance(group.spec, PagedKV))
    raise MemoryError(
        f"the model needs {_gigabytes(need.total)} ({need.total} bytes) of GPU memory: "
        f"{_gigabytes(need.weights)} for weights, {_gigabytes(need.cache)} for the KV cache of "
        f"{longest * PAGE_SIZE} positions, {_gigabytes(need.work)} to work in; "
        f"{_gigabytes(free)} ({free} bytes) are free on {device}: "
        + _remedy(need, free, demand, fast or need)
    )


def plan_batch(
    layouts: WeightLayouts,
    demand: Demand,
    max_split_tokens: int,
    converts: Callable[[Heads], bool],
    free: int,
    device: str,
) -> tuple[int, str]:
    """Returns (batch size in tokens per step, remark for the user or ""). If memory is short, the
    batch becomes smaller first; then weights whose tiles take much more memory stay in blocks.
    Raises MemoryError; see `check`.
    """
    least = demand.least_batch

    def need(n_batch: int) -> Need:
        asked = replace(demand, n_batch=n_batch)
        scratch = layouts.scratch_bytes(asked)
        return needed(asked, max_split_tokens, scratch, converts, layouts.keeps_blocks)

    layouts.compact = False
    for n_batch in (demand.n_batch, least):
        missing = need(n_batch).total - free
        if missing <= 0:
            return n_batch, ""
    layouts.compact = True
    check(need(least), replace(demand, n_batch=least), free, device, need(demand.n_batch))
    names = sorted(
        {w.format.name for w, role in demand.weights if not role.lookup and grows(w.format)}
    )
    return least, (
        f"weights in {', '.join(names)} stay in their file's blocks, at about a quarter of the "
        f"speed: as tiles they would take {_gigabytes(missing)} more than is free"
    )


def fitting_context(need: Need, free: int, n_seq: int) -> int:
    """The context length that would fit for each of n_seq sequences; 0 if less than a page."""
    left = free - need.weights - need.work - need.windowed
    return max(0, left // max(1, need.page) // n_seq * PAGE_SIZE)


def weight_bytes(tensor: Tensor, in_blocks: bool) -> int:
    """Bytes of a weight: a vector as f32, a matrix in tiles, or in blocks if its format has no
    tiles.
    """
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    *experts, n_rows, k = tensor.shape
    layout = None if in_blocks else layout_of(tensor.format, k)
    return tensor.nbytes if layout is None else prod(experts) * layout.nbytes(n_rows, k)


def step_bytes(demand: Demand, shapes: Sequence[Heads], specs: Sequence[StateSpec] = ()) -> int:
    """Bytes of a step's activations: the output of every op, and the logits of the sampled rows."""
    d, f = demand.n_embd, demand.n_ff
    stream = (4 + 4 + 2) * d  # x, what is added to x, and norm(x)
    gated = (4 + 4 + 2) * f  # gate and up if separate, and act(gate) * up
    per_token = stream + gated + max(map(_head_bytes, shapes)) + _expert_bytes(demand)
    per_token += max((_delta_bytes(x) for x in specs if isinstance(x, Recurrent)), default=0)
    per_token += (4 + 4) * demand.n_inputs  # inputs of layers: projected, and with the table added
    padding = demand.n_expert * _packed_rows_bytes(demand, PACKED_UNIT)
    return demand.n_batch * per_token + padding + 4 * demand.n_seq * demand.n_vocab


def _expert_bytes(demand: Demand) -> int:
    """Bytes per token for experts: router logits; gate, up, h and outputs; ids, weights and the
    orders of a sorted step; packed x and h; and the output of a shared expert.
    """
    d, f = demand.n_embd, demand.n_ff_expert
    each = (4 + 4 + 2) * f + 3 * 4 + _packed_rows_bytes(demand, PACKED_UNIT) // PACKED_UNIT
    return demand.n_used * each + 4 * demand.n_expert + (4 * d + 4 if demand.n_used else 0)


def _packed_rows_bytes(demand: Demand, n_rows: int) -> int:
    """Bytes of packed rows of pairs: x, h, outputs, and the pair of each row."""
    d, f = demand.n_embd, demand.n_ff_expert
    return packed_bytes(n_rows, d) + packed_bytes(n_rows, f) + n_rows * (4 * d + 4)


def _delta_bytes(spec: Recurrent) -> int:
    """Bytes per token for a gated delta net: the projections, u, decays, o before and after the
    norm; and the gate of the model's attention layers, which is at most as wide as o.
    """
    values = spec.n_v_head * spec.size
    return 2 * 4 * spec.channels + (4 + 4 + 2 + 4) * values + (4 + 4 + 8) * spec.n_v_head


def _head_bytes(heads: Heads) -> int:
    """Bytes per token for attention: q, k and v before and after RoPE, the output, and the angles
    of two RoPEs.
    """
    projected = 4 * (heads.n_head + 2 * heads.n_head_kv) * heads.head_size
    rotated = 2 * heads.n_head * heads.row
    attended = 2 * 2 * heads.n_head * heads.head_size  # also packed for the next GEMM
    return projected + rotated + attended + 2 * (4 * heads.head_size) + 4


def allocated(nbytes: int) -> int:
    """Bytes that an allocation takes: a large one takes whole pages, small ones share pages."""
    unit = 512 if nbytes < LARGE else PAGE
    return -(-nbytes // unit) * unit


def _remedy(need: Need, free: int, demand: Demand, fast: Need) -> str:
    tries = [layers_to_offload(x, free, demand) for x in (fast, need)]
    n_layers, rest = next((found for found in tries if found[0]), tries[-1])
    found = [_context(need, free, demand)]
    if n_layers:
        found.append(
            f"the experts of the first {_layers(n_layers)} in the memory of the host make room "
            f"(--n-cpu-moe {n_layers}; --cpu-moe: of all layers)"
        )
    elif rest is not need and _context(rest, free, demand):
        found.append(f"{_context(rest, free, demand)} with --cpu-moe")
    texts = [text for text in dict.fromkeys(found) if text]
    return ", or ".join(texts) or "no context would fit: take a smaller model or --device cpu"


def _context(need: Need, free: int, demand: Demand) -> str:
    n_ctx = fitting_context(need, free, demand.n_seq)
    return f"a context of {n_ctx} tokens would fit (-c {n_ctx})" if n_ctx else ""


def layers_to_offload(need: Need, free: int, demand: Demand) -> tuple[int, Need]:
    """(n, need): the rest of the model fits if the experts of the first n layers stay in host
    memory, with this need. n is 0 if that is not enough for any number of layers; the need is then
    that with all experts in host memory.
    """
    experts = [role for w, role in demand.weights if len(w.shape) == 3 and not role.on_host]
    rest = need
    for layer in sorted({role.layer for role in experts if role.layer is not None}):
        rest = _offloaded(need, demand, layer + 1)
        if rest.total <= free:
            return layer + 1, rest
    return 0, rest


def _offloaded(need: Need, demand: Demand, n_layers: int) -> Need:
    """The need with the experts of the first n_layers layers in host memory."""
    experts = [(w, role) for w, role in demand.weights if len(w.shape) == 3]
    moved = [
        (w, role if (role.layer or 0) >= n_layers else replace(role, on_host=True))
        for w, role in experts
    ]
    saved = _held(experts) - _held(moved)
    copied = copied_bytes(replace(demand, weights=moved)) - copied_bytes(demand)
    return replace(need, weights=need.weights - saved, work=need.work + copied)


def _held(experts: Sequence[tuple[Tensor, Role]]) -> int:
    """Bytes of the experts that are on the device."""
    sizes = (weight_bytes(w, False) for w, role in experts if not role.on_host)
    return sum(map(allocated, sizes))


def check_host(demand: Demand, available: int | None) -> str:
    """A remark about the experts that stay in host memory, "" if none do. Raises MemoryError if
    they and tables in host memory need more than `available` bytes; None: unknown.
    """
    sizes: dict[int, int] = {}
    tables = [w.nbytes for w, role in demand.weights if role.on_host and role.lookup]
    if available is not None and tables:
        available -= sum(tables)
        if available < 0:
            raise MemoryError(
                f"the inputs of layers need {_gigabytes(sum(tables))} of host memory, which is "
                f"{_gigabytes(-available)} more than there is: take a smaller model"
            )
    for w, role in demand.weights:
        if is_offloaded(w, role):
            layer = role.layer or 0
            sizes[layer] = sizes.get(layer, 0) + weight_bytes(w, False)
    total = sum(sizes.values())
    what = f"the experts of {_layers(len(sizes))}, {_gigabytes(total)},"
    if available is None or total <= available:
        return f"{what} stay in host memory, and are read through the bus" if sizes else ""
    sums = zip(sorted(sizes), accumulate(sizes[i] for i in sorted(sizes)), strict=True)
    fits = max((layer + 1 for layer, nbytes in sums if nbytes <= available), default=0)
    raise MemoryError(
        f"{what} do not fit into host memory, of which {_gigabytes(available)} "
        f"({available} bytes) are available: "
        + (f"keep fewer there (--n-cpu-moe {fits})" if fits else "take a smaller model")
    )


def _layers(n: int) -> str:
    return f"{n} layer{'s' * (n != 1)}"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
