"""The CUDA backend: prepare, plan, launch.

Weights are repacked once (weights.py). plan/ decides which kernels compute a layer, depending on
the number of tokens; attention.py, dense.py and gemm.py launch them. Repeated steps are captured as
CUDA graphs and replayed (steps/graphs.py). All inputs that change from step to step (ids,
positions, page tables, how attention is split) are one small upload. Activations between ops are
f16 if they are only multiplied, f32 if they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, OutOfMemory
from ...gguf import GGUFError, Tensor
from ...kernels.attention.rope_kv import Heads
from ...kernels.blocks.block_kernel import BlockMatrix
from ...kernels.blocks.get_rows import get_rows
from ...kernels.layout.embed_tile import EmbedTile
from ...kernels.moe.route import RouterChoice
from ...sampling import Sampler
from .. import host
from ..inputs import LayerInputs
from ..interface import (
    ActivationType,
    CacheShape,
    Demand,
    Dense,
    GatedDeltaNet,
    Head,
    Layer,
    MoE,
    Norm,
    PagedKV,
    Probe,
    Role,
    Step,
)
from . import memory
from .arrays import Array, Matrix, Sampled
from .attention import AttentionOps, converts_pages
from .context import StepContext
from .delta.layer import DeltaOps
from .dense import DenseOps
from .ends.inputs import InputOps
from .ends.scales import LayerScales, taken
from .moe.layer import MoEOps
from .plan import Activations, GemmChoice, copies_experts, lacking
from .sampling import Sampling
from .steps.graphs import Graphs
from .steps.upload import StepUpload
from .weights import Uploader, in_f32

ROWS_IN_F32 = ("X D", "X Fx")  # routers, and biases of experts
# contexts may be split over CTAs in decode steps of so many tokens, or of n_seq if that is more
SPLIT_TOKENS = 64
RECORDED_TOKENS = 64  # decode steps with cuBLAS up to this size are recorded as graphs


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
        gemm: GemmChoice = "auto",
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        """batch_invariant, activations, gemm: see plan.Planner. note: called with one-line remarks
        for the user. Raises CublasMissing. Batch invariance makes prefill and batches of more than
        4 sequences 2 to 5 times slower.
        """
        self.device, self.name, self.reason = device, name, reason
        self.activations: str = activations
        self._note = note
        self._graphs = Graphs(device)
        policy = {"batch_invariant": batch_invariant, "activations": activations, "gemm": gemm}
        self.context = StepContext(device, self._graphs, **policy)
        if gemm == "cublas":
            self.context.gemms.use_cublas()
        self._embed_tile = EmbedTile(device)
        self._sampling = Sampling(device)
        self._uploader: Uploader | None = Uploader(device)
        self.dense, self.moe = DenseOps(self.context), MoEOps(self.context)
        self.inputs, self._scales = InputOps(self.context), LayerScales(self.context.norms)
        self.attention: AttentionOps | None = None  # set when the KV cache is allocated
        self.delta: DeltaOps | None = None  # set at the same time
        self._steps: StepUpload | None = None
        self._offloaded: RouterChoice | None = None  # the router's choice, if experts are on host
        self._max_split_tokens = SPLIT_TOKENS  # sequences whose context may be split over CTAs
        self._pad_to: tuple[int, int] | None = None  # tokens and sequences of the largest step

    # Weights

    def plan_memory(self, demand: Demand) -> int:
        """The batch size (tokens per step) to use. Raises MemoryError if too little memory is free,
        of the GPU or, for experts, of the host.
        """
        self._max_split_tokens = max(SPLIT_TOKENS, demand.n_seq)
        sizes = demand, self._max_split_tokens, self._converts
        free = self.device.free_bytes
        n_batch, remark = memory.plan_batch(self.context.planner, *sizes, free, self.name)
        on_host = memory.check_host(demand, host.available_memory())
        for message in (remark, on_host):
            if message:
                self._note(message)
        if memory.has_offloaded_experts(demand):
            self._offloaded = RouterChoice(demand.n_expert, demand.n_used)
        self._pad_to = n_batch, demand.n_seq
        return n_batch

    def _converts(self, heads: Heads) -> bool:
        """Whether prefill attention reads pages of these heads after a conversion to f16."""
        invariant = self.context.planner.batch_invariant
        return converts_pages(self.device, heads, invariant)

    def device_bytes(self) -> int:
        """Bytes of GPU memory that are allocated."""
        return int(self.device.used_bytes)

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Matrix | Buffer:
        """A vector as f32; a matrix in tiles or in blocks: see arrays.Matrix."""
        if len(tensor.shape) == 1:
            return self._vector(tensor)
        if self._uploader is None:
            raise RuntimeError("weight() was called after weights_ready()")
        *experts, n_rows, k = tensor.shape
        if role.axes in ROWS_IN_F32:
            tensor, scale = in_f32(tensor, scale), None
        tiled = not (role.lookup or self.context.planner.keeps_blocks(tensor.format))
        on_host = memory.is_on_host(tensor, role)
        # Only kernels on tiles support row scales and experts.
        tiled = tiled or scale is not None or bool(experts)
        tiles, blocks = self._uploader.upload(tensor, tiled, on_host)
        if experts and tiles is None:
            raise GGUFError(
                f"{tensor.path}: tensor {tensor.name!r} has experts in {tensor.format.name} with "
                f"{k} columns, which no kernel multiplies on a GPU: use --device cpu"
            )
        by_row = None if scale is None else self._vector(scale)
        if tiles is None and by_row is not None:
            raise GGUFError(
                f"{tensor.path}: tensor {tensor.name!r} has a scale for each row, which on a GPU "
                f"{tensor.format.name} with {k} columns cannot have: use --device cpu"
            )
        tiles = replace(tiles, row_scale=by_row) if tiles else None
        n_experts = experts[0] if experts else 1
        raw = BlockMatrix(tensor.format, n_experts * n_rows, k, blocks) if blocks else None
        if not self.context.planner.runs_w8a8(activations, tiles):
            activations = "f16"
        return Matrix(n_rows, k, tiles, raw, by_row, activations, n_experts, on_host)

    def _vector(self, tensor: Tensor) -> Buffer:
        """The vector as f32 in device memory."""
        values = np.ascontiguousarray(tensor.dequantize(), np.float32)
        buffer = self.device.alloc(values.nbytes, tensor.name)
        self.device.upload(buffer, values)
        return buffer

    def weights_ready(self) -> None:
        """Wait for the uploads; free the staging memory."""
        self.device.synchronize()
        self._uploader = None

    def allocate_cache(self, shape: CacheShape) -> None:
        """Allocate the pages of the KV cache; raises MemoryError if they do not fit."""
        if self.attention is not None:
            raise RuntimeError("the cache was allocated before")
        paged = CacheShape(tuple(g for g in shape.groups if isinstance(g.spec, PagedKV)))
        rest = [g for g in shape.groups if not isinstance(g.spec, PagedKV)]
        try:
            self.delta = DeltaOps(self.context, rest, len(paged.groups))
        except OutOfMemory as error:
            raise shape.too_large(memory.page_sizes(shape), error.free) from None
        attention = self.attention = AttentionOps(self.context, paged, self._max_split_tokens)
        self._steps = StepUpload(
            self.device,
            attention.kernels,
            attention.kernel_of_group,
            spare=[*attention.pages.spare, *self.delta.states.spare],
            moving=self._graphs.forget,
            max_split_tokens=self._max_split_tokens,
        )

    def clear_pages(self, group: int, pages: Sequence[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        assert self.attention is not None
        self.attention.pages.clear(group, pages)

    # Steps

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        """Run forward(step). A shape that repeats is captured as a graph, which later steps replay;
        large steps are padded, so that few shapes exist.
        """
        if self._steps is None or self.attention is None:
            raise RuntimeError("allocate_cache comes before the first step")
        pads = probe is None and not step.hidden and self.context.planner.gemm != "cublas"
        argmax = self._sampling.expects_argmax(len(step.rows))
        batch = self._steps.upload(step, self._pad_to if pads else None, argmax)
        self.context.begin(batch, probe)
        self.attention.begin()
        fused = batch.decode and probe is None and not step.hidden
        # each place has its own result: one is read while the next step writes the other
        best = argmax and fused and batch.often
        self._sampling.begin(batch.place if best else None)

        def launch() -> Array:
            output = forward(step)
            if best:
                self.find_best(output)
            return output

        # copying experts takes so long that a graph saves nothing
        copies = self._offloaded is not None and self._begin_copies(self._offloaded)
        few = batch.decode and batch.all_rows and batch.n_tokens <= RECORDED_TOKENS
        by_cublas = self.context.planner.gemm == "cublas" and (step.hidden or not few)
        eager = probe is not None or copies or by_cublas
        shape = (*batch.shape, best, step.hidden)
        where = batch.place, batch.often
        output = launch() if eager else self._graphs.run(shape, *where, launch)
        if batch.n_rows == len(step.rows) or step.hidden:
            return output
        return replace(output, shape=(len(step.rows), *output.shape[1:]))

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Shapes of steps inside it count as frequent: their graphs are recorded at once."""
        if self._steps is None:
            raise RuntimeError("allocate_cache comes before a rehearsal")
        self._steps.rehearsing = True
        try:
            yield
        finally:
            self._steps.rehearsing = False

    def _begin_copies(self, choice: RouterChoice) -> bool:
        """Prepare the staging of experts; returns whether the step copies them from host memory."""
        self.moe.staging.begin()
        return copies_experts(self.context.planner, choice, self.context.s)

    # Ops

    def embed(
        self, step: Step, table: Matrix, scale: float = 1.0, norm: Norm | None = None
    ) -> Array:
        """x f32 [T, D]."""
        batch = self.context.batch
        n, ids, sampled = batch.n_tokens, batch.ids, self._sampling.ids
        x = self.context.f32("x" if norm is None else "y", n, table.k)
        if table.tiles is not None:
            self._embed_tile.launch(table.tiles, ids, sampled, x.data, n, scale)
        else:
            blocks, options = table.in_blocks, {"scale": scale, "sampled": sampled}
            get_rows(self.device, blocks, ids, x.data, n, pdl=True, **options)
        if norm is None:
            return x
        return self.context.norms.to_f32(x, norm, self.context.scratch("x", 4 * n * table.k))

    def mix(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] plus the output of layer.mixer, and of layer.ffn if the layer is parallel."""
        assert self.attention is not None and self.delta is not None
        layer = self._scales[layer].layer
        if isinstance(layer.mixer, GatedDeltaNet):
            return self.delta.mix(x, layer)
        o, plan = self.attention.heads(x, layer)
        if not layer.parallel or layer.ffn is None:
            return self.attention.attn_out(o, x, layer, plan)
        if not isinstance(layer.ffn, Dense):
            raise lacking("attention and experts in parallel")
        h, ffn_plan = self.dense.hidden(x, layer)  # before anything is added to x
        x = self.attention.attn_out(o, x, layer, plan)
        return self.dense.ffn_out(h, x, layer, ffn_plan)

    def feed_forward(self, x: Array, layer: Layer, step: Step) -> Array:
        """x[T, D] plus the output of layer.ffn."""
        layer = self._scales[layer].layer
        if isinstance(layer.ffn, MoE):
            return self.moe.feed_forward(x, layer)
        h, plan = self.dense.hidden(x, layer)
        return self.dense.ffn_out(h, x, layer, plan)

    def layer_inputs(self, x: Array, inputs: LayerInputs, step: Step) -> Array:
        """p f32 [L, T, I], the inputs of all layers."""
        return self.inputs.layer_inputs(x, inputs, self._sampling.ids)

    def end_layer(self, x: Array, layer: Layer, inputs: Array | None, step: Step) -> Array:
        """(x[T, D] plus the output of layer.input) * layer.scale."""
        scaled = self._scales[layer]
        return replace(self.inputs.end_layer(x, scaled, inputs), scale=scaled.after)

    def computed(self, layer: Layer) -> Layer:
        """The layer as it is planned, with layer scales folded into norms (ends/scales.py)."""
        return self._scales[layer].layer

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        """Logits f32 [R, V]."""
        c, w = self.context, head.weight
        if head.scale != 1:
            head = replace(head, norm=c.norms.scaled(head.norm, w.k, head.scale), scale=1.0)
        if x.scale != 1:
            head = replace(head, norm=taken(head.norm, x.scale))
        batch = c.batch
        logits = c.f32("logits", batch.n_rows, w.n_rows)
        if batch.n_rows:
            plan = c.planner.head(head, c.s, c.stream)
            rows = None if batch.all_rows else batch.rows
            options = {"soft_cap": head.soft_cap, "rows": rows}
            c.input_product(plan, x, head.norm, [w], [logits], **options)
        return logits

    def find_best(self, logits: Array) -> None:
        """Enqueue the argmax as a part of the step; for steps with greedy samplers only."""
        self._sampling.find_best(logits)

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Sampled:
        """ids[R], drawn on the device; numpy draws for samplers with a link without a kernel."""
        return self._sampling.draw(logits, samplers)

    def read(self, array: Array | Sampled | Buffer, row: int | None = None) -> NDArray:
        """The values, or one row of logits, on the host: int32 ids, or float32."""
        if isinstance(array, Sampled):
            return array.read()
        if isinstance(array, Buffer):  # a vector
            return self.device.download(array, np.float32, array.nbytes // 4)
        begin, shape = 0, (*array.shape[:-1], array.row)
        if row is not None:
            begin, shape = row * array.row * np.dtype(array.dtype).itemsize, shape[1:]
        full = self.device.download(array.data, array.dtype, shape, begin)
        values = full[..., : array.shape[-1]].astype(np.float32, copy=False)
        return values if array.scale == 1 else values * np.float32(array.scale)
