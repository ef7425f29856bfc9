"""A CUDA backend that computes nothing: it makes plans and records which kernels it would launch.

Its weights have shapes but no memory. `ggpy bench --plan` prints its plans, and `compile_steps`
compiles the kernels of a model's steps before they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import arch
from ..backends.cuda.backend import Cuda
from ..backends.cuda.weights import Uploader
from ..backends.interface import Recurrent, Step, pages_for
from ..cache_types import CacheTypes
from ..device.base import Buffer
from ..device.compile import CompileError, is_compiled
from ..gguf import Tensor
from ..kernels.layout.tile import TiledMatrix, layout_of
from ..runtime.state_table import WIDTH
from ..sampling import Sampler, SamplingParams
from ..util.simulated import SHARED_BYTES
from .compile_ahead import Wishes, compile_ahead

LARGE_SHARED = (
    227 << 10
)  # bytes of shared memory of a CTA on Hopper and on Blackwell for data centres
GPUS = {  # architecture -> SMs of a common GPU of it, used if there is no real one
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 82,
    "sm_89": 128,
    "sm_90": 132,
    "sm_90a": 132,
    "sm_100": 148,
    "sm_120": 170,
}
SMALL_SHARED = {"sm_120": 99 << 10}
N_CTX = 4096
# Batch sizes and prompt lengths at which the choice of kernels may change.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)


def device_of(architecture: str, sm_count: int | None = None) -> Any:
    """A device that computes nothing, of a given architecture; ValueError if it is unknown."""
    if architecture not in GPUS:
        raise ValueError(f"{architecture} is not known: take one of {', '.join(GPUS)}")
    shared = SMALL_SHARED.get(architecture) or SHARED_BYTES.get(architecture, LARGE_SHARED)
    facts = SimpleNamespace(
        arch=architecture, sm_count=sm_count or GPUS[architecture], shared_bytes=shared
    )
    return PlannedDevice(facts)


class PlannedDevice(Wishes):
    """Wishes that also replace streams and pinned memory."""

    used_bytes = 0

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.asked: list[tuple[str, Sequence[str], dict[str, Any]]] = []  # arguments of kernels()

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[Any]:
        """Record the source, the names and the options."""
        self.asked.append((source, names, options))
        return super().kernels(source, names, **options)

    def pinned(self, nbytes: int) -> Any:
        """Ordinary host memory."""
        return np.zeros(nbytes, np.uint8)

    def mapped(self, nbytes: int) -> Any:
        """Ordinary host memory and an address."""
        return self.pinned(nbytes), self.alloc(nbytes).at(0)

    def new_stream(self) -> Any:
        """A stream on which nothing happens."""
        return self.event()

    @property
    def stream(self) -> Any:
        """A stream on which nothing happens."""
        return self.event()


class NoUpload(Uploader):
    """Gives weights an address but no memory."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def upload(
        self, tensor: Tensor, tiled: bool, on_host: bool = False
    ) -> tuple[TiledMatrix | None, Buffer | None]:
        """Like Uploader.upload, without the copy."""
        memory, (n_rows, k) = self.device.alloc(1 << 40), tensor.shape[-2:]
        layout = layout_of(tensor.format, k) if tiled else None
        return (TiledMatrix(layout, n_rows, k, memory), None) if layout else (None, memory)


class PlannedCuda(Cuda):
    """A backend whose weights have shapes but no memory."""

    def __init__(self, device: Any, **policy: Any) -> None:
        super().__init__(device, **policy)
        self._uploader = NoUpload(device)

    def _vector(self, tensor: Tensor) -> Buffer:
        return self.device.alloc(4 * tensor.shape[0], tensor.name)


def compile_steps(
    file: Any,
    device: Any,
    n_seq: int,
    cache_types: CacheTypes,
    say: Callable[[str], None],
    **policy: Any,
) -> None:
    """Compile and load the kernels that a model's steps need on a GPU.

    Kernels that are not in the cache are compiled in several processes. All are loaded now, because
    loading a kernel later may wait for everything that runs on the GPU. n_seq: the most sequences
    that decode together. policy: see Cuda.
    """
    planned = PlannedDevice(device)
    ops = PlannedCuda(planned, **policy)
    decoder = arch.load(file, ops, N_CTX, n_seq=n_seq, cache_types=cache_types)
    ops.allocate_cache(decoder.cache_shape(n_seq, N_CTX, decoder.n_batch))
    for n in SIZES:
        if n <= n_seq:
            _run(ops, decoder, [1] * n)
            _run(ops, decoder, [1] * n, N_CTX - 1)
        if n <= decoder.n_batch:
            _run(ops, decoder, [n])
            _run(ops, decoder, [*[1] * min(n_seq - 1, 4), max(1, n - 4)])
    missing = [w for w in planned.wishes if not is_compiled(arch=device.target, **w)]
    if missing:
        compile_ahead(missing, device.target, None, say)
    for source, names, options in planned.asked:
        with suppress(CompileError):  # printed already; raised again when the kernel is needed
            device.kernels(source, names, **options)


def _run(ops: Cuda, decoder: Any, lengths: Sequence[int], depth: int = 0) -> None:
    """Run a step of sequences with lengths[i] new tokens each, and sample it, once greedily and
    once with default parameters. depth: tokens of the first sequence before its new ones.
    """
    width = pages_for(depth + max(lengths))
    n, groups = len(lengths), decoder.cache_shape(1, N_CTX, 1).groups
    widths = [WIDTH if isinstance(group.spec, Recurrent) else width for group in groups]
    last = np.cumsum(lengths, dtype=np.int32) - 1
    positions = np.concatenate([np.arange(k, dtype=np.int32) for k in lengths])
    positions[: lengths[0]] += depth
    step = Step(
        ids=np.zeros(sum(lengths), np.int32),
        positions=positions,
        sequences=np.repeat(np.arange(n, dtype=np.int32), lengths),
        page_tables=tuple(np.zeros((n, width), np.int32) for width in widths),
        rows=last,
    )
    logits = decoder.run(step)
    n_vocab = decoder.sizes.n_vocab
    for params in (SamplingParams(temperature=0), SamplingParams()):
        ops.sample(logits, [Sampler(params, n_vocab) for _ in range(min(n, 8))])
