"""The ops on a GPU: which kernel computes each, and where its operands lie.

A decode step of single tokens is captured as a CUDA graph per shape and replayed; all that changes
from step to step (ids, positions, page tables, how attention is split) is one small upload. One
token alone is normalised inside the products; several go through a norm kernel, with the same bits.
Activations between ops are halves where they are only multiplied with, floats where they are added
up. Policy only: grids and memory layouts belong to ggpy/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.base import Buffer, OutOfMemory, Ptr
from ..gguf import Tensor
from ..kernels.attend import Attend
from ..kernels.block_kernel import BlockMatrix
from ..kernels.elementwise import Elementwise
from ..kernels.embed_tile import EmbedTile
from ..kernels.get_rows import get_rows
from ..kernels.mul_mat_tile import Epilogue
from ..kernels.pack import PLAIN, packed_bytes
from ..kernels.rms_norm import RmsNorm
from ..kernels.rope_kv import Heads, RopeKv, Rotation, turns
from ..sampling import Sampler
from . import cuda_memory
from .cuda_arrays import Array, Matrix, Memory, Projected, Sampled, one_layout
from .cuda_products import Activations, Products
from .cuda_sample import Sampling
from .cuda_step import Batch, StepUpload
from .cuda_upload import Uploader
from .interface import PAGE_SIZE, Attention, CacheShape, Demand, FeedForward, Head, Norm, Rope, Step

GRAPH_TOKENS = 64  # steps of at most this many single tokens become graphs


class Cuda:
    """Ops on one GPU."""

    asynchronous = True

    def __init__(
        self,
        device: Any,
        name: str = "cuda:0",
        reason: str = "a CUDA GPU was found",
        batch_invariant: bool = False,
        activations: Activations = "f16",
    ) -> None:
        """batch_invariant: no product is chosen by the number of tokens, so that a sequence's bits
        depend on nothing else in its steps; prompts and batches of more than 8 are 3 to 5 times
        slower. activations: what quantised weights are multiplied with; "q8_1" keeps their blocks.
        """
        self.device, self.name, self.reason = device, name, reason
        self.batch_invariant = batch_invariant
        self._embed_tile = EmbedTile(device)
        self._elementwise = Elementwise(device)
        self._products = Products(device, self._elementwise, activations, self._room)
        self._products.hopper.allowed = not batch_invariant
        self._norm = RmsNorm(device, self._products.warps)
        self._sampling = Sampling(device)
        self._uploader: Uploader | None = Uploader(device)
        self._scratch: dict[str, Buffer] = {}
        self._graphs: dict[tuple, Any] = {}
        self._seen: set[tuple] = set()
        self._ropes: dict[int, tuple[Rope, Buffer]] = {}
        self._steps: StepUpload | None = None
        self._batch: Batch | None = None
        self._heads: Heads | None = None
        self._fuse = self._repeat = False

    # Weights

    def check_room(self, demand: Demand) -> None:
        """MemoryError if the GPU has too little free memory, before anything is uploaded."""
        weights = [
            (w, lookup or self._products.keeps_blocks(w.format)) for w, lookup in demand.weights
        ]
        demand = replace(demand, weights=weights)
        cuda_memory.check_room(demand, self.device.free_bytes, GRAPH_TOKENS, self.name)

    def device_bytes(self) -> int:
        """Bytes of GPU memory that are allocated."""
        return int(self.device.used_bytes)

    def weight(self, tensor: Tensor, lookup: bool = False) -> Matrix | Buffer:
        """A vector as floats; a matrix in tiles, or in blocks: see cuda_arrays.Matrix."""
        if len(tensor.shape) == 1:
            values = np.ascontiguousarray(tensor.dequantize(), np.float32)
            buffer = self.device.alloc(values.nbytes, tensor.name)
            self.device.upload(buffer, values)
            return buffer
        if self._uploader is None:
            raise RuntimeError("weights were handed over after weights_ready")
        n_rows, k = tensor.shape
        tiled = not (lookup or self._products.keeps_blocks(tensor.format))
        tiles, blocks = self._uploader.upload(tensor, tiled)
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
        self._steps = StepUpload(self.device, self._heads, self._drop_graphs)
        self._layer_bytes = shape.n_pages * self._heads.page_bytes
        self._rope = RopeKv(self.device, self._heads)
        self._attend = Attend(self.device, self._heads, GRAPH_TOKENS, self.device.shared_bytes)
        try:
            self._keys = self.device.zeros(shape.n_layer * self._layer_bytes, "keys")
            self._values = self.device.zeros(shape.n_layer * self._layer_bytes, "values")
        except OutOfMemory as error:
            page = 2 * shape.n_layer * self._heads.page_bytes
            raise MemoryError(
                f"{shape.n_pages * PAGE_SIZE} positions of keys and values need "
                f"{page * shape.n_pages / 1e9:.1f} GB, {error.free / 1e9:.1f} GB are free: "
                f"an n_ctx of {error.free // page * PAGE_SIZE} would fit"
            ) from None

    # Steps

    def run(self, step: Step, forward: Callable[[Step], Array], repeat: bool = True) -> Array:
        """forward(step): recorded at the second step of a shape, replayed from then on.

        repeat: False where single ops' outputs will be read: nothing is recorded, and nothing is
        fused across ops.
        """
        if self._steps is None:
            raise RuntimeError("allocate_cache comes before the first step")
        batch = self._batch = self._steps.upload(step)
        self._fuse, self._repeat = repeat and batch.alone, repeat
        self._products.prompt = not (batch.alone or self.batch_invariant)
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

    def _room(self, name: str, nbytes: int) -> Buffer:
        """Scratch memory of at least nbytes; its address stays as long as it is large enough."""
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

    def _half(self, name: str, rows: int, columns: int, order: int = PLAIN) -> Array:
        nbytes = packed_bytes(rows, columns) if order else 2 * rows * columns
        return Array(self._room(name, nbytes), np.float16, (rows, columns), columns, order)

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
        sampled = self._sampling.ids
        if table.tiles is not None:
            self._embed_tile.launch(table.tiles, ids, sampled, x.data, n, scale)
        else:
            blocks, options = table.in_blocks, {"scale": scale, "sampled": sampled}
            get_rows(self.device, blocks, ids, x.data, n, pdl=True, **options)
        return x

    def qkv(self, x: Array, attention: Attention, step: Step) -> Array | Projected:
        """q[T, H, E], half; k and v to their pages. Where tokens are alone, attention rotates."""
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
        row = self._attend.heads.row
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
        self._attend.launch(
            None if isinstance(q, Projected) else q.data,
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
            projected=q.parts if isinstance(q, Projected) else (),
            rotation=q.rotation if isinstance(q, Projected) else None,
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
            norm=[n.weight if n else None for n in norms],
            eps=[n.eps if n else 0.0 for n in norms],
        )

    def linear_add(self, h: Array, w: Matrix, x: Array, post_norm: Norm | None = None) -> Array:
        """x[T, D] += post_norm(h w^T), in place."""
        if post_norm is None:
            self._products.multiply(h, [w], [x], "ADD")
            return x
        n_tokens, width = x.shape
        y = self._float("y", n_tokens, width)
        self._products.multiply(h, [w], [y])
        self._norm.add(x.data, y.data, post_norm.weight, n_tokens, width, post_norm.eps)
        return x

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        """h[T, F], half."""
        f = feed_forward
        gate, up = f.w_gate, f.w_up
        order = PLAIN
        if self._repeat and f.w_down is not None and one_layout([gate, up]):
            order = self._products.hopper.order([f.w_down], x.shape[0])
        h = self._half("h", x.shape[0], gate.n_rows, order)
        if one_layout([gate, up]):
            self._multiply_normed(x, f.norm, [gate, up], [h], "GLU", f.activation)
        else:
            parts = [self._float(name, x.shape[0], gate.n_rows) for name in ("gate", "up")]
            self._multiply_normed(x, f.norm, [gate, up], parts)
            self._elementwise.glu(
                parts[0].data, parts[1].data, h.data, h.shape[0] * h.shape[1], f.activation
            )
        return h

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """l[R, V], float."""
        batch, w = self._now, head.weight
        logits = self._float("logits", batch.n_rows, w.n_rows)
        if batch.n_rows:
            rows = None if batch.all_rows else batch.rows
            self._multiply_normed(x, head.norm, [w], [logits], soft_cap=head.soft_cap, rows=rows)
        return logits

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Sampled:
        """ids[R]: on the device, or through numpy where a sampler has what has no kernel."""
        return self._sampling.draw(logits, samplers)

    def read(self, array: Array | Sampled) -> NDArray:
        """The values on the host: int32 ids, or float32."""
        if isinstance(array, Sampled):
            return array.read()
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
        """outs = epilogue(norm(x[rows]) W^T); one token is normalised inside a single launch."""
        n = outs[0].shape[0]
        if n == 1 and rows is None and one_layout(weights):
            self._products.multiply(x, weights, outs, epilogue, norm, activation, soft_cap)
            return
        order, k = self._products.hopper.order(weights, n), x.shape[1]
        normed = self._half("normed", n, k, order)
        self._norm.to_half(x.data, rows, norm.weight, normed.data, n, k, norm.eps, order)
        self._products.multiply(normed, weights, outs, epilogue, None, activation, soft_cap)

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
