"""`ggpy diff_backends`: what it says, and which models it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ggpy import hub
from ggpy.backends.trace import Record


def test_a_known_model_on_equal_backends(
    program: ModuleType,
    tiny_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda model: tiny_path("llama"))
    assert program.main(["smollm2", "cpu", "cpu", "-v"]) == 0
    *ops, last = capsys.readouterr().out.splitlines()
    assert len(ops) > 10 and all(line.endswith(": 0.00e+00") for line in ops)
    assert last.startswith("no op differs by more than 0.001; the largest is layer ")


def test_the_first_op_that_differs(
    program: ModuleType,
    tiny_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, n_runs = program.run, 0

    def disturbed(*arguments: Any) -> list[Record]:
        """The second run, with a large error in an op of layer 1 and those that follow."""
        nonlocal n_runs
        records, n_runs = run(*arguments), n_runs + 1
        for record in records[len(records) // 2 :] if n_runs == 2 else []:
            record.output[...] += 2 * np.abs(record.output).max()
        return records

    monkeypatch.setattr(program, "run", disturbed)
    assert program.main([str(tiny_path("llama")), "cpu", "cpu"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("cpu and cpu differ first at layer ") and out.count("\n") == 1


def test_a_model_that_is_not_there(refused: Callable[..., str]) -> None:
    assert "there is no file none.gguf" in refused("none.gguf", "cpu", "cpu")
    assert "required: MODEL, DEVICE" in refused()
