"""cuBLAS: what it is told, against its own rules in numpy; what is said where there is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from ggpy.device import cublas
from ggpy.device.base import Buffer, CudaError
from ggpy.device.cublas import Cublas, CublasMissing, gemm_arguments


class Failed(Exception):
    """What the bindings raise."""


class Bindings(ModuleType):
    """nvmath.bindings.cublas as far as it is used, on numpy arrays at made-up addresses."""

    cuBLASError = Failed

    def __init__(self) -> None:
        super().__init__("nvmath.bindings.cublas")
        self.memory: dict[int, np.ndarray] = {}
        self.calls: list[tuple] = []

    def get_property(self, which: int) -> int:
        return 13

    def create(self) -> int:
        return 7

    def set_stream(self, handle: int, stream: int) -> None:
        self.calls.append(("stream", handle, stream))

    def set_workspace(self, handle: int, workspace: int, nbytes: int) -> None:
        self.calls.append(("workspace", handle, workspace, nbytes))

    def destroy(self, handle: int) -> None:
        self.calls.append(("destroy", handle))

    def gemm_ex(
        self, handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c,
        c_type, ldc, compute, algorithm,
    ) -> None:  # fmt: skip
        """C[m, n] = alpha op(A) op(B) + beta C, all of them column by column."""
        if compute != 68 or algorithm != -1 or (a_type, b_type, c_type) != (2, 2, 0):
            raise Failed("not halves with sums in float")
        left = self._columns(a, lda, *((m, k) if transa == 0 else (k, m)))
        right = self._columns(b, ldb, *((k, n) if transb == 0 else (n, k)))
        left, right = (left.T if transa else left), (right.T if transb else right)
        to = self._columns(c, ldc, m, n)
        old = np.zeros_like(to) if _float(beta) == 0 else _float(beta) * to
        to[...] = _float(alpha) * left.astype(np.float64) @ right.astype(np.float64) + old

    def _columns(self, address: int, leading: int, rows: int, columns: int) -> np.ndarray:
        """The matrix as numpy sees it; it does not read past its last column."""
        flat = self.memory[address]
        step = flat.itemsize
        shape, strides = (rows, columns), (step, step * leading)
        assert flat.size >= (columns - 1) * leading + rows
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


def _float(address: int) -> float:
    import ctypes

    return ctypes.c_float.from_address(address).value


class Device:
    """What a handle takes from a GPU."""

    def __init__(self) -> None:
        self.stream, self.capturing = SimpleNamespace(handle=5), None
        self.noted: list[str] = []
        self.note = self.noted.append

    def make_current(self) -> None:
        pass

    def alloc(self, nbytes: int, name: str) -> Buffer:
        return Buffer(900, nbytes, name, lambda *_: None)


@pytest.fixture
def bindings(monkeypatch):
    """Bindings in place of nvmath's."""
    found = Bindings()
    monkeypatch.setattr(cublas, "load", lambda: found)
    return found


def memory(bindings: Bindings, address: int, array: np.ndarray) -> Buffer:
    bindings.memory[address] = array.reshape(-1)
    return Buffer(address, array.nbytes, str(address), lambda *_: None)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 8), (33, 1, 16), (1, 40, 24)], ids=str)
def test_the_product(bindings, shape, add):
    """Rows of y are `stride` apart, and what lies between them stays."""
    (n_tokens, n_rows, k), rng = shape, np.random.default_rng(shape)
    x = rng.standard_normal((n_tokens, k)).astype(np.float16)
    w = rng.standard_normal((n_rows, k)).astype(np.float16)
    y = rng.standard_normal((n_tokens, n_rows + 3)).astype(np.float32)
    expected = y.copy()
    expected[:, :n_rows] *= add
    expected[:, :n_rows] += x.astype(np.float64) @ w.astype(np.float64).T
    places = [memory(bindings, i, array) for i, array in enumerate((x, w, y), 1)]
    device = Device()
    handle = Cublas(device)
    handle.multiply(*places, n_tokens, n_rows, k, stride=n_rows + 3, add=add)
    np.testing.assert_allclose(bindings.memory[3].reshape(y.shape), expected, atol=1e-5)
    assert bindings.calls == [("stream", 7, 5), ("workspace", 7, 900, cublas.WORKSPACE)]
    assert device.noted == ["cublasGemmEx"]
    del handle
    assert bindings.calls[-1] == ("destroy", 7)


def test_arguments_are_whole_numbers_in_the_right_places():
    before, between, after = gemm_arguments(1, 2, 3, n_tokens=4, n_rows=5, k=6, stride=7)
    assert (before, between, after) == ((1, 0, 5, 4, 6), (2, 2, 6, 1, 2, 6), (3, 0, 7, 68, -1))


def test_a_graph_keeps_what_it_uses(bindings):
    device, kept = Device(), []
    handle = Cublas(device)
    device.capturing = SimpleNamespace(add=lambda name, buffers: kept.append((name, buffers)))
    x, w, y = (memory(bindings, i, np.zeros(64, t)) for i, t in ((1, "f2"), (2, "f2"), (3, "f4")))
    handle.multiply(x, w, y, 8, 8, 8, stride=8)
    ((name, buffers),) = kept
    assert name == "cublasGemmEx" and buffers[:3] == [x, w, y] and buffers[3].nbytes == 32 << 20


def test_an_error_says_which_product(bindings):
    handle = Cublas(Device())
    bindings.gemm_ex = lambda *_: (_ for _ in ()).throw(Failed("CUBLAS_STATUS_NOT_SUPPORTED"))
    x = memory(bindings, 1, np.zeros(64, "f2"))
    with pytest.raises(CudaError, match=r"cuBLAS: \[4, 8\] x \[8, 2\]: CUBLAS_STATUS_NOT"):
        handle.multiply(x, x, x, 4, 2, 8, stride=2)


def test_without_the_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath", None)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(CublasMissing, match=r"nvmath-python .* pip install 'ggpy\[cublas\]'"):
        cublas.load()


def test_without_the_library(monkeypatch):
    found = Bindings()
    found.get_property = lambda _: (_ for _ in ()).throw(Failed("libcublas.so.13\nnot found"))
    package = ModuleType("nvmath.bindings")
    package.cublas = found
    monkeypatch.setitem(sys.modules, "nvmath", ModuleType("nvmath"))
    monkeypatch.setitem(sys.modules, "nvmath.bindings", package)
    monkeypatch.setattr(cublas, "_preload", lambda: None)
    words = r"the library cuBLAS is not installed: pip install 'ggpy\[cublas\]' \(libcublas.so.13\)"
    with pytest.raises(CublasMissing, match=words):
        cublas.load()


def test_libraries_of_a_toolkit(monkeypatch, tmp_path):
    for name in ("libcublas.so.12", "libcublas.so.13", "libcublasLt.so.13", "libcublas.so.13.1.0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cublas, "library_folders", lambda: [tmp_path])
    assert [p.name for p in cublas._libraries("cublas")] == ["libcublas.so.13", "libcublas.so.12"]
    assert [p.name for p in cublas._libraries("cublasLt")] == ["libcublasLt.so.13"]
