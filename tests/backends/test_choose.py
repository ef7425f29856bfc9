"""The choice of a backend: a usable GPU, the CPU with the reason why not, or a refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ggpy.backends import choose, describe
from ggpy.backends.numpy.backend import Reference
from ggpy.device import CudaError, Gpu, NoGpu

ROOT = Path(__file__).resolve().parents[2]
GPU = Gpu("NVIDIA Test 9", 1, "sm_90a", 132, 150 * 10**9, 227 << 10, 50 << 20, "13.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that probing finds this, and that opening a GPU does that."""

    def pretend(found: Gpu | NoGpu, opened: Any = None) -> list[int]:
        asked: list[int] = []

        def probe(ordinal: int) -> Gpu | NoGpu:
            asked.append(ordinal)
            return found

        def device(ordinal: int) -> Any:
            if isinstance(opened, Exception):
                raise opened
            return opened

        monkeypatch.setattr("ggpy.device.probe", probe)
        monkeypatch.setattr("ggpy.device.gpu.CudaDevice", device)
        monkeypatch.setattr("ggpy.backends.cuda.backend.Cuda", lambda *given: given)
        return asked

    return pretend


def test_the_cpu_is_taken_without_looking_for_a_gpu(machine: Any) -> None:
    asked = machine(NoGpu("no reason"))
    ops = choose("cpu", 1)
    assert (ops.name, ops.reason, asked) == ("cpu", "as asked", [])


def test_numpy_can_be_asked_for(machine: Any) -> None:
    asked = machine(NoGpu("no reason"))
    assert type(choose("numpy", 1)) is Reference
    assert asked == []


def test_without_numba_numpy_computes_and_says_so(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(NoGpu("no reason"))
    for name in [n for n in sys.modules if n.startswith("ggpy.backends.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    told: list[str] = []
    assert type(choose("auto", 1, told.append)) is Reference
    assert len(told) == 1 and told[0].endswith("pip install 'ggpy[cpu]' adds numba")


@pytest.mark.parametrize(
    ("found", "activations", "words"),
    [
        (
            NoGpu("none"),
            "f16",
            "--activations f16 is nothing for the CPU: it has q16, q8",
        ),
        (GPU, "f32", "--activations f32 is nothing for a GPU: it has f16, q8_1, q8"),
    ],
)
def test_activations_of_another_device_are_refused(
    machine: Any, found: Any, activations: Any, words: str
) -> None:
    machine(found, SimpleNamespace())
    with pytest.raises(ValueError, match=words):
        choose("auto", 1, activations=activations)


def test_activations_of_8_bits_are_nothing_to_numpy() -> None:
    told: list[str] = []
    for activations in ("auto", "q16", "f32", "q8"):
        choose("numpy", 1, told.append, activations=activations)
    assert told == ["numpy computes in float32: --activations q8 has no effect"]


def test_without_a_gpu_auto_is_the_cpu_and_says_why(machine: Any) -> None:
    machine(NoGpu("no NVIDIA driver is installed"))
    ops = choose("auto", 1)
    assert (ops.name, ops.reason) == ("cpu", "no NVIDIA driver is installed")


@pytest.mark.parametrize(("asked", "ordinal"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_a_usable_gpu_is_taken_and_shown(machine: Any, asked: str, ordinal: int) -> None:
    opened = SimpleNamespace()
    ordinals = machine(GPU, opened)
    *taken, note = choose(asked)  # type: ignore[misc]
    assert taken == [opened, f"cuda:{ordinal}", describe(GPU), False, "f16", "auto"]
    assert callable(note)
    options = {"batch_invariant": True, "activations": "q8_1", "note": print}
    assert choose(asked, **options)[3:] == (True, "q8_1", "auto", print)  # type: ignore[index]
    assert ordinals == [ordinal, ordinal]
    assert describe(GPU) == "NVIDIA Test 9, 150 GB, sm_90a, driver for CUDA 13.0"


def test_compiling_is_told_once(machine: Any) -> None:
    machine(GPU, SimpleNamespace())
    told: list[str] = []
    device, *_ = choose("cuda", note=told.append)  # type: ignore[misc]
    device.on_compile()
    device.on_compile()
    assert len(told) == 1 and told[0].startswith("compiling kernels for this GPU, once: ")


@pytest.mark.parametrize("asked", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_never_falls_back(machine: Any, asked: str) -> None:
    machine(NoGpu("the NVIDIA driver finds no GPU"))
    words = f"device '{asked}' cannot be used: the NVIDIA driver finds no GPU; device cpu"
    with pytest.raises(ValueError, match=words):
        choose(asked)


def test_a_gpu_that_does_not_open_is_no_usable_one(machine: Any) -> None:
    machine(GPU, CudaError("opening the GPU: CUDA_ERROR_DEVICE_UNAVAILABLE"))
    assert choose("auto", 1).reason == "opening the GPU: CUDA_ERROR_DEVICE_UNAVAILABLE"
    with pytest.raises(ValueError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        choose("cuda")


def test_an_error_behind_an_open_gpu_is_not_hidden(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(GPU, SimpleNamespace())

    def broken(*_: Any) -> None:
        raise CudaError("a kernel does not load")

    monkeypatch.setattr("ggpy.backends.cuda.backend.Cuda", broken)
    with pytest.raises(CudaError, match="a kernel does not load"):
        choose("auto")


@pytest.mark.parametrize("asked", ["tpu", "cuda:x", "cuda:", "cuda:-1", "gpu", "CPU"])
def test_an_unknown_device_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device '{asked}': use auto, cpu, numpy, "):
        choose(asked)


def test_the_cpu_needs_nothing_of_cuda() -> None:
    code = (
        "import sys, ggpy\n"
        "model = ggpy.load('models/tiny/llama.gguf', device='cpu')\n"
        "list(model.generate('hello', max_tokens=2))\n"
        "loaded = {'cuda.bindings', 'cuda.core', 'cuda.pathfinder', 'ggpy.backends.cuda.backend'}\n"
        "print(sorted(set(sys.modules) & loaded))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
