"""The emulator runs CUDA's language, and reports what CUDA forbids with file and line."""

import numpy as np
import pytest
from emulator.process import EmulatorError
from emulator.small import ROW_SUMS, run

from ggpy.device.base import CudaError

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("dtype, name", [(np.float32, "float"), (np.float16, "half")])
def test_reduction(make, order, dtype, name):
    x = RNG.standard_normal((9, 300)).astype(dtype)
    sums = run(
        make(ROW_SUMS, order=order), f"row_sums<{name}>", 9, 128, [x], np.empty(9, np.float32), 300
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
        "deadlock in CTA (0,0,0)" in text and "kernel k, grid (2, 1, 1), threads (64, 1, 1)" in text
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
        add_acquire_release(counter, 1);
        while (add_acquire_release(counter, 0) < gridDim.x) spin_wait();
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


CLUSTER = """
#include "lib/cluster.cuh"
extern "C" __global__ void k(float* y) {
    SHARED_DYNAMIC(float, data);
    const int rank = cluster_rank<2>();
    BEFORE
    cluster_wait<2>();
    RemoteFloats<2>(data + 2 * threadIdx.x, rank ^ 1).put(0, make_float2(blockIdx.x, threadIdx.x));
    cluster_arrive<2>();
    cluster_wait<2>();
    y[(blockIdx.x * 64 + threadIdx.x) * 2] = data[2 * threadIdx.x];
    y[(blockIdx.x * 64 + threadIdx.x) * 2 + 1] = data[2 * threadIdx.x + 1];
}
"""


def test_blocks_of_a_cluster_share_their_memory(make):
    device = make(CLUSTER.replace("BEFORE", "cluster_arrive<2>();"))
    y = device.zeros(4 * 6 * 128)
    device.kernel("sample.cu", "k").launch(6, 64, (y,), smem=512, cluster=2)
    found = device.download(y, np.float32, (6, 64, 2))
    other, thread = np.broadcast_arrays(np.arange(6)[:, None] ^ 1, np.arange(64))
    np.testing.assert_array_equal(found[..., 0], other)
    np.testing.assert_array_equal(found[..., 1], thread)


@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("", "cluster_wait at .*the thread has not arrived"),
        ("cluster_arrive<2>(); cluster_arrive<2>();", "has not waited since it arrived"),
        ("if (rank) cluster_arrive<2>(); else return;", "CTA 0 of the cluster has ended"),
    ],
)
def test_a_clusters_barrier_is_used_as_it_must_be(make, before, error):
    kernel = make(CLUSTER.replace("BEFORE", before))
    y = kernel.zeros(4 * 6 * 128)
    with pytest.raises(EmulatorError, match=rf"(?s){error}"):
        kernel.kernel("sample.cu", "k").launch(6, 64, (y,), smem=512, cluster=2)


def test_a_grid_is_whole_clusters(make):
    device = make(CLUSTER.replace("BEFORE", "cluster_arrive<2>();"))
    with pytest.raises(CudaError, match="invalid launch"):
        device.kernel("sample.cu", "k").launch(5, 64, (device.zeros(64),), smem=512, cluster=2)


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
        match=r"kernel k.*does not end .*CTA \(0,0,0\) thread \(\d+,0,0\).*sample\.cu:4",
    ):
        run(device, "k", 1, 32, [], np.zeros(1, np.int32))


def test_a_crash_names_the_kernel(make):
    device = make('extern "C" __global__ void k(int* y) { *(volatile int*)(8) = 1; }')
    with pytest.raises(
        EmulatorError, match=r"kernel k.*CTA \(1,0,0\)|kernel k: Segmentation fault"
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
