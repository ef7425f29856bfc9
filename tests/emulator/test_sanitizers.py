"""Accesses out of bounds and undefined arithmetic are reported with the kernel's line."""

import numpy as np
import pytest
from emulator import build
from emulator.process import EmulatorError
from emulator.small import ROW_SUMS, run

RNG = np.random.default_rng(7)
needs_sanitizers = pytest.mark.skipif(bool(build.unavailable(True)), reason=build.unavailable(True))

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
        make(ROW_SUMS, sanitize=True), "row_sums<half>", 9, 128, [x], np.empty(9, np.float32), 300
    )
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-4)
