"""A loaded kernel and its launch: checks the configuration, packs the arguments, calls the driver.

The Python time of a launch matters, so launch configurations are built once and cached. Kernel
wrappers (`ggpy.kernels`) choose the grid.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggpy.device.base import (
    Argument,
    ArgumentPacker,
    CudaError,
    Grid,
    buffers_of,
    capability,
    three,
)
from ggpy.device.cubin import Cubin, Resources

if TYPE_CHECKING:
    from ggpy.device.gpu import CudaDevice
    from ggpy.device.stream import Stream

_PLAIN_SHARED = 48 << 10  # bytes per CTA, dynamic and static; a kernel must opt in to more
_HOPPER = 90  # compute capability of the first GPUs with PDL and clusters
_PORTABLE_CLUSTER = 8  # a kernel must opt in to larger clusters
_KEPT_CONFIGURATIONS = 512


class CudaKernel:
    """A kernel on a GPU; see ggpy.device.base.Kernel."""

    def __init__(
        self, device: CudaDevice, source: str, name: str, module: Any, cubin: Cubin
    ) -> None:
        """`module` was loaded from `cubin`, which was compiled from `source`."""
        # NVRTC 13.0 sometimes reports nothing: then the driver says whether the kernel exists.
        if cubin.resources and name not in cubin.resources:
            names = ", ".join(cubin.resources) or "none"
            raise CudaError(
                f'{source} has no kernel {name} (extern "C", or a template instance); '
                f"it has {names}"
            )
        self.device, self.name = device, name
        cu = device.cu
        symbol = cubin.symbol(name).encode()
        self._function = device.check(
            cu.cuModuleGetFunction(module, symbol), f"finding the kernel {name}"
        )
        self._module = module
        self.resources = cubin.resources.get(name) or self._ask_resources()
        self._packer = ArgumentPacker(name, self._parameter_sizes())
        self._configurations: dict[tuple, Any] = {}
        self._shared = _PLAIN_SHARED  # bytes that the kernel has opted in to
        self._launch = cu.cuLaunchKernelEx
        self._lock = threading.Lock()

    def launch(
        self,
        grid: Grid,
        threads: Grid,
        args: Sequence[Argument],
        *,
        smem: int = 0,
        pdl: bool = False,
        cluster: int = 1,
        cooperative: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Enqueues a launch; see ggpy.device.base.Kernel. CudaError names the kernel and the
        configuration.
        """
        device = self.device
        device.make_current()
        key = (grid, threads, smem, pdl, cluster, cooperative, stream)
        with self._lock:
            configuration = self._configurations.get(key) or self._configure(*key)
            self._packer.pack(args)
            result = self._launch(configuration, self._function, self._packer.address, 0)
        if result[0] != 0:
            raise device.error(
                result[0], f"launching {self._describe(grid, threads, smem, cluster)}"
            )
        if device.capturing is None:
            device.note(self.name)
        else:
            device.capturing.add(self.name, buffers_of(args))

    def max_ctas_per_sm(self, threads: int, smem: int = 0) -> int:
        """CTAs of this size that are resident on one SM at the same time."""
        self._allow_shared(smem)
        query = self.device.cu.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(
            self.device.check(
                query(self._function, threads, smem), f"asking for the occupancy of {self.name}"
            )
        )

    def _ask_resources(self) -> Resources:
        """The resources that the driver reports; its stack includes spills."""
        ask = self.device.cu.CUfunction_attribute

        def attribute(name: str) -> int:
            key = getattr(ask, f"CU_FUNC_ATTRIBUTE_{name}")
            result = self.device.cu.cuFuncGetAttribute(key, self._function)
            return int(self.device.check(result, f"asking about the kernel {self.name}"))

        registers, stack = attribute("NUM_REGS"), attribute("LOCAL_SIZE_BYTES")
        return Resources(registers, stack, 0, 0, attribute("SHARED_SIZE_BYTES"))

    def _parameter_sizes(self) -> list[int]:
        """Bytes of each parameter, which the driver reads from the machine code."""
        sizes: list[int] = []
        while True:
            status, _, size = self.device.cu.cuFuncGetParamInfo(self._function, len(sizes))
            if status != 0:
                return sizes
            sizes.append(int(size))

    def _configure(
        self,
        grid: Grid,
        threads: Grid,
        smem: int,
        pdl: bool,
        cluster: int,
        cooperative: bool,
        stream: Stream | None,
    ) -> Any:
        """The driver's launch configuration, cached for the next launch of the same shape."""
        cu, ctas, cta = self.device.cu, three(grid), three(threads)
        self._check_shape(ctas, cta, smem, cluster)
        self._allow_shared(smem)
        if cooperative:
            self._check_resident(math.prod(ctas), math.prod(cta), smem)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas
        config.blockDimX, config.blockDimY, config.blockDimZ = cta
        config.sharedMemBytes = smem
        config.hStream = (stream or self.device.stream).handle
        attributes = self._attributes(pdl, cluster, cooperative)
        config.attrs, config.numAttrs = attributes, len(attributes)
        if len(self._configurations) >= _KEPT_CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[grid, threads, smem, pdl, cluster, cooperative, stream] = config
        return config

    def _attributes(self, pdl: bool, cluster: int, cooperative: bool) -> list[Any]:
        cu, attributes = self.device.cu, []
        names = cu.CUlaunchAttributeID
        pdl = pdl and capability(self.device.arch) >= _HOPPER
        if pdl:
            attribute = cu.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > _PORTABLE_CLUSTER:
            self._set(
                cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            )
        if cluster > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = attribute.value.clusterDim
            shape.x, shape.y, shape.z = cluster, 1, 1
            attributes.append(attribute)
        # With PDL, CTAs of earlier kernels end without this kernel, so residency suffices.
        if cooperative and not pdl:
            attribute = cu.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        return attributes

    def _check_shape(self, ctas: tuple, cta: tuple, smem: int, cluster: int) -> None:
        what = self._describe(ctas, cta, smem, cluster)
        if not 0 < math.prod(cta) <= 1024:
            raise CudaError(f"{what}: a CTA has 1 to 1024 threads")
        if min(ctas) < 1 or max(ctas[1:]) > 65535:
            raise CudaError(f"{what}: a grid has at least 1 CTA, and at most 65535 along y and z")
        if cluster > 1 and capability(self.device.arch) < _HOPPER:
            raise CudaError(f"{what}: {self.device.arch} has no clusters")
        if ctas[0] % cluster:
            raise CudaError(f"{what}: the CTAs along x must be a multiple of the cluster")

    def _check_resident(self, ctas: int, threads: int, smem: int) -> None:
        resident = self.max_ctas_per_sm(threads, smem) * self.device.gpu.sm_count
        if ctas > resident:
            what = self._describe(ctas, threads, smem, 1)
            raise CudaError(
                f"{what}: only {resident} such CTAs run at the same time on {self.device.gpu.name}"
            )

    def _allow_shared(self, smem: int) -> None:
        static, limit = self.resources.shared, self.device.shared_bytes
        if smem + static <= self._shared:
            return
        if smem + static > limit:
            raise CudaError(
                f"kernel {self.name} needs {smem} bytes of dynamic and {static} bytes of static "
                f"shared memory; a CTA on {self.device.gpu.name} has at most {limit}"
            )
        attribute = self.device.cu.CUfunction_attribute
        self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem)
        # a second CTA does not fit: the rest of the shared memory becomes L1 cache
        if 2 * (smem + static) > limit:
            percent = math.ceil(100 * (smem + static) / limit)
            self._set(attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)
        self._shared = smem + static

    def _set(self, attribute: Any, value: int) -> None:
        result = self.device.cu.cuFuncSetAttribute(self._function, attribute, value)
        self.device.check(result, f"preparing the kernel {self.name}")

    def _describe(self, grid: Grid, threads: Grid, smem: int, cluster: int) -> str:
        clusters = f", clusters of {cluster}" if cluster > 1 else ""
        return (
            f"kernel {self.name}, grid {three(grid)}, threads {three(threads)}{clusters}, "
            f"{smem} bytes of dynamic shared memory"
        )
