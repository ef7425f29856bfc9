"""`ggpy bench`: the program, from its command line to its output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from timed_device import TimedDevice

from ggpy.backends import choose
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.interface import Ops
from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.table import FIELDS, SAMPLES
from ggpy.util import paths, simulated

ROOT = paths.data_dir("tools").parent
QUICK = ["--device", "numpy", "-p", "8", "-n", "2", "-r", "2"]


def test_json_of_a_file_and_a_shape(
    program: ModuleType, tiny_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*QUICK, "-m", str(tiny_path("gemma3")), "--synthetic", "tiny:Q4_K", "-d", "0,20"]
    assert program.main([*words, "-o", "json", "-oe", "jsonl"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["test"] for row in rows] == ["pp8", "tg2", "pp8 @ d20", "tg2 @ d20"] * 2
    assert [row["model_type"].split()[0] for row in rows] == ["gemma3"] * 4 + ["llama"] * 4
    for row in rows:
        assert [*row] == [*FIELDS, *SAMPLES]
        assert not row["error"] and len(row["samples_ns"]) == 2
        assert row["percent_of_limit"] > 0 and row["load_s"] > 0
        assert row["command"].startswith("ggpy bench --device numpy") and row["backends"] == "CPU"
    assert [json.loads(line) for line in captured.err.splitlines()] == rows


def test_types_of_keys_and_values(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, "--synthetic", "tiny:Q8_0", "-ctk", "q8_0,bf16", "-o", "json", "-oe", "md"]
    assert program.main(words) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    types = [(r["type_k"], r["type_v"], r["error"]) for r in rows]
    assert types == [("q8_0", "f32", "")] * 2 + [("bf16", "f32", "")] * 2
    table = captured.err
    assert "| type_k |" in table and "type_v" not in table and "|   q8_0 |" in table


def test_activations(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They reach the backend, which says which ones it has: numpy's are float32."""
    asked = []

    def recorded(*args: Any, **kinds: str) -> Ops:
        asked.append(kinds["activations"])
        return choose(*args, **kinds)

    monkeypatch.setattr("ggpy.backends.choose", recorded)
    words = [*QUICK, "--synthetic", "tiny:Q8_0", "-o", "json", "-oe", "md"]
    assert program.main([*words, "--activations", "q8"]) == 0
    captured = capsys.readouterr()
    assert {*asked} == {"q8"}
    assert [row["activations"] for row in json.loads(captured.out)] == ["f32"] * 2
    assert "| activations |" in captured.err
    assert captured.err.count("--activations q8 has no effect") == 1, "it is said once"
    assert program.main(words) == 0
    assert "activations" not in capsys.readouterr().err


def test_numbers_of_threads(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, "--synthetic", "tiny:Q8_0,tiny:F16", "-t", "1-2", "-o", "json", "-oe", "md"]
    assert program.main(words) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["n_threads"] for row in rows] == [1, 1, 2, 2] * 2
    assert [row["model_type"].split()[-1] for row in rows] == ["Q8_0"] * 4 + ["F16"] * 4
    limits = [x for x in captured.err.splitlines() if x.startswith("limit: ")]
    assert [line[-15:] for line in limits] == [" with 1 threads", " with 2 threads"]


def test_markdown_says_what_failed_and_goes_on(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*QUICK, "-m", "none.gguf", "--synthetic", "tiny:Q8_0", "-ub", "4", "--progress"]
    assert program.main(words) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "| threads | n_ubatch |" in lines[0] and lines[0].endswith("| % of limit |")
    assert [("failed" in line, "tiny" in line) for line in lines[2:6]] == [
        *((True, False), (True, False), (False, False), (False, False))
    ]
    assert any(line.startswith("none.gguf: pp8 failed: HubError: ") for line in lines)
    assert "ggpy bench: tiny:Q8_0: pp8" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure"),
        (["--synthetic", "tiny:Q8_0", "-p", "0", "-n", "0"], "nothing to measure"),
        (["--synthetic", "tiny:Q9"], "unknown type 'Q9'"),
        (["-m", "none.gguf"], "there is no file none.gguf"),
        (["--synthetic", "tiny:Q8_0", "--device", "gpu"], "unknown device 'gpu'"),
        (["--report", "/nowhere"], "no .json files"),
        ([*QUICK, "--synthetic", "tiny:Q8_0", "--activations", "f16"], "nothing for the CPU"),
        (["--plan", "tiny:Q8_0", "--activations", "q16"], "--plan is of a GPU"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*words)


def test_without_ceilings_there_are_speeds(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(ops: object, fresh: bool) -> None:
        raise RuntimeError("out of GPU memory")

    monkeypatch.setattr("ggpy.bench.kernels.ceilings.ceilings_of", fail)
    assert program.main([*QUICK, "--synthetic", "tiny:Q8_0"]) == 0
    captured = capsys.readouterr()
    assert "no limits: the ceilings could not be measured: out of GPU memory" in captured.err
    assert "limit:" not in captured.out and "tg2" in captured.out
    (tmp_path / "benchmarks").mkdir()
    assert program.main([*QUICK, "--synthetic", "tiny:Q8_0", "-o", "json"]) == 0
    (tmp_path / "benchmarks" / "cpu.json").write_text(capsys.readouterr().out)
    assert program.main(["--report", str(tmp_path / "benchmarks")]) == 0
    assert "Limits: unknown.\n" in (tmp_path / "BENCHMARKS.md").read_text()


def test_measured_json_becomes_a_page(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    assert program.main([*QUICK, "--synthetic", "tiny:F16", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    rows.append(rows[0] | {"command": "ggpy bench -p 9", "test": "pp9"})
    (folder / "cpu.json").write_text(json.dumps(rows))
    assert program.main(["--report", str(folder)]) == 0
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert "| tiny:F16 | 0.00 GiB | pp8 |" in page and "| pp9 |" in page
    assert f"```sh\n{rows[0]['command']}\nggpy bench -p 9\n```\n" in page


def test_a_profile(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device whose kernels take 10 us each."""
    ceilings = Ceilings(1e12, 1e14, "A GPU")
    monkeypatch.setattr("ggpy.bench.kernels.ceilings.ceilings_of", lambda ops, fresh: ceilings)
    monkeypatch.setattr(
        program, "open_ops", lambda options, n_threads: Cuda(TimedDevice(lambda name: 10.0))
    )
    words = ["--synthetic", "tiny:Q8_0", "-m", "none.gguf", "-n", "3", "--batch", "1,2"]
    assert program.main([*words, "--profile", "-o", "json"]) == 1, "one of the models is not there"
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["kind"] == "ggpy bench --profile" and found["gpu"] == "A GPU"
    assert [row["test"] for row in found["profiles"]] == ["tg3", "tg3 x2"]
    ops = {op["op"]: op for op in found["profiles"][1]["ops"]}
    assert ops["sample"]["us"] == pytest.approx(10.0) and ops["sample"]["count"] == 1
    assert ops["qkv"]["us"] == pytest.approx(10.0 * ops["qkv"]["count"])
    assert "none.gguf" in captured.err
    assert program.main([*words[:2], "-n", "3", "--batch", "2", "--profile"]) == 0
    out = capsys.readouterr().out
    assert "tiny:Q8_0, tg3 x2: a step takes " in out and "| sample | 1 | 10.0 | 10.00 |" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0"], "--profile is of steps that generate"),
        (["-o", "csv"], "a profile is printed as md or json"),
        ([], "--profile is of a GPU's kernels, and there is none"),
    ],
)
def test_a_profile_that_cannot_be(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    words = ["--synthetic", "tiny:Q8_0", "--device", "cpu", "--profile", *words]
    assert message in refused(*words)


def test_closed_pipe_is_no_error() -> None:
    command = f"set -o pipefail; '{sys.executable}' -m ggpy bench --synthetic tiny:Q8_0 "
    result = subprocess.run(
        ["bash", "-c", command + " ".join(QUICK) + " | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_plan_of_a_model_needs_no_gpu(
    tool: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(simulated.VARIABLE, "")  # what --as asks for ends with the test
    words = ["--plan", "Llama-3.2-1B:Q8_0", "--as", "sm_89", "--batch", "1", "-p", "512"]
    assert tool("bench").main(words) == 0
    title, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "Llama-3.2-1B:Q8_0 on sm_89 with 128 SMs"
    assert head.split() == [
        "|", "tokens", "|", "layers", "|", "tensor", "|", "kernel", "|", "x", "|", "norm", "|",
        "rope", "|", "epilogue", "|", "schedule", "|", "workspace", "|",
    ]  # fmt: skip
    kernels = {row.split("|")[4].strip() for row in rows if row}
    assert kernels == {"gemm_decode", "decode_attention", "gemm_prefill", "prefill_attention"}
    assert tool("bench").main([*words, "--activations", "q8_1"]) == 0
    kernels = {row.split("|")[4].strip() for row in capsys.readouterr().out.splitlines()[4:-1]}
    assert kernels == {"mul_mat_vec_q", "decode_attention", "prefill_attention"}


def test_a_plan_of_no_model_is_an_error(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("bench").main(["--plan", "no-such-model"]) == 2
    assert "no-such-model is neither a file nor a known model" in capsys.readouterr().err
