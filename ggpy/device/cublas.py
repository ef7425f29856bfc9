"""cuBLAS through nvmath-python's bindings: one product of halves, enqueued in the device's stream.

Both are optional, and nothing of them is imported before a `Cublas` is made. Knows no weights.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import Buffer, CudaError, Ptr, buffers_of
from .toolkit import library_folders

INSTALL = "pip install 'ggpy[cublas]'"
WORKSPACE = 32 << 20  # bytes, as NVIDIA recommends for Hopper; its own cannot go into graphs
NO_TRANSPOSE, TRANSPOSE = 0, 1  # cublasOperation_t
FLOAT, HALF = 0, 2  # cudaDataType_t: CUDA_R_32F, CUDA_R_16F
COMPUTE_32F, DEFAULT_ALGORITHM = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t


class CublasMissing(ValueError):
    """nvmath-python or cuBLAS is not installed; the text says what to install."""


def load() -> Any:
    """The module nvmath.bindings.cublas, with its library to be found; CublasMissing."""
    try:
        from nvmath.bindings import cublas
    except ImportError as error:
        raise CublasMissing(f"nvmath-python cannot be used ({error}): {INSTALL}") from None
    try:
        _preload()
        cublas.get_property(0)
    except Exception as error:  # the bindings' and cuda-pathfinder's own kinds
        detail = str(error).splitlines()[0]
        raise CublasMissing(f"the library cuBLAS is not installed: {INSTALL} ({detail})") from None
    return cublas


def _preload() -> None:
    """A toolkit's library that no search path leads to: once loaded, the bindings take it."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    for name in ("cublasLt", "cublas"):
        try:
            load_nvidia_dynamic_lib(name)
        except RuntimeError:
            for path in _libraries(name):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                    break


def _libraries(name: str) -> Iterator[Path]:
    """Files of a library that is named lib<name>.so.<major>."""
    for folder in library_folders():
        yield from sorted(folder.glob(f"lib{name}.so.1[2-9]"), reverse=True)


def gemm_arguments(
    x: int, w: int, y: int, n_tokens: int, n_rows: int, k: int, stride: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What cublasGemmEx is told for y[n_tokens, n_rows] = x[n_tokens, k] w[n_rows, k]^T, of
    addresses, less its scalars: before alpha, between alpha and beta, after beta.

    It thinks in columns: rows of w are columns of a matrix [k, n_rows] that is to be transposed,
    and y is [n_rows, n_tokens], `stride` floats from one token to the next.
    """
    before = (TRANSPOSE, NO_TRANSPOSE, n_rows, n_tokens, k)
    return before, (w, HALF, k, x, HALF, k), (y, FLOAT, stride, COMPUTE_32F, DEFAULT_ALGORITHM)


class Cublas:
    """A handle that works in the device's own stream."""

    def __init__(self, device: Any) -> None:
        """CublasMissing."""
        self.device, self._cublas = device, load()
        device.make_current()
        with self._errors("opening cuBLAS"):
            self._handle = self._cublas.create()
            self._cublas.set_stream(self._handle, int(device.stream.handle))
            self._workspace = device.alloc(WORKSPACE, "cuBLAS")
            self._cublas.set_workspace(self._handle, self._workspace.address, WORKSPACE)
        self._scalars = (ctypes.c_float(0.0), ctypes.c_float(1.0))

    def multiply(
        self,
        x: Buffer | Ptr,
        w: Buffer | Ptr,
        y: Buffer | Ptr,
        n_tokens: int,
        n_rows: int,
        k: int,
        *,
        stride: int,
        add: bool = False,
    ) -> None:
        """Enqueue float y[n_tokens, n_rows] (+)= half x[n_tokens, k] half w[n_rows, k]^T, summed in
        float; y has `stride` numbers from token to token.
        """
        device = self.device
        device.make_current()
        device.note("cublasGemmEx")
        if device.capturing is not None:
            device.capturing.add("cublasGemmEx", buffers_of([x, w, y, self._workspace]))
        zero, one = map(ctypes.addressof, self._scalars)
        at = [memory.address if isinstance(memory, Buffer) else memory.ptr for memory in (x, w, y)]
        before, between, after = gemm_arguments(at[0], at[1], at[2], n_tokens, n_rows, k, stride)
        with self._errors(f"cuBLAS: [{n_tokens}, {k}] x [{k}, {n_rows}]"):
            scalar = one if add else zero
            self._cublas.gemm_ex(self._handle, *before, one, *between, scalar, *after)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._cublas.cuBLASError as error:
            raise CudaError(f"{doing}: {error}") from None

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            with contextlib.suppress(Exception):  # the interpreter may be ending
                self.device.make_current()
                self._cublas.destroy(self._handle)
