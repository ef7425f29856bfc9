"""The ops in float32 numpy: what each one means, and a runtime for machines without a GPU.

Readable before fast, but weights are dequantised once (as far as memory goes), attention reads
pages in place where they are neighbours, and long prompts are attended in blocks of queries so that
memory stays bounded. Nothing here knows a model file's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...formats import by_name
from ...formats.base import F32
from ...formats.rows import encode_rows, row_scales
from ...gguf import Tensor
from ...sampling import Sampler
from .. import host
from ..interface import (
    PAGE_SIZE,
    ActivationType,
    Attention,
    CacheShape,
    Demand,
    FeedForward,
    Head,
    Norm,
    Rope,
    Step,
)
from .kv_pages import Pages, spread
from .kv_pages import check_room as check_cache
from .kv_pages import resolved as cache_types

MEMORY_RESERVE = 512 << 20  # bytes left to keys, values, activations and the rest of the machine
CHUNK_WEIGHTS = 1 << 19  # weights dequantised at a time
CHUNK_SCORES = 1 << 22  # attention scores held at a time
EXACT_COLUMNS = 1024  # products of two bytes that add up to less than 2^24, whatever the order

ROUNDED = {"int8": by_name("I8"), "e4m3": by_name("F8_E4M3")}  # what activations become

Note = Callable[[str], None]


class Matrix:
    """A weight w[N, K]: float32 if `array` is set, otherwise blocks dequantised at each use.

    Both without the scale[N] of its rows, if it has one.
    """

    def __init__(
        self,
        tensor: Tensor,
        array: F32 | None,
        scale: F32 | None = None,
        activations: ActivationType = "f16",
    ) -> None:
        self.tensor = tensor
        self.array = array
        self.scale = scale
        self.activations = activations

    def multiply(self, x: F32) -> F32:
        """x[T, K] -> x w^T [T, N]."""
        format = ROUNDED.get(self.activations)
        if format is None:
            y = self._product(x)
        else:
            scale = row_scales(x, format)
            values = format.dequantize(encode_rows(x, scale, format))
            y = self._product(values) * scale[:, None]
        return y if self.scale is None else y * self.scale

    def _product(self, x: F32) -> F32:
        """x[T, K] -> x values^T [T, N]."""
        product = _whole_product if self.activations == "int8" else np.matmul
        if self.array is not None:
            return product(x, self.array.T)
        parts = [product(x, self._dequantize(rows).T) for rows in _chunks(self.tensor)]
        return np.concatenate(parts, axis=1)

    def rows(self, ids: NDArray) -> F32:
        """w[ids], float32."""
        if self.array is not None:
            found = self.array[ids]
        else:
            found = self.tensor.format.dequantize(self.tensor.data[ids])
        return found if self.scale is None else found * self.scale[ids, None]

    def _dequantize(self, rows: slice) -> F32:
        return self.tensor.format.dequantize(self.tensor.data[rows])


class Reference:
    """Ops on the CPU; `note` is told when weights do not fit in memory as float32.

    weight_memory: bytes of float32 weights to hold at most; by default what the machine has free.
    """

    name = "cpu"
    asynchronous = False

    def __init__(
        self,
        n_threads: int | None = None,
        *,
        reason: str = "numpy on the CPU",
        note: Note = lambda message: None,
        weight_memory: int | None = None,
    ) -> None:
        self.reason = reason
        self._note = note
        host.set_blas_threads(n_threads or host.default_threads())
        self._budget = _default_budget() if weight_memory is None else weight_memory
        self._in_blocks = 0  # bytes of float32 that did not fit
        self._sampled = np.zeros(0, np.int64)
        self._keys: Pages | None = None
        self._values: Pages | None = None

    # Weights

    def weight(
        self,
        tensor: Tensor,
        lookup: bool = False,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Matrix | F32:
        """A vector as an array, a matrix as float32; in blocks if too large or only looked up."""
        if len(tensor.shape) == 1:
            return np.array(tensor.dequantize(), np.float32)
        by_row = None if scale is None else np.array(scale.dequantize(), np.float32)
        if lookup:
            return Matrix(tensor, None, by_row)
        nbytes = 4 * int(np.prod(tensor.shape))
        if nbytes > self._budget:
            self._in_blocks += nbytes
            return Matrix(tensor, None, by_row, activations)
        self._budget -= nbytes
        return Matrix(tensor, _dequantize(tensor), by_row, activations)

    def weights_ready(self) -> None:
        """Say so if some weights stayed in blocks."""
        if self._in_blocks:
            self._note(
                f"{_gigabytes(self._in_blocks)} of the weights do not fit in memory as float32: "
                "they stay in blocks and are dequantised at each use, which is slow"
            )

    def check_room(self, demand: Demand) -> int:
        """Only keys and values can be too large: weights that do not fit stay in the file."""
        check_cache(demand.cache)
        return demand.least_batch

    def allocate_cache(self, shape: CacheShape) -> None:
        """Zeroed pages, which take memory as they are written."""
        check_cache(shape)
        types = cache_types(shape)
        self._keys, self._values = Pages(shape, types.k), Pages(shape, types.v)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Nothing: positions that were not written are not read."""

    # Steps

    def run(self, step: Step, forward: Callable[[Step], F32], repeat: bool = True) -> F32:
        """forward(step)."""
        return forward(step)

    def embed(self, step: Step, table: Matrix, scale: float = 1.0) -> F32:
        """x[T, D] = table[ids] * scale."""
        ids = step.ids.astype(np.int64)
        late = ids < 0
        ids[late] = self._sampled[~ids[late]]
        return table.rows(ids) * np.float32(scale)

    def qkv(self, x: F32, attention: Attention, step: Step) -> F32:
        """q[T, H, E]; k and v go to their pages."""
        a = attention
        n = rms_norm(x, a.norm)
        q = _heads(_affine(n, a.wq, a.bq), a.n_head)
        k = _heads(_affine(n, a.wk, a.bk), a.n_head_kv)
        v = _heads(_affine(n, a.wv, a.bv), a.n_head_kv)
        if a.q_norm is not None:
            q = rms_norm(q, a.q_norm)
        if a.k_norm is not None:
            k = rms_norm(k, a.k_norm)
        cos, sin = _angles(a.rope, step.positions)
        page, place = step.pages, step.positions % PAGE_SIZE
        keys, values = self._cache
        q, k = (_rotate(x, a.rope, cos, sin) for x in (q, k))
        if keys.spreads:
            q, k = spread(q), spread(k)
        keys.write(a.layer, page, place, k)
        values.write(a.layer, page, place, v)
        return q

    def attend(self, q: F32, attention: Attention, step: Step) -> F32:
        """o[T, H*E], one sequence and one block of queries at a time."""
        out = np.empty((len(q), attention.n_head * attention.head_size), np.float32)
        for tokens in _sequences(step):
            pages = step.page_tables[step.sequences[tokens.start]]
            longest = int(step.positions[tokens.stop - 1]) + 1
            size = max(1, CHUNK_SCORES // (attention.n_head * longest))
            for start in range(tokens.start, tokens.stop, size):
                block = slice(start, min(start + size, tokens.stop))
                out[block] = self._attend(q[block], attention, step.positions[block], pages)
        return out

    def linear_add(
        self,
        h: F32,
        w: Matrix,
        x: F32,
        post_norm: Norm | None = None,
        then: Attention | FeedForward | None = None,
    ) -> F32:
        """x[T, D] + post_norm(h w^T)."""
        y = w.multiply(h)
        return x + (y if post_norm is None else rms_norm(y, post_norm))

    def ffn(self, x: F32, feed_forward: FeedForward, step: Step) -> F32:
        """h[T, F] = activation(n w_gate^T) * (n w_up^T) with n = norm(x)."""
        n = rms_norm(x, feed_forward.norm)
        gate = ACTIVATIONS[feed_forward.activation](feed_forward.w_gate.multiply(n))
        return gate * feed_forward.w_up.multiply(n)

    def logits(self, x: F32, head: Head, step: Step) -> F32:
        """l[R, V] of step.rows."""
        return _soft_cap(head.weight.multiply(rms_norm(x[step.rows], head.norm)), head.soft_cap)

    def sample(self, logits: F32, samplers: Sequence[Sampler]) -> NDArray[np.int64]:
        """ids[R]: row r through samplers[r]; each one's count of draws goes up."""
        for sampler in samplers:
            sampler.settle(self._sampled)
        pairs = zip(samplers, logits, strict=True)
        ids = np.array([sampler.try_sample(row) for sampler, row in pairs], np.int64)
        self._sampled = np.maximum(ids, 0)  # of a row without a token the next step needs some id
        return ids

    def read(self, array: NDArray) -> NDArray:
        """The array itself."""
        return array

    def device_bytes(self) -> int:
        """None but the process's."""
        return 0

    # Attention over pages

    @property
    def _cache(self) -> tuple[Pages, Pages]:
        if self._keys is None or self._values is None:
            raise RuntimeError("allocate_cache comes before the first step")
        return self._keys, self._values

    def _attend(self, q: F32, a: Attention, positions: NDArray, pages: NDArray) -> F32:
        """q[t, H, E] at rising positions -> o[t, H*E]."""
        t, share = len(q), a.n_head // a.n_head_kv
        first = max(0, int(positions[0]) - a.window + 1) if a.window else 0
        last = int(positions[-1]) + 1
        k, v = (part.read(a.layer, pages, first, last) for part in self._cache)  # [n, G, E]
        grouped = q.reshape(t, a.n_head_kv, share, a.head_size).transpose(
            1, 2, 0, 3
        )  # [G, H/G, t, E]
        scores = grouped.reshape(a.n_head_kv, share * t, a.head_size) @ k.transpose(1, 2, 0)
        scores = _soft_cap(scores * np.float32(a.scale), a.soft_cap)
        scores = scores.reshape(a.n_head_kv, share, t, last - first)
        scores[..., ~_visible(positions, np.arange(first, last), a.window)] = -np.inf
        sinks = None if a.sinks is None else a.sinks.reshape(a.n_head_kv, share, 1, 1)
        weights = _softmax(scores, sinks).reshape(a.n_head_kv, share * t, last - first)
        o = (weights @ v.transpose(1, 0, 2)).reshape(a.n_head_kv, share, t, a.head_size)
        return o.transpose(2, 0, 1, 3).reshape(t, a.n_head * a.head_size)


def _visible(positions: NDArray, others: NDArray, window: int) -> NDArray[np.bool_]:
    """mask[t, n]: position p sees itself and earlier ones, only the last `window` if not 0."""
    distance = positions[:, None] - others
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _softmax(scores: F32, sinks: F32 | None) -> F32:
    """Over the last axis; a sink is one more score that only takes weight."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / (total if sinks is None else total + np.exp(sinks - top))


def _sequences(step: Step) -> Iterator[slice]:
    """The tokens of each sequence in turn."""
    borders = np.flatnonzero(np.diff(step.sequences)) + 1
    for start, stop in zip([0, *borders], [*borders, len(step.sequences)], strict=True):
        yield slice(int(start), int(stop))


# Formulas


def _whole_product(x: F32, w: F32) -> F32:
    """x[T, K] w[K, N] of whole numbers of 8 bits, rounded once: the sums are exact before."""
    total = np.zeros((len(x), w.shape[1]))
    for start in range(0, len(w), EXACT_COLUMNS):
        part = slice(start, start + EXACT_COLUMNS)
        total += x[:, part] @ w[part]
    return total.astype(np.float32)


def rms_norm(x: F32, norm: Norm) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the norm's weight is an array."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean + np.float32(norm.eps)) * norm.weight


def _affine(x: F32, w: Matrix, bias: F32 | None) -> F32:
    y = w.multiply(x)
    return y if bias is None else y + bias


def _heads(x: F32, n_head: int) -> F32:
    """x[T, n_head*E] -> [T, n_head, E]."""
    return x.reshape(len(x), n_head, -1)


def _angles(rope: Rope, positions: NDArray) -> tuple[F32, F32]:
    """cos and sin [T, 1, pairs] of position * inv_freq, times the magnitude; angles in float64."""
    angle = positions[:, None, None] * rope.inv_freq
    cos, sin = np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude
    return cos.astype(np.float32), sin.astype(np.float32)


def _rotate(x: F32, rope: Rope, cos: F32, sin: F32) -> F32:
    """x[T, heads, E] with its pairs rotated."""
    n = len(rope.inv_freq)
    if rope.style == "neox":
        first, second = slice(0, n), slice(n, 2 * n)
    else:
        first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def _soft_cap(x: F32, cap: float) -> F32:
    """cap * tanh(x / cap); 0 is none."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def _silu(x: F32) -> F32:
    """x / (1 + exp(-x)), by way of tanh: exp would overflow."""
    return x * (np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5))


def _gelu_tanh(x: F32) -> F32:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


# Memory


def _dequantize(tensor: Tensor) -> F32:
    """The whole matrix by chunks of rows, since dequantisers need several times their result."""
    out = np.empty(tensor.shape, np.float32)
    for rows in _chunks(tensor):
        out[rows] = tensor.format.dequantize(tensor.data[rows])
    host.drop_pages(tensor.data)
    return out


def _chunks(tensor: Tensor) -> Iterator[slice]:
    n_rows, columns = tensor.shape
    size = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def _default_budget() -> int:
    free = host.available_memory()
    return 1 << 62 if free is None else max(0, free - MEMORY_RESERVE)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
