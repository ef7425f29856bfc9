"""A GPU: its memory, its kernels, its streams.

Built on `cuda.bindings.driver`. Of this folder only `gpu`, `launch`, `stream` and `cublas` make
driver calls with effects. This module deals in bytes, addresses and launches, and knows nothing of
tensors, formats or models.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ggpy.device.base import Buffer, CudaError, OutOfHostMemory, OutOfMemory, Ptr, buffers_of
from ggpy.device.compile import compile_cubin
from ggpy.device.launch import CudaKernel
from ggpy.device.probe import NoGpu, driver, probe
from ggpy.device.stream import Event, Graph, Stream
from ggpy.util.paths import cuda_dir

_REMEMBERED = 32  # maximum number of kernels that an error names
_PORTABLE, _MAPPED = 1, 2  # flags of cuMemHostAlloc
_CURRENT = threading.local()  # .device: the device whose context the thread uses


class CudaDevice:
    """One GPU's primary context; see ggpy.device.base.Device. CudaError if no GPU is usable."""

    def __init__(self, ordinal: int = 0, *, cuda: Path | None = None) -> None:
        """`cuda` is the folder of the CUDA sources, by default the project's."""
        found = probe(ordinal)
        if isinstance(found, NoGpu):
            raise CudaError(found.reason)
        self.gpu = found
        self.cu = driver()
        self.cuda = cuda or cuda_dir()
        self.used_bytes = self.host_bytes = 0
        self.on_compile: Callable[[], None] = lambda: None  # called before a kernel is compiled
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._kernels: dict[tuple, dict[str, CudaKernel]] = {}
        self._handle = self.check(self.cu.cuDeviceGet(ordinal), "opening the GPU")
        self._context = self.check(
            self.cu.cuDevicePrimaryCtxRetain(self._handle), "opening the GPU"
        )
        self.make_current()
        self.capturing: Graph | None = None
        self.stream = Stream(self)

    @property
    def arch(self) -> str:
        """The architecture that kernels are selected and compiled for, such as "sm_90a"."""
        return self.gpu.arch

    @property
    def target(self) -> str:
        """The target that `compile_cubin` compiles for this GPU, such as "sm_90a"."""
        return self.gpu.target

    @property
    def sm_count(self) -> int:
        """Number of streaming multiprocessors (SMs)."""
        return self.gpu.sm_count

    @property
    def shared_bytes(self) -> int:
        """Maximum bytes of shared memory per CTA."""
        return self.gpu.shared_bytes

    @property
    def free_bytes(self) -> int:
        """Free bytes of the GPU's memory."""
        self.make_current()
        return int(self.check(self.cu.cuMemGetInfo(), "asking for free memory")[0])

    def make_current(self) -> None:
        """Makes the GPU's context current in the calling thread; every method of this class calls
        it.
        """
        if getattr(_CURRENT, "device", None) is not self:
            self.check(self.cu.cuCtxSetCurrent(self._context), "using the GPU in a thread")
            _CURRENT.device = self

    # ---- memory ----

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates uninitialised memory, aligned to 256 bytes; OutOfMemory."""
        self.make_current()
        result = self.cu.cuMemAlloc(max(1, nbytes))
        if result[0] == self.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(name, nbytes, self.free_bytes)
        ptr = int(self.check(result, f"allocating {nbytes} bytes for {name or 'a buffer'}"))
        self.used_bytes += nbytes
        return Buffer(ptr, nbytes, name, self._release)

    def zeros(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates memory and fills it with zeros; OutOfMemory."""
        buffer = self.alloc(nbytes, name)
        self.fill(buffer, 0)
        return buffer

    def fill(self, buffer: Buffer, byte: int, stream: Stream | None = None) -> None:
        """Sets every byte, in stream order."""
        stream = self._enter(stream, [buffer])
        result = self.cu.cuMemsetD8Async(buffer.address, byte, buffer.nbytes, stream.handle)
        self.check(result, f"filling {buffer!r}")

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocates page-locked host memory (uint8). Copies between it and the GPU run at full
        speed and asynchronously.
        """
        self.make_current()
        result = self.cu.cuMemHostAlloc(max(1, nbytes), _PORTABLE)
        ptr = int(self.check(result, f"allocating {nbytes} bytes of page-locked host memory"))
        memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
        weakref.finalize(memory, _free_pinned, self.cu, self._context, ptr)
        return np.ctypeslib.as_array(memory)

    def alloc_host(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates uninitialised, page-locked host memory that kernels read over the bus; its
        address is the same on the host and on the GPU. OutOfHostMemory.
        """
        self.make_current()
        result = self.cu.cuMemHostAlloc(max(1, nbytes), _PORTABLE | _MAPPED)
        if result[0] == self.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfHostMemory(name, nbytes)
        ptr = int(self.check(result, f"allocating {nbytes} bytes of page-locked host memory"))
        self.host_bytes += nbytes
        return Buffer(ptr, nbytes, name, self._release_host)

    def mapped(self, nbytes: int) -> tuple[np.ndarray, Ptr]:
        """Allocates page-locked host memory (uint8) that kernels can write; returns the array and
        its device address. The host may read the array once an event after the kernels is reached.
        """
        memory = self.pinned(nbytes)
        return memory, Ptr(memory.ctypes.data)

    def upload(
        self, to: Buffer | Ptr, array: np.ndarray, offset: int = 0, stream: Stream | None = None
    ) -> None:
        """Copies a host array into a buffer, in stream order.

        The call reads pageable memory before it returns. It reads pinned memory later: the array
        must not change until then.
        """
        array = np.ascontiguousarray(array)
        address = _address(to, offset, array.nbytes)
        stream = self._enter(stream, buffers_of([to]), array)
        result = self.cu.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, stream.handle)
        self.check(result, f"uploading {array.nbytes} bytes")

    def upload_array(self, array: np.ndarray, name: str = "") -> Buffer:
        """A buffer that holds `array`."""
        buffer = self.alloc(array.nbytes, name)
        self.upload(buffer, array)
        return buffer

    def download(
        self, source: Buffer | Ptr, dtype: Any, shape: int | tuple[int, ...], offset: int = 0
    ) -> np.ndarray:
        """A host copy of what the device's stream has written; waits for the stream."""
        result = np.empty(shape, dtype)
        self.download_into(result, source, offset)
        self.stream.synchronize()
        return result

    def download_into(
        self, array: np.ndarray, source: Buffer | Ptr, offset: int = 0, stream: Stream | None = None
    ) -> None:
        """Copies device memory into a host array, in stream order; wait for the stream before you
        read the array.
        """
        if not array.flags.c_contiguous:
            raise ValueError("a host array must be contiguous to be copied into")
        address = _address(source, offset, array.nbytes)
        stream = self._enter(stream, buffers_of([source]), array)
        result = self.cu.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, stream.handle)
        self.check(result, f"downloading {array.nbytes} bytes")

    def copy(
        self, to: Buffer | Ptr, source: Buffer | Ptr, nbytes: int, stream: Stream | None = None
    ) -> None:
        """Copies between buffers on the device or of `alloc_host`, in stream order."""
        stream = self._enter(stream, buffers_of([to, source]))
        result = self.cu.cuMemcpyAsync(
            _address(to, 0, nbytes), _address(source, 0, nbytes), nbytes, stream.handle
        )
        self.check(result, f"copying {nbytes} bytes")

    def tensor_map(
        self, at: Buffer | Ptr, shape: tuple[int, int], box: tuple[int, int]
    ) -> ctypes.Array:
        """Returns a TensorMap (cuda/lib/wgmma.cuh) of f16 [rows, columns]. A TMA copy takes a box
        of it, at most 64 columns, and writes the box to shared memory in 128-byte rows with the
        128-byte swizzle.
        """
        self.make_current()
        cu, (rows, columns), pitch = self.cu, shape, 2 * shape[1]
        made = cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            _address(at, 0, rows * pitch),
            [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
            [cu.cuuint64_t(pitch)],
            [cu.cuuint32_t(box[1]), cu.cuuint32_t(box[0])],
            [cu.cuuint32_t(1)] * 2,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        words = self.check(made, f"encoding a tensor map of f16 {list(shape)}").opaque
        return (ctypes.c_uint64 * 16)(*[int(word) for word in words])

    def _release(self, ptr: int, nbytes: int) -> None:
        self.used_bytes -= nbytes
        # The interpreter may be shutting down.
        with contextlib.suppress(CudaError, AttributeError, TypeError):
            self.make_current()
            self.cu.cuMemFree(ptr)

    def _release_host(self, ptr: int, nbytes: int) -> None:
        self.host_bytes -= nbytes
        with contextlib.suppress(CudaError, AttributeError, TypeError):
            self.make_current()
            self.cu.cuMemFreeHost(ptr)

    # ---- kernels ----

    def kernel(self, source: str, name: str, **options: Any) -> CudaKernel:
        """The kernel `name` (extern "C", or a template instance) of a file in the `cuda` folder;
        CompileError."""
        return self.kernels(source, [name], **options)[0]

    def kernels(
        self,
        source: str,
        names: Sequence[str],
        *,
        defines: dict[str, str | int] | None = None,
        extra_source: str = "",
        options: Sequence[str] = (),
        headers: dict[str, str] | None = None,
    ) -> list[CudaKernel]:
        """Several kernels of one file, compiled together and cached for the next call;
        CompileError.
        """
        key = (
            source,
            tuple((defines or {}).items()),
            extra_source,
            tuple(options),
            tuple((headers or {}).items()),
        )
        known = self._kernels.setdefault(key, {})
        missing = [name for name in dict.fromkeys(names) if name not in known]
        if missing:
            self.make_current()
            # Other kernels are extern "C".
            templates = [name for name in missing if not name.isidentifier()]
            cubin = compile_cubin(
                source,
                self.target,
                defines=defines,
                expressions=templates,
                extra_source=extra_source,
                options=options,
                headers=headers,
                folder=self.cuda,
                on_compile=self.on_compile,
            )
            module = self.check(
                self.cu.cuModuleLoadData(cubin.code), f"loading the kernels of {source}"
            )
            known.update({name: CudaKernel(self, source, name, module, cubin) for name in missing})
        return [known[name] for name in names]

    # ---- streams ----

    def new_stream(self) -> Stream:
        """A second stream beside `stream`; only events order the two."""
        return Stream(self)

    def event(self, timing: bool = False) -> Event:
        """A mark in a stream; with `timing`, `elapsed_ms` can measure from it."""
        return Event(self, timing)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Records what the device's stream enqueues into a graph instead of running it."""
        self.make_current()
        graph = Graph(self)
        graph.begin()
        self.capturing = graph
        try:
            yield graph
        except BaseException:
            self.capturing = None
            graph.abandon()
            raise
        self.capturing = None
        graph.end()

    def synchronize(self) -> None:
        """Waits for everything enqueued; CudaError names the kernels launched since the last
        synchronisation.
        """
        self.make_current()
        self.check(self.cu.cuCtxSynchronize(), "waiting for the GPU")
        self._recent.clear()

    def _enter(
        self, stream: Stream | None, buffers: Sequence[Buffer], array: np.ndarray | None = None
    ) -> Stream:
        """Common start of copies and fills: returns the stream to use; a capture keeps what the
        operation needs.
        """
        self.make_current()
        if self.capturing is not None:
            self.capturing.keep(buffers, array)
        return stream or self.stream

    # ---- errors ----

    def note(self, name: str) -> None:
        """Remembers a launched kernel, because its error may show only later."""
        self._recent.append(name)

    def check(self, result: tuple, doing: str) -> Any:
        """The value of a driver call that returned (status, value...). CudaError names the
        operation that failed and the kernels launched before it.
        """
        if result[0] != 0:
            raise self.error(result[0], doing)
        return result[1] if len(result) == 2 else result[1:]

    def error(self, status: Any, doing: str) -> CudaError:
        """The exception for a driver status."""
        words = self.cu.cuGetErrorString(status)[1]
        meaning = f" ({words.decode()})" if words else ""
        names = ", ".join(dict.fromkeys(self._recent))
        after = f"; launched since the last synchronisation: {names}" if names else ""
        return CudaError(f"{doing}: {status.name}{meaning}{after}")


def _free_pinned(cu: Any, context: Any, ptr: int) -> None:
    cu.cuCtxSetCurrent(context)
    _CURRENT.device = None  # the device of that context is not known here
    cu.cuMemFreeHost(ptr)


def _address(at: Buffer | Ptr, offset: int, nbytes: int) -> int:
    """The address `offset` bytes after `at`; ValueError if `nbytes` bytes from there leave the
    buffer.
    """
    owner = at.owner if isinstance(at, Ptr) else at
    address = (at.ptr if isinstance(at, Ptr) else at.address) + offset
    if (
        owner is not None
        and not owner.address <= address <= address + nbytes <= owner.address + owner.nbytes
    ):
        raise ValueError(
            f"{nbytes} bytes at offset {address - owner.address} are outside {owner!r}"
        )
    return address
