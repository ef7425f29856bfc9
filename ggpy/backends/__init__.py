"""Backends: `choose` is the one place that chooses the machine that computes.

It takes a GPU if there is a usable one, and says what makes a GPU unusable. On the CPU it takes
numba's kernels if numba is installed, and numpy otherwise. CUDA is not imported for the CPU, and
numba is not imported for a GPU.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..util import simulated

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal

    from ..device.gpu import CudaDevice
    from ..device.probe import Gpu
    from .cpu.backend import CpuActivations
    from .cuda.plan import Activations, GemmChoice
    from .interface import Ops

    ActivationChoice = Literal["auto", "f16", "q8_1", "q8", "q16", "f32"]

GPU_ACTIVATIONS = {"auto": "f16", "f16": "f16", "q8_1": "q8_1", "q8": "q8_1"}
CPU_ACTIVATIONS = {"auto": "q16", "q16": "q16", "q8": "q8", "q8_1": "q8", "f32": "f32"}


def choose(
    device: str = "auto",
    n_threads: int | None = None,
    note: Callable[[str], None] | None = None,
    batch_invariant: bool = False,
    activations: ActivationChoice = "auto",
    gemm: GemmChoice = "auto",
) -> Ops:
    """The ops for "auto", "cpu", "numpy", "cuda" or "cuda:N"; ValueError if the device cannot be
    used.

    "auto" is the first GPU if it is usable, else the CPU; the `reason` of the ops says why. "numpy"
    is the CPU without numba: the specification.

    | option | meaning |
    |---|---|
    | n_threads | CPU threads; None: one for each core that the process may use, half with numpy |
    | note | gets one-line remarks for the user |
    | batch_invariant | on a GPU, no bits depend on other sequences, even in large batches |
    | activations | the input of quantised weights; "auto": f16 on a GPU, q16 on the CPU |
    | gemm | "cublas" for many tokens: only on a GPU, with f16 and without batch_invariant |

    activations are "f16" or "q8_1" on a GPU, and "q16", "q8" or "f32" on the CPU.
    """
    if gemm == "cublas" and (batch_invariant or activations not in ("auto", "f16")):
        raise ValueError(
            "--gemm cublas rounds weights to f16: it goes with neither --batch-invariant nor "
            "--activations q8_1"
        )
    note = note or (lambda message: None)
    gpu, reason = choose_gpu(device, note)
    if gpu is not None:
        from .cuda.backend import Cuda

        of_gpu: Activations = _activations(activations, GPU_ACTIVATIONS, "a GPU")
        return Cuda(gpu, gpu_name(device), reason, batch_invariant, of_gpu, gemm, note)
    if gemm == "cublas":
        raise ValueError(f"--gemm cublas needs a GPU, the device is cpu ({reason}): leave it away")
    of_cpu: CpuActivations = _activations(activations, CPU_ACTIVATIONS, "the CPU")
    return _on_cpu(device, n_threads, reason, note, of_cpu)


def _on_cpu(
    device: str,
    n_threads: int | None,
    reason: str,
    note: Callable[[str], None],
    activations: CpuActivations,
) -> Ops:
    """The ops of numba, if it is installed and device is not "numpy"; otherwise those of numpy."""
    if device != "numpy":
        if find_spec("numba") is None:
            note("numpy computes, which is slow: pip install 'ggpy[cpu]' adds numba")
        else:
            try:
                from .cpu.backend import Cpu

                return Cpu(n_threads, reason=reason, note=note, activations=activations)
            except ImportError as error:
                note(f"numpy computes, which is slow: numba cannot be imported ({error})")
    from .numpy.backend import Reference

    if activations == "q8":
        note("numpy computes in float32: --activations q8 has no effect")
    return Reference(n_threads, reason=reason, note=note)


def _activations(asked: str, known: dict[str, Any], where: str) -> Any:
    """The backend's name for a type of activations; ValueError for a type of another device."""
    if asked not in known:
        can = ", ".join(name for name in known if name != "auto")
        raise ValueError(f"--activations {asked} is nothing for {where}: it has {can}")
    return known[asked]


def choose_gpu(
    device: str = "auto", note: Callable[[str], None] | None = None
) -> tuple[CudaDevice | None, str]:
    """(the GPU that `choose` takes for the device, or None for the CPU; the reason). ValueError as
    for `choose`. The reason for a GPU describes it.
    """
    if not re.fullmatch(r"auto|cpu|numpy|cuda(:\d{1,9})?", device):
        raise ValueError(f"unknown device {device!r}: use auto, cpu, numpy, cuda or cuda:N")
    if device in ("cpu", "numpy"):
        return None, "as asked"
    gpu, reason = _open_gpu(_ordinal(device), note)
    if gpu is None and simulated.asked():
        raise ValueError(f"--as {simulated.asked()} needs a GPU: {reason}")
    if gpu is None and device != "auto":
        raise ValueError(f"device {device!r} cannot be used: {reason}; device cpu needs none")
    return gpu, reason


def gpu_name(device: str) -> str:
    """The name of the device's GPU in messages: cuda:N."""
    return f"cuda:{_ordinal(device)}"


def _ordinal(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def describe(gpu: Gpu) -> str:
    """A GPU in one clause, which the user reads as the reason for its use."""
    size = f"{gpu.total_bytes / 1e9:.0f} GB"
    arch = f"as if it were {gpu.arch}" if gpu.ptx else gpu.arch
    return f"{gpu.name}, {size}, {arch}, driver for CUDA {gpu.driver}"


def _open_gpu(ordinal: int, note: Callable[[str], None] | None) -> tuple[CudaDevice | None, str]:
    """(the GPU of this number, its description), or (None, why it cannot be used)."""
    from ..device import CudaError, NoGpu, cache, probe

    gpu = probe(ordinal)
    if isinstance(gpu, NoGpu):
        return None, gpu.reason
    from ..device.gpu import CudaDevice

    try:
        device = CudaDevice(ordinal)
    except CudaError as error:  # another program has it for itself, or all of its memory
        return None, str(error)

    def compiling() -> None:
        device.on_compile = lambda: None  # once is enough
        if note:
            kept = cache.refusal() or f"once: they are kept in {cache.folder()}"
            note(f"compiling kernels for this GPU, {kept}")

    device.on_compile = compiling
    return device, describe(gpu)
