"""tools/make_benchmarks.py: its runs are commands that exist, and it writes what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ggpy.cli.benchmarks.bench_options import combinations, parser
from ggpy.evaluate.synthetic import parse
from ggpy.kernels.blocks.block_kernel import supported_formats


def test_its_runs_are_valid_commands(
    program: ModuleType, tool: Callable[[str], ModuleType]
) -> None:
    kernels = tool("bench_kernels")
    for name, words in program.RUNS.items():
        if words[0] == "bench":
            options = parser().parse_args(words[1:])
            assert list(combinations(options)) and options.models, name
            assert all(synthetic and parse(model) for synthetic, model in options.models)
        else:
            names = [case.name for case in kernels.chosen(words[2])]
            assert len(names) > 300 and not any(
                "tests/support/kernels/cases.py" in name for name in names
            )


def test_every_format_that_weights_have_is_measured(program: ModuleType) -> None:
    """Q8_1 and Q8_K are what activations become; I8 and F8_E4M3 come with scales of rows."""
    words = ",".join([*program.RUNS["models"], *program.RUNS["formats"]]).split(",")
    measured = {word.partition(":")[2] for word in words}
    schemes = {"W8A16", "W4A16", "W8A8", "W8A8_FP8"}
    formats = {f.name for f in supported_formats()} - {"Q8_1", "Q8_K", "I8", "F8_E4M3"}
    assert formats | schemes <= measured


def test_results_become_files_and_a_page(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ["bench", "--synthetic", "tiny:Q8_0", "--device", "cpu", "-p", "8", "-n", "2", "-r", "2"]
    runs = {"models": tiny, "depth": [*tiny, "-d", "4"], "kernels": ["bench_kernels", "-k", "("]}
    monkeypatch.setattr(program, "RUNS", runs)
    folder = tmp_path / "results"
    folder.mkdir()
    words = ["--name", "some", "-o", str(folder)]
    assert program.main([*words, "--only", "models,depth"]) == 0
    assert {path.name for path in folder.iterdir()} == {"some-models.json", "some-depth.json"}
    assert [row["test"] for row in json.loads((folder / "some-depth.json").read_text())] == [
        *("pp8 @ d4", "tg2 @ d4")
    ]
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert page.index("## some depth") < page.index("## some models")
    before = (folder / "some-models.json").read_text()
    runs["models"] = ["bench", "--synthetic", "nothing"]
    assert program.main([*words, "--only", "models,kernels"]) == 1
    assert (folder / "some-models.json").read_text() == before, "it stays as it was"
    assert not (folder / "some-kernels.json").exists()


def test_what_it_does_not_know(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--only", "speed"]) == 2
    assert "no run 'speed': models, prompts, formats, batch" in capsys.readouterr().err
