"""Tensor cores, matrix loads, and integer, f16 and float functions against numpy."""

import ml_dtypes
import numpy as np
import pytest
from emulator.small import run

RNG = np.random.default_rng(7)

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
extern "C" __global__ void u8s8(const int8_t* a, const int8_t* b, int* d) {
    product<int8_t, 32>(a, b, d, [](int (&c)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {
        mma_m16n8k32_u8s8(c, a, b);
    });
}
extern "C" __global__ void u8s8_k16(const int8_t* a, const int8_t* b, int* d) {
    product<int8_t, 16>(a, b, d, [](int (&c)[4], uint32_t (&a)[2], uint32_t (&b)[1]) {
        mma_m16n8k16_u8s8(c, a, b[0]);
    });
}
extern "C" __global__ void e4m3(const uint8_t* a, const uint8_t* b, float* d) {
    product<uint8_t, 32>(a, b, d, [](float (&c)[4], uint32_t (&a)[4], uint32_t (&b)[2]) {
        mma_m16n8k32_e4m3(c, a, b);
    });
}
"""


@pytest.mark.parametrize(
    "name, k",
    [
        *[("f16", 16), ("f16_k8", 8), ("bf16", 16)],
        *[("s8", 32), ("u8s8", 32), ("u8s8_k16", 16), ("e4m3", 32)],
    ],
)
def test_tensor_core_products(make, name, k):
    if "s8" in name:
        a, b = (RNG.integers(-128, 128, (n, k)).astype(np.int8) for n in (16, 8))
        d = RNG.integers(-999, 999, (16, 8)).astype(np.int32)
        unsigned = a.view(np.uint8) if "u8" in name else a
        exact = d + unsigned.astype(np.int32) @ b.astype(np.int32).T
        stored = (a, b)
    else:
        a, b = (RNG.standard_normal((n, k)).astype(np.float16).astype(np.float32) for n in (16, 8))
        if name == "e4m3":
            stored = tuple(v.astype(ml_dtypes.float8_e4m3fn) for v in (a, b))
            a, b = (v.astype(np.float32) for v in stored)
            stored = tuple(v.view(np.uint8) for v in stored)
        elif name == "bf16":
            a, b = ((v.view(np.uint32) & 0xFFFF0000).view(np.float32) for v in (a, b))
            stored = tuple((v.view(np.uint32) >> 16).astype(np.uint16) for v in (a, b))
        else:
            stored = (a.astype(np.float16), b.astype(np.float16))
        d = RNG.standard_normal((16, 8)).astype(np.float32)
        exact = d + a.astype(np.float64) @ b.astype(np.float64).T
    device = make(MMA)
    names = ["f16", "f16_k8", "bf16", "s8", "u8s8", "u8s8_k16", "e4m3"]
    device.kernels("sample.cu", names)  # one compilation for all cases
    result = run(device, name, 1, 32, list(stored), d)
    np.testing.assert_allclose(result, exact, rtol=1e-6, atol=1e-6)


WGMMA = """
#include "lib/wgmma.cuh"
// d[64][8] = or += a[64][16] b[8][16]^T; the first warp copies b to shared memory.
template <bool ADD, uint32_t LINES, int BYTES>
__device__ void product(const half* a, const uint4* b, float* d) {
    SHARED_DYNAMIC(uint8_t, shared);
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    if (threadIdx.x < 16) {
        int row = lane / 2, piece = lane % 2, swizzle = BYTES == 128 ? row : row / 4 % 2;
        *(uint4*)(shared + row * BYTES + (piece ^ swizzle) * 16) = b[lane];
    }
    __syncthreads();
    uint32_t ra[4];
    float c[4];
    for (int i = 0; i < 4; ++i) {
        ra[i] = *(const uint32_t*)(a + (first + g + i % 2 * 8) * 16 + i / 2 * 8 + 2 * t);
        c[i] = d[(first + g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    wgmma_f16<8, ADD, LINES>(c, ra, wgmma_operand(shared));
    for (int i = 0; i < 4; ++i) d[(first + g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}
extern "C" __global__ void wide(const half* a, const uint4* b, float* d) {
    product<true, LINES_OF_128, 128>(a, b, d);
}
extern "C" __global__ void narrow(const half* a, const uint4* b, float* d) {
    product<false, LINES_OF_32, 32>(a, b, d);
}
"""


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_products_of_a_warpgroup(make, name):
    """Lines of 128 bytes and of 32, with their swizzles."""
    a, b = (RNG.standard_normal((n, 16)).astype(np.float16) for n in (64, 8))
    d = RNG.standard_normal((64, 8)).astype(np.float32)
    device = make(WGMMA)
    device.kernels("sample.cu", ["wide", "narrow"])
    result = run(device, name, 1, 128, [a, b], d, smem=1024)
    exact = a.astype(np.float64) @ b.astype(np.float64).T + (d if name == "wide" else 0)
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


def test_pairs_of_floats_become_bf16(make):
    """Rounded to the nearest, ties to even; NaN whose bits would overflow stay NaN."""
    device = make("""
        #include "lib/common.cuh"
        extern "C" __global__ void k(const float2* x, uint32_t* y) {
            y[threadIdx.x] = floats_to_bf16(x[threadIdx.x].x, x[threadIdx.x].y);
        }""")
    ties = np.array([0x3F808000, 0x3F818000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    numbers = RNG.standard_normal(58) * np.exp(RNG.uniform(-80, 80, 58))
    x = np.concatenate([numbers, [np.inf, -0.0], ties]).astype(np.float32)
    y = run(device, "k", 1, 32, [x], np.zeros(32, np.uint32)).view(ml_dtypes.bfloat16)
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))
