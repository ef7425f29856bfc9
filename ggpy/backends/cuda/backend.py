"""The ops on a GPU: which kernel computes each, and where its operands lie.

Steps that repeat are captured as CUDA graphs and replayed (graphs.py); all that changes from step
to step (ids, positions, page tables, how attention is split) is one small upload. One or two tokens
are normalised inside the products, as far as registers hold them, which add what another norm left
before, and rotate q and k whose pairs are neighbours; else attention of single tokens does. Others
go through norm kernels; on Hopper norms of two to sixteen are handed from product to product, where
these can (deferred_norm.py). Activations between ops are f16 where they are only multiplied with,
f32 where they are added up. Policy only: grids and memory layouts belong to ggpy/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...gguf import GGUFError, Tensor
from ...kernels.attention.paged_attention import Asked, Attend
from ...kernels.attention.prefill_attention import AttendPrompt
from ...kernels.attention.rope_kv import Heads, RopeKv, Rotation, Turning, TurningRows
from ...kernels.blocks.block_kernel import BlockMatrix
from ...kernels.blocks.get_rows import get_rows
from ...kernels.gemm.elementwise import Elementwise
from ...kernels.gemm.gemm import Epilogue
from ...kernels.layout.embed_tile import EmbedTile
from ...kernels.layout.pack import PLAIN, packed_bytes
from ...kernels.norm.rms_norm import RmsNorm
from ...sampling import Sampler
from ..interface import ActivationType, Attention, CacheShape, Demand, FeedForward, Head, Norm, Step
from . import memory
from .arrays import Array, Matrix, Memory, Projected, Sampled
from .attention import Prompts
from .deferred_norm import Handing
from .gemm import Activations, Products
from .gemm_f16 import Gemm
from .graphs import Graphs
from .kv_pages import Pages
from .residual import Residual
from .rope import Ropes
from .sampling import Sampling
from .step import Batch, StepUpload
from .weights import Uploader

GRAPH_TOKENS = 64  # of steps of at most this many single tokens every shape stays recorded


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
        gemm: Gemm = "auto",
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        """batch_invariant: no product is chosen by the number of tokens, so that a sequence's bits
        depend on nothing else in its steps; prompts and batches of more than 4 are 2 to 5 times
        slower. activations: what quantised weights are multiplied with; "q8_1" keeps their blocks.
        gemm: what multiplies many tokens; CublasMissing. note: gets one-line remarks for the user.
        """
        self.device, self.name, self.reason = device, name, reason
        self._note = note
        self.batch_invariant = batch_invariant
        self._embed_tile = EmbedTile(device)
        self._elementwise = Elementwise(device)
        options = activations, self._room, gemm, batch_invariant
        self._products = Products(device, self._elementwise, *options)
        self._norm = RmsNorm(device, self._products.warps)
        self._handing = Handing(self._products.hopper.hands_on, self._room)
        self._sampling = Sampling(device)
        self._uploader: Uploader | None = Uploader(device)
        self._scratch: dict[str, Buffer] = {}
        self._graphs = Graphs(device)
        self._ropes = Ropes(device, self._room)
        given = self._norm, self._handing, self._float, self._half
        self._residual = Residual(self._products, *given)
        self._steps: StepUpload | None = None
        self._batch: Batch | None = None
        self._heads: Heads | None = None
        self._fuse = self._repeat = False
        self._most_split = GRAPH_TOKENS  # sequences whose attention has room to be split

    # Weights

    def check_room(self, demand: Demand) -> int:
        """MemoryError if the GPU has too little free memory, before anything is uploaded."""
        _, halved = self._prompts_of(memory.heads_of(demand.cache))
        self._most_split = max(GRAPH_TOKENS, demand.n_seq)
        n_batch, remark = memory.settle(
            self._products, demand, self._most_split, halved, self.device.free_bytes, self.name
        )
        if remark:
            self._note(remark)
        return n_batch

    def device_bytes(self) -> int:
        """Bytes of GPU memory that are allocated."""
        return int(self.device.used_bytes)

    def weight(
        self,
        tensor: Tensor,
        lookup: bool = False,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Matrix | Buffer:
        """A vector as floats; a matrix in tiles, or in blocks: see arrays.Matrix."""
        if len(tensor.shape) == 1:
            return self._vector(tensor)
        if self._uploader is None:
            raise RuntimeError("weights were handed over after weights_ready")
        n_rows, k = tensor.shape
        tiled = not (lookup or self._products.keeps_blocks(tensor.format))
        # Only kernels over tiles know scales of rows.
        tiles, blocks = self._uploader.upload(tensor, tiled or scale is not None)
        by_row = None if scale is None else self._vector(scale)
        if tiles is None and by_row is not None:
            raise GGUFError(
                f"{tensor.path}: tensor {tensor.name!r} has a scale for each row, which on a GPU "
                f"{tensor.format.name} with {k} columns cannot have: use --device cpu"
            )
        tiles = replace(tiles, row_scale=by_row) if tiles else None
        raw = BlockMatrix(tensor.format, n_rows, k, blocks) if blocks else None
        if not self._products.w8a8.runs(activations, tiles):
            activations = "f16"
        return Matrix(n_rows, k, tiles, raw, by_row, activations)

    def _vector(self, tensor: Tensor) -> Buffer:
        """The numbers as floats."""
        values = np.ascontiguousarray(tensor.dequantize(), np.float32)
        buffer = self.device.alloc(values.nbytes, tensor.name)
        self.device.upload(buffer, values)
        return buffer

    def weights_ready(self) -> None:
        """Wait for the uploads; free the staging memory."""
        self.device.synchronize()
        self._uploader = None

    def allocate_cache(self, shape: CacheShape) -> None:
        """Pages for keys and values; MemoryError."""
        if self._heads is not None:
            raise RuntimeError("the cache was allocated before")
        self._heads = memory.heads_of(shape)
        self._rope = RopeKv(self.device, self._heads)
        shared, most_split = self.device.shared_bytes, self._most_split
        self._attend = Attend(self.device, self._heads, most_split, shared, self.batch_invariant)
        there, halved = self._prompts_of(self._heads)
        self._pages = Pages(self.device, self._heads, shape, halved)
        self._prompts = Prompts(self._attend, self._pages.halves) if there else None
        prompts_from = self._prompts.from_tokens if self._prompts else None
        given = self._graphs.forget, prompts_from, self._attend.places, most_split
        self._steps = StepUpload(self.device, self._heads, *given)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zeros where numbers that are not finite may be."""
        self._pages.clear(self.device, pages)

    def _prompts_of(self, heads: Heads) -> tuple[bool, bool]:
        """Whether prompts have attention of their own, and whether pages become halves for it."""
        there = not self.batch_invariant and AttendPrompt.fits(self.device, heads)
        return there, there and not heads.has_halves

    # Steps

    def run(self, step: Step, forward: Callable[[Step], Array], repeat: bool = True) -> Array:
        """forward(step): recorded at the second step of a shape, replayed from then on.

        repeat: False where single ops' outputs will be read: nothing is recorded, and nothing is
        fused across ops.
        """
        if self._steps is None:
            raise RuntimeError("allocate_cache comes before the first step")
        batch = self._batch = self._steps.upload(step)
        self._handing.begin()
        self._ropes.begin()
        self._fuse, self._repeat = repeat and batch.alone, repeat
        self._products.prompt = not (batch.alone or self.batch_invariant)
        best = self._sampling.begin(batch.place if self._fuse else None, batch.n_rows)
        rare = not (batch.alone and batch.all_rows and batch.n_tokens <= GRAPH_TOKENS)

        def launch() -> Array:
            logits = forward(step)
            if best:
                self.find_best(logits)
            return logits

        if not repeat or (rare and not self._products.may_be_recorded):
            return launch()
        return self._graphs.run((*batch.shape, best), batch.place, rare, launch)

    def _room(self, name: str, nbytes: int) -> Buffer:
        """Scratch memory of at least nbytes; its address stays as long as it is large enough. Zeros
        at first: packed activations have rows of tokens that are none, which products read.
        """
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self._graphs.forget()
            self.device.synchronize()
            self._scratch.pop(name, None)
            buffer = self._scratch[name] = self.device.zeros(nbytes, name)
        return buffer

    def _float(self, name: str, rows: int, columns: int) -> Array:
        return Array(self._room(name, 4 * rows * columns), np.float32, (rows, columns), columns)

    def _half(
        self, name: str, rows: int, columns: int, order: int = PLAIN, late: bool = False
    ) -> Array:
        nbytes = packed_bytes(rows, columns) if order else 2 * rows * columns
        memory = self._room(name, nbytes)
        return Array(memory, np.float16, (rows, columns), columns, order, late)

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
        """q[T, H, E], half; k and v to their pages; or what attention rotates, of tokens alone."""
        a, n, rotation = attention, self._now.n_tokens, self._ropes.rotation(attention)
        weights, row, pages = a.projections, self._attend.heads.row, self._pages.of(a.layer)
        memory = self._room("q", 2 * n * a.n_head * row)
        q = Array(memory, np.float16, (n, a.n_head, a.head_size), row)
        turning = self._turning(a, rotation, q)
        if turning is not None:
            outs = [Array(to, np.float16, (n, row), row) for to in (memory, *pages)]
            self._multiply_normed(x, a.norm, weights, outs, "QKV", turning=turning)
            return q
        named = zip("qkv", weights, strict=True)
        parts = [self._float(f"projected {name}", n, w.n_rows) for name, w in named]
        self._multiply_normed(x, a.norm, weights, parts)
        projected = [part.data for part in parts]
        if self._fuse:
            return Projected(projected, rotation)
        self._rope.launch(projected, rotation, self._now.memory, n, pages, memory)
        return q

    def _turning(self, a: Attention, rotation: Rotation, q: Array) -> Turning | TurningRows | None:
        """How one product makes q, k and v and rotates them, if it does."""
        weights, n = a.projections, self._now.n_tokens
        if self._fuse:
            if not (self._rope.rows_turn(rotation) and self._products.turn_rows(weights, n)):
                return None
            to = q.data, self._pages.of(a.layer), self._now.memory
            return TurningRows(*to, rotation, self._rope.heads)
        if not (self._rope.product_turns(rotation) and self._products.turn_heads(weights, n)):
            return None
        return self._ropes.turning(a, self._rope, self._now)

    def attend(self, q: Array | Projected, attention: Attention, step: Step) -> Array:
        """o[T, H*E], half."""
        a, batch = attention, self._now
        order = PLAIN
        if self._repeat and a.wo is not None and self._attend.packs:
            order = self._products.order([a.wo], batch.n_tokens)
        o = self._half("o", batch.n_tokens, a.n_head * a.head_size, order, late=True)
        parts, rotation = (q.parts, q.rotation) if isinstance(q, Projected) else ((), None)
        asked = Asked(
            None if isinstance(q, Projected) else q.data,
            batch.memory,
            self._pages.of(a.layer),
            o.data,
            a.scale,
            a.window,
            a.soft_cap,
            a.sinks,
            projected=parts,
            rotation=rotation,
            turned=self._fuse and rotation is None,
            order=order,
            n_tokens=batch.n_tokens,
        )
        if self._prompts and batch.n_prompt_tiles:
            self._prompts.launch(asked, batch)
        if batch.n_tiles:
            self._attend.launch(asked, batch.tiles, batch.n_tiles, batch.n_split)
        return o

    def linear_add(
        self,
        h: Array,
        w: Matrix,
        x: Array,
        post_norm: Norm | None = None,
        then: Attention | FeedForward | None = None,
    ) -> Array:
        """x[T, D] += post_norm(h w^T), in place or elsewhere."""
        return self._residual.add(h, w, x, post_norm, then, self._fuse)

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        """h[T, F], half."""
        f = feed_forward
        gate, up = f.w_gate, f.w_up
        n, order = x.shape[0], PLAIN
        together = self._products.together([gate, up], n)
        packs = together and self._products.order([gate, up], n) != PLAIN  # as it takes x
        if self._repeat and f.w_down is not None and packs:
            order = self._products.order([f.w_down], n)
        h = self._half("h", n, gate.n_rows, order)
        if together:
            self._multiply_normed(x, f.norm, [gate, up], [h], "GLU", f.activation)
        else:
            parts = [self._float(name, n, gate.n_rows) for name in ("gate", "up")]
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

    def find_best(self, logits: Array) -> None:
        """What `sample` needs if all samplers are greedy, as part of the step."""
        self._sampling.find_best(logits)

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
        turning: Turning | TurningRows | None = None,
    ) -> None:
        """outs = epilogue(norm(x[rows]) W^T); some products normalise x themselves."""
        n = outs[0].shape[0]
        if self._products.normalises(weights, n, rows is None):
            options = epilogue, norm, activation, soft_cap, rows
            self._products.multiply(x, weights, outs, *options, turning=turning)
            return
        normed, handed = self._handing.take(norm) or (None, None)
        if normed is None:
            order, k = self._products.order(weights, n), x.shape[1]
            normed, after = self._half("normed", n, k, order), self._handing.after(n)
            self._norm.to_half(x.data, rows, norm.weight, normed.data, n, k, norm.eps, order, after)
        given = epilogue, None, activation, soft_cap
        self._products.multiply(normed, weights, outs, *given, handed=handed, turning=turning)
