"""The ops on a GPU: which kernel computes each, and where its operands lie.

A decode step of single tokens is captured as a CUDA graph per shape and replayed; everything that changes from step to
step (ids, positions, page tables, how attention is split) is one small upload. One token alone is normalised inside
the products; several go through a norm kernel, with the same bits. Activations between ops are halves where they are
only multiplied with, floats where they are added up. Policy only: grids and memory layouts belong to ggpy/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.base import Buffer, OutOfMemory, Ptr
from ..gguf import Tensor
from ..kernels.argmax import Argmax
from ..kernels.attend import Attend, plan_tiles
from ..kernels.block_kernel import BlockMatrix
from ..kernels.dequantize_mul_mat_vec import dequantize_mul_mat_vec
from ..kernels.elementwise import Elementwise
from ..kernels.embed_tile import EmbedTile
from ..kernels.get_rows import get_rows
from ..kernels.mul_mat_tile import Epilogue, Limits, MulMatTile
from ..kernels.rms_norm import RmsNorm
from ..kernels.rope_kv import Batch as BatchMemory
from ..kernels.rope_kv import Heads, RopeKv, Rotation, turns
from ..kernels.tile import TiledMatrix
from ..sampling import Sampler
from . import cuda_memory
from .cuda_upload import Uploader
from .interface import PAGE_SIZE, Attention, CacheShape, Demand, FeedForward, Head, Norm, Rope, Step

GRAPH_TOKENS = 64  # steps of at most this many single tokens become graphs
MAX_SAMPLED = 1024  # rows of a step that are sampled at most
IN_FLIGHT = 4  # steps whose uploads and results may be under way

Memory = Buffer | Ptr


@dataclass(frozen=True)
class Array:
    """An activation in device memory; `row` elements of it from row to row, of which shape[-1] count."""

    data: Memory
    dtype: type
    shape: tuple[int, ...]
    row: int


@dataclass(frozen=True)
class Projected:
    """q, k and v before their rotation, which attention does: floats [T, H*E], [T, G*E], [T, G*E]."""

    parts: list[Memory]
    rotation: Rotation


@dataclass(frozen=True)
class Matrix:
    """A weight [n_rows, k]: in tiles, or in the file's blocks where the format has no tiles or only rows are used."""

    n_rows: int
    k: int
    tiles: TiledMatrix | None
    blocks: BlockMatrix | None


@dataclass(frozen=True)
class Sampled:
    """Ids that a step sampled: pinned int32[R], valid once the event is reached."""

    ids: NDArray[np.int32]
    event: Any


@dataclass(frozen=True)
class Batch:
    """A step's integers on the device, and the sizes that decide which kernels run."""

    n_tokens: int
    n_rows: int
    n_tiles: int
    alone: bool  # each token is the only one of its sequence
    split: bool  # some token is, so that its context may be split
    all_rows: bool  # the wanted rows are all tokens, in order
    ids: Memory
    rows: Memory
    tiles: Memory
    memory: BatchMemory


class Cuda:
    """Ops on one GPU."""

    asynchronous = True

    def __init__(
        self, device: Any, name: str = "cuda:0", reason: str = "a CUDA GPU was found"
    ) -> None:
        self.device, self.name, self.reason = device, name, reason
        limits = Limits(shared=device.shared_bytes, multiprocessors=device.sm_count)
        self._product = MulMatTile(device, limits)
        self._norm = RmsNorm(device)
        self._embed_tile = EmbedTile(device)
        self._elementwise = Elementwise(device)
        self._argmax = Argmax(device, MAX_SAMPLED)
        self._uploader: Uploader | None = Uploader(device)
        self._sampled = device.zeros(4 * MAX_SAMPLED, "sampled ids")
        self._results = [device.pinned(4 * MAX_SAMPLED).view(np.int32) for _ in range(IN_FLIGHT)]
        self._scratch: dict[str, Buffer] = {}
        self._graphs: dict[tuple, Any] = {}
        self._seen: set[tuple] = set()
        self._ropes: dict[int, tuple[Rope, Buffer]] = {}
        self._staging: list[tuple[NDArray[np.int32], Any]] = []
        self._step_buffer: Buffer | None = None
        self._n_steps = 0
        self._batch: Batch | None = None
        self._heads: Heads | None = None
        self._fuse = False

    # Weights

    def check_room(self, demand: Demand) -> None:
        """MemoryError if the GPU has too little free memory, before anything is uploaded."""
        cuda_memory.check_room(demand, self.device.free_bytes, GRAPH_TOKENS, self.name)

    def device_bytes(self) -> int:
        """Bytes of GPU memory that are allocated."""
        return int(self.device.used_bytes)

    def weight(self, tensor: Tensor, lookup: bool = False) -> Matrix | Buffer:
        """A vector as floats; a matrix in tiles, or in its blocks if it has none or is only looked up."""
        if len(tensor.shape) == 1:
            values = np.ascontiguousarray(tensor.dequantize(), np.float32)
            buffer = self.device.alloc(values.nbytes, tensor.name)
            self.device.upload(buffer, values)
            return buffer
        if self._uploader is None:
            raise RuntimeError("weights were handed over after weights_ready")
        n_rows, k = tensor.shape
        tiles, blocks = self._uploader.upload(tensor, tiled=not lookup)
        raw = BlockMatrix(tensor.format, n_rows, k, blocks) if blocks else None
        return Matrix(n_rows, k, tiles, raw)

    def weights_ready(self) -> None:
        """Wait for the uploads; free the staging memory."""
        self.device.synchronize()
        self._uploader = None

    def allocate_cache(self, shape: CacheShape) -> None:
        """Pages of halves, zeroed: what attention masks must still be finite."""
        if self._heads is not None:
            raise RuntimeError("the cache was allocated before")
        self._heads = Heads(shape.n_head, shape.n_head_kv, shape.head_size, PAGE_SIZE)
        self._layer_bytes = shape.n_pages * self._heads.page_bytes
        self._rope = RopeKv(self.device, self._heads)
        self._attend = Attend(self.device, self._heads, GRAPH_TOKENS, self.device.shared_bytes)
        try:
            self._keys = self.device.zeros(shape.n_layer * self._layer_bytes, "keys")
            self._values = self.device.zeros(shape.n_layer * self._layer_bytes, "values")
        except OutOfMemory as error:
            page = 2 * shape.n_layer * self._layer_bytes // shape.n_pages
            raise MemoryError(
                f"{shape.n_pages * PAGE_SIZE} positions of keys and values need {page * shape.n_pages / 1e9:.1f} GB, "
                f"{error.free / 1e9:.1f} GB are free: an n_ctx of {error.free // page * PAGE_SIZE} would fit"
            ) from None

    # Steps

    def run(self, step: Step, forward: Callable[[Step], Array], repeat: bool = True) -> Array:
        """forward(step): recorded at the second step of a shape, replayed from then on.

        repeat: False where single ops' outputs will be read: nothing is recorded, nothing fused across ops.
        """
        batch = self._batch = self._upload(step)
        self._fuse = repeat and batch.alone
        if not repeat:
            return forward(step)
        key = (batch.n_tokens, batch.memory.stride)
        if not batch.alone or batch.n_tokens > GRAPH_TOKENS or not batch.all_rows:
            return forward(step)
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.launch()
            return result
        if key not in self._seen:
            self._seen.add(key)  # compiles and allocates what the recording must not
            return forward(step)
        with self.device.capture() as graph:
            result = forward(step)
        self._graphs[key] = graph, result
        graph.launch()
        return result

    def _upload(self, step: Step) -> Batch:
        """The step's integers in one copy: ids, positions, sequences, rows, page tables, attention tiles."""
        n_tokens, n_rows = len(step.ids), len(step.rows)
        width = step.page_tables.shape[1]
        stride = 1 << (width - 1).bit_length()
        tables = np.zeros((len(step.page_tables), stride), np.int32)
        tables[:, :width] = step.page_tables
        if self._heads is None:
            raise RuntimeError("allocate_cache comes before the first step")
        tiles = plan_tiles(step.positions, step.sequences, self._heads)
        parts = [step.ids, step.positions, step.sequences, step.rows, tables.ravel(), tiles.ravel()]
        offsets = np.cumsum([0, *[-(-part.size // 4) * 16 for part in parts]]).tolist()
        host, device = self._staging_for(offsets[-1])
        for part, offset in zip(parts, offsets, strict=False):
            host[offset // 4 : offset // 4 + part.size] = part
        self.device.upload(device, host[: offsets[-1] // 4])
        self._staging[self._n_steps % IN_FLIGHT] = host, self.device.event().record()
        at = [device.at(offset) for offset in offsets[:-1]]
        self._n_steps += 1
        alone = len(step.page_tables) == n_tokens
        return Batch(
            n_tokens=n_tokens,
            n_rows=n_rows,
            n_tiles=len(tiles),
            alone=alone,
            split=alone or bool((tiles[:, 2] > 1).any()),
            all_rows=n_rows == n_tokens,
            ids=at[0],
            rows=at[3],
            tiles=at[5],
            memory=BatchMemory(at[1], at[2], at[4], stride),
        )

    def _staging_for(self, nbytes: int) -> tuple[NDArray[np.int32], Buffer]:
        """Pinned integers that no copy reads any more, and where they go."""
        if self._step_buffer is None or self._step_buffer.nbytes < nbytes:
            self._drop_graphs()
            size = max(2 * nbytes, 1 << 16)
            self._step_buffer = self.device.alloc(size, "step")
            self._staging = [
                (self.device.pinned(size).view(np.int32), None) for _ in range(IN_FLIGHT)
            ]
        host, event = self._staging[self._n_steps % IN_FLIGHT]
        if event is not None:
            event.synchronize()
        return host, self._step_buffer

    def _room(self, name: str, nbytes: int) -> Buffer:
        """Scratch memory of at least nbytes that keeps its address as long as it is large enough."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self._drop_graphs()
            self.device.synchronize()
            self._scratch.pop(name, None)
            buffer = self._scratch[name] = self.device.alloc(nbytes, name)
        return buffer

    def _drop_graphs(self) -> None:
        """Recorded addresses are about to change."""
        if self._graphs:
            self.device.synchronize()
        self._graphs.clear()
        self._seen.clear()

    def _float(self, name: str, rows: int, columns: int) -> Array:
        return Array(self._room(name, 4 * rows * columns), np.float32, (rows, columns), columns)

    def _half(self, name: str, rows: int, columns: int) -> Array:
        return Array(self._room(name, 2 * rows * columns), np.float16, (rows, columns), columns)

    # Ops

    @property
    def _now(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("ops are called inside run")
        return self._batch

    def embed(self, step: Step, table: Matrix, scale: float = 1.0) -> Array:
        """x[T, D], float."""
        batch = self._now
        x = self._float("x", batch.n_tokens, table.k)
        ids, n = batch.ids, batch.n_tokens
        if table.tiles is not None:
            self._embed_tile.launch(table.tiles, ids, self._sampled, x.data, n, scale)
        else:
            get_rows(
                self.device,
                table.blocks,
                ids,
                x.data,
                n,
                scale=scale,
                sampled=self._sampled,
                pdl=True,
            )
        return x

    def qkv(self, x: Array, attention: Attention, step: Step) -> Array | Projected:
        """q[T, H, E], half; k and v to their pages. A step of single tokens leaves the rotation to attention."""
        a, batch = attention, self._now
        weights = [a.wq, a.wk, a.wv]
        parts = [
            self._float(f"projected {n}", batch.n_tokens, w.n_rows)
            for n, w in zip("qkv", weights, strict=True)
        ]
        self._multiply_normed(x, a.norm, weights, parts)
        projected = Projected([part.data for part in parts], self._rotation(a))
        if self._fuse:
            return projected
        row = self._heads.row
        memory = self._room("q", 2 * batch.n_tokens * a.n_head * row)
        q = Array(memory, np.float16, (batch.n_tokens, a.n_head, a.head_size), row)
        pages = self._pages(a.layer)
        self._rope.launch(
            projected.parts, projected.rotation, batch.memory, batch.n_tokens, pages, memory
        )
        return q

    def attend(self, q: Array | Projected, attention: Attention, step: Step) -> Array:
        """o[T, H*E], half."""
        a, batch = attention, self._now
        o = self._half("o", batch.n_tokens, a.n_head * a.head_size)
        fused = {"projected": q.parts, "rotation": q.rotation} if isinstance(q, Projected) else {}
        self._attend.launch(
            None if fused else q.data,
            batch.memory,
            self._pages(a.layer),
            batch.tiles,
            batch.n_tiles,
            o.data,
            scale=a.scale,
            split=batch.split,
            window=a.window,
            soft_cap=a.soft_cap,
            sinks=a.sinks,
            **fused,
        )
        return o

    def _rotation(self, a: Attention) -> Rotation:
        norms = (a.q_norm, a.k_norm)
        return Rotation(
            turns=self._turns(a.rope),
            n_pairs=len(a.rope.inv_freq),
            neox=a.rope.style == "neox",
            magnitude=a.rope.magnitude,
            bias=(a.bq, a.bk, a.bv),
            norm=[n and n.weight for n in norms],
            eps=[n.eps if n else 0.0 for n in norms],
        )

    def linear_add(self, h: Array, w: Matrix, x: Array, post_norm: Norm | None = None) -> Array:
        """x[T, D] += post_norm(h w^T), in place."""
        if post_norm is None:
            self._multiply(h, [w], [x], "ADD")
            return x
        y = self._float("y", *x.shape)
        self._multiply(h, [w], [y])
        self._norm.add(x.data, y.data, post_norm.weight, *x.shape, post_norm.eps)
        return x

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        """h[T, F], half."""
        f = feed_forward
        gate, up = f.w_gate, f.w_up
        h = self._half("h", x.shape[0], gate.n_rows)
        if gate.tiles and up.tiles and gate.tiles.layout == up.tiles.layout:
            self._multiply_normed(x, f.norm, [gate, up], [h], "GLU", f.activation)
        else:
            parts = [self._float(name, *h.shape) for name in ("gate", "up")]
            self._multiply_normed(x, f.norm, [gate, up], parts)
            self._elementwise.glu(
                parts[0].data, parts[1].data, h.data, h.shape[0] * h.shape[1], f.activation
            )
        return h

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """l[R, V], float."""
        batch, w = self._now, head.weight
        l = self._float("logits", batch.n_rows, w.n_rows)
        if batch.n_rows:
            rows = None if batch.all_rows else batch.rows
            self._multiply_normed(x, head.norm, [w], [l], soft_cap=head.soft_cap, rows=rows)
        return l

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Sampled:
        """ids[R]: on the device where all samplers want the highest logit, else through numpy."""
        n_rows, n_vocab = logits.shape
        host = self._results[self._n_steps % IN_FLIGHT]
        if all(s.greedy and not s.needs_history and not s.params.logit_bias for s in samplers):
            self._argmax.launch(logits.data, n_rows, n_vocab, self._sampled)
            for sampler in samplers:
                sampler.n_drawn += 1
            self.device.download_into(host[:n_rows], self._sampled)
        else:
            rows = self.read(logits)
            host[:n_rows] = [
                sampler.sample(row) for sampler, row in zip(samplers, rows, strict=True)
            ]
            self.device.upload(self._sampled, host[:n_rows])
        return Sampled(host[:n_rows], self.device.event().record())

    def read(self, array: Array | Sampled) -> NDArray:
        """The values on the host: int32 ids, or float32."""
        if isinstance(array, Sampled):
            array.event.synchronize()
            return array.ids.copy()
        full = self.device.download(array.data, array.dtype, (*array.shape[:-1], array.row))
        return full[..., : array.shape[-1]].astype(np.float32)

    # Parts

    def _multiply_normed(
        self,
        x: Array,
        norm: Norm,
        weights: list[Matrix],
        outs: list[Array],
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        soft_cap: float = 0.0,
        rows: Memory | None = None,
    ) -> None:
        """outs = epilogue(norm(x[rows]) W^T); one token is normalised inside the product where that is one launch."""
        n = outs[0].shape[0]
        if n == 1 and rows is None and _one_layout(weights):
            self._multiply(x, weights, outs, epilogue, norm, activation, soft_cap)
            return
        normed = self._half("normed", n, x.shape[1])
        self._norm.to_half(x.data, rows, norm.weight, normed.data, n, x.shape[1], norm.eps)
        self._multiply(normed, weights, outs, epilogue, None, activation, soft_cap)

    def _multiply(
        self,
        x: Array,
        weights: list[Matrix],
        outs: list[Array],
        epilogue: Epilogue = "STORE",
        norm: Norm | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
    ) -> None:
        """outs[i] = epilogue(x weights[i]^T), in as few launches as the layouts allow; ADD adds to what out holds."""
        n = outs[0].shape[0]
        for part in _by_layout(weights):
            to = outs if epilogue == "GLU" else outs[part]
            residual = to[0].data if epilogue == "ADD" else None
            tiles = [w.tiles for w in weights[part] if w.tiles is not None]
            if tiles:
                self._product.launch(
                    tiles,
                    x.data,
                    [out.data for out in to],
                    n,
                    epilogue=epilogue,
                    norm=norm and norm.weight,
                    eps=norm.eps if norm else 0.0,
                    residual=residual,
                    activation=activation,
                    soft_cap=soft_cap,
                )
                continue
            blocks, y = weights[part][0].blocks, to[0]
            dequantize_mul_mat_vec(
                self.device, blocks, x.data, y.data, n, residual=residual, pdl=True
            )
            if soft_cap:
                self._elementwise.soft_cap(y.data, n * y.shape[1], soft_cap)

    def _pages(self, layer: int) -> tuple[Ptr, Ptr]:
        offset = layer * self._layer_bytes
        return self._keys.at(offset), self._values.at(offset)

    def _turns(self, rope: Rope) -> Buffer:
        """The rope's frequencies on the device, uploaded once."""
        if id(rope) not in self._ropes:
            values = turns(rope.inv_freq)
            buffer = self.device.alloc(values.nbytes, "rope")
            self.device.upload(buffer, values)
            self._ropes[id(rope)] = rope, buffer
        return self._ropes[id(rope)][1]


def _one_layout(weights: Sequence[Matrix]) -> bool:
    return all(w.tiles is not None and w.tiles.layout == weights[0].tiles.layout for w in weights)


def _by_layout(weights: Sequence[Matrix]) -> list[slice]:
    """Neighbours that one launch can multiply; a matrix in blocks is alone."""
    groups: list[slice] = []
    for i, w in enumerate(weights):
        if groups and w.tiles is not None and _one_layout([weights[groups[-1].start], w]):
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups
