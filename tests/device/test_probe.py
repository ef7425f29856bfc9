"""Probing a machine that lacks something gives the reason, quickly, as often as it is asked."""

import subprocess
import sys
from pathlib import Path

import pytest

from ggpy.device import CudaError, Gpu, NoGpu, probe, toolkit
from ggpy.device.gpu import CudaDevice

ROOT = Path(__file__).resolve().parents[2]


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )


def test_probe_answers_twice_without_hanging():
    done = python(
        "from ggpy.device import probe; a = probe(); assert probe() == a; print(type(a).__name__)"
    )
    assert done.stdout.strip() in ("Gpu", "NoGpu"), done.stderr


def test_a_machine_without_a_gpu_has_a_reason():
    found = probe()
    if isinstance(found, Gpu):
        pytest.skip(f"this machine has a {found.name}")
    assert len(found.reason) > 20
    with pytest.raises(CudaError) as error:
        CudaDevice()
    assert str(error.value) == found.reason


def test_without_cuda_python():
    done = python(
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "from ggpy.device import probe; print(probe().reason)"
    )
    assert done.stdout.strip() == "cuda-python is not installed: pip install cuda-python", (
        done.stderr
    )


def test_without_nvrtc(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")

    def absent():
        raise RuntimeError("libnvrtc.so.13 was not found\nmore")

    monkeypatch.setattr(bindings, "nvrtcVersion", absent)
    toolkit.load_nvrtc.cache_clear()
    with pytest.raises(
        toolkit.NvrtcMissing, match=r"pip install 'ggpy\[cuda\]' \(libnvrtc.so.13 was not found\)$"
    ):
        toolkit.load_nvrtc()


def test_importing_the_package_imports_no_cuda():
    done = python(
        "import sys, ggpy.device\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'cuda'))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_no_gpu_is_data():
    assert NoGpu("x") == NoGpu("x") and NoGpu("x") != NoGpu("y")
