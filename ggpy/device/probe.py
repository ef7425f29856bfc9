"""Lists the usable GPUs, or says exactly why there is none.

This module only queries the driver: it makes no context and allocates no memory. The reason names
the first missing thing and the remedy.

A GPU can simulate an older architecture (ggpy/util/simulated.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from ggpy.device import toolkit
from ggpy.device.base import capability
from ggpy.util import simulated

MIN_CAPABILITY = (7, 5)  # Turing, the oldest architecture that the kernels support


@dataclass(frozen=True)
class Gpu:
    """One usable GPU."""

    name: str
    ordinal: int
    arch: str  # architecture that kernels are selected and compiled for, such as "sm_90a"
    sm_count: int
    total_bytes: int  # bytes of its memory
    shared_bytes: int  # maximum bytes of shared memory per CTA
    l2_bytes: int
    driver: str  # the newest CUDA version that the driver supports, such as "13.0"
    ptx: bool = False  # the GPU simulates an older one: the driver compiles PTX of `arch`

    @property
    def target(self) -> str:
        """Argument of NVRTC's --gpu-architecture: machine code of `arch`, or PTX ("compute_80")."""
        return self.arch.replace("sm_", "compute_") if self.ptx else self.arch


@dataclass(frozen=True)
class NoGpu:
    """No GPU is usable, and why."""

    reason: str


def probe(ordinal: int = 0) -> Gpu | NoGpu:
    """GPU number `ordinal`, or the reason why it cannot be used."""
    cu = driver()
    if isinstance(cu, NoGpu):
        return cu
    count = cu.cuDeviceGetCount()[1]
    if count == 0:
        return NoGpu("the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it)")
    if not 0 <= ordinal < count:
        return NoGpu(f"there is no GPU {ordinal}: the driver finds {count}, numbered from 0")
    gpu = _describe(cu, ordinal)
    if isinstance(gpu, Gpu) and (arch := simulated.asked()):
        gpu = simulate(gpu, arch)
    return gpu if isinstance(gpu, NoGpu) else _compiler_for(gpu) or gpu


def simulate(gpu: Gpu, arch: str) -> Gpu | NoGpu:
    """The GPU as if it had the older architecture `arch`: with PTX and the shared memory per CTA of
    `arch`, and without launch features and kernels of newer architectures. Its memory and number of
    SMs do not change. NoGpu if `arch` is unknown or newer.
    """
    shared = simulated.SHARED_BYTES.get(arch)
    if shared is None:
        names = ", ".join(simulated.SHARED_BYTES)
        return NoGpu(f"{simulated.VARIABLE} is {arch!r}: use one of {names}")
    if capability(arch) > capability(gpu.arch):
        return NoGpu(f"{gpu.name} is {gpu.arch}: it cannot be used as the newer {arch}")
    return replace(gpu, arch=arch, ptx=True, shared_bytes=min(gpu.shared_bytes, shared))


def list_gpus() -> list[Gpu | NoGpu]:
    """Every GPU of the machine, in the driver's order."""
    cu = driver()
    return [] if isinstance(cu, NoGpu) else [probe(i) for i in range(cu.cuDeviceGetCount()[1])]


@functools.cache
def driver() -> Any:
    """The module `cuda.bindings.driver` after cuInit, or NoGpu."""
    try:
        from cuda.bindings import driver as cu
    except ImportError:
        return NoGpu("cuda-python is not installed: pip install cuda-python")
    try:
        status = cu.cuInit(0)[0]
    except RuntimeError:  # the bindings raise it if there is no library to load
        return NoGpu("no NVIDIA driver is installed (libcuda was not found)")
    if status != cu.CUresult.CUDA_SUCCESS:
        return NoGpu(_WHY.get(status.name, f"the NVIDIA driver does not start: {status.name}"))
    return cu


_WHY = {
    "CUDA_ERROR_NO_DEVICE": "the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it)",
    "CUDA_ERROR_STUB_LIBRARY": (
        "only a stub of the NVIDIA driver library was found: install the driver"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the NVIDIA driver library and its kernel module have different versions: "
        "restart the machine"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "the CUDA compatibility libraries do not support this GPU: remove them from LD_LIBRARY_PATH"
    ),
}


def _describe(cu: Any, ordinal: int) -> Gpu | NoGpu:
    device = cu.cuDeviceGet(ordinal)[1]
    ask = cu.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(cu.cuDeviceGetAttribute(getattr(ask, f"CU_DEVICE_ATTRIBUTE_{name}"), device)[1])

    name = cu.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode()
    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    if capability < MIN_CAPABILITY:
        return NoGpu(
            f"{name} has compute capability {_dotted(capability)}; "
            f"{_dotted(MIN_CAPABILITY)} is needed"
        )
    version = int(cu.cuDriverGetVersion()[1])
    return Gpu(
        name=name,
        ordinal=ordinal,
        arch=architecture(*capability),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        total_bytes=int(cu.cuDeviceTotalMem(device)[1]),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        driver=f"{version // 1000}.{version % 1000 // 10}",
    )


def architecture(major: int, minor: int) -> str:
    """The architecture that kernels are compiled for, from the compute capability; sm_90a has the
    instructions wgmma and setmaxnreg.
    """
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _compiler_for(gpu: Gpu) -> NoGpu | None:
    """The reason why kernels cannot be compiled for the GPU, or None."""
    try:
        toolkit.header_folders()
        version = toolkit.nvrtc_version()
    except toolkit.NvrtcMissing as error:
        return NoGpu(f"{gpu.name} was found, but {error}")
    if int(version.split(".")[0]) > int(gpu.driver.split(".")[0]):
        return NoGpu(
            f"the driver of {gpu.name} knows CUDA {gpu.driver}, "
            f"the CUDA compiler here is {version}: "
            f"install a newer driver, or a CUDA {gpu.driver.split('.')[0]} compiler"
        )
    if gpu.ptx and _numbers(version) > _numbers(gpu.driver):
        return NoGpu(
            f"the driver of {gpu.name} reads PTX up to CUDA {gpu.driver}, the CUDA compiler here "
            f"writes that of {version}: pip install 'cuda-toolkit[nvrtc,cudart]=={gpu.driver}.*'"
        )
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
