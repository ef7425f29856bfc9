"""`ggpy run` and the machine: which device it says it takes, and what it says when that fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggpy.backends import choose
from ggpy.cli import run
from ggpy.device import CompileError, CudaError, NoGpu, OutOfMemory

LLAMA = str(Path(__file__).resolve().parents[2] / "models" / "tiny" / "llama.gguf")
ANSWER = ("-p", "hello", "-n", "4", "--no-chat", "-s", "1", "--ignore-eos")
REASON = "no NVIDIA driver is installed (libcuda was not found)"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `ggpy run` on a machine without a GPU: (status, stdout, stderr)."""
    monkeypatch.setattr("ggpy.device.probe", lambda ordinal=0: NoGpu(REASON))
    return lambda *arguments: (run.main([*arguments]), *capsys.readouterr())


def test_auto_takes_the_cpu_and_gives_the_reason(cli: Run) -> None:
    status, out, err = cli(LLAMA, *ANSWER)
    assert (status, len(out) > 0) == (0, True)
    assert f"device: cpu ({REASON})\n" in err
    assert re.search(r"^memory: \d+ MB at most$", err, re.M)


@pytest.mark.parametrize("asked", ["cuda", "cuda:2"])
def test_cuda_without_a_gpu_is_refused_in_one_line(cli: Run, asked: str) -> None:
    status, out, err = cli(LLAMA, *ANSWER, "--device", asked)
    assert (status, out) == (2, "")
    words = f"device '{asked}' cannot be used: {REASON}; device cpu needs none"
    assert err == f"ggpy run: error: {words}\n"


def test_memory_of_a_device_is_shown(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(choose("cpu", 1)), "device_bytes", lambda self: 5_400_000_000)
    *_, err = cli(LLAMA, *ANSWER)
    assert re.search(r"^memory: \d+ MB at most, 5400 MB on cpu$", err, re.M)


def test_a_model_that_is_too_large_is_refused(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpy.backends.host.available_memory", lambda: 100_000)
    status, out, err = cli(LLAMA, *ANSWER, "--device", "cpu")
    assert (status, out) == (2, "")
    words = r"ggpy run: error: the KV cache of 256 positions .* context of \d+ tokens would fit\n$"
    assert re.search(words, err)


@pytest.mark.parametrize(
    ("model", "words", "remark"),
    [
        ("llama", ["-ncmoe", "3"], "this model has no experts: --n-cpu-moe and --cpu-moe change "),
        ("llama", ["--cpu-moe"], "this model has no experts"),
        ("glm4moe", ["--n-cpu-moe", "1"], "note: --n-cpu-moe 1 changes nothing: before layer 2, "),
        ("glm4moe", ["-ncmoe", "1"], "this model has no experts; take 2 or more"),
        *(("gpt-oss", ["-ncmoe", "1"], ""), ("llama", [], ""), ("llama", ["-ncmoe", "0"], "")),
    ],
)
def test_experts_that_are_not_there(cli: Run, model: str, words: list[str], remark: str) -> None:
    """On the CPU all experts lie in the host's memory anyway, and nothing is said of that."""
    path = str(Path(LLAMA).with_stem(model))
    status, out, err = cli(path, *ANSWER, *words, "--device", "numpy")
    assert (status, len(out) > 0) == (0, True)
    assert remark in err if remark else "experts" not in err


ERRORS = [
    CudaError("launching kernel paged_attention<64>, grid (8, 1, 1): CUDA_ERROR_ILLEGAL_ADDRESS"),
    OutOfMemory("keys", 5 << 30, 1 << 20),
    CompileError(
        "cuda/attention/paged_attention.cu does not compile (-x):\na.cu(12): error: expected a ;"
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_device_that_fails_at_work_is_an_error_and_no_traceback(
    cli: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(type(choose("cpu", 1)), "mix", fail)
    status, out, err = cli(LLAMA, *ANSWER)
    assert (status, out) == (1, "")
    assert err.endswith(f"\nggpy run: error: {error}\n") and "Traceback" not in err
    assert "Traceback" in cli(LLAMA, *ANSWER, "-v")[2]


def test_a_bug_keeps_its_traceback(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(choose("cpu", 1)), "mix", fail)
    status, _, err = cli(LLAMA, *ANSWER)
    assert status == 1 and "Traceback" in err and err.endswith("ggpy run: error: a bug\n")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_check_names_the_layer_where_numbers_end(cli: Run, overflowing: Path) -> None:
    status, out, err = cli(str(overflowing), *ANSWER, "--check")
    assert (status, out) == (1, "")
    words = r"ggpy run: error: \d+ logits are NaN or infinite; the first are in layer 1, ffn_act, "
    assert re.search(f"^{words}", err.splitlines()[-1])
    assert "Traceback" not in err


def test_check_changes_nothing_about_a_sound_model(cli: Run) -> None:
    _, expected, _ = cli(LLAMA, *ANSWER)
    status, out, err = cli(LLAMA, *ANSWER, "--check")
    assert (status, out) == (0, expected)
    assert "the model's numbers are finite" in err
