"""--gemm cublas: a whole model through it, and what it does not go with."""

from __future__ import annotations

import numpy as np
import pytest
from cases import nmse
from counting_device import CountingDevice
from products import Products
from steps import for_groups

from ggpy import arch
from ggpy.backends import choose
from ggpy.backends.cuda import gemm, weights_f16
from ggpy.backends.cuda.arrays import Array, Matrix
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.plan import GemmKernels, Planner
from ggpy.backends.interface import Step
from ggpy.backends.numpy.backend import Reference
from ggpy.device.base import Buffer
from ggpy.device.cublas import Cublas, CublasMissing
from ggpy.gguf import File
from ggpy.kernels.layout.pack import CODES, PLAIN

TOLERANCE = 1e-5  # as of the products that it stands for
PROMPT = np.random.default_rng(4).integers(5, 350, 50)


class InNumpy:
    """Cublas on a device that is not a GPU."""

    def __init__(self, device) -> None:
        self.device, self.shapes = device, []

    def multiply(self, x, w, y, n_tokens, n_rows, k, *, stride, add=False):
        self.shapes.append((n_tokens, n_rows, k))
        get = self.device.download
        product = get(x, np.float16, (n_tokens, k)).astype(np.float32) @ get(
            w, np.float16, (n_rows, k)
        ).T.astype(np.float32)
        for token in range(n_tokens):  # what lies between rows is not touched
            at = y.at(4 * token * stride) if isinstance(y, Buffer) else y + 4 * token * stride
            old = get(at, np.float32, (n_rows,)) if add else 0
            self.device.upload(at, product[token] + old)


def step(ids: np.ndarray, position: int) -> Step:
    """Of one sequence, in page 1; all logits."""
    n = np.arange(len(ids), dtype=np.int32)
    table = np.array([[1]], np.int32)
    return Step(np.asarray(ids).astype(np.int32), n + position, 0 * n, (table,), n)


def batch(position: int, n: int = 40) -> Step:
    """A token of each of n sequences."""
    i = np.arange(n, dtype=np.int32)
    return Step(5 + i, 0 * i + position, i, (i[:, None].copy(),), i)


def batches(ops, path) -> np.ndarray:
    """Logits of four tokens of each of 40 sequences: directly, recorded, replayed twice."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64, n_seq=40)
    ops.allocate_cache(decoder.cache_shape(40, 64, 64))
    return np.concatenate([ops.read(decoder.run(batch(i))) for i in range(4)])


def logits(ops, path) -> np.ndarray:
    """Of a prompt, and of a token after it."""
    with File(path) as file:
        decoder = arch.load(file, ops, 64)
    shape = decoder.cache_shape(2, 64, 64)
    ops.allocate_cache(shape)
    steps = step(PROMPT, 0), step(np.array([9]), len(PROMPT))
    return np.concatenate([ops.read(decoder.run(for_groups(s, shape))) for s in steps])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_model(emulator, monkeypatch, tiny_path, architecture):
    """Every product of the prompt, with caps and norms after them; in pieces; none of decode."""
    made = []
    monkeypatch.setattr(weights_f16, "SCRATCH", 1 << 14)
    monkeypatch.setattr(gemm, "Cublas", lambda device: (made.append(InNumpy(device)), made[0])[1])
    expected = logits(Reference(1), tiny_path(architecture))
    found = logits(Cuda(emulator, gemm="cublas"), tiny_path(architecture))
    assert nmse(found, expected) <= TOLERANCE
    (product,) = made
    assert {n for n, _, _ in product.shapes} == {len(PROMPT)}
    assert max(2 * rows * k for _, rows, k in product.shapes) <= 1 << 14
    assert len(product.shapes) > 2 * 7 + 1


def test_packed_activations_are_not_read_as_rows(emulator, monkeypatch):
    monkeypatch.setattr(gemm, "Cublas", InNumpy)
    products = Products(emulator, gemm="cublas")
    x = Array(emulator.alloc(1), np.float16, (32, 64), 64, CODES)
    y = Array(emulator.alloc(1), np.float32, (32, 64), 64)
    w = Matrix(64, 64, None, None)
    assert products.plan([w], 32).x_layout == PLAIN
    with pytest.raises(RuntimeError, match="packed for tiles"):
        products.multiply(x, [w], [y])


def test_scales_of_rows_and_odd_columns_are_for_others():
    policy = {"gemm": "cublas"}
    takes = Planner(GemmKernels(CountingDevice()), "sm_80", **policy).by_cublas
    scale = CountingDevice().alloc(64)
    assert takes(Matrix(64, 64, None, None), 32)
    assert not takes(Matrix(64, 64, None, None), 31)
    assert not takes(Matrix(64, 12, None, None), 32)
    assert not takes(Matrix(64, 64, None, None, scale), 32)
    assert not takes(Matrix(64, 64, None, None, activations="int8"), 32)


def test_a_missing_library_ends_the_program(emulator, monkeypatch):
    def missing(device):
        raise CublasMissing("pip install 'ggpy[cublas]'")

    monkeypatch.setattr(gemm, "Cublas", missing)
    with pytest.raises(ValueError, match=r"ggpy\[cublas\]"):
        Cuda(emulator, gemm="cublas")


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"activations": "q8_1"}])
def test_what_it_does_not_go_with(options):
    with pytest.raises(ValueError, match="neither --batch-invariant nor --activations q8_1"):
        choose("auto", gemm="cublas", **options)


def test_it_is_for_a_gpu():
    with pytest.raises(ValueError, match=r"--gemm cublas needs a GPU, the device is cpu \(as ask"):
        choose("cpu", gemm="cublas")


# On a GPU


@pytest.fixture
def cublas(gpu):
    """The real one."""
    try:
        return Cublas(gpu)
    except CublasMissing as error:
        pytest.skip(str(error))


def test_the_product(gpu, cublas):
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((n, 4096)).astype(np.float16) for n in (37, 300))
    start = rng.standard_normal((37, 304)).astype(np.float32)
    buffers = [gpu.upload_array(a) for a in (x, w, start)]
    expected = start.astype(np.float64)
    for add in (False, True):
        cublas.multiply(*buffers, 37, 300, 4096, stride=304, add=add)
        expected[:, :300] = x.astype(np.float64) @ w.T.astype(np.float64) + (
            expected[:, :300] if add else 0
        )
        y = gpu.download(buffers[2], np.float32, (37, 304))
        assert nmse(y, expected) <= 1e-10
        assert np.array_equal(y[:, 300:], start[:, 300:])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_a_model_on_a_gpu(gpu, cublas, tiny_path, architecture):
    expected = logits(Reference(1), tiny_path(architecture))
    found = logits(Cuda(gpu, gemm="cublas"), tiny_path(architecture))
    assert nmse(found, expected) <= TOLERANCE


def test_in_a_graph(gpu, cublas, tiny_path):
    expected = batches(Reference(1), tiny_path("llama"))
    assert nmse(batches(Cuda(gpu, gemm="cublas"), tiny_path("llama")), expected) <= TOLERANCE
