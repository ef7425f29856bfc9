"""`ggpy compare`, against a program that answers as llama-bench does."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ggpy.bench import xllamacpp
from ggpy.bench.table import LLAMA_BENCH, SAMPLES

QUICK = ["--device", "cpu", "-t", "1", "-p", "8", "-n", "2", "-r", "2"]

# Prints what llama-bench prints with -o json (the fields that tell a test apart, and speeds), and
# notes how it was called. The speeds of the n-th call are n times 100 and 110.
FAKE = """#!{python}
import json, sys
from pathlib import Path
here = Path(__file__).parent
calls = here / "calls.json"
known = json.loads(calls.read_text()) if calls.exists() else []
known.append(sys.argv[1:])
calls.write_text(json.dumps(known))
if (here / "fail").exists():
    print("ggml_cuda_init: failed", file=sys.stderr)
    sys.exit((here / "fail").read_text() and 1)
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows = []
for depth in words.get("-d", "0").split(","):
    for p, n in [(int(words["-p"]), 0), (0, int(words["-n"]))]:
        if not p and not n:
            continue
        ts = [100.0 * len(known), 110.0 * len(known)]
        rows.append({{
            "build_commit": "0123abc", "build_number": 7000, "cpu_info": "A CPU", "gpu_info": "",
            "backends": "CPU", "model_filename": words["-m"], "model_type": "llama 1B Q8_0",
            "n_batch": 2048, "n_ubatch": 512, "n_prompt": p, "n_gen": n, "n_depth": int(depth),
            "avg_ns": 1, "stddev_ns": 0, "avg_ts": sum(ts) / 2, "stddev_ts": 1.0,
            "samples_ns": [1, 1], "samples_ts": ts,
        }})
print(json.dumps(rows))
"""


@pytest.fixture
def llama_bench(tmp_path: Path) -> Path:
    if sys.platform == "win32":
        pytest.skip("a script is no program there")
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def words(llama_bench: Path, tiny_path: Callable[[str], Path]) -> list[str]:
    """What the program is told in most tests."""
    return ["--llama-bench", str(llama_bench), "-m", str(tiny_path("llama")), *QUICK]


def calls(llama_bench: Path) -> Any:
    return json.loads((llama_bench.parent / "calls.json").read_text())


def test_both_run_the_same_tests_in_turn(
    program: ModuleType, llama_bench: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*words, "-d", "0,4", "-o", "json"]) == 0
    captured = capsys.readouterr()
    tests = ["-p", "8", "-n", "2", "-r", "2", "-d", "0,4"]
    expected = ["-m", words[3], "-ngl", "0", "-dev", "none", "-t", "1", *tests, "-o", "json"]
    assert calls(llama_bench) == [expected, expected]
    said = [line.rpartition(", ")[2] for line in captured.err.splitlines()]
    assert said == ["ggpy", "llama-bench", "ggpy", "llama-bench"]
    found = json.loads(captured.out)
    assert [row["test"] for row in found["rows"]] == ["pp8", "tg2", "pp8 @ d4", "tg2 @ d4"]
    for row in found["rows"]:
        assert row["llama_ts"] == 155.0, "the median of 100, 110, 200 and 220"
        assert row["ratio"] == pytest.approx(row["ggpy_ts"] / 155.0) and row["ggpy_ts"] > 0
        assert row["llama_spread"] == pytest.approx(120 / 155)
        assert (row["llama_build"], row["llama_device"]) == ("0123abc", "A CPU")


def test_markdown(
    program: ModuleType, llama_bench: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*words, "--rounds", "1", "--llama-args", "-ngl 12"]) == 0
    out = capsys.readouterr().out
    assert calls(llama_bench)[0][2:4] == ["-ngl", "12"] and len(calls(llama_bench)) == 1
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| llama.gguf")]
    assert [row[1] for row in rows] == ["pp8", "tg2"]
    for row in rows:
        assert row[3] == "105.00 !"
        assert float(row[4]) == pytest.approx(float(row[2].rstrip(" !")) / 105, abs=0.01)
    assert "llama.cpp 0123abc on A CPU" in out and "the machine was busy" in out


def test_activations_are_those_of_ggpy(
    program: ModuleType, llama_bench: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*words, "--rounds", "1", "--activations", "q8"]) == 0
    assert "--activations" not in calls(llama_bench)[0]
    capsys.readouterr()
    assert program.main([*words, "--activations", "f16"]) == 1
    assert "--activations f16 is nothing for the CPU" in capsys.readouterr().err


def test_a_program_that_fails_is_status_1(
    program: ModuleType, llama_bench: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("1", ""):  # it says so, or only prints nothing
        (llama_bench.parent / "fail").write_text(text)
        assert program.main(words) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and "ggml_cuda_init: failed" in captured.err


@pytest.mark.skipif("GGPY_TEST_LLAMA_BENCH" not in os.environ, reason="set it to a llama-bench")
def test_a_real_llama_bench(
    program: ModuleType,
    tool: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It takes what it is given, and its fields are those of `ggpy bench`, in that order."""
    real, path = os.environ["GGPY_TEST_LLAMA_BENCH"], str(tmp_path / "x.gguf")
    assert tool("make_synthetic").main(["tiny:Q8_0", path]) == 0
    capsys.readouterr()
    words = ["--llama-bench", real, "-m", path, *QUICK, "-pg", "8,2", "-d", "0,4", "-o", "json"]
    assert program.main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = ["pp8", "tg2", "pp8+tg2", "pp8 @ d4", "tg2 @ d4", "pp8+tg2 @ d4"]
    assert [row["test"] for row in rows] == names
    assert all(row["llama_ts"] > 0 and row["llama_build"] for row in rows)
    (theirs,) = program.run([real, "-m", path, "-p", "8", "-n", "0", "-r", "1", "-o", "json"])
    assert [*theirs] == [*LLAMA_BENCH, *SAMPLES]
    assert all(type(theirs[name]) is kind for name, kind in LLAMA_BENCH.items())
    with pytest.raises(RuntimeError, match=r"ended with 1: .*failed to load model"):
        program.run([real, "-m", str(tmp_path / "none.gguf"), "-o", "json"])


def test_theirs_uses_the_gpu_that_ours_used(program: ModuleType) -> None:
    options = program.parser().parse_args(["--llama-bench", "x"])
    ours = {"backends": "CUDA", "main_gpu": 3, "n_threads": 8}
    expected = "-ngl 99 -fa 1 -sm none -mg 3 -t 8"
    assert program.their_options(options, ours) == expected.split()


def test_a_crash_is_not_what_was_said_before_it(program: ModuleType) -> None:
    """llama-bench notes what it loads, and opens its list before it loads a model."""
    crash = "import os, sys; print('['); print('loaded CPU', file=sys.stderr); os._exit(3)"
    with pytest.raises(RuntimeError, match="ended with 3: loaded CPU"):
        program.run([sys.executable, "-c", crash])


def test_rows_of_other_tests_are_not_compared(program: ModuleType) -> None:
    row = {"n_prompt": 8, "n_gen": 0, "avg_ts": 1.0}
    with pytest.raises(RuntimeError, match="no test that is the same"):
        list(program.joined([row], [row | {"n_prompt": 9}]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "x.gguf"], "there is no such program"),
        ([], "nothing to measure"),
        (["-m", "x.gguf", "--rounds", "0"], "--rounds: '0' is not a whole number of 1 or more"),
        (["-m", "x.gguf", "--plot", "x.png"], "there is no such program"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused("--llama-bench", "nowhere/llama-bench", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--device", "cpu"], "pip install xllamacpp"), ([], "add --device cpu")],
)
def test_without_a_llama_bench_the_wheel_is_taken(
    words: list[str],
    message: str,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xllamacpp, "is_installed", lambda: False)
    assert message in refused("-m", "x.gguf", *words)


def test_options_that_only_one_has_are_refused(
    refused: Callable[..., str], llama_bench: Path
) -> None:
    said = refused("--llama-bench", llama_bench, "-m", "x.gguf", "--batch", "2")
    assert "--batch is not an option of both programs" in said
