"""GPUs: find a GPU, compile kernels for it, allocate its memory, launch kernels.

The only package that imports `cuda`, and only inside functions: importing this package is cheap and
works without a GPU.
"""

from ggpy.device.base import (
    Buffer,
    CudaError,
    Device,
    Kernel,
    OutOfHostMemory,
    OutOfMemory,
    Ptr,
)
from ggpy.device.compile import CompileError
from ggpy.device.probe import Gpu, NoGpu, list_gpus, probe
from ggpy.device.toolkit import NvrtcMissing

__all__ = [
    "Buffer",
    "CompileError",
    "CudaError",
    "Device",
    "Gpu",
    "Kernel",
    "NoGpu",
    "NvrtcMissing",
    "OutOfHostMemory",
    "OutOfMemory",
    "Ptr",
    "list_gpus",
    "probe",
]
