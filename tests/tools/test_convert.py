"""`ggpy convert` as a program: what it makes, what it says, and how it fails."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkpoints import BASE, KINDS, config_of, weights_of, write, write_weights
from quantised_checkpoints import gptq, grouped, save
from small_vocab import TEXTS

import ggpy
from ggpy import hub
from ggpy.gguf import File

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit status, stderr); stdout stays empty."""

    def called(*words: object) -> tuple[int, str]:
        try:
            status = program.main([*map(str, words), "-t", "1"])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return called


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("in") / "llama", "llama")


def test_a_checkpoint_becomes_a_model_that_runs(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.gguf"
    status, said = run(folder, out, "--type", "q8_0", "--name", "My model")
    assert status == 0
    lines = said.splitlines()
    assert re.match(r"ggpy convert: llama, 22 tensors, 0\.1 million weights in Q8_0: ", lines[0])
    tensors = [line for line in lines if line.startswith("[")]
    assert len(tensors) == 22
    assert re.fullmatch(
        r"\[   5/  22\] blk\.0\.attn_k\.weight +32 x 64 +BF16 -> Q8_0 +rmse 0\.\d+ +0\.002 MB"
        r"(, \d+ s left)?",
        tensors[4],
    )
    assert lines[-1].startswith("ggpy convert: done in ")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    with File(out) as file:
        assert file.metadata["general.name"] == "My model"
    with ggpy.load(str(out), device="cpu", n_ctx=64) as model:
        assert np.isfinite(model.logits(model.tokenizer.encode("hello world"))).all()


def test_ggpy_run_answers_with_it(folder: Path, tmp_path: Path, run: Run) -> None:
    assert run(folder, tmp_path / "out.gguf")[0] == 0
    words = ["run", "out.gguf", "-p", "Hello", "-n", "4", "--device", "cpu", "-t", "1", "--no-chat"]
    words += ["--temp", "0", "--ignore-eos"]
    result = subprocess.run(
        [sys.executable, "-m", "ggpy", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout.strip(), result.stderr


@pytest.mark.parametrize(
    ("name", "type"), [("llama", "BF16"), ("llama-linear", "F16"), ("mistral", "F16")]
)
def test_the_default_type_is_as_stored(name: str, type: str, tmp_path: Path, run: Run) -> None:
    write(tmp_path / name, name)
    assert run(tmp_path / name, tmp_path)[0] == 0  # a folder: the file's name is made
    with File(tmp_path / f"{name}-{type}.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].format.name == type


def packed_folder(folder: Path) -> Path:
    """A checkpoint that GPTQ has quantised."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}

    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        group = grouped(w, 32, True)
        return gptq(stem, group), group.weights

    save(folder, "llama-linear", make, quantization)
    return folder


def test_a_quantised_checkpoint_stays_as_it_is_by_default(tmp_path: Path, run: Run) -> None:
    folder = packed_folder(tmp_path / "model")
    assert run(folder, tmp_path)[0] == 0
    with File(tmp_path / "model-Q4_0.gguf") as file:
        kinds = {name: tensor.format.name for name, tensor in file.tensors.items()}
        assert file.metadata["general.file_type"] == 2
    assert kinds["blk.0.attn_q.weight"] == "Q4_0" and kinds["output.weight"] == "F16"
    status, said = run(folder, tmp_path / "out.gguf", "--type", "q8_0")
    assert status == 0 and "warning: the checkpoint's Q4_0 weights are rounded again" in said
    with File(tmp_path / "out.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].format.name == "Q8_0"


def test_smoothquant(folder: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "text").write_text("".join(TEXTS))
    words = ["--smoothquant", "0.5", "--calibration", tmp_path / "text", "--device", "cpu"]
    status, said = run(folder, tmp_path / "out.gguf", *words)
    assert status == 0, said
    assert re.search(r"calibrated with \d+ chunks of text\n", said)
    assert re.search(r"\d+ tensors smoothed, 0\.\d MB in W8A8, to .*out\.gguf\n$", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "text"]
    with File(tmp_path / "out.gguf") as file:
        assert file.metadata["ggpy.activations"] == "int8"
        assert file.metadata["quantize.smoothquant.alpha"] == 0.5
        assert file.tensors["blk.0.ffn_down.weight"].format.name == "I8"
    with ggpy.load(str(tmp_path / "out.gguf"), device="cpu", n_ctx=64) as model:
        assert np.isfinite(model.logits(model.tokenizer.encode("hello world"))).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--smoothquant", "0.5"], "--smoothquant ALPHA and --calibration FILE belong together"),
        (["--calibration", "TEXT"], "belong together"),
        (["--smoothquant", "2", "--calibration", "TEXT"], "--smoothquant 2: give 0 to 1"),
        (
            ["--smoothquant", "0.5", "--calibration", "TEXT", "--type", "q8_0"],
            "--smoothquant makes w8a8, not q8_0",
        ),
        (["--smoothquant", "0.5", "--calibration", "TEXT", "--dry-run"], "neither with"),
        (["--smoothquant", "0.5", "--calibration", "/nowhere/text"], "No such file"),
        (["--smoothquant", "0.5", "--calibration", "TEXT"], "a calibration text of 2 tokens"),
    ],
)
def test_smoothing_that_cannot_be_done(
    words: list[str], message: str, folder: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "text").write_text("a")
    words = [str(tmp_path / "text") if word == "TEXT" else word for word in words]
    status, said = run(folder, tmp_path / "out.gguf", *words, "--device", "cpu")
    assert status == 2 and message in said.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_types_by_pattern(folder: Path, tmp_path: Path, run: Run) -> None:
    words = ["--tensor-type", "ffn_down=q5_0", "--tensor-type", "attn_.$=f16", "--pure"]
    words += ["--output-tensor-type", "q4_1", "--token-embedding-type", "q8_0"]
    out = "--outfile", tmp_path / "out.gguf"  # as llama.cpp's converter names it
    assert run(folder, *out, "--type", "q4_0", *words)[0] == 0
    with File(tmp_path / "out.gguf") as file:
        kinds = {name: tensor.format.name for name, tensor in file.tensors.items()}
    wanted = {"output": "Q4_1", "token_embd": "Q8_0", "blk.1.ffn_down": "Q5_0"}
    assert {name: kinds[f"{name}.weight"] for name in wanted} == wanted
    assert kinds["blk.0.ffn_up.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_0"


def test_a_mix_falls_back_where_rows_are_short(folder: Path, tmp_path: Path, run: Run) -> None:
    status, said = run(folder, tmp_path / "out.gguf", "--type", "q4_k_m")
    assert status == 0 and "15 tensors get another type than Q4_K_M gives them, because" in said
    with File(tmp_path / "out.gguf") as file:
        assert file.metadata["general.file_type"] == 15
        assert file.tensors["blk.1.ffn_up.weight"].format.name == "Q5_0"


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path, run: Run) -> None:
    status, said = run(folder, tmp_path / "out.gguf", "--dry-run", "--split-max-size", "100K")
    assert status == 0 and not list(tmp_path.iterdir())
    assert "out-00001-of-0000" in said


def test_split_files_run(folder: Path, tmp_path: Path, run: Run) -> None:
    assert run(folder, tmp_path / "out.gguf", "--split-max-size", "100K")[0] == 0
    first = min(path.name for path in tmp_path.iterdir())
    with ggpy.load(str(tmp_path / first), device="cpu", n_ctx=64) as model:
        assert np.isfinite(model.logits([3, 4])).all()


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing/at/all", "x.gguf"], "nothing/at/all: is no folder: give the one that config"),
        (["{folder}/config.json", "x.gguf"], "is no folder"),
        (["{folder}", "x.gguf", "--type", "q9"], "unknown type 'q9': there are F32, "),
        (["{folder}", "x.gguf", "--tensor-type", "a"], "--tensor-type a: say REGEX=TYPE"),
        (["{folder}", "x.gguf", "--tensor-type", "(=f16"], "'(' is no expression"),
        (["{folder}", "x.gguf", "--tensor-type", "a=q9"], "unknown block format 'q9'"),
        (["{folder}", "x.gguf", "--output-tensor-type", "iq1_s"], "cannot be quantised to"),
        (["{folder}", "x.gguf", "--split-max-size", "0"], "'0' is no size"),
        (["{folder}", "no/such/x.gguf"], "there is no folder no/such: make it first"),
        (["{folder}", "x.gguf", "--outfile", "y.gguf"], "named twice: as OUT and with --outfile"),
        (["{folder}", "no-such/"], "there is no folder no-such: make it first"),
        (["{folder}", "{folder}/config.json"], "is a part of the checkpoint: name another file"),
        (["{folder}", "x.gguf", "--what"], "unrecognized arguments: --what"),
        ([], "the following arguments are required: CHECKPOINT"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    words: list[str], message: str, folder: Path, tmp_path: Path, run: Run, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, said = run(*(word.format(folder=folder) for word in words))
    assert status == 2 and message in said
    if not said.startswith("usage:"):
        assert said.startswith("ggpy convert: error: ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_full_disk(folder: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    from ggpy.gguf.writer import Writer

    def full(self: Writer, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "write", full)
    status, said = run(folder, tmp_path / "out.gguf")
    last = said.splitlines()[-1]
    assert status == 2 and not list(tmp_path.iterdir())
    wanted = (
        f"ggpy convert: error: {tmp_path}/out.gguf: No space left on device: nothing was written"
    )
    assert last == wanted


def test_too_little_room_is_known_before(
    folder: Path, tmp_path: Path, run: Run, monkeypatch: Any
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))  # type: ignore[attr-defined]
    status, said = run(folder, tmp_path / "out.gguf")
    assert status == 2 and "are free there" in said and not list(tmp_path.iterdir())


def test_a_missing_part(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "in", "llama")
    (tmp_path / "in" / "model-00002-of-00003.safetensors").unlink()
    status, said = run(tmp_path / "in", tmp_path / "out.gguf")
    assert status == 2 and "model-00002-of-00003.safetensors, which the index names, is" in said


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_it_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A model that takes some seconds, interrupted as soon as its first tensors are written."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    write(tmp_path / "in", "llama-linear", **wide, num_key_value_heads=16)
    kind = KINDS["llama-linear"]
    assert config_of(kind)["vocab_size"] == BASE["vocab_size"]
    weights = {name: np.zeros(_wide(array.shape), np.float32)
               for name, array in weights_of("llama-linear").items()}  # fmt: skip
    write_weights(tmp_path / "in", weights, "float32")
    words = ["convert", "in", "out.gguf", "--type", "q2_k", "-t", "1", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ggpy", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr
    try:
        while not process.stderr.readline().startswith("[   2/"):
            assert process.poll() is None
        assert any(tmp_path.glob("out.gguf.*.part"))
        process.send_signal(number := getattr(signal, name))
        said = process.stderr.read()
        assert process.wait(30) == 128 + number, said
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in said
    time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shapes of a model with other widths."""
    return tuple({64: 1024, 96: 4096, 32: 1024}.get(size, size) for size in shape)


# The hub


def test_a_repository_is_fetched(folder: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    asked = []
    monkeypatch.setattr(hub, "fetch_checkpoint", lambda name: asked.append(name) or folder)
    assert run("user/repo", tmp_path / "out.gguf", "--dry-run")[0] == 0
    assert asked == ["user/repo"]


def test_a_repository_that_cannot_be_fetched(tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    pytest.importorskip("huggingface_hub")
    away = "the hub cannot be reached"
    monkeypatch.setattr("ggpy.hub.hugging_face._unreachable", lambda endpoint: away)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    status, said = run("user/no-such-repo", tmp_path / "out.gguf")
    assert status == 2 and "there is no folder user/no-such-repo; cannot fetch it" in said
    assert said.count("\n") == 1
