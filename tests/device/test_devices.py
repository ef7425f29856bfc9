"""The GPU and the emulator behave alike: the same kernels, the same answers, the same refusals."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from devices import KINDS, open_device

from ggpy.device.base import CudaError
from ggpy.util.paths import cuda_dir

RNG = np.random.default_rng(3)

SOURCE = """
#include "lib/mma.cuh"
template <typename T> __global__ void scale(const T* x, float* y, int n, float factor) {
    grid_dependency_wait();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = float(x[i]) * factor;
    grid_dependency_launch();
}
extern "C" __global__ void add_one(float* y) {
    grid_dependency_wait();
    y[threadIdx.x] += 1;
}
extern "C" __global__ void reverse(const uint4* x, uint4* y) {
    SHARED_DYNAMIC(uint4, tile);
    cp_async<16>(&tile[threadIdx.x], x + threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    y[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void together(uint32_t* counter, uint32_t* y) {
    if (threadIdx.x == 0) {
        add_acquire_release(counter, 1);
        while (add_acquire_release(counter, 0) < gridDim.x) spin_wait();
        y[blockIdx.x] = add_acquire_release(counter, 0);
    }
}
// d[16][8] += a[16][16] b[8][16] transposed, operands read by ldmatrix; e in int8 with K = 32.
extern "C" __global__ void products(const uint4* a, const uint4* b, float* d, const uint4* a8,
                                    const uint4* b8, int* e) {
    __shared__ uint4 sa[32], sb[16];
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    sa[lane] = a[lane];
    if (lane < 16) sb[lane] = b[lane];
    __syncwarp();
    uint32_t ra[4], rb[2];
    load_matrix<4>(ra, &sa[lane % 16 * 2 + lane / 16]);
    load_matrix<2>(rb, &sb[lane % 8 * 2 + lane / 8 % 2]);
    float c[4];
    for (int i = 0; i < 4; ++i) c[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_m16n8k16_f16(c, ra, rb);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
    __syncwarp();
    sa[lane] = a8[lane];
    if (lane < 16) sb[lane] = b8[lane];
    __syncwarp();
    load_matrix<4>(ra, &sa[lane % 16 * 2 + lane / 16]);
    load_matrix<2>(rb, &sb[lane % 8 * 2 + lane / 8 % 2]);
    int f[4] = {};
    mma_m16n8k32_s8(f, ra, rb);
    for (int i = 0; i < 4; ++i) e[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = f[i];
}
// What the intrinsics answer, to compare the emulator's with the GPU's: eight words a thread.
extern "C" __global__ void intrinsics(const int* x, int* y, int n) {
    int i = threadIdx.x, a = x[i], b = x[i + n], c = x[i + 2 * n], *out = y + 8 * i;
    half2 h = __halves2half2(__ushort_as_half(a & 0x7bff), __ushort_as_half(b & 0xfbff));
    half2 k = __hfma2(h, __float2half2_rn(0.37f), __float2half2_rn(1.0f));
    out[0] = __dp4a(a, b, c);
    out[1] = __byte_perm(a, b, c & 0x7777);
    out[2] = lop3<0x6A>(a, b, c);
    out[3] = __funnelshift_r(a, b, c);
    out[4] = __vsubss4(a, b);
    out[5] = *reinterpret_cast<int*>(&k);
    out[6] = __float2int_rn(__int_as_float(a & 0x4fffffff | 0x40000000));
    out[7] = __shfl_xor_sync(0xffffffff, a, 5) + __popc(__ballot_sync(0xffffffff, b > c));
}
"""


KERNELS = (
    "scale<half>",
    "scale<float>",
    "add_one",
    "reverse",
    "together",
    "products",
    "intrinsics",
)


@pytest.fixture(params=KINDS)
def device(request, tmp_path):
    folder = tmp_path / "cuda"
    (folder / "lib").mkdir(parents=True)
    for name in ("lib/common.cuh", "lib/mma.cuh"):
        (folder / name).write_bytes((cuda_dir() / name).read_bytes())
    (folder / "a.cu").write_text(SOURCE)
    opened = open_device(request.param, folder)
    opened.kernels("a.cu", KERNELS)  # one compilation for all tests
    yield opened
    if hasattr(opened, "close"):
        opened.close()


def test_templates_and_scalars(device):
    for dtype, name in ((np.float16, "half"), (np.float32, "float")):
        x = RNG.standard_normal(1000).astype(dtype)
        y = device.alloc(4000, "y")
        kernel = device.kernel("a.cu", f"scale<{name}>")
        kernel.launch(8, 128, (device.upload_array(x, "x"), y, 1000, 2.5))
        np.testing.assert_array_equal(
            device.download(y, np.float32, 1000), x.astype(np.float32) * np.float32(2.5)
        )


def test_kernels_of_one_file_are_compiled_together_and_kept(device):
    scale, add_one = device.kernels("a.cu", ["scale<float>", "add_one"])
    assert (
        device.kernel("a.cu", "add_one") is add_one
        and device.kernel("a.cu", "scale<float>") is scale
    )


def test_dynamic_shared_memory(device):
    x = RNG.integers(0, 1 << 31, (1024, 4)).astype(np.uint32)
    y = device.alloc(x.nbytes)
    device.kernel("a.cu", "reverse").launch(1, 1024, (device.upload_array(x), y), smem=60_000)
    np.testing.assert_array_equal(device.download(y, np.uint32, x.shape), x[::-1])


def test_graph_of_dependent_launches(device):
    scale, add_one = device.kernels("a.cu", ["scale<float>", "add_one"])
    x, y = device.upload_array(np.arange(64, dtype=np.float32)), device.zeros(256, "y")
    with device.capture() as graph:
        scale.launch(1, 64, (x, y, 64, 3.0))
        add_one.launch(1, 64, (y,), pdl=True)
        add_one.launch(1, 64, (y,), pdl=True)
        device.copy(x, y, 256)
    assert not device.download(y, np.float32, 64).any()
    graph.launch()
    graph.launch()
    expected = (np.arange(64) * 3 + 2) * 3 + 2
    np.testing.assert_array_equal(device.download(y, np.float32, 64), expected)
    with pytest.raises(CudaError, match="captured graph"):
        y.free()
    graph.close()
    y.free()


def test_cooperative_launch(device):
    blocks = 2 * device.sm_count
    y = device.zeros(4 * blocks)
    device.kernel("a.cu", "together").launch(blocks, 64, (device.zeros(4), y), cooperative=True)
    np.testing.assert_array_equal(device.download(y, np.uint32, blocks), blocks)


def test_tensor_core_products(device):
    a, b = (
        RNG.standard_normal((16, 16)).astype(np.float16),
        RNG.standard_normal((8, 16)).astype(np.float16),
    )
    a8, b8 = (RNG.integers(-128, 128, (n, 32)).astype(np.int8) for n in (16, 8))
    d = RNG.standard_normal((16, 8)).astype(np.float32)
    args = [device.upload_array(v) for v in (a, b, d, a8, b8)]
    e = device.alloc(512)
    device.kernel("a.cu", "products").launch(1, 32, (*args, e))
    exact = d + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(
        device.download(args[2], np.float32, (16, 8)), exact, rtol=1e-5, atol=1e-5
    )
    expected = a8.astype(np.int32) @ b8.astype(np.int32).T
    np.testing.assert_array_equal(device.download(e, np.int32, (16, 8)), expected)


def test_intrinsics_agree(device):
    """Every device against the emulator without sanitizers."""
    x = np.random.default_rng(11).integers(-(1 << 31), 1 << 31, (3, 64)).astype(np.int32)

    def answers(on):
        on.kernels("a.cu", KERNELS)
        y = on.alloc(64 * 8 * 4)
        on.kernel("a.cu", "intrinsics").launch(1, 64, (on.upload_array(x), y, 64))
        return on.download(y, np.int32, (64, 8))

    reference = open_device("emulator", device.cuda)
    try:
        expected = answers(reference)
    finally:
        reference.close()
    np.testing.assert_array_equal(answers(device), expected)
    dp4a = x[2] + (x[0].view(np.int8).astype(np.int64) * x[1].view(np.int8)).reshape(64, 4).sum(1)
    np.testing.assert_array_equal(expected[:, 0], dp4a.astype(np.uint32).view(np.int32))


def test_copies_into_pinned_memory(device):
    x = RNG.integers(0, 255, 1000).astype(np.uint8)
    pinned = device.pinned(1000)
    pinned[:] = x
    buffer, back = device.alloc(1000), device.pinned(1000)
    device.upload(buffer, pinned)
    device.download_into(back, buffer)
    device.synchronize()
    np.testing.assert_array_equal(back, x)


def test_another_thread_may_use_the_device(device):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(device.download(device.zeros(8), np.int32, 2))
    )
    thread.start()
    thread.join()
    assert results[0].tolist() == [0, 0]


def test_memory_is_counted(device):
    buffer = device.alloc(12345, "scratch")
    assert device.used_bytes == 12345 and repr(buffer) == "buffer 'scratch' (12345 bytes)"
    buffer.free()
    assert device.used_bytes == 0


ILLEGAL = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from ggpy.device.gpu import CudaDevice
from ggpy.device.base import Ptr, CudaError
device = CudaDevice(cuda=Path(sys.argv[1]))
device.kernel("a.cu", "add_one").launch(1, 32, (Ptr(4096),))
try:
    device.synchronize()
except CudaError as error:
    print(error)
"""


def test_an_illegal_address_names_the_kernel(device):
    if "Cuda" not in type(device).__name__:
        pytest.skip("the emulator's own tests have this")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", ILLEGAL, str(device.cuda)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout and done.stdout.strip().endswith(
        "add_one"
    ), done.stderr
