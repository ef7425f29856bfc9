"""The emulated device's interface: arguments, buffers, graphs, compile errors, limits."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulator import build
from emulator.process import EmulatorError
from emulator.small import run

from ggpy.device.base import CudaError, OutOfMemory
from ggpy.device.compile import CompileError

TESTS = str(Path(__file__).resolve().parent.parent)


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


def test_memory_may_be_freed_in_the_middle_of_a_command(make, monkeypatch):
    """The garbage collector may free memory during a command; answers must not be mixed up."""
    device = make(PARAMETERS)
    numbers = np.arange(4, dtype=np.float32)
    kept, dropped, used = device.upload_array(numbers), [device.alloc(64)], []
    read = device.host._read

    def collecting(size, seconds):
        dropped.clear()
        used.append(device.used_bytes)
        return read(size, seconds)

    monkeypatch.setattr(device.host, "_read", collecting)
    np.testing.assert_array_equal(device.download(kept, np.float32, 4), numbers)
    monkeypatch.undo()
    assert used[0] == device.used_bytes and not device.host._freed
    np.testing.assert_array_equal(device.download(kept, np.float32, 4), numbers)


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
    device = make('extern "C" __global__ void k(int* y, int n) { y[n] = 1; }')
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


def test_a_kernel_may_have_the_name_of_a_library_function(make):
    device = make('extern "C" __global__ void ftok(int* y) { *y = 6; }')
    assert run(device, "ftok", 1, 1, [], np.zeros(1, np.int32))[0] == 6


def test_a_kernel_compiled_twice_has_memory_of_its_own_size(make):
    """Shared memory in a template whose size depends on a macro; the smaller size comes first."""
    device = make("""
        template <class T> __device__ T* part_of(int i) {
            __shared__ T parts[THREADS];
            return parts + i;
        }
        extern "C" __global__ void k(int* out) {
            *part_of<int>(threadIdx.x) = threadIdx.x;
            __syncthreads();
            out[threadIdx.x] = *part_of<int>(THREADS - 1 - threadIdx.x);
        }
    """)
    for n in (32, 128):
        out = device.alloc(4 * n)
        device.kernel("sample.cu", "k", defines={"THREADS": n}).launch(1, n, (out,))
        assert device.download(out, np.int32, n).tolist() == list(range(n))[::-1]


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


def test_headers_are_precompiled(make, monkeypatch):
    """Headers are precompiled even if a macro of the kernel has a name that occurs in them."""
    run, warnings = build.subprocess.run, []

    def warning(command, **options):
        done = run([*(part for part in command if part != "-w"), "-Winvalid-pch"], **options)
        warnings.append(done.stderr)
        return done

    # The process id makes the source unique, so the cache does not contain it.
    device = make(f'extern "C" __global__ void k(int* y) {{ *y = X + {os.getpid()}; }}')
    monkeypatch.setattr(build.subprocess, "run", warning)
    y = device.zeros(4)
    device.kernel("sample.cu", "k", defines={"X": 7}).launch(1, 1, (y,))
    assert device.download(y, np.int32, 1)[0] == 7 + os.getpid()
    assert warnings and not any("pch" in text for text in warnings)


def test_processes_that_want_the_same_compile_it_once(tmp_path):
    log, wrapper = tmp_path / "log", tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {build.compiler()} "$@"\n')
    wrapper.chmod(0o755)
    code = "from emulator import build; print(build.host_program(False))"
    environment = {"CXX": str(wrapper), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": TESTS}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environment, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    found = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0] * 3 and len(found) == 1
    compiled = [line for line in log.read_text().splitlines() if "host.cpp" in line]
    assert len(compiled) == 1
