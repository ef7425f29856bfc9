"""Compile a CUDA kernel of your own with NVRTC, launch it, and compare it with numpy.

    python examples/own_kernel.py

The kernel is own_kernel.cu, beside this file: edit it and run again. Without a GPU the kernel is
compiled all the same, so the compiler's messages and the registers of a thread can be seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggpy.device import Device, NoGpu, probe
from ggpy.device.compile import compile_cubin

FOLDER, SOURCE = Path(__file__).resolve().parent, "own_kernel.cu"
THREADS = 256  # of a CTA
KERNEL = f"softmax_rows<{THREADS}>"  # a template instance, which NVRTC makes by name
ROWS, COLUMNS = 1000, 3001


def softmax(device: Device, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The softmax of each row of x[R, C], on the device."""
    kernel = device.kernel(SOURCE, KERNEL)
    source, out = device.alloc(x.nbytes, "x"), device.alloc(x.nbytes, "softmax")
    device.upload(source, x)
    kernel.launch(x.shape[0], THREADS, (source, out, x.shape[1]))
    return device.download(out, np.float32, x.shape)


def reference(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same in numpy."""
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def show_resources(arch: str) -> None:
    """Compile for an architecture and print what a thread takes; no GPU is needed."""
    cubin = compile_cubin(SOURCE, arch, expressions=[KERNEL], folder=FOLDER)
    needs = cubin.resources[KERNEL]
    print(f"{KERNEL} for {arch}: {len(cubin.code)} bytes, {needs.registers} registers a thread")


def main() -> None:
    """Compile; launch and compare where there is a GPU."""
    gpu = probe()
    if isinstance(gpu, NoGpu):
        for arch in ("sm_80", "sm_90a"):
            show_resources(arch)
        print(f"no GPU to launch on: {gpu.reason}")
        return

    from ggpy.device.gpu import CudaDevice

    show_resources(gpu.arch)
    x = np.random.default_rng(1).normal(0, 3, (ROWS, COLUMNS)).astype(np.float32)
    error = np.abs(softmax(CudaDevice(cuda=FOLDER), x) - reference(x)).max()
    print(f"on {gpu.name}: {ROWS} rows of {COLUMNS}, largest difference from numpy {error:.1e}")
    if error > 1e-6:
        raise SystemExit("the kernel is wrong")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # NVRTC is not installed, or the kernel does not compile
        raise SystemExit(f"own_kernel.py: {error}") from None
