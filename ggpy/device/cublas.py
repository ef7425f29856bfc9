"""cuBLAS through the bindings of nvmath-python: one f16 GEMM, enqueued in the device's stream.

Both packages are optional and are imported when a `Cublas` is constructed. This module knows no
weights.
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
# bytes, as NVIDIA recommends for Hopper; a graph cannot capture cuBLAS's default workspace
WORKSPACE = 32 << 20
NO_TRANSPOSE, TRANSPOSE = 0, 1  # cublasOperation_t
FLOAT, HALF = 0, 2  # cudaDataType_t: CUDA_R_32F, CUDA_R_16F
COMPUTE_32F, DEFAULT_ALGORITHM = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t


class CublasMissing(ValueError):
    """nvmath-python or cuBLAS is not installed; the message says what to install."""


def load() -> Any:
    """The module nvmath.bindings.cublas, with its library loaded; CublasMissing."""
    try:
        from nvmath.bindings import cublas
    except ImportError as error:
        raise CublasMissing(f"nvmath-python cannot be used ({error}): {INSTALL}") from None
    try:
        _preload()
        cublas.get_property(0)
    except Exception as error:  # the bindings and cuda-pathfinder raise exceptions of their types
        detail = str(error).splitlines()[0]
        raise CublasMissing(f"the library cuBLAS is not installed: {INSTALL} ({detail})") from None
    return cublas


def _preload() -> None:
    """Loads the library of a CUDA toolkit that is on no search path; the bindings then use it."""
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
    """Library files with the name lib<name>.so.<major>."""
    for folder in library_folders():
        yield from sorted(folder.glob(f"lib{name}.so.1[2-9]"), reverse=True)


def gemm_arguments(
    x: int, w: int, y: int, n_tokens: int, n_rows: int, k: int, stride: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Arguments of cublasGemmEx for y[n_tokens, n_rows] = x[n_tokens, k] w[n_rows, k]^T, without
    the scalars: (before alpha, between alpha and beta, after beta). x, w, y are addresses.

    cuBLAS is column-major: w is a matrix [k, n_rows] that is transposed, and y is [n_rows,
    n_tokens] with a leading dimension of `stride` floats.
    """
    before = (TRANSPOSE, NO_TRANSPOSE, n_rows, n_tokens, k)
    return before, (w, HALF, k, x, HALF, k), (y, FLOAT, stride, COMPUTE_32F, DEFAULT_ALGORITHM)


class Cublas:
    """A cuBLAS handle that works in the device's stream."""

    def __init__(self, device: Any) -> None:
        """CublasMissing if nvmath-python or cuBLAS is not installed."""
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
        """Enqueues f32 y[n_tokens, n_rows] (+)= f16 x[n_tokens, k] f16 w[n_rows, k]^T, accumulated
        in f32. Consecutive tokens of y are `stride` floats apart.
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
