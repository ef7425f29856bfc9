"""GPUs: find one, compile kernels for it, give it memory, launch.

The only package that imports `cuda`, and only inside functions: importing it costs nothing and
works without a GPU.
"""

from ggpy.device.base import Buffer, CudaError, Device, Kernel, OutOfMemory, Ptr
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
    "OutOfMemory",
    "Ptr",
    "list_gpus",
    "probe",
]
