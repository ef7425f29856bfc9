"""A device that runs CUDA kernels on the CPU, with the interface of ggpy.device.base.

Memory and kernels live in a separate process (host/). If that process ends (a sanitizer's report,
an invalid address, an endless loop), the device raises EmulatorError and the test run continues.
With `sanitize=True`, accesses out of bounds and undefined arithmetic are errors too, with the file
and line of the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from emulator import build
from emulator.process import EmulatorError, Host

from ggpy.device.base import (
    Argument,
    ArgumentPacker,
    Buffer,
    CudaError,
    Grid,
    OutOfMemory,
    Ptr,
    buffers_of,
    three,
)
from ggpy.device.compile import CompileError
from ggpy.util.paths import cuda_dir


class EmulatedKernel:
    """A kernel. Launches finish before the call returns."""

    def __init__(self, device: Emulated, name: str, library: int, index: int) -> None:
        self.device, self.name = device, name
        reply = device.host.ask("N", library, payload=f"entry_{index}".encode())
        self._entry, count, *facts = struct.unpack(f"<{len(reply) // 8}Q", reply)
        self._packer = ArgumentPacker(
            name, facts[0 : 2 * count : 2], "".join(map(chr, facts[1::2]))
        )

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
        stream: Any = None,
    ) -> None:
        """See ggpy.device.base.Kernel."""
        shape, block = three(grid), three(threads)
        if not (
            0 < math.prod(block) <= 1024
            and all(n > 0 for n in shape)
            and max(shape[1:]) < 65536
            and 0 < cluster <= 8
            and shape[0] % cluster == 0
        ):
            raise CudaError(f"kernel {self.name}: invalid launch of grid {shape}, threads {block}")
        self._packer.pack(args)
        call = (shape, block, smem, cooperative, cluster, self._packer.cells(), buffers_of(args))
        self.device.enqueue(lambda: self._run(*call), call[-1])

    def _run(
        self,
        grid: tuple,
        threads: tuple,
        smem: int,
        cooperative: bool,
        cluster: int,
        cells: bytes,
        buffers: list[Buffer],
    ) -> None:
        name, device = self.name.encode(), self.device
        launch = *grid, *threads, smem, cooperative, cluster
        head = struct.pack("<12Q", *launch, device.order, device.seconds, len(name))
        payload = (head + name).ljust(-(-(len(head) + len(name)) // 16) * 16, b"\0") + cells
        device.read(buffers)
        try:
            device.host.ask("K", self._entry, payload=payload, seconds=device.seconds + 10)
        except EmulatorError as error:
            shape = f"grid {grid}, threads {threads}, {smem} bytes of dynamic shared memory"
            what = f"kernel {self.name}, {shape}"
            raise EmulatorError(
                f"{what}:\n{error}\n  buffers: {', '.join(map(describe, buffers))}"
            ) from None
        device.written(buffers)


def describe(buffer: Buffer) -> str:
    """A buffer's name, address range and size."""
    return (
        f"{buffer.name or 'unnamed'} [{buffer.ptr or 0:#x}, {(buffer.ptr or 0) + buffer.nbytes:#x})"
    )


class EmulatedGraph:
    """The operations of a capture."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.buffers: list[Buffer] = []

    def launch(self, stream: Any = None) -> None:
        """Run the operations."""
        for call in self.calls:
            call()

    def close(self) -> None:
        """Release the buffers."""
        for buffer in self.buffers:
            buffer.pins -= 1
        self.calls, self.buffers = [], []


class EmulatedStream:
    """A stream. All work finishes before the call returns."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait(self, event: EmulatedEvent) -> None:
        """Nothing is under way."""


class EmulatedEvent:
    """An event. The emulator measures no time."""

    def record(self, stream: Any = None) -> EmulatedEvent:
        """Nothing is under way."""
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


class Emulated:
    """The device. `order` is the order of CTAs, warps and lanes: 0 forward, 1 backward, else a
    random seed.

    A kernel whose result depends on `order` lacks a barrier. `seconds` limits the time of a launch.
    Raises EmulatorUnavailable if the emulator cannot be built on this machine.
    """

    def __init__(
        self,
        *,
        cuda: Path | None = None,
        sanitize: bool = False,
        order: int = 0,
        seconds: int = 60,
        sm_count: int = 4,
    ) -> None:
        self.cuda, self.sanitize, self.order, self.seconds = (
            cuda or cuda_dir(),
            sanitize,
            order,
            seconds,
        )
        self.sm_count = sm_count
        self.shared_bytes = 227 << 10  # per CTA, as on sm_90
        self.arch = "sm_80"  # the features that wrappers may use; sm_90a is emulated in part
        self.stream = EmulatedStream()
        self.used_bytes = self.host_bytes = 0
        self.host = Host(build.host_program(sanitize))
        self._libraries: dict[tuple, dict[str, EmulatedKernel]] = {}
        self._graph: EmulatedGraph | None = None
        self._mapped: dict[int, np.ndarray] = {}

    @property
    def free_bytes(self) -> int:
        """The maximum size of an allocation minus the allocated bytes."""
        return (1 << 40) - self.used_bytes

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        """Memory of `nbytes`, filled with 0xff (NaN in every float format)."""
        if nbytes >= 1 << 40:
            raise OutOfMemory(name, nbytes, 1 << 40)
        (ptr,) = struct.unpack("<Q", self.host.ask("A", nbytes))
        self.used_bytes += nbytes
        return Buffer(ptr, nbytes, name, self._release)

    def zeros(self, nbytes: int, name: str = "") -> Buffer:
        """Memory of zeros."""
        buffer = self.alloc(nbytes, name)
        self.fill(buffer, 0)
        return buffer

    def fill(self, buffer: Buffer, byte: int, stream: Any = None) -> None:
        """Set every byte."""
        self.enqueue(
            lambda: self.host.ask("S", buffer.address, byte << 56 | buffer.nbytes), [buffer]
        )

    def pinned(self, nbytes: int) -> np.ndarray:
        """Host memory."""
        return np.empty(nbytes, np.uint8)

    def alloc_host(self, nbytes: int, name: str = "") -> Buffer:
        """Memory that stands for page-locked memory of the host."""
        (ptr,) = struct.unpack("<Q", self.host.ask("A", nbytes))
        self.host_bytes += nbytes
        return Buffer(ptr, nbytes, name, self._release_host)

    def mapped(self, nbytes: int) -> tuple[np.ndarray, Buffer]:
        """Host memory, and the device address of the same memory."""
        memory, buffer = np.empty(nbytes, np.uint8), self.alloc(nbytes, "host memory")
        self._mapped[buffer.address] = memory
        return memory, buffer

    def read(self, buffers: Sequence[Buffer]) -> None:
        """Update mapped buffers whose host memory may have changed."""
        for buffer in buffers:
            memory = self._mapped.get(buffer.address)
            if memory is not None:
                self.upload(buffer, memory)

    def written(self, buffers: Sequence[Buffer]) -> None:
        """Update host memory of mapped buffers that kernels may have written."""
        for buffer in buffers:
            memory = self._mapped.get(buffer.address)
            if memory is not None:
                memory[:] = self.download(buffer, np.uint8, memory.shape)

    def upload(
        self, to: Buffer | Ptr, array: np.ndarray, offset: int = 0, stream: Any = None
    ) -> None:
        """Copy a host array to the device."""
        data = np.ascontiguousarray(array)
        address = self._range(to, offset, data.nbytes)
        copied = data.view(np.ndarray)
        self.enqueue(
            lambda: self.host.ask("W", address, payload=copied.tobytes()), buffers_of([to])
        )

    def upload_array(self, array: np.ndarray, name: str = "") -> Buffer:
        """A buffer that holds `array`."""
        buffer = self.alloc(array.nbytes, name)
        self.upload(buffer, array)
        return buffer

    def download(
        self, source: Buffer | Ptr, dtype: Any, shape: int | tuple[int, ...], offset: int = 0
    ) -> np.ndarray:
        """Return a host copy."""
        result = np.empty(shape, dtype)
        data = self.host.ask("R", self._range(source, offset, result.nbytes), result.nbytes)
        return np.frombuffer(bytearray(data), dtype).reshape(result.shape)

    def download_into(
        self, array: np.ndarray, source: Buffer | Ptr, offset: int = 0, stream: Any = None
    ) -> None:
        """Copy device memory into a host array."""
        self.enqueue(
            lambda: array.__setitem__(..., self.download(source, array.dtype, array.shape, offset)),
            buffers_of([source]),
        )

    def copy(self, to: Buffer | Ptr, source: Buffer | Ptr, nbytes: int, stream: Any = None) -> None:
        """Copy from device to device."""
        target, origin = self._range(to, 0, nbytes), self._range(source, 0, nbytes)
        move = lambda: self.host.ask("W", target, payload=self.host.ask("R", origin, nbytes))  # noqa: E731
        self.enqueue(move, buffers_of([to, source]))

    def tensor_map(
        self, at: Buffer | Ptr, shape: tuple[int, int], box: tuple[int, int]
    ) -> ctypes.Array:
        """A TensorMap of tensor.h, as Gpu.tensor_map makes them for GPUs."""
        rows, columns = shape
        address = self._range(at, 0, 2 * rows * columns)
        return (ctypes.c_uint64 * 16)(address, rows, columns, *box)

    def kernel(self, source: str, name: str, **options: Any) -> EmulatedKernel:
        """See ggpy.device.base.Device."""
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
    ) -> list[EmulatedKernel]:
        """See ggpy.device.base.Device. Raises CompileError; ignores NVRTC's `options`."""
        defines = defines or {}
        key = source, tuple(defines.items()), extra_source, str(headers)
        known = self._libraries.setdefault(key, {})
        missing = [name for name in dict.fromkeys(names) if name not in known]
        if missing:
            try:
                path = build.kernel_library(
                    self.cuda, source, missing, defines, extra_source, self.sanitize, headers
                )
            except build.BuildError as error:
                raise CompileError(str(error)) from None
            (library,) = struct.unpack("<Q", self.host.ask("L", payload=str(path).encode()))
            known.update(
                {name: EmulatedKernel(self, name, library, i) for i, name in enumerate(missing)}
            )
        return [known[name] for name in names]

    def new_stream(self) -> EmulatedStream:
        """A stream."""
        return EmulatedStream()

    def event(self, timing: bool = False) -> EmulatedEvent:
        """An event."""
        return EmulatedEvent()

    @contextlib.contextmanager
    def capture(self) -> Iterator[EmulatedGraph]:
        """Record enqueued operations instead of running them."""
        graph = self._graph = EmulatedGraph()
        try:
            yield graph
        finally:
            self._graph = None

    def synchronize(self) -> None:
        """Nothing is under way."""

    def enqueue(self, call: Callable[[], Any], buffers: Sequence[Buffer]) -> None:
        """Run a call, or record it during a capture."""
        if self._graph is None:
            call()
            return
        self._graph.calls.append(call)
        for buffer in buffers:
            buffer.pins += 1
            self._graph.buffers.append(buffer)

    def close(self) -> None:
        """End the process and free all buffers."""
        self.host.close()

    def __enter__(self) -> Emulated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _range(self, at: Buffer | Ptr, offset: int, nbytes: int) -> int:
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

    def _release_host(self, ptr: int, nbytes: int) -> None:
        self.host_bytes -= nbytes
        self.host.free(ptr)

    def _release(self, ptr: int, nbytes: int) -> None:
        self._mapped.pop(ptr, None)
        self.used_bytes -= nbytes
        self.host.free(ptr)
