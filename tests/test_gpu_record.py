"""The record of the last run on a GPU belongs to the kernels as they are, and was a success."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ggpy.device import Gpu, NoGpu
from tools import record_gpu

ROOT = Path(__file__).resolve().parent.parent
RENEW = "run `python tools/record_gpu.py` on a machine with an NVIDIA GPU, and commit the record"


def test_the_kernels_are_those_that_ran_on_a_gpu() -> None:
    assert record_gpu.RECORD.is_file(), f"there is no {record_gpu.RECORD.name}: {RENEW}"
    record = json.loads(record_gpu.RECORD.read_text(encoding="utf-8"))
    tests = record["tests"]
    assert record["digest"] == record_gpu.digest(), (
        f"cuda/ or ggpy/kernels/ changed after the last run on a GPU, which was on {record['date']}"
        f" ({record['gpu']}): {RENEW}"
    )
    assert tests["passed"] > 0 == tests["failed"], f"that run was no success: {tests}; {RENEW}"
    assert record["gpu"] and record["cuda compiler"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the digest covers."""
    for folder in record_gpu.KERNELS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def test_the_digest_is_of_contents(copy: Path) -> None:
    expected = record_gpu.digest()
    assert record_gpu.digest(copy) == expected
    source = copy / "cuda" / "common.cuh"
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    (copy / "cuda" / "notes.swp").write_text("an editor's")
    assert record_gpu.digest(copy) == expected


@pytest.mark.parametrize(
    "name", ["cuda/common.cuh", "cuda/formats/q4_k.cuh", "ggpy/kernels/tile.py"]
)
def test_every_change_of_a_kernel_changes_the_digest(copy: Path, name: str) -> None:
    expected = record_gpu.digest()
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n")
    assert record_gpu.digest(copy) != expected
    (copy / name).unlink()
    assert record_gpu.digest(copy) != expected


def test_a_renamed_file_is_a_change(copy: Path) -> None:
    (copy / "cuda" / "common.cuh").rename(copy / "cuda" / "usual.cuh")
    assert record_gpu.digest(copy) != record_gpu.digest()


def test_counts_of_a_report() -> None:
    suites = '<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>'
    assert record_gpu.counts(suites) == {"passed": 4, "failed": 3, "skipped": 3}


def test_without_a_gpu_nothing_is_recorded(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(record_gpu, "probe", lambda ordinal: NoGpu("no driver"))
    path = tmp_path / "record.json"
    assert record_gpu.main(["-o", str(path)]) == 2
    assert capsys.readouterr().err == "ggpy: error: no GPU to test on: no driver\n"
    assert not path.exists()


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (2, 1)])
def test_a_run_is_recorded(monkeypatch, tmp_path: Path, failed: int, status: int) -> None:
    gpu = Gpu("NVIDIA Test 9", 0, "sm_90a", 132, 1, 1, 1, "13.0")
    monkeypatch.setattr(record_gpu, "probe", lambda ordinal: gpu)
    tests = {"passed": 5, "failed": failed, "skipped": 0, "seconds": 1}
    monkeypatch.setattr(record_gpu, "run_tests", lambda processes: tests)
    monkeypatch.setattr(record_gpu, "machine", lambda gpu: {"gpu": gpu.name})
    monkeypatch.setattr(record_gpu, "speeds", lambda device: {f"x on {device}": 5.0})
    path = tmp_path / "record.json"
    assert record_gpu.main(["-o", str(path)]) == status
    record = json.loads(path.read_text())
    assert record.pop("date")
    assert record == {
        "gpu": "NVIDIA Test 9",
        "digest": record_gpu.digest(),
        "tests": tests,
        "speeds": {"x on cuda:0": 5.0},
    }


def test_tests_that_need_a_gpu_are_marked(request: pytest.FixtureRequest) -> None:
    """The record counts what is marked, so that must be all that takes the fixture."""
    for item in request.session.items:
        needs = "gpu" in getattr(item, "fixturenames", ())
        assert not needs or item.get_closest_marker("gpu"), item.nodeid
