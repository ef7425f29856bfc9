"""The ops on the CPU, by numba kernels that read the blocks of the file.

It is the numpy backend with its work replaced: each part of a layer (mixer, feed-forward, end)
becomes a program of the pool, if all of it has kernels. numpy computes the other parts, whose
products are still computed by kernels. Nothing here knows a model file's names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from ...formats import by_name
from ...formats.base import F32
from ...gguf import Tensor
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
    PagedKV,
    Probe,
    Role,
    Step,
)
from ..numpy.backend import Reference
from ..numpy.delta import GroupStates
from ..numpy.functions import soft_capped
from ..numpy.kv_pages import GroupPages, resolved
from ..numpy.matrix import HostMatrix
from . import delta, experts, kernels, layer_inputs, layers
from .compiled import progress
from .jobs import BlockRows, Build, JobList, Programs
from .matrix import MappedMatrix
from .pool import ThreadPool, address_of
from .sizes import KINDS
from .step import Memory, StepArrays, Tables

CpuActivations = Literal["q16", "q8", "f32"]
Note = Callable[[str], None]
IN_FLOATS = by_name("F32")

REPEATED = 8  # programs are kept for steps of at most so many tokens, or rows of logits


class Cpu(Reference):
    """Ops on the CPU.

    n_threads: None is one for each core that this process may use. activations: for few tokens, the
    input of a product is rounded to whole numbers of 15 bits ("q16") or 8 ("q8") with a scale for
    each 32, or it is not ("f32").
    """

    def __init__(
        self,
        n_threads: int | None = None,
        *,
        reason: str = "numba on the CPU",
        note: Note = lambda message: None,
        activations: CpuActivations = "q16",
        weight_memory: int | None = None,
    ) -> None:
        super().__init__(1, reason=reason, note=note, weight_memory=weight_memory)
        self.n_threads = host.checked_threads(n_threads, note)
        self.activations = activations
        self._step: StepArrays | None = None
        self._is_probed = False
        self._tables: Tables = {}
        self._with_kernels: dict[tuple[Layer, str], bool] = {}
        self._told: set[str] = set()  # kinds of layers that were noted as computed by numpy
        self._x: F32 | None = None  # what `_own` returned
        self._inputs: F32 | None = None  # the layers' own inputs, in a buffer
        self.use(ThreadPool(self.n_threads))
        progress.close()  # before a message about this device is printed

    def use(self, pool: ThreadPool) -> None:
        """Compute with these threads."""
        self.pool = pool
        self._programs = Programs(pool, self.activations)
        self._buffers = self._programs.buffers

    # Weights

    def plan_memory(self, demand: Demand) -> int:
        """The least batch. Links all kernels before weights are read, because linking reads 40 MB
        of LLVM's library, which leave memory afterwards.
        """
        n_batch = super().plan_memory(demand)
        for tensor, role in demand.weights:
            if _has_kernels_for(tensor, role):
                kernels.prepare(tensor.format, self.activations, len(tensor.shape) > 2)
        kernels.prepare_common(any(len(tensor.shape) > 2 for tensor, _ in demand.weights))
        _prepare_cache(demand.cache(n_batch))
        return n_batch

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> HostMatrix | F32:
        """A vector is returned as an array. A matrix stays in its blocks in the mapped file; it is
        converted to float32, if that fits in memory, if its format has no kernels or its rows have
        different scales.
        """
        by_matrix = None if scale is None else np.array(scale.dequantize(), np.float32)
        plain = activations == "f16" and len(tensor.shape) > 1
        if by_matrix is not None and len(tensor.shape) == 2:
            plain = plain and bool((by_matrix == by_matrix[0]).all())
        if plain and _has_kernels_for(tensor, role):
            return MappedMatrix(tensor, self.multiply, by_matrix)
        found = super().weight(tensor, role, scale, activations)
        if plain and isinstance(found, HostMatrix) and found.array is not None:
            kernels.prepare(IN_FLOATS, "f32")
            return MappedMatrix(
                Tensor(tensor.name, tensor.shape, IN_FLOATS, found.array.view(np.uint8)),
                self.multiply,
                by_matrix,
            )
        return found

    def weights_ready(self) -> None:
        """Wipes the progress bar of compiling. A note says if the code cannot be kept."""
        progress.close()
        if progress.not_kept:
            again = "compiled kernels cannot be kept, so the next start compiles them again"
            self._note(f"{again}: {progress.not_kept}")
            progress.not_kept = ""

    def allocate_cache(self, shape: CacheShape) -> None:
        """Zeroed pages, which take memory as they are written."""
        self._programs.forget()
        self._with_kernels.clear()
        super().allocate_cache(shape)

    # Steps

    def run(self, step: Step, forward: Callable[[Step], F32], probe: Probe | None = None) -> F32:
        """forward(step), with the pool's threads awake."""
        self._is_probed = probe is not None
        self.pool.settle()  # a late thread may still look at the tables of the step before
        self._step = None
        self._arrays(step)
        self.pool.begin()
        self._programs.begin()
        try:
            found = super().run(step, forward, probe)
            self._programs.run_queued()
            return found
        finally:
            self._programs.end()
            self.pool.end()

    def mix(self, x: F32, layer: Layer, step: Step) -> F32:
        """x[T, D] with the output of layer.mixer added, and layer.ffn's if they are parallel."""
        arrays = self._arrays(step)
        found = self._again(x, layer, "mix")
        if found is not None:
            return found
        if not self._has_kernels(layer, "mix"):
            self._programs.run_queued()
            return super().mix(x, layer, step)
        build = partial(_mix, layer=layer, step=arrays, memory=self._memory(layer.mixer.group))
        return self._through(x, layer, "mix", build)

    def feed_forward(self, x: F32, layer: Layer, step: Step) -> F32:
        """x[T, D] with the output of layer.ffn added."""
        found = self._again(x, layer, "ffn")
        if found is not None:
            return found
        ffn = layer.ffn
        if ffn is None or not self._has_kernels(layer, "ffn"):
            self._programs.run_queued()
            return super().feed_forward(x, layer, step)
        if isinstance(ffn, Dense):
            return self._through(x, layer, "ffn", lambda p: layers.dense(p, ffn, len(x)))
        return self._experts(x, layer, ffn)

    def _experts(self, x: F32, layer: Layer, ffn: MoE) -> F32:
        """x[T, D] with the outputs of experts added."""
        rows = len(x)
        if experts.are_few(self._programs.new(), ffn, rows):
            return self._through(x, layer, "ffn", lambda p: experts.experts(p, ffn, rows))
        x = self._through(x, layer, "route", lambda p: _route(p, ffn, rows))
        self._programs.run_queued()
        ids = self._buffers.raw("ids").view(np.int32)[: rows * ffn.router.n_used].copy()
        return self._through(
            x, layer, "", lambda p: experts.experts_of_many(p, ffn, rows, ids), keep=False
        )

    def layer_inputs(self, x: F32, inputs: LayerInputs, step: Step) -> F32:
        """p[T, L, I], the inputs of all layers, in the buffer that programs read."""
        self._inputs = self._in_buffer("inputs", super().layer_inputs(x, inputs, step))
        return self._inputs

    def end_layer(self, x: F32, layer: Layer, inputs: F32 | None, step: Step) -> F32:
        """(x[T, D] with the output of layer.input added) * layer.scale."""
        if not self._has_kernels(layer, "end") or (layer.input and inputs is None):
            self._programs.run_queued()
            return super().end_layer(x, layer, inputs, step)
        if inputs is not None and inputs is not self._inputs:
            self._inputs = inputs = self._in_buffer("inputs", inputs)
        found = self._again(x, layer, "end")
        if found is not None:
            return found
        build = partial(layer_inputs.end, layer=layer, shape=x.shape, inputs=inputs)
        return self._through(x, layer, "end", build)

    def logits(self, x: F32, head: Head, step: Step) -> F32:
        """l[R, V] of step.rows."""
        if not layers.has_head(head):
            self._programs.run_queued()
            return super().logits(x, head, step)
        n = len(step.rows)
        y = self._many_logits(x, head, step) if n > REPEATED else self._few_logits(x, head, step)
        return soft_capped(y if head.scale == 1 else y * np.float32(head.scale), head.soft_cap)

    def _many_logits(self, x: F32, head: Head, step: Step) -> F32:
        """norm(x[rows]) w^T."""
        self._programs.run_queued()
        rows = np.ascontiguousarray(x[step.rows], np.float32)
        y = np.empty((layers.rounded_up(len(rows), 16), head.weight.blocks.n), np.float32)
        program = self._programs.new()
        layers.head(program, head, rows.shape, address_of(rows), address_of(y))
        self._programs.run_once(program, rows, y)
        return y[: len(rows)]

    def _few_logits(self, x: F32, head: Head, step: Step) -> F32:
        """norm(x[rows]) w^T by a program that is kept; a single token is read from buffer "x"."""
        self._arrays(step)
        n, in_place = len(step.rows), len(x) == len(step.rows) == 1
        name = "x" if in_place else "rows"
        build = partial(_head, head=head, name=name, shape=(n, x.shape[1]))
        program = None
        while program is None:
            if in_place:
                self._own(x)
            else:
                self._programs.run_queued()
                self._in_buffer("rows", x[step.rows])
            program = self._programs.made((head, name, n), build)
        self._programs.run(program)
        self._programs.run_queued()
        return self._buffers.view("logits", n, head.weight.blocks.n).copy()

    def multiply(self, matrix: BlockRows, x: F32) -> F32:
        """x[T, K] w^T[K, N]."""
        self._programs.run_queued()
        shape = x.shape[:-1]
        x = np.ascontiguousarray(x, np.float32).reshape(-1, matrix.k)
        program = self._programs.new()
        source = self._buffers.floats("source", len(x), matrix.k)
        self._buffers.view("source", *x.shape)[:] = x
        out = np.empty((layers.rounded_up(len(x), 16), matrix.n), np.float32)
        program.product(matrix, source, len(x), address_of(out))
        self._programs.run_once(program, out)
        return out[: len(x)].reshape(*shape, matrix.n)

    def read(self, array: F32, row: int | None = None) -> F32:
        """The array or one of its rows; a copy of x, because the next op changes it."""
        self._programs.run_queued()
        found = array if row is None else array[row]
        return found.copy() if array is self._x else found

    def add_up(self, x: F32) -> F32:
        """Sums of each 1024 numbers of x, by all threads: measures how fast memory can be read."""
        out = np.empty(x.size // 1024, np.float32)
        jobs = self._programs.new()
        jobs.add("add_up", len(out), address_of(out), 4, address_of(x))
        self.pool.begin()
        self._programs.run_once(jobs, x, out)
        self.pool.end()
        return out

    # Programs

    def _arrays(self, step: Step) -> StepArrays:
        if self._step is None or self._step.step is not step:
            self._step = StepArrays(step, self._buffers, self._tables, self._cache)
            self._programs.choose(None if self._is_probed else self._step.shape)
        return self._step

    def _has_kernels(self, layer: Layer, half: str) -> bool:
        """Whether kernels compute a part of a layer; under a probe, numpy computes everything."""
        key = layer, half
        if key not in self._with_kernels:
            self._with_kernels[key] = found = self._find_kernels(layer, half)
            kind = layers.kind_of(layer, half)
            if not found and kind not in self._told:
                self._told.add(kind)
                self._note(f"numpy computes {kind} of this model: only their products are fast")
        return self._with_kernels[key] and not self._is_probed

    def _find_kernels(self, layer: Layer, half: str) -> bool:
        if half == "mix":
            memory = self._memory(layer.mixer.group)
            return delta.has_delta(layer) or layers.has_mix(layer, memory)
        if half == "end":
            return layer_inputs.has_end(layer)
        return layers.has_dense(layer.ffn) or experts.has_experts(layer.ffn)

    def _own(self, x: F32) -> F32:
        """x in the buffer "x", which programs read and write."""
        if x is self._x:
            return x
        self._x = self._in_buffer("x", x)
        return self._x

    def _in_buffer(self, name: str, x: F32) -> F32:
        self._programs.run_queued()
        self._buffers.floats(name, *x.shape)
        copy = self._buffers.view(name, *x.shape)
        copy[:] = x
        return copy

    def _again(self, x: F32, layer: Layer, half: str) -> F32 | None:
        """x changed by the program that an earlier step made; None if there is no such program."""
        program = self._programs.find((layer, half, len(x)))
        if program is None:
            return None
        x = self._own(x)
        self._programs.run(program)
        return x

    def _through(self, x: F32, layer: Layer, half: str, build: Build, keep: bool = True) -> F32:
        """x changed by the jobs of a part of a layer, which are kept for steps of few tokens."""
        keep = keep and len(x) <= REPEATED
        x = self._own(x)
        while (program := self._programs.made((layer, half, len(x)), build, keep)) is None:
            self._x = None
            x = self._own(x)
        if keep:
            self._programs.run(program)
        else:
            self._programs.run_once(program)
        return x


def _has_kernels_for(tensor: Tensor, role: Role) -> bool:
    """Whether kernels multiply a matrix from its blocks."""
    return len(tensor.shape) > 1 and not role.lookup and kernels.can_expand(tensor.format)


def _prepare_cache(shape: CacheShape) -> None:
    """Links the kernels that the cache needs. Then nothing needs LLVM, nor OpenSSL, which hashes
    files, so their code is dropped from memory.
    """
    specs = [group.spec for group in shape.groups]
    paged = [resolved(spec) for spec in specs if isinstance(spec, PagedKV)]
    for name in {type for types in paged for type in (types.k, types.v)} & KINDS.keys():
        kernels.expand(by_name(name))
    if len(paged) < len(specs):
        kernels.prepare_states()
    progress.close()
    host.drop_libraries("llvmlite", "libcrypto")


def _head(p: JobList, head: Head, name: str, shape: tuple[int, int]) -> None:
    """Adds jobs that compute buffer "logits" from x[shape] in the buffer `name`."""
    rows, n = shape[0], head.weight.blocks.n
    out = p.buffers.bytes("logits", 4 * n) if rows == 1 else p.buffers.floats("logits", rows, n)
    layers.head(p, head, shape, p.buffers.floats(name, *shape), out)


def _mix(p: JobList, layer: Layer, step: StepArrays, memory: Memory) -> None:
    if isinstance(layer.mixer, GatedDeltaNet):
        assert isinstance(memory, GroupStates)
        delta.delta_net(p, layer.mixer, step, memory)
    else:
        assert isinstance(memory, GroupPages)
        layers.mix(p, layer, step, memory)


def _route(p: JobList, ffn: MoE, rows: int) -> None:
    experts.routed(p, ffn, rows)
