"""Heads, pages and sequences for tests of rope_kv and attention, and float64 references.

Letters: T tokens, H query heads, G key/value heads, E elements of a head; row is E in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from kernel_buffers import Output, upload
from packed_cases import unpacked

from ggpy.kernels.attention.paged_attention import AttentionParams, PagedAttention, plan_tiles
from ggpy.kernels.attention.pages_to_f16 import PagesToF16, as_f16, plan_f16_pages
from ggpy.kernels.attention.prefill_attention import PrefillAttention, plan_prefill_tiles
from ggpy.kernels.attention.rope_kv import (
    AttentionMetadata,
    Heads,
    RopeKv,
    Rotation,
    UnusualHeads,
    angles,
)
from ggpy.kernels.layout.pack import PLAIN, packed_bytes

PAGE = 64  # positions
GARBAGE = 1000.0  # old contents of pages: finite, and kernels must not read it


@dataclass
class Sequences:
    """A step: for each sequence its length, including the step's tokens, and their number."""

    lengths: list[int]
    n_tokens: list[int]
    positions: np.ndarray = field(init=False)  # [T]
    sequences: np.ndarray = field(init=False)  # [T]
    tables: np.ndarray = field(init=False)  # [S, stride]: pages in random order
    n_pages: int = field(init=False)

    def __post_init__(self) -> None:
        both = list(zip(self.lengths, self.n_tokens, strict=True))
        self.positions = np.concatenate([np.arange(n - t, n) for n, t in both]).astype(np.int32)
        self.sequences = np.repeat(np.arange(len(both)), self.n_tokens).astype(np.int32)
        counts = [-(-n // PAGE) for n in self.lengths]
        self.n_pages = sum(counts) + 1
        order = iter(np.random.default_rng(self.n_pages).permutation(self.n_pages).tolist())
        self.tables = np.zeros((len(both), max(counts)), np.int32)
        for row, count in zip(self.tables, counts, strict=True):
            row[:count] = [next(order) for _ in range(count)]

    def batch(self, device: Any) -> AttentionMetadata:
        """The metadata of the step on the device."""
        pages, _ = self.place(self.sequences, self.positions)
        arrays = (self.positions, pages, self.sequences, self.tables)
        return AttentionMetadata(*(upload(device, array) for array in arrays), self.tables.shape[1])

    def place(
        self, sequences: int | np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages and slots of positions of one sequence, or of one each."""
        return self.tables[sequences, positions // PAGE], positions % PAGE


def heads(n_head: int, n_head_kv: int, head_size: int) -> Heads:
    """Heads with pages of PAGE positions."""
    return Heads(n_head, n_head_kv, head_size, PAGE)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """float32, normal."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def frequencies(n_pairs: int, base: float = 10000.0) -> np.ndarray:
    """The RoPE frequencies of n_pairs pairs, float64."""
    return base ** (-np.arange(n_pairs) / n_pairs)


def placed(values: np.ndarray) -> np.ndarray:
    """Permutes values [..., row, PAGE] to the layout of pages, [..., PAGE / 16, row, 16].

    In every second group of four elements, the first eight of 16 positions follow the other eight.
    """
    parts = values.reshape(*values.shape[:-1], PAGE // 16, 2, 8)
    return np.moveaxis(_swapped(parts), -4, -3).reshape(values.shape)


def taken(pages: np.ndarray) -> np.ndarray:
    """The inverse of `placed`."""
    *outer, row, _ = pages.shape
    parts = np.moveaxis(pages.reshape(*outer, PAGE // 16, row, 2, 8), -3, -4)
    return _swapped(parts).reshape(pages.shape)


def _swapped(parts: np.ndarray) -> np.ndarray:
    """[..., row, PAGE / 16, 2, 8]; its own inverse."""
    swaps = np.arange(parts.shape[-4]) & 4 > 0
    return np.where(swaps[:, None, None, None], parts[..., ::-1, :], parts)


class Pages:
    """The KV cache of a layer: k [page, G, PAGE, row], v [page, G, row, PAGE].

    On the device, v has the layout of `placed`.
    """

    def __init__(self, device: Any, h: Heads, s: Sequences, fill: float) -> None:
        self.heads, self.sequences = h, s
        self.k = np.full((s.n_pages, h.n_head_kv, PAGE, h.row), fill, np.float16)
        self.v = np.full((s.n_pages, h.n_head_kv, h.row, PAGE), fill, np.float16)
        self.outputs = [Output(device, array.nbytes) for array in (self.k, self.v)]

    def put(self, sequence: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Write k and v [n, G, E] to the host copy, with zeros in the padding."""
        page, slot = self.sequences.place(sequence, positions)
        padding = ((0, 0), (0, 0), (0, self.heads.row - self.heads.head_size))
        self.k[page, :, slot] = np.pad(k, padding)
        self.v[page, :, :, slot] = np.pad(v, padding)

    def send(self, device: Any) -> tuple[Any, Any]:
        """Upload the host copy."""
        for array, output in zip((self.k, placed(self.v)), self.outputs, strict=True):
            device.upload(output.buffer, array)
        return self.outputs[0].buffer, self.outputs[1].buffer

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Download the device copy."""
        k, v = self.outputs
        return k.read(np.float16, self.k.shape), taken(v.read(np.float16, self.v.shape))


@dataclass(frozen=True)
class Turn:
    """RoPE, norms and biases that are applied to heads before attention."""

    inv_freq: np.ndarray
    neox: bool = True
    magnitude: float = 1.0
    bias: Sequence[np.ndarray | None] = (None, None, None)
    norm: Sequence[np.ndarray | None] = (None, None)
    eps: tuple[float, float] = (1e-5, 1e-6)
    value_eps: float | None = None
    shared: bool = False
    unusual: UnusualHeads | None = None

    def on(self, device: Any) -> Rotation:
        """The arguments on a device."""
        send = lambda array: None if array is None else upload(device, array)  # noqa: E731
        return Rotation(
            angles=upload(device, angles(self.inv_freq)),
            n_pairs=len(self.inv_freq),
            neox=self.neox,
            magnitude=self.magnitude,
            bias=[send(b) for b in self.bias],
            norm=[send(n) for n in self.norm],
            eps=self.eps,
            value_eps=self.value_eps,
            shared=self.shared,
            unusual=self.unusual,
        )

    def apply(self, part: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64 of part 0, 1, 2 (q, k, v) x[T, n, E]."""
        x = x.astype(np.float64)
        if self.bias[part] is not None:
            x = x + self.bias[part].reshape(x.shape[1:])
        if part == 2 and self.value_eps is not None:
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.value_eps)
        if part == 2:
            return x
        u = self.unusual or UnusualHeads(length=1)
        if u.norm_last:
            x = self.normed(part, self.rotated(x, positions))
        else:
            x = self.rotated(self.normed(part, x), positions)
        if part == 0:
            x = x * (1 + u.growth * np.log(1 + (positions + u.offset) // u.length))[:, None, None]
        return x

    def normed(self, part: int, x: np.ndarray) -> np.ndarray:
        """The norm of each head."""
        norm, u = self.norm[part], self.unusual
        if norm is None:
            return x
        if u is not None and u.centred:
            x = x - np.mean(x, axis=-1, keepdims=True)
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.eps[part]) * norm

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """RoPE."""
        n, out = len(self.inv_freq), x.copy()
        a = slice(0, n) if self.neox else slice(0, 2 * n, 2)
        b = slice(n, 2 * n) if self.neox else slice(1, 2 * n, 2)
        angle = positions.astype(np.float64)[:, None, None] * self.inv_freq
        c, s = self.magnitude * np.cos(angle), self.magnitude * np.sin(angle)
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
        return out


def rope_kv(device, h: Heads, s: Sequences, turn: Turn, parts, pages: Pages) -> np.ndarray:
    """float16 q[T, H, row] from float32 parts (q, k, v) [T, n, E]; writes k and v to pages."""
    n = len(s.positions)
    q = Output(device, 2 * n * h.n_head * h.row)
    projected = [None if part is None else upload(device, part) for part in parts]
    memory = pages.send(device)
    RopeKv(device, h).launch(projected, turn.on(device), s.batch(device), n, memory, q.buffer)
    return q.read(np.float16, (n, h.n_head, h.row))


class Attended:
    """The output of attention, in rows or packed."""

    def __init__(self, device: Any, h: Heads, n_tokens: int, order: int) -> None:
        self.shape, self.order = (n_tokens, h.n_head, h.head_size), order
        columns = h.n_head * h.head_size
        self.nbytes = packed_bytes(n_tokens, columns) if order else 2 * n_tokens * columns
        self.output = Output(device, self.nbytes)

    def read(self) -> np.ndarray:
        """float16 [T, H, E]."""
        if not self.order:
            return self.output.read(np.float16, self.shape)
        n, columns = self.shape[0], self.shape[1] * self.shape[2]
        packed = self.output.read(np.float16, (self.nbytes // 2,))
        return unpacked(packed, n, columns, self.order)[:n].reshape(self.shape)


def sent(device: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those options of attention that are arrays, on the device."""
    arrays = {name: options.get(name) for name in ("sinks", "gate")}
    return {name: upload(device, x) for name, x in arrays.items() if x is not None}


class Attention:
    """Attention on a device; it can run several times."""

    def __init__(self, device: Any, h: Heads, batch_invariant: bool = False) -> None:
        self.device, self.heads = device, h
        self.kernel = PagedAttention(device, h, 8, device.shared_bytes, batch_invariant)

    def run(
        self, s: Sequences, pages: Pages, *, q=None, turn=None, parts=(), order=PLAIN, **options
    ):
        """float16 o[T, H, E] for float16 q[T, H, row], or for parts that the kernel rotates."""
        device, h = self.device, self.heads
        n = len(s.positions)
        rotates = turn is not None or options.get("rotated")
        resident_splits = self.kernel.resident_splits(n) if rotates and n == len(s.tables) else None
        tiles = plan_tiles(s.positions, s.sequences, h, resident_splits=resident_splits)
        out = Attended(device, h, len(s.positions), order)
        if turn is not None:
            options["projected"] = [None if x is None else upload(device, x) for x in parts]
            options["rotation"] = turn.on(device)
        options |= sent(device, options)
        params = AttentionParams(
            None if q is None else upload(device, q),
            s.batch(device),
            pages.send(device),
            out.output.buffer,
            order=order,
            n_tokens=len(s.positions),
            **options,
        )
        self.kernel.launch(params, upload(device, tiles), len(tiles), int(tiles[:, 2].max()))
        return out.read()


class PromptAttention:
    """Prefill attention of the sequences that have at least so many tokens in the step."""

    def __init__(self, device: Any, h: Heads, wgmma: bool = False, least: int = 2) -> None:
        self.device, self.heads, self.least = device, h, least
        self.kernel = PrefillAttention(PagedAttention(device, h, 8, device.shared_bytes), wgmma)

    def run(self, s: Sequences, pages: Pages, q: np.ndarray, order: int = PLAIN, **options):
        """float16 o[T, H, E] for float16 q[T, H, row]; NaN for sequences with fewer tokens.

        pages: Pages (f16), or TypedPages, which are converted to f16.
        """
        device, h = self.device, self.heads
        tiles = plan_prefill_tiles(s.positions, s.sequences, h, self.least)
        out = Attended(device, h, len(s.positions), order)
        options |= sent(device, options)
        options |= {"order": order, "n_tokens": len(s.positions)}
        batch, memory = s.batch(device), pages.send(device)
        if not h.is_f16:
            tables, memory = halved(device, h, s, memory, self.least, options.get("window", 0))
            batch = replace(batch, page_tables=upload(device, tables))
        parts = upload(device, q), batch, memory, out.output.buffer
        self.kernel.launch(AttentionParams(*parts, **options), upload(device, tiles), len(tiles))
        return out.read()


def halved(device: Any, h: Heads, s: Sequences, memory: Any, least: int, window: int) -> tuple:
    """Page tables and f16 pages (keys, values) of the positions that prefill reads; others NaN."""
    listed, tables = plan_f16_pages(s.positions, s.sequences, s.tables, PAGE, least)
    sizes = as_f16(h).key_bytes, as_f16(h).value_bytes
    pages = [Output(device, len(listed) * size).buffer for size in sizes]
    PagesToF16(device, h).launch(memory, pages, upload(device, listed), len(listed), window)
    return tables, pages


def attention(
    q,
    keys,
    values,
    positions,
    *,
    scale,
    window=0,
    soft_cap=0.0,
    sinks=None,
    gate=None,
    chunked=False,
    both_sides=False,
):
    """float64 o[T, H, E] of one sequence's q[T, H, E] at positions, keys and values [n, G, E];
    times sigmoid(gate[T, H, E]).

    chunked: the window is a chunk, whose first position is a multiple of it. both_sides: half of
    the window is before a token, and half after it; no window: a token sees all positions.
    """
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    share = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x, share, axis=1) for x in (keys, values))
    s = np.einsum("the,nhe->htn", q, keys) * scale
    if soft_cap:
        s = soft_cap * np.tanh(s / soft_cap)
    at = np.arange(len(keys))
    distance = positions[:, None] - at
    if both_sides:
        seen = np.abs(distance) <= (window // 2 if window else len(keys))
    elif chunked:
        seen = (distance >= 0) & (at // window == positions[:, None] // window)
    else:
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
    s = np.where(seen, s, -np.inf)
    sink = np.full((len(s), 1, 1), -np.inf) if sinks is None else sinks.reshape(-1, 1, 1)
    top = np.maximum(s.max(axis=-1, keepdims=True), sink)
    e = np.exp(s - top)
    weights = e / (e.sum(axis=-1, keepdims=True) + np.exp(sink - top))
    o = np.einsum("htn,nhe->the", weights, values)
    return o if gate is None else o / (1 + np.exp(-gate.astype(np.float64)))


def fill(device, h, s, seed=0):
    """Pages, float16 q[T, H, row], and keys and values [n, G, E] of each sequence."""
    pages = Pages(device, h, s, GARBAGE)
    pages.k[..., h.head_size :], pages.v[:, :, h.head_size :] = 0, 0  # as rope_kv leaves them
    contents = []
    for i, n in enumerate(s.lengths):
        k, v = (
            random(n, h.n_head_kv, h.head_size, seed=seed + 9 * i + j).astype(np.float16)
            for j in (1, 2)
        )
        pages.put(i, np.arange(n), k, v)
        contents.append((k, v))
    q = np.zeros((len(s.positions), h.n_head, h.row), np.float16)
    q[..., : h.head_size] = random(len(q), h.n_head, h.head_size, seed=seed)
    return pages, q, contents


def expected(h, s, q, contents, gate=None, **options):
    """float64 o[T, H, E]."""
    parts = []
    for i, (k, v) in enumerate(contents):
        rows = s.sequences == i
        options["gate"] = None if gate is None else gate[rows]
        parts.append(attention(q[rows][..., : h.head_size], k, v, s.positions[rows], **options))
    return np.concatenate(parts)
