"""The interface that a GPU and the CPU emulator share: buffers, kernel arguments, errors, and the
protocols Kernel and Device.

A kernel wrapper is written against `Device` and `Kernel` and runs on either. Nothing in this module
calls a driver.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

Grid = int | tuple[int, ...]  # CTAs, or threads, along x, y, z


def capability(arch: str) -> int:
    """The compute capability of an architecture, times ten: 90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


class CudaError(RuntimeError):
    """A driver call or a kernel failed; the message names the kernels that may be the cause."""


class OutOfMemory(CudaError):
    """The device has less free memory than the program asked for."""

    def __init__(self, name: str, needed: int, free: int) -> None:
        """`needed` and `free` in bytes."""
        self.needed, self.free = needed, free
        super().__init__(
            f"out of GPU memory: {name or 'a buffer'} needs {needed / 2**20:.1f} MiB, "
            f"{free / 2**20:.1f} MiB are free; use a smaller context (-c), a smaller model, "
            "or stop other programs on the GPU"
        )


class OutOfHostMemory(CudaError):
    """The machine has less memory that can be page-locked than the program asked for."""

    def __init__(self, name: str, needed: int) -> None:
        """`needed` in bytes."""
        self.needed = needed
        super().__init__(
            f"out of host memory: {name or 'a buffer'} needs {needed / 2**20:.1f} MiB that can be "
            "page-locked; keep fewer layers there (--n-cpu-moe), or stop other programs"
        )


class Buffer:
    """Device memory, or memory of the host that kernels reach: `ptr` is its address, `nbytes` its
    size in bytes. `free()` or the last reference frees it.
    """

    __slots__ = ("__weakref__", "_release", "name", "nbytes", "pins", "ptr")

    def __init__(
        self, ptr: int, nbytes: int, name: str, release: Callable[[int, int], None]
    ) -> None:
        """`release(ptr, nbytes)` returns the memory to the device."""
        self.ptr: int | None = ptr
        self.nbytes = nbytes
        self.name = name
        self.pins = 0  # captured graphs that use the address
        self._release = release

    def at(self, offset: int) -> Ptr:
        """The address `offset` bytes into the buffer, as a kernel argument. ValueError if the
        offset is outside the buffer.
        """
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset {offset} is outside {self!r}")
        return Ptr(self.address + offset, self)

    def part(self, offset: int, nbytes: int) -> Buffer:
        """The `nbytes` bytes at `offset` as a buffer, which keeps this buffer alive and frees
        nothing. ValueError if the bytes are outside the buffer.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} are outside {self!r}")

        def release(ptr: int, nbytes: int, whole: Buffer = self) -> None:
            """The whole buffer is freed when no part refers to it."""

        return Buffer(self.address + offset, nbytes, self.name, release)

    @property
    def address(self) -> int:
        """`ptr`, checked: CudaError after free()."""
        if self.ptr is None:
            raise CudaError(f"{self!r} was freed")
        return self.ptr

    def free(self) -> None:
        """Returns the memory to the device; a second call does nothing. CudaError while a graph
        uses the address.
        """
        if self.pins:
            raise CudaError(f"{self!r} cannot be freed: {self.pins} captured graph(s) use it")
        if self.ptr is not None:
            ptr, self.ptr = self.ptr, None
            self._release(ptr, self.nbytes)

    def __del__(self) -> None:
        if getattr(self, "ptr", None) is not None:
            self.pins = 0
            self.free()

    def __repr__(self) -> str:
        return f"buffer {self.name!r} ({self.nbytes} bytes)"


class Ptr:
    """An address inside a buffer; the pointer keeps the buffer alive."""

    __slots__ = ("owner", "ptr")

    def __init__(self, ptr: int, owner: Buffer | None = None) -> None:
        self.ptr = ptr
        self.owner = owner

    def __add__(self, nbytes: int) -> Ptr:
        return Ptr(self.ptr + nbytes, self.owner)

    def __repr__(self) -> str:
        return f"Ptr({self.ptr:#x})"


Argument = Any  # Buffer, Ptr, None, int, float, bool, numpy scalar, ctypes structure


def buffers_of(args: Sequence[Argument]) -> list[Buffer]:
    """The buffers that the arguments point into."""
    owners = [arg.owner if isinstance(arg, Ptr) else arg for arg in args]
    return [owner for owner in owners if isinstance(owner, Buffer)]


CELL = 16  # alignment in bytes of every parameter in the packed arguments


class ArgumentPacker:
    """Converts Python arguments to a kernel's parameters: `data` holds the parameters, `pointers`
    their addresses.

    A Python int takes the width of the parameter; a float needs a parameter of 4 or 8 bytes; any
    other argument must have exactly the size of the parameter. Every launch reuses the buffers, so
    one packer serves one launch at a time.
    """

    def __init__(self, kernel: str, sizes: Sequence[int], kinds: str = "") -> None:
        """`sizes` in bytes; `kinds`, if known, has one letter per parameter: i, f, p or s for
        integer, float, pointer, structure.
        """
        self.kernel, self.sizes, self.kinds = kernel, tuple(sizes), kinds
        self._cells = [-(-size // CELL) * CELL for size in sizes]
        self.data = ctypes.create_string_buffer(sum(self._cells) + CELL)
        start = -(-ctypes.addressof(self.data) // CELL) * CELL
        self._offset = start - ctypes.addressof(self.data)
        offsets = [start + sum(self._cells[:i]) for i in range(len(sizes))]
        self.pointers = (ctypes.c_void_p * max(1, len(sizes)))(*offsets)
        self.address = ctypes.addressof(self.pointers)
        self._packings: dict[tuple[type, ...], tuple[struct.Struct, list[Callable]]] = {}

    def pack(self, args: Sequence[Argument]) -> None:
        """Writes the arguments to where `pointers` point. TypeError or ValueError names the kernel
        and the parameter.
        """
        types = tuple(map(type, args))
        packing = self._packings.get(types) or self._packing(types, args)
        convert = packing[1]
        try:
            packing[0].pack_into(
                self.data, self._offset, *[f(arg) for f, arg in zip(convert, args, strict=True)]
            )
        except struct.error:
            self._explain(args)

    def cells(self) -> bytes:
        """The packed parameters, each at a multiple of CELL bytes."""
        return self.data.raw[self._offset : self._offset + sum(self._cells)]

    def _packing(
        self, types: tuple[type, ...], args: Sequence[Argument]
    ) -> tuple[struct.Struct, list[Callable]]:
        if len(args) != len(self.sizes):
            raise TypeError(
                f"kernel {self.kernel} has {len(self.sizes)} parameters, not {len(args)}"
            )
        parts = [self._part(index, arg) for index, arg in enumerate(args)]
        text = "<" + "".join(
            code + f"{cell - size}x"
            for (code, _), cell, size in zip(parts, self._cells, self.sizes, strict=True)
        )
        packing = struct.Struct(text), [convert for _, convert in parts]
        # The type of an array does not determine its size.
        if not any(isinstance(arg, np.ndarray | np.void) for arg in args):
            self._packings[types] = packing
        return packing

    def _part(self, index: int, arg: Argument) -> tuple[str, Callable]:
        """The struct code of a parameter, and the function that converts `arg` to its value."""
        size = self.sizes[index]
        kind = self.kinds[index] if self.kinds else ""
        if isinstance(arg, Buffer | Ptr) and size == 8 and kind in ("", "p", "i"):
            return "Q", operator.attrgetter("ptr")
        if arg is None and size == 8 and kind in ("", "p"):
            return "Q", lambda _: 0
        if isinstance(arg, int) and size in _INTEGERS and kind != "f":
            modulus = 1 << 8 * size
            return _INTEGERS[
                size
            ], lambda value: value - modulus if modulus >> 1 <= value < modulus else value
        if isinstance(arg, float) and size in (4, 8) and kind in ("", "f"):
            return "f" if size == 4 else "d", float
        if isinstance(arg, np.generic | np.ndarray) and arg.nbytes == size and _fits(arg, kind):
            return f"{size}s", lambda value: value.tobytes()
        if isinstance(arg, ctypes.Structure | ctypes.Array) and ctypes.sizeof(arg) == size:
            return f"{size}s", bytes
        raise TypeError(
            f"kernel {self.kernel}: parameter {index} has {size} bytes{_KINDS[kind]}, "
            f"the argument is {arg!r} ({type(arg).__name__})"
        )

    def _explain(self, args: Sequence[Argument]) -> None:
        for index, (arg, size) in enumerate(zip(args, self.sizes, strict=True)):
            if isinstance(arg, Buffer) and arg.ptr is None:
                raise CudaError(f"kernel {self.kernel}: argument {index}, {arg!r}, was freed")
            if isinstance(arg, int) and not -(1 << 8 * size - 1) <= arg < 1 << 8 * size:
                raise ValueError(
                    f"kernel {self.kernel}: argument {index}, {arg}, does not fit its {size} bytes"
                )
        raise ValueError(
            f"kernel {self.kernel}: arguments {tuple(args)!r} do not fit parameters of "
            f"{self.sizes} bytes"
        )


_INTEGERS = {1: "b", 2: "h", 4: "i", 8: "q"}
_KINDS = {
    "": "",
    "i": " (an integer)",
    "f": " (a float)",
    "p": " (a pointer)",
    "s": " (a structure)",
}


def _fits(arg: np.generic | np.ndarray, kind: str) -> bool:
    return {"i": arg.dtype.kind in "iub", "f": arg.dtype.kind == "f", "p": False}.get(kind, True)


def three(extent: Grid) -> tuple[int, int, int]:
    """The extent of a grid or of a CTA along x, y, z."""
    x, y, z = (extent, 1, 1) if isinstance(extent, int) else (*extent, 1, 1)[:3]
    return int(x), int(y), int(z)


class Kernel(Protocol):
    """A kernel that can be launched."""

    name: str

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
        """Launches `grid` CTAs of `threads` threads with `smem` bytes of dynamic shared memory.

        pdl: the kernel may start before the previous kernel ends (programmatic dependent launch,
            compute capability 9.0 and up; ignored on older GPUs). The kernel must call
            grid_dependency_wait.
        cluster: CTAs along x that form a thread-block cluster (compute capability 9.0 and up).
        cooperative: all CTAs must be resident at the same time; CudaError if the GPU cannot hold
            all of them.
        """


class Device(Protocol):
    """Memory and kernels of a GPU, or of the emulator."""

    @property
    def arch(self) -> str:
        """The architecture that kernels may use, such as "sm_90a"."""

    @property
    def sm_count(self) -> int:
        """Number of streaming multiprocessors (SMs)."""

    @property
    def shared_bytes(self) -> int:
        """Maximum bytes of shared memory per CTA."""

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates uninitialised memory; OutOfMemory."""

    def zeros(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates memory and fills it with zeros; OutOfMemory."""

    def alloc_host(self, nbytes: int, name: str = "") -> Buffer:
        """Allocates uninitialised, page-locked memory of the host, which kernels read and `copy`
        takes; OutOfHostMemory.
        """

    def copy(self, to: Buffer | Ptr, source: Buffer | Ptr, nbytes: int, stream: Any = None) -> None:
        """Copies from buffer to buffer, in stream order."""

    def fill(self, buffer: Buffer, byte: int) -> None:
        """Sets every byte, in stream order."""

    def upload(
        self, to: Buffer | Ptr, array: np.ndarray, offset: int = 0, stream: Any = None
    ) -> None:
        """Copies a host array into a buffer, in stream order. The call reads pageable memory before
        it returns.
        """

    def download(
        self, source: Buffer | Ptr, dtype: Any, shape: int | tuple[int, ...], offset: int = 0
    ) -> np.ndarray:
        """A host copy of what the stream has written; waits for the stream."""

    def kernel(self, source: str, name: str, **compile_options: Any) -> Kernel:
        """The kernel `name` (extern "C", or a template instance) of a file in the `cuda` folder."""

    def kernels(self, source: str, names: Sequence[str], **compile_options: Any) -> list[Kernel]:
        """Several kernels of one file, compiled together."""

    def capture(self) -> AbstractContextManager[Any]:
        """Records what the `with` block enqueues into a graph, to `launch()` later."""

    def synchronize(self) -> None:
        """Waits for everything enqueued; CudaError if a kernel failed."""
