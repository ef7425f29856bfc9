"""`ggpy quantize` and `ggpy convert` where there is a GPU: the CPU's files, and who is said to make
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write as write_checkpoint
from quantize_cases import WEIGHTS, digest_of_file, importance_of, write_case

from ggpy.quantization import device_workers
from ggpy.quantization.importance import write_gguf

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "quantize.json"


@pytest.fixture
def machine_as_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take the emulator for a GPU, unless they are told to take the CPU."""

    def choose(name: str, note: Any) -> tuple[Any, str]:
        return (None, "as asked") if name == "cpu" else (machine, "a test's")

    monkeypatch.setattr(device_workers, "choose_gpu", choose)


@pytest.mark.usefixtures("machine_as_gpu")
@pytest.mark.parametrize("options", ["", "--imatrix weights.imatrix.gguf"])
def test_quantize(
    tmp_path: Path, tool: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_case(WEIGHTS, tmp_path / "weights.gguf")
    write_gguf(tmp_path / "weights.imatrix.gguf", importance_of(WEIGHTS))
    words = f"--device cuda:2 {options} weights.gguf out.gguf q4_k_m 1"
    assert tool("quantize").main(words.split()) == 0
    assert capsys.readouterr().err == "ggpy quantize: device: cuda:2 (a test's)\n"
    golden = json.loads(GOLDEN.read_text())["files"]
    name = "Q4_K_M imatrix" if options else "Q4_K_M"
    assert digest_of_file(tmp_path / "out.gguf") == golden[name]


@pytest.mark.usefixtures("machine_as_gpu")
@pytest.mark.parametrize("type", ["q5_1", "q8_0"])
def test_convert(tmp_path: Path, tool: Any, capsys: Any, type: str) -> None:
    folder, program = write_checkpoint(tmp_path / "llama", "llama"), tool("convert")
    for device in ("auto", "cpu"):
        words = [folder, tmp_path / device, "--type", type, "--device", device, "-t", "1"]
        assert program.main(list(map(str, words))) == 0
    said = capsys.readouterr().err
    assert "ggpy convert: device: cuda:0 (a test's)\n" in said
    assert "ggpy convert: device: cpu (as asked)\n" in said
    assert (tmp_path / "auto").read_bytes() == (tmp_path / "cpu").read_bytes()


@pytest.mark.usefixtures("machine_as_gpu")
def test_speeds(tool: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tool("quantize")
    monkeypatch.setattr(program, "BENCH_SECONDS", 0)
    monkeypatch.setattr(program, "BENCH_WEIGHTS", 1 << 14)
    assert program.main(["--bench", "q4_0,iq4_nl", "1", "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "million weights a second on a GPU and 1 cores (random, float32)"
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["quantize", "convert"])
def test_a_device_that_cannot_be_had_is_refused(
    tmp_path: Path, tool: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from ggpy.device import NoGpu

    monkeypatch.setattr("ggpy.device.probe", lambda ordinal: NoGpu("no driver"))
    if name == "quantize":
        source = write_case(WEIGHTS, tmp_path / "weights.gguf")
        words = [str(source), str(tmp_path / "out.gguf"), "q8_0", "1"]
    else:
        source = write_checkpoint(tmp_path / "llama", "llama")
        words = [str(source), str(tmp_path / "out.gguf"), "--type", "q8_0"]
    for device, message in (
        ("cuda", "device 'cuda' cannot be used: no driver; device cpu needs none"),
        ("tpu", "unknown device 'tpu': use auto, cpu, numpy, cuda or cuda:N"),
    ):
        assert tool(name).main([*words, "--device", device]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"ggpy {name}: error: {message}"
        assert [path.name for path in tmp_path.iterdir()] == [source.name]
