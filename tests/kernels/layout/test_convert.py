"""The integer-to-f16 converters: all bytes and all nibbles in every position of a word."""

import numpy as np
import pytest
from kernel_buffers import Output, upload

SOURCE = """
extern "C" __global__ void bytes(const uint32_t* in, half2* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half2 h[2];
    int8_to_half(in[i], h);
    out[2 * i] = h[0], out[2 * i + 1] = h[1];
}
template <int OFFSET>
__global__ void nibbles(const uint32_t* in, half2* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half2 h[4];
    int4_to_half<OFFSET>(in[i], h);
    for (int k = 0; k < 4; ++k) out[4 * i + k] = h[k];
}
extern "C" __global__ void floats(const int2* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int q[2] = {in[i].x, in[i].y};
    float f[8];
    int8_to_float(q, f);
    for (int k = 0; k < 8; ++k) out[8 * i + k] = f[k];
}
"""


def run(device, name, words, dtype, count):
    """Run a converter. Returns `count` numbers for each word."""
    words = np.ascontiguousarray(words)
    out = Output(device, len(words) * count * np.dtype(dtype).itemsize)
    names = ["bytes", "nibbles<0>", "nibbles<8>", "floats"]
    kernels = device.kernels("lib/convert.cuh", names, extra_source=SOURCE)
    kernel = kernels[names.index(name)]
    kernel.launch(-(-len(words) // 64), 64, (upload(device, words), out.buffer, len(words)))
    return out.read(dtype, (len(words), count)).astype(np.float32)


def test_all_bytes(device):
    values = (np.arange(256)[:, None] + [0, 85, 170, 255]).astype(np.int8)
    result = run(device, "bytes", values.view(np.uint32)[:, 0], np.float16, 4)
    assert np.array_equal(result, values)


def test_all_bytes_to_float(device):
    values = (np.arange(256)[:, None] + 37 * np.arange(8)).astype(np.int8)
    assert np.array_equal(run(device, "floats", values, np.float32, 8), values)


@pytest.mark.parametrize("offset", [0, 8])
def test_all_nibbles(device, offset):
    n = (np.arange(16)[:, None] + 3 * np.arange(8)) % 16
    interleaved = n[:, [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
    words = (interleaved << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1).astype(np.uint32)
    assert np.array_equal(run(device, f"nibbles<{offset}>", words, np.float16, 8), n - offset)
