"""The programs of examples/: each runs as a user runs it, without a GPU, and prints its results."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ggpy.sampling import SamplingParams
from ggpy.tokenizer import Tokenizer
from ggpy.util import paths

ROOT = paths.data_dir("models").parent
EXAMPLES = ROOT / "examples"


def output_of(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints; it must end with status 0, in time, and say no more."""
    result = subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def _environment() -> dict[str, str]:
    """Without a GPU; ggpy is this checkout's."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}


@pytest.fixture(scope="module")
def own_kernel() -> ModuleType:
    """examples/own_kernel.py as a module."""
    spec = importlib.util.spec_from_file_location("own_kernel", EXAMPLES / "own_kernel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generate_streams_a_text_then_a_chat() -> None:
    lines = output_of("generate", "-n", "8", "-p", "The sky", "-q", "Why?", "--device", "cpu")
    text = "\n".join(lines)
    assert lines[0].startswith("<Model llama.gguf: llama, 256 tokens of context, cpu")
    assert re.search(r"^The sky.+\n\n8 tokens, [\d.]+ a second$", text, re.M | re.S)
    assert re.search(r"^user: Why\?\nassistant: ", text, re.M)


def test_generate_continues_with_the_same_text_each_time() -> None:
    first, again = (output_of("generate", "-n", "8", "--device", "cpu") for _ in range(2))
    assert first[2] == again[2] and first[2].startswith("The sky is")


def test_client_streams_an_answer_and_tells_an_error() -> None:
    from running_server import TINY, running  # needs the extra `server`

    ends = Tokenizer.from_gguf(TINY / "llama.gguf").end_ids
    endless = SamplingParams(temperature=0, logit_bias=dict.fromkeys(ends, -math.inf))
    with running(api_keys=("k",), sampling=endless) as server:
        arguments = ["hello", "--url", server.url, "--key", "k", "-n", "6"]
        text = "\n".join(output_of("client", *arguments))
        assert re.search(r"^.+\n\n6 tokens in [\d.]+ s, the first after [\d.]+ s$", text, re.S)
        wrong = [sys.executable, "examples/client.py", "hello", "--url", server.url]
        result = subprocess.run(wrong, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert result.returncode == 1 and "the API key is missing or wrong" in result.stderr


def test_quantization_error_has_a_row_for_each_type_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    head, *rows = output_of("quantization_error", str(plot))
    found = {row.split()[0]: row.split()[1:] for row in rows[:-2]}
    assert head.split() == ["type", "bits", "error"]
    assert found["Q8_0"][0] == "8.50" and found["Q4_K"][0] == "4.50"
    errors = {name: float(cells[1].rstrip("%")) for name, cells in found.items()}
    assert list(errors.values()) == sorted(errors.values())
    assert errors["Q8_0"] < errors["Q6_K"] < errors["Q5_K"] < errors["Q4_K"] < errors["Q2_K"] < 50
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_own_kernel_is_compiled_where_there_is_no_gpu(nvrtc: None) -> None:
    *compiled, last = output_of("own_kernel")
    assert [re.sub(r"\d+ bytes, \d+", "N bytes, N", line) for line in compiled] == [
        f"softmax_rows<256> for {arch}: N bytes, N registers a thread"
        for arch in ("sm_80", "sm_90a")
    ]
    assert last.startswith("no GPU to launch on: ")


def test_own_kernel_computes_softmax(own_kernel: ModuleType, tmp_path: Path) -> None:
    """In the emulator, under sanitizers."""
    from emulator import build
    from emulator.emulated import Emulated

    if build.unavailable():
        pytest.skip(build.unavailable())
    x = np.random.default_rng(2).normal(0, 3, (3, 700)).astype(np.float32)
    with Emulated(cuda=_for_emulator(tmp_path), sanitize=True) as device:
        _assert_softmax(own_kernel, device, x)


def test_own_kernel_on_a_gpu(own_kernel: ModuleType, gpu: Any) -> None:
    from ggpy.device.gpu import CudaDevice

    x = np.random.default_rng(3).normal(0, 3, (5, 3001)).astype(np.float32)
    _assert_softmax(own_kernel, CudaDevice(cuda=EXAMPLES), x)


def _assert_softmax(own_kernel: ModuleType, device: Any, x: np.ndarray) -> None:
    found = own_kernel.softmax(device, x)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(found, e / e.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-9)


def _for_emulator(folder: Path) -> Path:
    """A folder with the source, which includes what stands for CUDA on a CPU."""
    (folder / "lib").mkdir()
    common = (paths.cuda_dir() / "lib" / "common.cuh").read_text(encoding="utf-8")
    (folder / "lib" / "common.cuh").write_text(common, encoding="utf-8")
    source = (EXAMPLES / "own_kernel.cu").read_text(encoding="utf-8")
    text = f'#include "lib/common.cuh"\n{source}'
    (folder / "own_kernel.cu").write_text(text, encoding="utf-8")
    return folder
