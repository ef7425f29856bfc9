"""`ggpy llama_bench`, with llama.cpp's functions replaced, and with the wheel where it is there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ggpy.bench import xllamacpp
from ggpy.bench.xllamacpp import LlamaBatch, OpaqueParams, ThreadpoolParams

WORDS = ["-p", "40", "-n", "3", "-d", "0,5", "-b", "16", "-ub", "8", "-r", "2", "-t", "1"]


class Calls:
    """Stands in for the library: notes what it is called with, and answers as llama.cpp does."""

    def __init__(self, failing: str = "") -> None:
        self.steps: list[int] = []
        self.sizes: list[int] = []
        self.freed: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return {
            "llama_model_load_from_file": lambda *_: 0 if self._failing == "load" else 1,
            "llama_model_default_params": OpaqueParams,
            "llama_context_default_params": OpaqueParams,
            "llama_init_from_model": self._context,
            "ggml_threadpool_params_default": lambda n: ThreadpoolParams(n_threads=n),
            "llama_vocab_n_tokens": lambda _: 100,
            "llama_batch_get_one": lambda ids, n: LlamaBatch(n, ids),
            "llama_decode": self._decode,
            "llama_model_desc": lambda _, text, size: setattr(text, "value", b"llama 1B Q8_0"),
            "llama_free": lambda _: self.freed.append("context"),
            "ggml_threadpool_free": lambda _: self.freed.append("threads"),
            "llama_model_free": lambda _: self.freed.append("model"),
        }.get(name, lambda *_: 7)

    def _context(self, model: int, params: OpaqueParams) -> int:
        self.sizes = list(params.words[:3])
        return 2

    def _decode(self, context: int, batch: LlamaBatch) -> int:
        assert all(0 <= batch.token[i] < 100 for i in range(batch.n_tokens))
        self.steps.append(batch.n_tokens)
        return int(self._failing == "decode")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(xllamacpp, "library", lambda: found)
    monkeypatch.setattr(xllamacpp, "is_installed", lambda: True)
    monkeypatch.setattr(xllamacpp, "version", lambda _: "1.2")
    return found


def test_tests_are_run_as_llama_bench_runs_them(
    program: ModuleType,
    calls: Calls,
    tiny_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tiny_path("llama"))
    assert program.main(["-m", path, *WORDS]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [
        *[(40, 0, 0), (0, 3, 0)],
        *[(40, 0, 5), (0, 3, 5)],
    ]
    once = [[16, 16, 8], [1, 1, 1], [5, 16, 16, 8], [5, 1, 1, 1]]
    assert calls.steps == [n for steps in once for _ in range(3) for n in steps]
    assert calls.sizes[0] >= 5 + 3 and calls.sizes[1:] == [16, 8]
    assert calls.freed == ["context", "threads", "model"] * 4
    assert program.main(["-m", path, "-p", "0", "-n", "1", "-r", "1", "-t", "1,2"]) == 0
    assert [row["n_threads"] for row in json.loads(capsys.readouterr().out)] == [1, 2]
    for row in rows:
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        n = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"][0] == pytest.approx(n * 1e9 / row["samples_ns"][0])
        assert row["model_type"] == "llama 1B Q8_0" and row["build_commit"] == "xllamacpp 1.2"


@pytest.mark.parametrize(
    ("failing", "message"), [("load", "does not load"), ("decode", "failed on a step")]
)
def test_what_llama_cpp_refuses_is_status_1(
    program: ModuleType,
    calls: Calls,
    failing: str,
    message: str,
    tiny_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls._failing = failing
    assert program.main(["-m", str(tiny_path("llama")), *WORDS]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a file with -m"),
        (["--synthetic", "tiny:Q8_0"], "name a file with -m"),
        (["-m", "x.gguf", "--batch", "2"], "one sequence is measured"),
        (["-m", "x.gguf", "--device", "cuda"], "measured on the CPU"),
        (["-m", "x.gguf", "-ctk", "q8_0"], "--cache-type-k is of `ggpy bench`"),
        (["-m", "x.gguf", "--profile"], "--profile is of `ggpy bench`"),
        (["-m", "x.gguf", "--plot", "x.png"], "--plot is of `ggpy bench`"),
        (["-m", "x.gguf"], "pip install xllamacpp"),
    ],
)
def test_what_it_does_not_measure_is_refused(
    words: list[str],
    message: str,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xllamacpp, "is_installed", lambda: False)
    assert message in refused(*words)


@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not installed"
)
def test_the_wheel(
    program: ModuleType,
    tool: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "x.gguf")
    assert tool("make_synthetic").main(["tiny:Q8_0", path]) == 0
    capsys.readouterr()
    assert program.main(["-m", path, *WORDS]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4 and all(row["avg_ts"] > 0 for row in rows)
    words = ["-m", path, "--device", "cpu", "-p", "8", "-n", "2", "-r", "1", "-o", "json"]
    assert tool("compare").main([*words, "--rounds", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [row["test"] for row in found] == ["pp8", "tg2"]
    assert all(row["llama_build"].startswith("xllamacpp ") for row in found)
