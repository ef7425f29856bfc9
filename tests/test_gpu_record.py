"""The record of the last run on a GPU belongs to the kernels as they are, and was a success."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggpy.device import Gpu, NoGpu
from ggpy.device.probe import simulate
from ggpy.util import simulated
from tools import record_gpu

ROOT = Path(__file__).resolve().parent.parent
RENEW = "run `python tools/record_gpu.py` on a machine with an NVIDIA GPU, and commit the record"


@pytest.mark.parametrize("arch", record_gpu.ARCHITECTURES)
def test_the_kernels_are_those_that_ran_on_a_gpu(arch: str) -> None:
    assert record_gpu.RECORD.is_file(), f"there is no {record_gpu.RECORD.name}: {RENEW}"
    runs = record_gpu.read(record_gpu.RECORD)
    assert arch in runs, f"no run as {arch}: {RENEW}"
    run, tests = runs[arch], runs[arch]["tests"]
    assert run["digest"] == record_gpu.digest(), (
        f"cuda/ or ggpy/kernels/ changed after the last run as {arch}, which was on {run['date']}"
        f" ({run['gpu']}): {RENEW}"
    )
    assert tests["passed"] > 0 and not record_gpu.bad(tests), f"no success: {tests}; {RENEW}"
    assert run["gpu"] and run["cuda compiler"]
    assert run["compiled for"].partition("_")[2] == arch.partition("_")[2]


@pytest.mark.parametrize("arch", record_gpu.ARCHITECTURES)
def test_replaced_tests_failed_for_a_reason_and_exist_no_more(arch: str) -> None:
    tests = record_gpu.read(record_gpu.RECORD)[arch]["tests"]
    replaced = tests.get("replaced", {})
    for name, reason in replaced.items():
        assert name in tests["failed"] and len(reason.split()) > 5
    parts = [name.partition("::") for name in replaced]
    ids = [(f"{module.replace('.', '/')}.py", rest) for module, _, rest in parts]
    if files := sorted({file for file, _ in ids}):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *files]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for file, rest in ids:
            assert f"{file}::" in found.stdout and f"{file}::{rest}\n" not in found.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the digest covers."""
    for folder in record_gpu.KERNELS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def test_the_digest_is_of_contents(copy: Path) -> None:
    expected = record_gpu.digest()
    assert record_gpu.digest(copy) == expected
    source = copy / "cuda" / "lib" / "common.cuh"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    (copy / "cuda" / "notes.swp").write_text("an editor's")
    assert record_gpu.digest(copy) == expected


@pytest.mark.parametrize(
    "name", ["cuda/lib/common.cuh", "cuda/formats/q4_k.cuh", "ggpy/kernels/layout/tile.py"]
)
def test_every_change_of_code_changes_the_digest(copy: Path, name: str) -> None:
    expected, path = record_gpu.digest(), copy / name
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "\nx = 1\n", encoding="utf-8")
    assert record_gpu.digest(copy) != expected
    path.unlink()
    assert record_gpu.digest(copy) != expected


def test_comments_and_docstrings_do_not_change_the_digest(copy: Path) -> None:
    expected = record_gpu.digest()
    for name, mark in (("cuda/lib/mma.cuh", "//"), ("ggpy/kernels/layout/tile.py", "#")):
        path = copy / name
        text = path.read_text(encoding="utf-8").replace(f" {mark} ", f" {mark} Another word: ")
        path.write_text(f"{text}\n{mark} The end.\n", encoding="utf-8")
    assert record_gpu.digest(copy) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("int a = 1;  // one\n/* two\n */ int  b;", "int a = 1 ; int b ;"),
        ('x("// no comment", \'"\');', 'x ( "// no comment" , \'"\' ) ;'),
        ("#pragma once // once\n#include <a>\nint\na", "#pragma once #include <a> int a"),
        ("#define F(x) \\\n  x\ny", "#define F(x) \\ x y"),
    ],
)
def test_tokens_of_cuda(text: str, code: str) -> None:
    assert record_gpu.cuda_code(text).split() == code.split()


def test_python_without_docstrings() -> None:
    plain = record_gpu.python_code("def f(x):\n    return '# x'\n")
    text = '"""A."""\n\ndef f(x):\n    """B.\n\n    C.\n    """\n    return \'# x\'  # D\n'
    assert record_gpu.python_code(text) == plain == "def f(x):\n    return '# x'"
    assert record_gpu.python_code("def f(x):\n    return -x\n") != plain


def test_a_renamed_file_is_a_change(copy: Path) -> None:
    (copy / "cuda" / "lib" / "common.cuh").rename(copy / "cuda" / "lib" / "usual.cuh")
    assert record_gpu.digest(copy) != record_gpu.digest()


def test_results_of_a_report() -> None:
    def case(module: str, name: str, inside: str = "") -> str:
        return f'<testcase classname="{module}" name="{name}">{inside}</testcase>'

    cases = [
        case("tests.kernels.a", "one"),
        case("tests.kernels.a", "two", '<skipped message="no"/>'),
        case("tests.kernels.a", "three", '<failure message="wrong"/>'),
        case("tests.kernels.a", "four", '<error message="failed on setup"/>'),
        case("", "tests.serve.test_chat", '<error message="collection failure"/>'),
        case("tests.tools.test_bench_kernels", "test_on_a_gpu", '<failure message="111"/>'),
    ]
    tests = record_gpu.results(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    failed = ["tests.kernels.a::three", "tests.kernels.a::four", *record_gpu.TIMED]
    assert tests == {
        "passed": 1,
        "failed": failed,
        "skipped": 1,
        "not imported": ["tests.serve.test_chat"],
    }
    assert record_gpu.bad(tests) == failed[:2]
    assert record_gpu.bad({**tests, "replaced": {"tests.kernels.a::four": "why"}}) == failed[:1]
    missing = ["tests.kernels.b"]
    assert record_gpu.bad({"failed": [], "not imported": missing}) == missing


def test_without_a_gpu_nothing_is_recorded(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("ggpy.device.probe", lambda ordinal: NoGpu("no driver"))
    path = tmp_path / "record.json"
    assert record_gpu.main(["-o", str(path)]) == 2
    assert capsys.readouterr().err == "ggpy record_gpu: error: no GPU to test on: no driver\n"
    assert not path.exists()


@pytest.fixture
def hopper(monkeypatch) -> None:
    """A GPU, as which and what it is used, whose tests take no time; two fail as sm_80."""

    def used(ordinal: int) -> Gpu | NoGpu:
        gpu = Gpu("NVIDIA Test 9", ordinal, "sm_90a", 132, 1, 227 << 10, 1, "13.0")
        return simulate(gpu, arch) if (arch := simulated.asked()) else gpu

    def tests(which: list[str], dist: str, processes: int) -> dict[str, int]:
        failed = ["tests.a::b", "tests.a::c"] if simulated.asked() == "sm_80" else []
        return {"passed": 5, "failed": failed, "skipped": 0, "not imported": [], "seconds": 1}

    monkeypatch.setenv(simulated.VARIABLE, "")  # what is asked for ends with the test
    monkeypatch.setattr("ggpy.device.probe", used)
    monkeypatch.setattr(record_gpu, "run_tests", tests)
    monkeypatch.setattr(record_gpu, "_driver_version", lambda ordinal: "580.1")
    monkeypatch.setattr("ggpy.device.toolkit.nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(record_gpu, "speeds", lambda device: {f"x on {device}": 5.0})


@pytest.mark.usefixtures("hopper")
def test_a_run_is_recorded_beside_those_as_others(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert record_gpu.main(["-o", str(path)]) == 0
    assert record_gpu.main(["--as", "sm_80", "--no-speeds", "-o", str(path)]) == 1
    runs = record_gpu.read(path)
    assert list(runs) == ["sm_80", "sm_90a"]
    assert runs["sm_90a"].pop("date")
    assert runs["sm_90a"] == {
        "gpu": "NVIDIA Test 9",
        "compiled for": "sm_90a",
        "driver": "580.1",
        "cuda of the driver": "13.0",
        "cuda compiler": "13.0",
        "digest": record_gpu.digest(),
        "tests": {"passed": 5, "failed": [], "skipped": 0, "not imported": [], "seconds": 1},
        "speeds": {"x on cuda:0": 5.0},
    }
    older = runs["sm_80"]
    assert (older["compiled for"], older["speeds"]) == ("compute_80", {})
    assert len(older["tests"]["failed"]) == 2


@pytest.mark.usefixtures("hopper")
def test_the_emulators_run_is_recorded_beside_them(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "record.json"
    assert record_gpu.main(["--no-speeds", "-o", str(path)]) == 0
    asked = []
    tests = {"passed": 9, "failed": [], "skipped": 0, "not imported": [], "seconds": 1}
    monkeypatch.setattr(record_gpu, "run_tests", lambda *given: asked.append(given) or tests)
    assert record_gpu.main(["--emulator", "-n", "2", "-o", str(path)]) == 0
    which = ["tests/kernels", "tests/backends", "-m", "not gpu"]
    assert asked == [(which, "loadfile", 2)]
    runs = record_gpu.read(path)
    assert list(runs) == ["emulator", "sm_90a"]
    assert runs["emulator"].pop("date")
    digest = record_gpu.digest(beside=record_gpu.OF_EMULATOR)
    assert runs["emulator"] == {"cuda compiler": "13.0", "digest": digest, "tests": tests}
    assert digest != record_gpu.digest()


@pytest.mark.usefixtures("hopper")
def test_all_architectures_in_one_call(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert record_gpu.main(["--all", "--no-speeds", "-o", str(path)]) == 1  # sm_80 failed
    assert set(record_gpu.read(path)) == set(record_gpu.ARCHITECTURES)


def test_tests_that_need_a_gpu_are_marked(request: pytest.FixtureRequest) -> None:
    """The record counts what is marked, so that must be all that takes the fixture."""
    for item in request.session.items:
        needs = "gpu" in getattr(item, "fixturenames", ())
        assert not needs or item.get_closest_marker("gpu"), item.nodeid
