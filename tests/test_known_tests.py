"""`pytest` repeats a part of what is known to pass; what is not known, it runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from known_tests import ONE_IN, Known, is_known, is_whole_suite, left_out, recorded

from tools import record_gpu
from tools.record_gpu import OF_EMULATOR

Source = pytest.Config.ArgsSource
SUCCESS = {"passed": 5, "failed": [], "skipped": 1, "not imported": []}


class Item(SimpleNamespace):
    """An item that can be in a set."""

    __hash__ = object.__hash__


def item(nodeid: str, gpu: bool = False, **params: Any) -> Any:
    call = SimpleNamespace(params=params) if params else None
    return Item(
        nodeid=nodeid, callspec=call, fixturenames=list(params), get_closest_marker=lambda _: gpu
    )


@pytest.mark.parametrize(
    ("test", "known"),
    [
        (item("tests/kernels/gemm/test_a.py::test_b[emulator-1]", machine="emulator"), True),
        (item("tests/kernels/gemm/test_a.py::test_compiles", nvrtc=None), True),
        (item("tests/kernels/gemm/test_a.py::test_b[gpu-1]", gpu=True, machine="gpu"), False),
        (item("tests/backends/cuda/test_a.py::test_b", emulator=None), True),
        (item("tests/backends/cuda/test_a.py::test_plan"), False),
        (item("tests/serve/test_a.py::test_b", emulator=None), False),
    ],
)
def test_what_the_record_knows(test: Any, known: bool) -> None:
    assert is_known(test, compiles=True) is known


def test_what_compiles_is_not_known_with_another_compiler() -> None:
    compiled = item("tests/kernels/gemm/test_a.py::test_compiles", nvrtc=None)
    run = item("tests/kernels/gemm/test_a.py::test_runs", machine="emulator")
    assert not is_known(compiled, compiles=False) and is_known(run, compiles=False)


def test_a_part_of_each_file_is_repeated_and_another_for_another_digest() -> None:
    """2 ONE_IN + 1 functions of ONE_IN + 1 tests in a file, one in another, and one elsewhere."""
    names = [f"a.py::test_{i}[{j}]" for i in range(2 * ONE_IN + 1) for j in range(ONE_IN + 1)]
    items = [item(f"tests/kernels/{name}") for name in (*names, "b.py::test_c")]
    items.append(item("tests/test_d.py::test_e"))
    kept = [
        {test.nodeid for test in items}
        - {test.nodeid for test in left_out(items, Known(digest, compiles=True))}
        for digest in ("one", "another", "one")
    ]
    assert kept[0] == kept[2] != kept[1]
    for some in kept:
        assert {"tests/kernels/b.py::test_c", "tests/test_d.py::test_e"} <= some
        counts = Counter(name.partition("[")[0] for name in some if "/a.py" in name)
        assert len(counts) == 3 and set(counts.values()) == {2}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record with a success of the emulator, of the present code."""
    path = tmp_path / "record.json"
    run = {"digest": "beef" * 16, "tests": SUCCESS, "cuda compiler": "13.7"}
    path.write_text(json.dumps({"emulator": run}))
    monkeypatch.setattr(record_gpu, "RECORD", path)
    monkeypatch.setattr(
        record_gpu, "digest", lambda beside: "beef" * 16 if beside == OF_EMULATOR else ""
    )
    monkeypatch.setattr("known_tests.compiler", lambda: "13.7")
    return path


def test_a_success_with_the_present_code_is_known(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = record_gpu.read(record)["emulator"]["digest"]
    assert recorded() == Known(digest, compiles=True)
    monkeypatch.setattr("known_tests.compiler", lambda: "13.8")
    assert recorded() == Known(digest, compiles=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": "0" * 64},
        {"tests": {**SUCCESS, "failed": ["tests.kernels.test_a::test_b"]}},
        {"tests": {**SUCCESS, "not imported": ["tests.kernels.test_a"]}},
        {"tests": {**SUCCESS, "passed": 0}},
    ],
)
def test_other_code_and_failures_are_not(record: Path, changed: dict[str, Any]) -> None:
    run = {**record_gpu.read(record)["emulator"], **changed}
    record.write_text(json.dumps({"emulator": run}))
    assert recorded() is None
    record.write_text(json.dumps({"sm_90a": {}}))
    assert recorded() is None


@pytest.mark.parametrize("place", OF_EMULATOR)
def test_every_place_that_decides_is_in_the_digest(place: str, tmp_path: Path) -> None:
    path = tmp_path / place if place.endswith(".py") else tmp_path / place / "new.py"
    path.parent.mkdir(parents=True)
    before = record_gpu.digest(tmp_path, OF_EMULATOR)
    path.write_text("x = 1\n")
    assert record_gpu.digest(tmp_path, OF_EMULATOR) != before


@pytest.mark.parametrize(
    ("options", "source", "whole"),
    [
        ({}, Source.TESTPATHS, True),
        ({}, Source.ARGS, False),
        ({"keyword": "gemm"}, Source.TESTPATHS, False),
        ({"markexpr": "gpu"}, Source.TESTPATHS, False),
        ({"lf": True}, Source.TESTPATHS, False),
        ({"repeat_all": True}, Source.TESTPATHS, False),
    ],
)
def test_only_the_whole_suite_is_shortened(
    options: dict[str, Any], source: Any, whole: bool
) -> None:
    none = {"keyword": "", "markexpr": "", "repeat_all": False}
    config: Any = SimpleNamespace(option=SimpleNamespace(**none | options), args_source=source)
    assert is_whole_suite(config) is whole


def test_contributing_names_the_part() -> None:
    words = {2: "two", 3: "three", 4: "four", 5: "five"}
    text = (record_gpu.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = words[ONE_IN]
    assert f"one in {part} functions of each file, with one in {part} of their parameters" in (
        " ".join(text.split())
    )
