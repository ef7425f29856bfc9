"""`ggpy show`: the tables, the JSON, and files that cannot be shown."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from gguf_files import (
    BOOL,
    F32,
    F64,
    STR,
    TYPE_F16,
    TYPE_Q8_0,
    U32,
    array,
    gguf,
    key,
    tensor,
    text,
    u32,
)

from ggpy import hub
from ggpy.util import paths

ROOT = paths.data_dir("tools").parent


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    keys = [
        key("general.architecture", STR, text("llama")),
        key("general.alignment", U32, u32(64)),
        key("eps", F32, f32(1e-5)),
        key("odd", F64, struct.pack("<d", float("nan"))),
        key("flag" * 99, BOOL, b"\1"),
        key("note", STR, text("long " * 99 + "\x1b[31m")),
        array("words", STR, 300, text("<s>\n") + text("naïve") * 299),
        array("scores", F32, 3, f32(-1, 0.1, float("inf"))),
    ]
    tensors = [tensor("w", (64, 3), TYPE_Q8_0), tensor("\x1b[2Jn", (5,), TYPE_F16, 256)]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(keys, tensors, bytes(266), align=64))
    return path


def test_tables(program: ModuleType, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([str(path)]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    size = path.stat().st_size
    assert lines[:2] == [
        "tiny.gguf",
        f"GGUF version 3, {size / 1e6:.1f} MB, 8 keys, 2 tensors, 0.0 million weights, "
        f"{8 * (3 * 68 + 10) / (3 * 64 + 5):.2f} bits a weight",
    ]
    start = size - 266
    for expected in (
        "general.architecture str 'llama'",
        "general.alignment u32 64",
        "eps f32 1e-05",
        "odd f64 nan",
        "flag" * 17 + "f... bool True",
        "scores arr[f32] 3: -1, 0.1, inf",
        f"w Q8_0 3 x 64 0.000 MB {start}",
        rf"'\x1b[2Jn' F16 5 0.000 MB {start + 256}",
        "Q8_0 1 tensors 0.0 MB 95.3%",
        "F16 1 tensors 0.0 MB 4.7%",
    ):
        assert expected in lines
    assert any(line.startswith(r"words arr[str] 300: '<s>\n', 'naïve', ") for line in lines)
    assert any(line.startswith("note str 'long long") and line.endswith("...") for line in lines)
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 170


def test_json_has_everything(
    program: ModuleType, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["version"], found["nbytes"]) == (
        str(path),
        3,
        path.stat().st_size,
    )
    values = {name: entry["value"] for name, entry in found["metadata"].items()}
    assert values["words"] == ["<s>\n"] + ["naïve"] * 299
    assert values["scores"] == [-1, pytest.approx(0.1), "inf"]
    assert (values["odd"], values["flag" * 99], values["general.alignment"]) == ("nan", True, 64)
    assert found["metadata"]["scores"]["type"] == "arr[f32]"
    assert found["tensors"][0] == {
        "name": "w",
        "type": "Q8_0",
        "shape": [3, 64],
        "nbytes": 204,
        "file": str(path),
        "offset": path.stat().st_size - 266,
    }


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_file_with_nothing_in_it(
    option: list[str], program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(gguf())
    assert program.main([str(path), *option]) == 0
    assert "none.gguf" in capsys.readouterr().out


def test_bad_file_is_one_line_and_status_2(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([str(tmp_path / "none.gguf")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == f"ggpy show: error: there is no file {tmp_path / 'none.gguf'}; known models: "
        f"{hub.known_names()}\n"
    )


def test_a_known_model_is_shown_by_its_name(
    program: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda model: path)
    assert program.main(["smollm2"]) == 0
    assert capsys.readouterr().out.startswith("tiny.gguf\n")


def run(command: str) -> subprocess.CompletedProcess[str]:
    root = ROOT
    return subprocess.run(
        ["bash", "-c", command], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )


def test_from_the_command_line(path: Path) -> None:
    result = run(f"PYTHONIOENCODING=ascii '{sys.executable}' -m ggpy show '{path}'")
    assert result.returncode == 0, result.stderr
    assert r"na\xefve" in result.stdout


def test_closed_pipe_is_no_error(path: Path) -> None:
    result = run(f"set -o pipefail; '{sys.executable}' -m ggpy show '{path}' | true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("model", sorted((ROOT / "models" / "tiny").glob("*.gguf")), ids=str)
def test_every_tiny_model_can_be_run(
    model: Path, program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([str(model)]) == 0
    assert "can be run: yes\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "tensors", "why"),
    [
        ({"expert_count": 8}, {}, "llama needs tensor 'blk.0.ffn_gate_inp.weight' and 7 more"),
        ({"magic": 3}, {}, "not supported: llama.magic = 3"),
        ({}, {"blk.1.ffn_up.weight": None}, "llama needs tensor 'blk.1.ffn_up.weight'"),
        ({"block_count": 3}, {}, "llama needs tensor 'blk.2.attn_norm.weight' and 8 more"),
    ],
)
def test_what_is_missing_is_said(
    settings: dict,
    tensors: dict,
    why: str,
    program: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tools import make_tiny

    path = make_tiny.write(tmp_path / "t.gguf", "llama", settings, tensors)
    assert program.main([str(path)]) == 0
    assert f"can be run: no, {why}" in capsys.readouterr().out
    assert program.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why_not_run"].startswith(why)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"tokenizer.ggml.model": "plamo2"}, "tokenizer.ggml.model: 'plamo2' is not supported"),
        ({"general.type": "adapter"}, "general.type = 'adapter': an adapter (LoRA)"),
        ({"general.type": "mmproj"}, "general.type = 'mmproj': what reads images or audio"),
    ],
)
def test_other_tokenizers_and_files_that_are_no_models(
    metadata: dict, why: str, program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from tools import make_tiny

    path = make_tiny.write(tmp_path / "t.gguf", "llama", metadata=metadata)
    assert program.main([str(path)]) == 0
    assert f"can be run: no, {why}" in capsys.readouterr().out


def test_an_architecture_that_is_not_here_is_named(
    program: ModuleType, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba", 1))
    assert program.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "can be run: no, architecture 'mamba' is not supported; supported are: " in said
    assert "cohere2, command-r, " in said
