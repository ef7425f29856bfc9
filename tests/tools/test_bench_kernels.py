"""`ggpy bench_kernels`: the program, on a device whose kernels take known times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from timed_device import TimedDevice

from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.kernels.runs import FIELDS
from ggpy.bench.kernels.table import MACHINE
from ggpy.device.probe import NoGpu, probe
from ggpy.kernels.blocks.block_kernel import supported_formats

Tool = Callable[[str], ModuleType]
SOME = ["-k", "^(argmax|attend SmolLM2|get_rows tests.* Q4_K)"]


@pytest.fixture
def program(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with a GPU whose kernels take 10 us."""
    module = tool("bench_kernels")
    cost = lambda name: 130.0 if name == "matrix_rate" else US[0]  # noqa: E731
    monkeypatch.setattr(module, "open_gpu", lambda name: TimedDevice(cost))
    ceilings = Ceilings(1e12, 1e14, "A GPU")
    monkeypatch.setattr("ggpy.bench.kernels.ceilings.ceilings_of", lambda ops, fresh: ceilings)
    monkeypatch.setattr("ggpy.bench.kernels.runs.compile_ahead", lambda *_: None)
    monkeypatch.setattr("ggpy.device.toolkit.nvrtc_version", lambda: "13.0")
    US[0] = 10.0
    return module


US = [10.0]


def measure(program: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert program.main([*SOME, "-o", "json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_declared_case_has_a_name(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    cases = program.load_cases()
    assert len(set(names)) == len(names)
    for kernel in cases.KERNELS:
        listed = [
            name for name in names if name.startswith(f"{kernel} tests/support/kernels/cases.py ")
        ]
        assert len(listed) == len(set(map(str, cases.gpu_cases(kernel)))) > 100
        large = [name for name in names if name.startswith(f"{kernel} Llama-3.1-8B ")]
        assert len(large) == len(cases.NUMBERS.get(kernel, ("",))) * len(supported_formats())


def test_json_and_its_schema(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(program, capsys)
    assert [*found] == [*MACHINE, "rows"]
    assert all(type(found[name]) is kind for name, kind in MACHINE.items())
    assert found["command"].startswith("ggpy bench_kernels -k ")
    assert {row["what"] for row in found["rows"]} == {"argmax", "attend", "get_rows"}
    for row in found["rows"]:
        assert [*row] == [*FIELDS] and not row["error"]
        assert row["us"] == pytest.approx(10.0)


def test_a_slower_kernel_is_said_and_is_status_1(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(measure(program, capsys)))
    assert program.main([*SOME, "--compare", str(old)]) == 0
    captured = capsys.readouterr()
    assert "| same |" in captured.out and "slower" not in captured.out
    US[0] = 12.0
    assert program.main([*SOME, "--compare", str(old), "-o", "json"]) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert {row["verdict"] for row in rows} == {"slower"}
    assert rows[0]["change"] == pytest.approx(0.2) and rows[0]["old_us"] == pytest.approx(10.0)
    assert f"{len(rows)} slower" in captured.err
    new.write_text(captured.out)
    assert program.main(["--load", str(old), "--compare", str(new), "-k", "argmax"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("| faster |") == 2 and "attend" not in captured.out
    other = json.loads(old.read_text()) | {"gpu": "Another"}
    old.write_text(json.dumps(other))
    program.main([*SOME, "--compare", str(old)])
    assert "was measured on Another, this is A GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-k", "none such"], "-k 'none such': none of "),
        (["-k", "("], "-k '(':"),
        (["-r", "3"], "-r 3: a median needs 5 runs or more"),
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--load", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*words)


def test_without_a_gpu_it_says_why(tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    module = tool("bench_kernels")
    assert module.main(["--device", "cpu"]) == 2
    assert "kernels run on a GPU, cuda or cuda:N" in capsys.readouterr().err
    found = probe()
    if not isinstance(found, NoGpu):
        pytest.skip("there is a GPU")
    assert module.main([*SOME]) == 2
    assert f"no GPU to measure: {found.reason}" in capsys.readouterr().err


def test_on_a_gpu(gpu: Any, tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    """A product and attention take some microseconds, and no more than they can."""
    module = tool("bench_kernels")
    words = ["-k", "^(product Llama-3.1-8B ffn_down Q8_0|attend Llama-3.1-8B)", "-o", "json"]
    assert module.main(words) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert not row["error"] and 1 < row["us"] < 10_000 and row["registers"] > 8
        assert 0 < row["percent_of_limit"] < 110
