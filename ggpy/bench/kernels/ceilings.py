"""The limits of this machine: bytes read per second, and MMA operations per second.

On a GPU two kernels measure them once and the user's cache keeps the result. On the CPU they
are measured each time, because other programs change them. Nothing here depends on models.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ...util.paths import cache_dir, cuda_dir

if TYPE_CHECKING:
    from ...backends.interface import Ops

RUNS, WARM = 7, 50
READ_BYTES = 8 << 30  # large enough that the start and the end of a launch do not count
CHUNK = 32 << 20  # random bytes, which are repeated
# (CTAs per SM, threads)
GRIDS = ((1, 512), (1, 1024), (2, 512), (2, 1024), (4, 512), (8, 256), (64, 512))
MATRIX_BLOCKS = (1, 2, 4)  # CTAs per SM
MATRIX_SECONDS = 0.02  # approximate duration of one measurement
GUESS = (
    5e12  # operations per second of a small GPU: only the duration of the first try depends on it
)
CPU_BYTES, CPU_ROWS, CPU_READ = 64 << 20, 1024, 512 << 20


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second and operations per second (a multiply-add is two), and the device."""

    bandwidth: float
    matrix_rate: float
    device: str

    @property
    def known(self) -> bool:
        """Whether both could be measured."""
        return self.bandwidth > 0 and self.matrix_rate > 0


def ceilings_of(ops: Ops, fresh: bool = False) -> Ceilings:
    """The ceilings of the machine that the ops run on; `fresh` measures a GPU again."""
    device = getattr(ops, "device", None)
    if device is None:
        return measure_cpu(ops)
    path = _path(device)
    kept = None if fresh else _load(path)
    if kept is None:
        kept = measure_gpu(device)
        _store(path, kept)
    return kept


# The user's cache


def _path(device: Any) -> Path:
    """One file per GPU model, driver, and version of the probe kernels."""
    gpu = device.gpu
    source = hashlib.sha256((cuda_dir() / "probe/ceilings.cu").read_bytes()).hexdigest()[:12]
    name = f"{gpu.name}-{gpu.sm_count}-{gpu.driver}-{source}"
    return cache_dir("ceilings") / (re.sub(r"[^\w.-]+", "_", name) + ".json")


def _load(path: Path) -> Ceilings | None:
    try:
        found = Ceilings(**json.loads(path.read_bytes()))
        return found if found.known else None
    except (OSError, ValueError, TypeError):
        return None


def _store(path: Path, found: Ceilings) -> None:
    with suppress(OSError):  # if it cannot be stored, the next run measures again
        from ...device.cache import write_atomically

        write_atomically(path, json.dumps(asdict(found)).encode())


# A GPU


def measure_gpu(device: Any, read_bytes: int = READ_BYTES) -> Ceilings:
    """The best of several launch shapes, each the median of RUNS; takes about a second."""
    from ...kernels.probe.ceilings import ProbeKernels as Kernels

    kernels = Kernels(device)
    return Ceilings(
        bandwidth=_bandwidth(device, kernels, read_bytes),
        matrix_rate=_matrix_rate(device, kernels),
        device=device.gpu.name,
    )


def _bandwidth(device: Any, kernels: Any, read_bytes: int) -> float:
    from ...kernels.probe.ceilings import LOADS_IN_FLIGHT

    nbytes = min(read_bytes, device.free_bytes // 2) // CHUNK * CHUNK or CHUNK
    warps = max(blocks * threads // 32 for blocks, threads in GRIDS) * device.sm_count
    data, result = device.alloc(nbytes, "data to read"), device.alloc(4 * warps, "what was read")
    chunk = np.random.default_rng(0).integers(0, 1 << 32, CHUNK // 4, np.uint32)
    device.upload(data, chunk)
    for offset in range(CHUNK, nbytes, CHUNK):
        device.copy(data.at(offset), data, CHUNK)

    def seconds(blocks: int, threads: int, at_once: int) -> float:
        grid = blocks * device.sm_count
        return _seconds(device, lambda: kernels.read(data, nbytes, result, grid, threads, at_once))

    for _ in range(WARM):  # an idle GPU takes a while to reach its full clocks
        kernels.read(data, nbytes, result, device.sm_count, GRIDS[0][1], LOADS_IN_FLIGHT[0])
    fastest = min(seconds(*grid, n) for grid in GRIDS for n in LOADS_IN_FLIGHT)
    data.free()
    return nbytes / fastest


def _matrix_rate(device: Any, kernels: Any) -> float:
    from ...kernels.probe.ceilings import FLOPS_PER_ITERATION, MATRIX_THREADS

    most = max(MATRIX_BLOCKS) * device.sm_count
    result = device.alloc(4 * most * MATRIX_THREADS, "products")

    def rate(blocks: int, iterations: int) -> float:
        seconds = _seconds(device, lambda: kernels.multiply(result, blocks, iterations))
        return FLOPS_PER_ITERATION * blocks * iterations / seconds

    guess = rate(device.sm_count, max(64, int(GUESS / FLOPS_PER_ITERATION / device.sm_count / 100)))
    rates = [
        rate(n * device.sm_count, _iterations(guess, n * device.sm_count)) for n in MATRIX_BLOCKS
    ]
    result.free()
    return max(rates)


def _iterations(rate: float, blocks: int) -> int:
    """Iterations for a launch of MATRIX_SECONDS."""
    from ...kernels.probe.ceilings import FLOPS_PER_ITERATION

    return max(1, int(rate * MATRIX_SECONDS / FLOPS_PER_ITERATION / blocks))


def _seconds(device: Any, enqueue: Callable[[], None]) -> float:
    """Median device time of what `enqueue` enqueues, after warm-up."""
    enqueue()
    enqueue()
    events = [device.event(timing=True).record()]
    for _ in range(RUNS):
        enqueue()
        events.append(device.event(timing=True).record())
    device.synchronize()
    times = [b.elapsed_ms(events[i]) / 1e3 for i, b in enumerate(events[1:])]
    return median(times)


# The CPU


def measure_cpu(ops: Any = None) -> Ceilings:
    """The speed of reading and of the f32 matrix product: of the numba backend's threads, or of
    numpy, whose reading is that of a copy (bytes read plus bytes written).
    """
    if hasattr(ops, "add_up"):
        return _measure_threads(ops)
    source = np.ones(CPU_BYTES // 4, np.float32)
    target = np.empty_like(source)
    a = np.random.default_rng(0).standard_normal((CPU_ROWS, CPU_ROWS)).astype(np.float32)
    copy = _cpu_seconds(lambda: np.copyto(target, source))
    product = _cpu_seconds(lambda: a @ a)
    return Ceilings(2 * CPU_BYTES / copy, 2 * CPU_ROWS**3 / product, "cpu")


def _measure_threads(ops: Any) -> Ceilings:
    """Measures reading of more bytes than caches hold, and a prefill product of quant blocks, which
    is bound by arithmetic; the same in float32 would also wait for memory.
    """
    from ...backends.interface import Role
    from ...formats import by_name
    from ...formats.random_blocks import random_blocks
    from ...gguf import Tensor

    source = np.ones(CPU_READ // 4, np.float32)
    shape, format = (4 * CPU_ROWS, 4 * CPU_ROWS), by_name("Q8_0")
    x = np.random.default_rng(0).standard_normal((CPU_ROWS // 2, shape[1]), np.float32)
    blocks = random_blocks(format, prod(shape) // format.block_size, np.random.default_rng(0), 1.0)
    data = np.ascontiguousarray(blocks).view(np.uint8).reshape(shape[0], -1)
    w = ops.weight(Tensor("w", shape, format, data), Role("F D"))

    def multiply() -> None:
        ops.pool.begin()
        w.multiply(x)
        ops.pool.end()

    read, product = _cpu_seconds(lambda: ops.add_up(source)), _cpu_seconds(multiply)
    ops.weights_ready()  # wipes the progress bar of compiling
    return Ceilings(CPU_READ / read, 2 * len(x) * prod(shape) / product, "cpu")


def _cpu_seconds(call: Callable[[], object]) -> float:
    """The shortest of RUNS, because other programs can only make a run longer."""
    call()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
