"""The emulator computes what CUDA defines, and reports what CUDA forbids with the kernel's file and
line."""

import ctypes

import numpy as np
import pytest
from emulator import build
from emulator.emulated import Emulated, EmulatorError

from ggpy.device.base import CudaError, OutOfMemory
from ggpy.device.compile import CompileError
from ggpy.paths import cuda_dir

if build.unavailable():
    pytest.skip(build.unavailable(), allow_module_level=True)

needs_sanitizers = pytest.mark.skipif(bool(build.unavailable(True)), reason=build.unavailable(True))
RNG = np.random.default_rng(7)


@pytest.fixture
def make(tmp_path):
    """Writes a source beside common.cuh and opens a device on it."""
    devices = []
    (tmp_path / "common.cuh").write_bytes((cuda_dir() / "common.cuh").read_bytes())

    def create(source, **options):
        (tmp_path / "sample.cu").write_text('#include "common.cuh"\n' + source)
        devices.append(Emulated(cuda=tmp_path, **options))
        return devices[-1]

    yield create
    for device in devices:
        device.close()


def run(device, name, grid, threads, inputs, output, *scalars, **launch):
    """Launch with the arrays of `inputs`, then `output` (its initial value), then scalars; returns
    the output."""
    buffers = [device.upload_array(array) for array in (*inputs, output)]
    device.kernel("sample.cu", name).launch(grid, threads, (*buffers, *scalars), **launch)
    return device.download(buffers[-1], output.dtype, output.shape)


REDUCTION = """
__device__ float warp_sum(float x) {
    for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}
template <typename T>
__global__ void __launch_bounds__(128) row_sums(const T* x, float* sums, int n) {
    __shared__ float part[4], total;  // two declarators, and a ; in a comment
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += float(x[blockIdx.x * n + i]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) total = part[0] + part[1] + part[2] + part[3];
    __syncthreads();
    if (threadIdx.x == 77) sums[blockIdx.x] = total;
}
"""


@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("dtype, name", [(np.float32, "float"), (np.float16, "half")])
def test_reduction(make, order, dtype, name):
    x = RNG.standard_normal((9, 300)).astype(dtype)
    sums = run(
        make(REDUCTION, order=order), f"row_sums<{name}>", 9, 128, [x], np.empty(9, np.float32), 300
    )
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-4)


def test_shuffles(make):
    device = make("""
        extern "C" __global__ void k(const int* x, int* y) {
            int lane = threadIdx.x % 32, v = x[threadIdx.x];
            int* out = y + 6 * threadIdx.x;
            out[0] = __shfl_sync(~0u, v, 3);
            out[1] = __shfl_sync(~0u, v, 11, 8);
            out[2] = __shfl_up_sync(~0u, v, 2);
            out[3] = __shfl_down_sync(~0u, v, 2, 16);
            out[4] = __shfl_xor_sync(~0u, v, 5);
            out[5] = lane % 2 ? __shfl_xor_sync(0xaaaaaaaa, v, 2) : -1;
        }""")
    x = RNG.integers(-999, 999, 64).astype(np.int32)
    y = run(device, "k", 1, 64, [x], np.empty((64, 6), np.int32)).reshape(2, 32, 6)
    lane = np.arange(32)
    for warp, v in enumerate(x.reshape(2, 32)):
        down = np.where(lane % 16 < 14, lane + 2, lane)
        sources = [
            lane * 0 + 3,
            lane // 8 * 8 + 3,
            np.maximum(lane - 2, 0) + (lane < 2) * lane,
            down % 32,
            lane ^ 5,
        ]
        np.testing.assert_array_equal(y[warp, :, :5], np.stack([v[s] for s in sources], 1))
        np.testing.assert_array_equal(y[warp, 1::2, 5], v[lane ^ 2][1::2])


def test_votes_and_reductions(make):
    device = make("""
        extern "C" __global__ void k(const int* x, int* y) {
            int v = x[threadIdx.x];
            int* out = y + 9 * threadIdx.x;
            out[0] = __ballot_sync(~0u, v > 0);
            out[1] = __any_sync(~0u, v == 7);
            out[2] = __all_sync(~0u, v > -9);
            out[3] = __match_any_sync(~0u, v);
            out[4] = __reduce_add_sync(~0u, v);
            out[5] = __reduce_min_sync(~0u, v);
            out[6] = __reduce_max_sync(~0u, unsigned(v));
            out[7] = __syncthreads_count(v > 0);
            out[8] = __syncthreads_or(v == 7) * 2 + __syncthreads_and(v > -9);
        }""")
    x = RNG.integers(-4, 5, 32).astype(np.int32)
    y = run(device, "k", 1, 32, [x], np.empty((32, 9), np.int32))
    ballot = sum(int(v > 0) << i for i, v in enumerate(x))
    match = [sum(int(v == w) << i for i, v in enumerate(x)) for w in x]
    unsigned = x.view(np.uint32)
    count = int((x > 0).sum())
    row = [ballot, 0, 1, 0, x.sum(), x.min(), unsigned.max(), count, 1]
    expected = np.tile(np.array(row, np.uint64).astype(np.uint32).view(np.int32), (32, 1))
    expected[:, 3] = np.array(match, np.uint32).view(np.int32)
    np.testing.assert_array_equal(y, expected)


def test_threads_that_have_ended_are_not_waited_for(make):
    device = make("""
        extern "C" __global__ void k(int* y, int n) {
            if (threadIdx.x >= n) return;
            __syncthreads();
            __syncwarp();
            y[threadIdx.x] = 1 + __shfl_sync(~0u, threadIdx.x, 0);
        }""")
    y = run(device, "k", 1, 64, [], np.zeros(64, np.int32), 40)
    np.testing.assert_array_equal(y, np.array([1] * 32 + [33] * 8 + [0] * 24))


def test_deadlock_says_who_waits_where(make):
    device = make("""
        extern "C" __global__ void k(int* y) {
            if (threadIdx.x < 16)
                __syncwarp();
            else
                __syncthreads();
        }""")
    with pytest.raises(EmulatorError) as error:
        run(device, "k", 2, 64, [], np.zeros(1, np.int32))
    text = str(error.value)
    assert (
        "deadlock in block (0,0,0)" in text
        and "kernel k, grid (2, 1, 1), threads (64, 1, 1)" in text
    )
    assert "threads 0-15 wait in __syncwarp at " in text and "sample.cu:5" in text
    assert "threads 16-63 wait in __syncthreads at " in text and "sample.cu:7" in text


def test_divergent_barriers_are_an_error(make):
    device = make("""
        extern "C" __global__ void k(int* y) {
            if (threadIdx.x < 32) __syncthreads();
            else __syncthreads();
        }""")
    with pytest.raises(
        EmulatorError, match=r"different barriers: __syncthreads at .*:4 and __syncthreads at .*:5"
    ):
        run(device, "k", 1, 64, [], np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "body, message",
    [
        ("__syncwarp(1 << (threadIdx.x + 1) % 32);", "is not in its mask"),
        ("if (threadIdx.x % 2) __syncwarp(); else __ballot_sync(~0u, 1);", "different collectives"),
        (
            "if (threadIdx.x > 8) __shfl_sync(0xfffffe00, 1, 2);",
            "lane 9 reads lane 2, which does not take part",
        ),
        ("named_barrier_sync(1, 33);", "multiple of 32"),
        ("named_barrier_sync(1, 64 + threadIdx.x / 32 * 32);", "different barriers"),
    ],
)
def test_wrong_collectives(make, body, message):
    device = make('extern "C" __global__ void k(int* y) {' + body + "}")
    with pytest.raises(EmulatorError, match=message):
        run(device, "k", 1, 64, [], np.zeros(1, np.int32))
    assert (
        run(
            make('extern "C" __global__ void k(int* y) { *y = 3; }'),
            "k",
            1,
            1,
            [],
            np.zeros(1, np.int32),
        )[0]
        == 3
    )


def test_a_missing_barrier_shows_in_another_order(make):
    source = """
        extern "C" __global__ void k(int* y) {
            __shared__ int s[64];
            s[threadIdx.x] = threadIdx.x;
            y[threadIdx.x] = s[63 - threadIdx.x];
        }"""
    right = 63 - np.arange(64)
    results = [
        run(make(source, order=order), "k", 1, 64, [], np.zeros(64, np.int32)) for order in (0, 1)
    ]
    assert not all(np.array_equal(result, right) for result in results)


def test_shared_memory_is_poisoned_for_every_block(make):
    device = make("""
        extern "C" __global__ void k(int* y) {
            SHARED_DYNAMIC(int, d);
            __shared__ __align__(16) int s[4];
            y[2 * blockIdx.x] = d[3];
            y[2 * blockIdx.x + 1] = s[1];
            s[1] = d[3] = 5;
        }""")
    y = run(device, "k", 3, 1, [], np.zeros(6, np.int32), smem=16)
    np.testing.assert_array_equal(y, -1)


def test_dynamic_shared_memory(make):
    device = make("""
        template <int N> __global__ void turn(const float4* x, float4* y) {
            SHARED_DYNAMIC(float4, tile);
            tile[threadIdx.x] = x[blockIdx.x * N + threadIdx.x];
            __syncthreads();
            y[blockIdx.x * N + threadIdx.x] = tile[N - 1 - threadIdx.x];
        }""")
    x = RNG.standard_normal((5, 256, 4)).astype(np.float32)
    y = run(device, "turn<256>", 5, 256, [x], np.empty_like(x), smem=256 * 16)
    np.testing.assert_array_equal(y, x[:, ::-1])


GLOBAL_OVERRUN = 'extern "C" __global__ void k(int* y, int n) {\n    y[n] = 1;\n}'
SHARED_OVERRUN = """extern "C" __global__ void k(int* y, int n) {
    __shared__ int s[8];
    __shared__ int t[8];
    s[n] = t[0] = 1;
    *y = s[0] + t[1];
}"""


def test_writes_past_the_end_are_noticed_without_sanitizers(make):
    with pytest.raises(EmulatorError, match="wrote byte 40 of a buffer of 40 bytes"):
        run(make(GLOBAL_OVERRUN), "k", 1, 1, [], np.zeros(10, np.int32), 10)
    with pytest.raises(EmulatorError, match=r"wrote byte 36 of s \(32 bytes\)"):
        run(make(SHARED_OVERRUN), "k", 1, 1, [], np.zeros(10, np.int32), 9)


@needs_sanitizers
@pytest.mark.parametrize("index", [10, -1])
def test_sanitizer_finds_access_outside_a_buffer(make, index):
    with pytest.raises(EmulatorError, match=r"(?s)heap-buffer-overflow.*in k .*sample\.cu:3"):
        run(make(GLOBAL_OVERRUN, sanitize=True), "k", 1, 1, [], np.zeros(10, np.int32), index)


@needs_sanitizers
def test_sanitizer_finds_reads_outside_shared_memory(make):
    source = """extern "C" __global__ void k(int* y, int n) {
        SHARED_DYNAMIC(int, d);
        *y = d[n];
    }"""
    with pytest.raises(EmulatorError, match=r"(?s)use-after-poison.*in k .*sample\.cu:4"):
        run(make(source, sanitize=True), "k", 1, 32, [], np.zeros(1, np.int32), 12, smem=48)
    with pytest.raises(EmulatorError, match=r"sample\.cu:5.*index 9 out of bounds"):
        run(make(SHARED_OVERRUN, sanitize=True), "k", 1, 1, [], np.zeros(10, np.int32), 9)


@needs_sanitizers
@pytest.mark.parametrize(
    "body, message",
    [
        ("y[0] = 1 << n;", r"sample\.cu:2:\d+: runtime error: shift exponent 40"),
        (
            "y[0] = 2147483600 + n * 10;",
            r"sample\.cu:2:\d+: runtime error: signed integer overflow",
        ),
        ("*(uint4*)(y + 1) = uint4();", r"sample\.cu:2:\d+: runtime error: .*misaligned"),
    ],
)
def test_sanitizer_finds_undefined_behaviour(make, body, message):
    device = make('extern "C" __global__ void k(int* y, int n) {' + body + "}", sanitize=True)
    with pytest.raises(EmulatorError, match=message):
        run(device, "k", 1, 1, [], np.zeros(10, np.int32), 40)


@needs_sanitizers
def test_correct_kernels_are_clean_under_sanitizers(make):
    x = RNG.standard_normal((9, 300)).astype(np.float16)
    sums = run(
        make(REDUCTION, sanitize=True), "row_sums<half>", 9, 128, [x], np.empty(9, np.float32), 300
    )
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-4)


def test_atomics(make):
    device = make("""
        extern "C" __global__ void k(int* y, float* total, unsigned* ticket, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            atomicAdd(y, i);
            atomicMax(y + 1, i);
            atomicMin(y + 2, -i);
            atomicOr(y + 3, 1 << i % 16);
            atomicAdd(total, 0.5f);
            for (int old = y[4], seen; ; old = seen)
                if ((seen = atomicCAS(y + 4, old, old + 2)) == old) break;
            __syncthreads();
            if (threadIdx.x == 0 && atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1) y[5] = y[0];
        }""")
    buffers = [device.zeros(24), device.zeros(4), device.zeros(4)]
    device.kernel("sample.cu", "k").launch(4, 64, (*buffers, 0))
    total = 255 * 256 // 2
    assert device.download(buffers[0], np.int32, 6).tolist() == [
        total,
        255,
        -255,
        65535,
        512,
        total,
    ]
    assert device.download(buffers[1], np.float32, 1)[0] == 128
    assert device.download(buffers[2], np.uint32, 1)[0] == 0


GRID_BARRIER = """
extern "C" __global__ void k(int* y, uint32_t* counter, int* part) {
    if (threadIdx.x == 0) {
        part[blockIdx.x] = blockIdx.x + 1;
        add_release(counter, 1);
        while (load_acquire(counter) < gridDim.x) spin_wait();
    }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += part[i];
    if (threadIdx.x == 40) y[blockIdx.x] = sum;
}
"""


def test_cooperative_blocks_run_together(make):
    device = make(GRID_BARRIER)
    y = device.zeros(4 * 20)
    device.kernel("sample.cu", "k").launch(
        20, 64, (y, device.zeros(4), device.alloc(80)), cooperative=True
    )
    np.testing.assert_array_equal(device.download(y, np.int32, 20), 210)


def test_waiting_for_another_block_needs_a_cooperative_launch(make):
    device = make(GRID_BARRIER)
    with pytest.raises(
        EmulatorError, match=r"(?s)cooperative=True.*threads 0 wait in spin_wait at .*sample\.cu:7"
    ):
        device.kernel("sample.cu", "k").launch(
            20, 64, (device.zeros(80), device.zeros(4), device.alloc(80))
        )


def test_endless_loops_end(make):
    device = make(
        """
        extern "C" __global__ void k(volatile int* y) {
            __syncthreads();
            while (*y == 0) {}
        }""",
        seconds=1,
    )
    with pytest.raises(
        EmulatorError,
        match=r"kernel k.*does not end .*block \(0,0,0\) thread \(\d+,0,0\).*sample\.cu:4",
    ):
        run(device, "k", 1, 32, [], np.zeros(1, np.int32))


def test_a_crash_names_the_kernel(make):
    device = make('extern "C" __global__ void k(int* y) { *(volatile int*)(8) = 1; }')
    with pytest.raises(
        EmulatorError, match=r"kernel k.*block \(1,0,0\)|kernel k: Segmentation fault"
    ):
        run(device, "k", 2, 32, [], np.zeros(1, np.int32))


def test_named_barriers(make):
    device = make(
        """
        extern "C" __global__ void k(const int* x, int* y) {
            __shared__ int s[32];
            for (int round = 0; round < 3; ++round) {
                if (threadIdx.x < 32) {
                    if (round) named_barrier_sync(2, 64);
                    s[threadIdx.x] = x[32 * round + threadIdx.x];
                    named_barrier_arrive(1, 64);
                } else {
                    named_barrier_sync(1, 64);
                    y[32 * round + threadIdx.x - 32] = s[63 - threadIdx.x];
                    if (round < 2) named_barrier_arrive(2, 64);
                }
            }
        }""",
        order=1,
    )
    x = np.arange(96, dtype=np.int32)
    y = run(device, "k", 1, 64, [x], np.zeros(96, np.int32))
    np.testing.assert_array_equal(y, x.reshape(3, 32)[:, ::-1].ravel())


ASYNC = """
template <bool waits> __global__ void k(const uint4* x, uint4* y) {
    __shared__ uint4 s[2][32];
    cp_async<16>(&s[0][threadIdx.x], x + threadIdx.x);
    cp_async_commit();
    cp_async<16>(&s[1][threadIdx.x], x + 32 + threadIdx.x, 8);
    cp_async_commit();
    cp_async_wait<1>();
    y[threadIdx.x] = s[0][threadIdx.x];
    if (waits) cp_async_wait<0>();
    y[32 + threadIdx.x] = s[1][threadIdx.x];
}
"""


def test_asynchronous_copies_arrive_when_waited_for(make):
    x = RNG.integers(0, 1 << 31, (2, 32, 4)).astype(np.uint32)
    expected = x.copy()
    expected[1, :, 2:] = 0
    device = make(ASYNC)
    np.testing.assert_array_equal(run(device, "k<true>", 1, 32, [x], np.zeros_like(x)), expected)
    expected[1] = 0xFFFFFFFF
    np.testing.assert_array_equal(run(device, "k<false>", 1, 32, [x], np.zeros_like(x)), expected)


MMA = """
// a[16][K], b[8][K] (columns of B), d[16][8]; every lane loads what the layout gives it.
template <typename T, int K, typename D, typename F>
__device__ void product(const T* a, const T* b, D* d, F multiply) {
    constexpr int E = 4 / sizeof(T), R = K / (4 * E);
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t ra[2 * R], rb[R];
    for (int r = 0; r < R; ++r) {
        ra[2 * r] = *(const uint32_t*)(a + g * K + r * 4 * E + t * E);
        ra[2 * r + 1] = *(const uint32_t*)(a + (g + 8) * K + r * 4 * E + t * E);
        rb[r] = *(const uint32_t*)(b + g * K + r * 4 * E + t * E);
    }
    D c[4];
    for (int i = 0; i < 4; ++i) c[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    multiply(c, ra, rb);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}
extern "C" __global__ void f16(const half* a, const half* b, float* d) {
    product<half, 16>(a, b, d, [](float (&c)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {
        mma_m16n8k16_f16(c, a, b);
    });
}
extern "C" __global__ void f16_k8(const half* a, const half* b, float* d) {
    product<half, 8>(a, b, d, [](float (&c)[4], uint32_t (&a)[2], uint32_t (&b)[1]) {
        mma_m16n8k8_f16(c, a, b[0]);
    });
}
extern "C" __global__ void bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
    product<__nv_bfloat16, 16>(a, b, d, [](float (&c)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {
        mma_m16n8k16_bf16(c, a, b);
    });
}
extern "C" __global__ void s8(const int8_t* a, const int8_t* b, int* d) {
    product<int8_t, 32>(a, b, d, [](int (&c)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {
        mma_m16n8k32_s8(c, a, b);
    });
}
"""


@pytest.mark.parametrize("name, k", [("f16", 16), ("f16_k8", 8), ("bf16", 16), ("s8", 32)])
def test_tensor_core_products(make, name, k):
    if name == "s8":
        a, b = (RNG.integers(-128, 128, (n, k)).astype(np.int8) for n in (16, 8))
        d = RNG.integers(-999, 999, (16, 8)).astype(np.int32)
        exact = d + a.astype(np.int32) @ b.astype(np.int32).T
        stored = (a, b)
    else:
        a, b = (RNG.standard_normal((n, k)).astype(np.float16).astype(np.float32) for n in (16, 8))
        if name == "bf16":
            a, b = ((v.view(np.uint32) & 0xFFFF0000).view(np.float32) for v in (a, b))
            stored = tuple((v.view(np.uint32) >> 16).astype(np.uint16) for v in (a, b))
        else:
            stored = (a.astype(np.float16), b.astype(np.float16))
        d = RNG.standard_normal((16, 8)).astype(np.float32)
        exact = d + a.astype(np.float64) @ b.astype(np.float64).T
    result = run(make(MMA), name, 1, 32, list(stored), d)
    np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-6)


def test_load_matrix(make):
    device = make("""
        extern "C" __global__ void k(const uint4* x, uint32_t* y) {
            __shared__ uint4 s[32];  // four matrices of 8 rows of 8
            s[threadIdx.x] = x[threadIdx.x];
            __syncwarp();
            uint32_t m4[4], m2[2], m1[1];
            load_matrix<4>(m4, &s[threadIdx.x]);
            load_matrix<2, true>(m2, &s[threadIdx.x]);
            load_matrix<1>(m1, &s[threadIdx.x]);
            for (int i = 0; i < 4; ++i) y[i * 32 + threadIdx.x] = m4[i];
            for (int i = 0; i < 2; ++i) y[(4 + i) * 32 + threadIdx.x] = m2[i];
            y[6 * 32 + threadIdx.x] = m1[0];
        }""")
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = run(device, "k", 1, 32, [x], np.zeros((7, 32), np.uint32)).view(np.uint16).reshape(7, 8, 8)
    np.testing.assert_array_equal(y[:4], x)
    np.testing.assert_array_equal(y[4:6], x[:2].transpose(0, 2, 1))
    np.testing.assert_array_equal(y[6], x[0])


def test_integer_intrinsics(make):
    device = make("""
        extern "C" __global__ void k(const int* x, int* y, int n) {
            int i = threadIdx.x, a = x[i], b = x[i + n], c = x[i + 2 * n];
            int* out = y + 8 * i;
            out[0] = __dp4a(a, b, c);
            out[1] = __dp4a(unsigned(a), unsigned(b), unsigned(c));
            out[2] = __byte_perm(a, b, 0x5270);
            out[3] = lop3<0xEA>(a, b, c);
            out[4] = __popc(a) + 64 * __clz(a);
            out[5] = __funnelshift_r(a, b, 13);
            out[6] = __vsubss4(a, b);
            out[7] = __mulhi(a, b);
        }""")
    x = RNG.integers(-(1 << 31), 1 << 31, (3, 64)).astype(np.int32)
    y = run(device, "k", 1, 64, [x], np.zeros((64, 8), np.int32), 64)
    a, b, c = x
    ua, ub, uc = (v.view(np.uint32).astype(np.uint64) for v in x)
    s, t = (
        a.view(np.int8).reshape(-1, 4).astype(np.int64),
        b.view(np.int8).reshape(-1, 4).astype(np.int64),
    )
    us, ut = (
        a.view(np.uint8).reshape(-1, 4).astype(np.int64),
        b.view(np.uint8).reshape(-1, 4).astype(np.int64),
    )
    both = np.concatenate([us, ut], 1)
    bytes_ = sum(both[:, pick] << 8 * i for i, pick in enumerate((0, 7, 2, 5)))
    clz = np.array([32 - int(v).bit_length() for v in ua])
    popc = np.array(
        [int(v).bit_count() if hasattr(int, "bit_count") else bin(int(v)).count("1") for v in ua]
    )
    saturated = np.clip(s - t, -128, 127) & 255
    expected = [
        c + (s * t).sum(1),
        uc.astype(np.int64) + (us * ut).sum(1),
        bytes_,
        (ua & ub | uc).astype(np.int64),
        popc + 64 * clz,
        ((ub << np.uint64(32) | ua) >> np.uint64(13)).astype(np.int64),
        sum(saturated[:, i] << 8 * i for i in range(4)),
        a.astype(np.int64) * b >> 32,
    ]
    wrapped = np.stack(
        [np.asarray(v, np.int64).astype(np.uint32).view(np.int32) for v in expected], 1
    )
    np.testing.assert_array_equal(y, wrapped)


def test_half_arithmetic_rounds_once(make):
    device = make("""
        extern "C" __global__ void k(const half2* x, half2* y, int n) {
            int i = threadIdx.x;
            half2 a = x[i], b = x[i + n], c = x[i + 2 * n];
            y[3 * i] = __hfma2(a, b, c);
            y[3 * i + 1] = __hadd2(__hmul2(a, b), c);
            y[3 * i + 2] = __hsub2(a, __float2half2_rn(__half2float(b.x)));
        }""")
    x = RNG.standard_normal((3, 128)).astype(np.float16)
    y = run(device, "k", 1, 64, [x], np.zeros((64, 3, 2), np.float16), 64)
    a, b, c = (v.reshape(64, 2) for v in x)
    fma = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(y[:, 0], fma)
    np.testing.assert_array_equal(y[:, 1], a * b + c)
    np.testing.assert_array_equal(y[:, 2], a - b[:, :1])


def test_float_functions(make):
    device = make("""
        extern "C" __global__ void k(const float* x, float* y) {
            float v = x[threadIdx.x];
            float* out = y + 6 * threadIdx.x;
            out[0] = rsqrtf(fabsf(v) + 1);
            out[1] = __expf(v);
            sincospif(v, out + 2, out + 3);
            out[4] = __float2int_rn(v);
            out[5] = max(v, 0.5f) + min(2, 3u);
        }""")
    x = np.concatenate([RNG.standard_normal(60), [0.5, 1.5, -2.5, 3.0]]).astype(np.float32)
    y = run(device, "k", 1, 64, [x], np.zeros((64, 6), np.float32))
    v = x.astype(np.float64)
    expected = [
        1 / np.sqrt(abs(v) + 1),
        np.exp(v),
        np.sin(np.pi * v),
        np.cos(np.pi * v),
        np.rint(v),
        np.maximum(v, 0.5) + 2,
    ]
    np.testing.assert_allclose(y, np.stack(expected, 1), rtol=1e-6, atol=1e-6)


class Shape(ctypes.Structure):
    """A structure as a kernel parameter."""

    _fields_ = (("rows", ctypes.c_int), ("scale", ctypes.c_float), ("out", ctypes.c_uint64))


PARAMETERS = """
struct Shape { int rows; float scale; float* out; };
extern "C" __global__ void k(Shape shape, char small, double wide, float* base, half h,
                             unsigned u) {
    shape.out[threadIdx.x] = shape.rows * shape.scale + small + wide + base[0] + float(h) + u;
}
"""


def test_parameters_by_value(make):
    device = make(PARAMETERS)
    out, base = device.alloc(32), device.upload_array(np.array([9, 1000], np.float32))
    args = (Shape(3, 0.5, out.ptr + 8), -5, 2.25, base.at(4), np.float16(0.125), 0xFFFFFF00)
    device.kernel("sample.cu", "k").launch(1, 4, args)
    np.testing.assert_array_equal(
        device.download(out, np.float32, 4, offset=8), np.float32(998.875 + 0xFFFFFF00)
    )


@pytest.mark.parametrize(
    "index, value",
    [
        (0, 3),
        (1, 1000),
        (1, 1.5),
        (2, 7),
        (3, 1.0),
        (3, np.float64(1)),
        (4, np.float32(1)),
        (5, None),
        (5, 1 << 32),
    ],
)
def test_wrong_arguments_are_refused(make, index, value):
    device = make(PARAMETERS)
    buffer = device.alloc(64)
    args = [Shape(3, 0.5, buffer.ptr), -5, 2.25, buffer, np.float16(0.125), 6]
    args[index] = value
    with pytest.raises((TypeError, ValueError), match=rf"kernel k.*{index}"):
        device.kernel("sample.cu", "k").launch(1, 4, args)
    with pytest.raises(TypeError, match="6 parameters, not 5"):
        device.kernel("sample.cu", "k").launch(1, 4, args[:5])


def test_freed_buffers_are_refused(make):
    device = make(GLOBAL_OVERRUN)
    buffer = device.alloc(64, "scratch")
    kernel = device.kernel("sample.cu", "k")
    kernel.launch(1, 1, (buffer, 0))
    assert device.used_bytes == 64
    buffer.free()
    assert device.used_bytes == 0
    with pytest.raises(CudaError, match=r"'scratch'.*freed"):
        kernel.launch(1, 1, (buffer, 0))


def test_graphs_replay_and_hold_their_buffers(make):
    device = make('extern "C" __global__ void k(int* y, int n) { atomicAdd(y, n); }')
    buffer = device.zeros(4, "counter")
    kernel = device.kernel("sample.cu", "k")
    with device.capture() as graph:
        kernel.launch(2, 3, (buffer, 5))
    assert device.download(buffer, np.int32, 1)[0] == 0
    graph.launch()
    graph.launch()
    assert device.download(buffer, np.int32, 1)[0] == 60
    with pytest.raises(CudaError, match=r"'counter'.*captured graph"):
        buffer.free()
    graph.close()
    buffer.free()


def test_compile_errors_have_the_sources_line(make):
    with pytest.raises(CompileError, match=r"sample\.cu:4.*nothing"):
        make("""__global__ void k(int* y) { __shared__ int a[4],
                    b[4]; a[0] = 1; }
                __global__ void l(int* y) { *y = nothing; }""").kernel("sample.cu", "k")
    with pytest.raises(CompileError, match="SHARED_DYNAMIC"):
        make('extern "C" __global__ void k() { extern __shared__ int s[]; }').kernel(
            "sample.cu", "k"
        )


def test_defines_and_extra_source(make):
    device = make('extern "C" __global__ void k(int* y) { *y = N; }')
    values = []
    for n in (3, 4):
        y = device.zeros(4)
        device.kernel("sample.cu", "k", defines={"N": n}).launch(1, 1, (y,))
        values.append(int(device.download(y, np.int32, 1)[0]))
    assert values == [3, 4]
    with pytest.raises(CompileError, match="never"):
        device.kernel(
            "sample.cu",
            "k",
            defines={"N": 1},
            extra_source='static_assert(sizeof(half) == 3, "never");',
        )


def test_limits(make):
    device = make(
        'extern "C" __global__ void k(int* y) { __shared__ char big[50000]; big[0] = *y; }'
    )
    with pytest.raises(EmulatorError, match="50000 bytes of __shared__"):
        run(device, "k", 1, 1, [], np.zeros(1, np.int32))
    with pytest.raises(CudaError, match="invalid launch"):
        run(device, "k", 1, 1025, [], np.zeros(1, np.int32))
    with pytest.raises(OutOfMemory, match="needs"):
        device.alloc(1 << 45, "too much")


@pytest.mark.parametrize(
    "declaration, expected",
    [
        ("__shared__ float a[3][N + 1];", ["float [3][N + 1]", "& a"]),
        ("__shared__ Pair<int, 4> p, q[2];", ["Pair<int, 4>", "& p", "& q"]),
        ("__shared__ alignas(16) unsigned char *x;", ["unsigned char *", ", 16,", "& x"]),
        (
            "__shared__ __align__(sizeof(uint4)) half h[8 * M];",
            ["half [8 * M]", "sizeof(uint4)", "& h"],
        ),
        ("// __shared__ float a;", ["// __shared__ float a;"]),
        ('"__shared__ int a;"', ['"__shared__ int a;"']),
    ],
)
def test_shared_declarations_are_understood(declaration, expected):
    text = build.rewrite(declaration, "x.cu")
    assert all(part in text for part in expected)
