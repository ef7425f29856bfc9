"""What the device layer does on the host, against a driver that only records: test_host_side.py
runs this file.

Its name keeps it out of an ordinary collection: it needs fake_driver.cpp as the process's libcuda.
"""

import ctypes
import gc
import threading

import numpy as np
import pytest

from ggpy.device import toolkit
from ggpy.device.base import CudaError, OutOfHostMemory, OutOfMemory
from ggpy.device.gpu import CudaDevice
from ggpy.device.probe import Gpu, NoGpu, list_gpus, probe
from ggpy.util.simulated import SHARED_BYTES

FAKE = ctypes.CDLL("libcuda.so.1")
FAKE.fake_record.restype = ctypes.c_char_p
FAKE.fake_memory_left.restype = ctypes.c_size_t
ILLEGAL_ADDRESS = 700

SOURCE = """
extern "C" __global__ void params_8_8_4_4(float* a, float* b, int n, float e) { a[n] = b[0] * e; }
extern "C" __global__ void params_16_1_8(float4 v, char c, double d) {}
extern "C" __global__ void params_8(int* y) { __shared__ int s[1000]; s[y[0]] = 1; y[1] = s[y[2]]; }
extern "C" __global__ void static4000_8(int* y) { __shared__ int s[1000]; s[*y] = 1; *y = s[y[2]]; }
__global__ void mangled(int* y) {}
"""


@pytest.fixture
def device(tmp_path):
    (tmp_path / "a.cu").write_text(SOURCE)
    return CudaDevice(cuda=tmp_path)


def record():
    return FAKE.fake_record().decode()


def fail(function, status=1):
    FAKE.fake_fail(function.encode(), status)


def test_probe_describes_the_gpu():
    gpu = probe()
    expected = ("Fake GPU", 0, "sm_90a", 132, 64 << 20, 232448, 50 << 20, "13.0")
    assert gpu == Gpu(*expected) and list_gpus() == [gpu]
    assert probe(3) == NoGpu("there is no GPU 3: the driver finds 1, numbered from 0")


@pytest.mark.parametrize(
    "capability, arch", [(75, "sm_75"), (86, "sm_86"), (100, "sm_100"), (120, "sm_120")]
)
def test_architecture(capability, arch):
    FAKE.fake_capability(capability)
    try:
        assert probe().arch == arch
    finally:
        FAKE.fake_capability(90)


def test_old_gpus_are_refused():
    FAKE.fake_capability(70)
    try:
        assert probe() == NoGpu("Fake GPU has compute capability 7.0; 7.5 is needed")
        with pytest.raises(CudaError, match=r"7\.5 is needed"):
            CudaDevice()
    finally:
        FAKE.fake_capability(90)


def test_a_driver_older_than_the_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("FAKE_VERSION", "12040")
    assert "knows CUDA 12.4, the CUDA compiler here is 13." in probe().reason


def test_missing_compiler_says_what_to_install(monkeypatch):
    def missing():
        raise toolkit.NvrtcMissing(f"no NVRTC: {toolkit.INSTALL}")

    monkeypatch.setattr(toolkit, "nvrtc_version", missing)
    assert probe() == NoGpu("Fake GPU was found, but no NVRTC: pip install 'ggpy[cuda]'")


def test_memory_goes_up_and_down(device):
    x = np.arange(50, dtype=np.float32)
    buffer = device.upload_array(x, "x")
    np.testing.assert_array_equal(device.download(buffer, np.float32, (5, 10)), x.reshape(5, 10))
    device.upload(buffer.at(8), np.float32([7, 8]), offset=4)
    np.testing.assert_array_equal(device.download(buffer, np.float32, 3, offset=8), [2, 7, 8])
    other = device.zeros(200)
    device.copy(other.at(100), buffer, 100)
    assert device.download(other, np.float32, 50)[25:28].tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"12 bytes at offset 192 are outside buffer 'x' \(200 bytes\)"
    ):
        device.upload(buffer, np.zeros(3, np.float32), offset=192)
    with pytest.raises(ValueError, match="offset 201 is outside"):
        buffer.at(201)


def test_memory_is_counted_and_returned(device):
    left = FAKE.fake_memory_left()
    first, second = device.alloc(1000), device.alloc(5000)
    assert device.used_bytes == 6000 and FAKE.fake_memory_left() == left - 6000 == device.free_bytes
    first.free()
    first.free()
    assert device.used_bytes == 5000
    del second
    gc.collect()
    assert device.used_bytes == 0 and FAKE.fake_memory_left() == left


def test_out_of_memory_has_its_numbers(device):
    with pytest.raises(
        OutOfMemory, match=r"weights needs 128\.0 MiB, \d+\.\d MiB are free"
    ) as error:
        device.alloc(128 << 20, "weights")
    assert error.value.needed == 128 << 20 and error.value.free == FAKE.fake_memory_left()


def test_pinned_memory_lives_as_long_as_its_views(device):
    memory = device.pinned(64)
    view = memory[8:16].view(np.int32)
    del memory
    gc.collect()
    assert record() != "freed host memory"
    view[:] = 3
    del view
    gc.collect()
    assert record() == "freed host memory"


def test_launch_passes_what_it_was_given(device):
    a, b = device.alloc(64, "a"), device.alloc(64, "b")
    kernel = device.kernel("a.cu", "params_8_8_4_4")
    kernel.launch((3, 2), 128, (a, b.at(4), -5, 1.5), smem=256)
    words = [
        a.ptr.to_bytes(8, "little").hex(),
        (b.ptr + 4).to_bytes(8, "little").hex(),
        "fbffffff",
        "0000c03f",
    ]
    expected = "params_8_8_4_4 grid 3 2 1 threads 128 1 1 shared 256 attributes parameters "
    assert record() == expected + " ".join(words)
    kernel.launch(1, (4, 4, 4), (None, np.uint64(17), np.uint32(0xFFFFFFFF), np.float32(-2)))
    words = ["00" * 8, "11" + "00" * 7, "ffffffff", "000000c0"]
    assert record().endswith("threads 4 4 4 shared 0 attributes parameters " + " ".join(words))
    vector = np.array([1, 2, 3, 4], np.float32)
    device.kernel("a.cu", "params_16_1_8").launch(1, 1, (vector, 7, 0.5))
    assert record().endswith("parameters " + vector.tobytes().hex() + " 07 000000000000e03f")


def test_launch_attributes(device):
    kernel, y = device.kernel("a.cu", "params_8"), device.alloc(8)
    kernel.launch(4, 32, (y,), pdl=True)
    assert "attributes 6:1 parameters" in record()
    kernel.launch(4, 32, (y,), cluster=2, pdl=True)
    assert "attributes 6:1 4:2 parameters" in record()
    kernel.launch(264, 32, (y,), cooperative=True)
    assert "grid 264 " in record() and "attributes 2:1 parameters" in record()
    kernel.launch(264, 32, (y,), cooperative=True, pdl=True)
    assert "attributes 6:1 parameters" in record()
    with pytest.raises(
        CudaError,
        match=r"kernel params_8, grid \(265, 1, 1\).*only 264 such CTAs run at the same",
    ):
        kernel.launch(265, 32, (y,), cooperative=True)


def test_dynamic_shared_memory_beyond_48_kb(device):
    kernel, y = device.kernel("a.cu", "params_8"), device.alloc(8)
    kernel.launch(1, 32, (y,), smem=100_000)
    assert "carveout" not in record(), "two blocks fit"
    kernel.launch(1, 32, (y,), smem=200_000)
    assert "shared 200000" in record()
    static = kernel.resources.shared
    percent = -(-100 * (200_000 + static) // 232448)
    assert f" carveout:{percent} " in record(), "the rest may be cache"
    with pytest.raises(
        CudaError, match=rf"and {static} bytes of static shared memory; .* at most 232448"
    ):
        kernel.launch(1, 32, (y,), smem=232448)


@pytest.mark.parametrize("smem", [48 << 10, (48 << 10) - 3999])
def test_static_shared_memory_counts_towards_48_kb(device, smem):
    kernel, y = device.kernel("a.cu", "static4000_8"), device.alloc(8)
    assert kernel.resources.shared == 4000
    kernel.launch(1, 32, (y,), smem=smem)
    assert f"shared {smem} " in record()


@pytest.fixture
def used_as(tmp_path, monkeypatch):
    """A function that opens the GPU as if it were an older one, of a driver that reads any PTX."""
    (tmp_path / "a.cu").write_text(SOURCE)
    monkeypatch.setenv("FAKE_VERSION", "13990")

    def opened(arch):
        monkeypatch.setenv("GGPY_AS", arch)
        return CudaDevice(cuda=tmp_path)

    return opened


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_gpu_is_used_as_an_older_one(used_as, arch):
    device = used_as(arch)
    assert (device.arch, device.target) == (arch, arch.replace("sm", "compute"))
    assert device.shared_bytes == min(232448, SHARED_BYTES[arch])
    kernel, y = device.kernel("a.cu", "params_8"), device.alloc(8)
    kernel.launch(4, 32, (y,), pdl=True)
    static = device.kernel("a.cu", "static4000_8")
    assert static.resources.shared == 4000, "the driver says it: PTX does not"
    hopper = arch == "sm_90"
    assert ("attributes 6:1 parameters" if hopper else "attributes parameters") in record()
    kernel.launch(264, 32, (y,), pdl=True, cooperative=True)
    assert f"attributes {'6' if hopper else '2'}:1 parameters" in record()
    if hopper:
        kernel.launch(4, 32, (y,), cluster=2)
    else:
        with pytest.raises(CudaError, match=f"{arch} has no clusters"):
            kernel.launch(4, 32, (y,), cluster=2)
    with pytest.raises(CudaError, match=f"at most {device.shared_bytes}"):
        kernel.launch(1, 32, (y,), smem=device.shared_bytes + 1)


def test_what_a_gpu_cannot_be_used_as(used_as, monkeypatch):
    with pytest.raises(CudaError, match="GGPY_AS is 'sm_70': use one of sm_75, sm_80,"):
        used_as("sm_70")
    monkeypatch.setenv("FAKE_VERSION", "13000")
    with pytest.raises(CudaError, match=r"reads PTX up to CUDA 13\.0, .* writes that of 13\."):
        used_as("sm_80")
    FAKE.fake_capability(86)
    try:
        with pytest.raises(CudaError, match="is sm_86: it cannot be used as the newer sm_89"):
            used_as("sm_89")
    finally:
        FAKE.fake_capability(90)


@pytest.mark.parametrize(
    "grid, threads, cluster, message",
    [
        (0, 32, 1, "at least 1 CTA"),
        ((1, 70000), 32, 1, "at most 65535"),
        (1, 1025, 1, "1 to 1024 threads"),
        (3, 32, 2, "multiple of the cluster"),
    ],
)
def test_impossible_launches_are_refused(device, grid, threads, cluster, message):
    with pytest.raises(CudaError, match=f"kernel params_8, grid.*{message}"):
        device.kernel("a.cu", "params_8").launch(grid, threads, (None,), cluster=cluster)


def test_wrong_arguments_are_refused(device):
    kernel = device.kernel("a.cu", "params_8_8_4_4")
    for args in (
        (None, None, 1),
        (None, None, 1, 1.0, 2),
        (None, None, None, 1.0),
        (1.0, "x", 1, 1.0),
    ):
        with pytest.raises(TypeError, match="kernel params_8_8_4_4"):
            kernel.launch(1, 1, args)
    buffer = device.alloc(8, "scratch")
    buffer.free()
    with pytest.raises(CudaError, match=r"'scratch'.*was freed"):
        kernel.launch(1, 1, (buffer, None, 1, 1.0))
    with pytest.raises(ValueError, match="does not fit its 4 bytes"):
        kernel.launch(1, 1, (None, None, 1 << 32, 1.0))


def test_a_kernel_that_is_not_there(device):
    with pytest.raises(CudaError, match=r'a\.cu has no kernel mangled \(extern "C".*params_8'):
        device.kernel("a.cu", "mangled")


def test_errors_name_the_kernels(device):
    first, second, y = (
        device.kernel("a.cu", "params_8"),
        device.kernel("a.cu", "params_8_8_4_4"),
        device.alloc(8),
    )
    first.launch(1, 1, (y,))
    device.synchronize()
    fail("cuLaunchKernelEx")
    with pytest.raises(
        CudaError,
        match=r"launching kernel params_8, grid \(1, 1, 1\), threads \(7, 1, 1\).*INVALID_V",
    ):
        first.launch(1, 7, (y,))
    second.launch(1, 1, (y, y, 1, 1.0))
    fail("cuCtxSynchronize", ILLEGAL_ADDRESS)
    with pytest.raises(CudaError) as error:
        device.synchronize()
    text = str(error.value)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)" in text
    assert text.endswith("launched since the last synchronisation: params_8_8_4_4")


def test_graphs_replay_and_hold_their_buffers(device):
    kernel, y = device.kernel("a.cu", "params_8"), device.zeros(8, "y")
    before = FAKE.fake_launches()
    with device.capture() as graph:
        kernel.launch(1, 1, (y,))
        device.upload(y, np.array([1, 2], np.int32))
        kernel.launch(1, 1, (y.at(4),), pdl=True)
    assert FAKE.fake_launches() == before and device.download(y, np.int32, 2).tolist() == [0, 0]
    graph.launch()
    graph.launch()
    assert FAKE.fake_launches() == before + 4 and device.download(y, np.int32, 2).tolist() == [1, 2]
    with pytest.raises(CudaError, match=r"'y'.*captured graph"):
        y.free()
    fail("cuGraphLaunch", ILLEGAL_ADDRESS)
    with pytest.raises(CudaError, match=r"launching a graph: CUDA_ERROR_ILLEGAL_ADDRESS.*params_8"):
        graph.launch()
    graph.close()
    y.free()


def test_a_failed_capture_leaves_the_device_usable(device):
    kernel, y = device.kernel("a.cu", "params_8"), device.zeros(8, "y")
    with pytest.raises(KeyError), device.capture():
        kernel.launch(1, 1, (y,))
        raise KeyError
    before = FAKE.fake_launches()
    kernel.launch(1, 1, (y,))
    assert FAKE.fake_launches() == before + 1
    y.free()


def test_events_and_streams(device):
    start, end, stream = (
        device.event(timing=True).record(),
        device.event(timing=True),
        device.new_stream(),
    )
    stream.wait(start)
    end.record(stream)
    assert end.done() and end.elapsed_ms(start) == 1.5
    fail("cuEventQuery", 600)
    assert not end.done()
    stream.synchronize()


def test_other_threads_may_use_the_device(device):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(device.download(device.zeros(4), np.int32, 1)[0])
    )
    thread.start()
    thread.join()
    assert results == [0]


def test_memory_of_the_host_that_kernels_read(device):
    used, left = device.used_bytes, FAKE.fake_memory_left()
    first = device.alloc_host(64, "experts")
    assert record() == "host memory with flags 3", "portable, and mapped"
    assert (device.host_bytes, device.used_bytes) == (64, used)
    source = device.upload_array(np.arange(16, dtype=np.float32))
    device.copy(first.at(8), source, 56)
    back = device.zeros(64)
    device.copy(back, first.at(8), 56, stream=device.new_stream())
    assert device.download(back, np.float32, 14).tolist() == list(range(14))
    with pytest.raises(ValueError, match="57 bytes at offset 8 are outside buffer 'experts'"):
        device.copy(back, first.at(8), 57)
    first.free()
    assert record() == "freed host memory" and device.host_bytes == 0
    source.free(), back.free()
    assert FAKE.fake_memory_left() == left


def test_out_of_host_memory_has_its_numbers(device):
    fail("cuMemHostAlloc", 2)
    with pytest.raises(
        OutOfHostMemory, match=r"experts needs 3\.0 MiB .* \(--n-cpu-moe\)"
    ) as error:
        device.alloc_host(3 << 20, "experts")
    assert error.value.needed == 3 << 20 and device.host_bytes == 0
