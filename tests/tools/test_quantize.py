"""`ggpy quantize`: its words, options and lines, and what it refuses.

tests/test_requantize.py has the bytes, tests/test_mix.py the choices.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from quantize_cases import CASES, WEIGHTS, digest_of_file, importance_of, write_case

from ggpy import hub
from ggpy.gguf import File
from ggpy.quantization.importance import write_gguf
from ggpy.util import paths

GOLDEN = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "quantize.json").read_text()
)["files"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and an importance matrix, in which programs run."""
    write_case(WEIGHTS, tmp_path / "weights.gguf")
    write_gguf(tmp_path / "weights.imatrix.gguf", importance_of(WEIGHTS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(program: ModuleType, folder: Path, capsys) -> Callable[[str], str]:
    """What the program prints when all goes well, on one core."""

    def printed(words: str) -> str:
        assert program.main(words.split()) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return printed


@pytest.fixture
def refused(program: ModuleType, folder: Path, capsys) -> Callable[[str], str]:
    """What it says when it exits with 2; nothing is written then."""

    def message(words: str) -> str:
        before = sorted(folder.iterdir())
        assert program.main(words.split()) == 2
        assert sorted(folder.iterdir()) == before
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("ggpy quantize: error: ")
        return last

    return message


# Words


@pytest.mark.parametrize(
    "words",
    [
        *("weights.gguf Q4_0 1", "weights.gguf ggml-model-Q4_0.gguf q4_0 1", "weights.gguf 2 1"),
        "--imatrix weights.imatrix.gguf --exclude-weights blk weights.gguf q4_0 1",
    ],
)
def test_words(run, folder: Path, words: str) -> None:
    run(words)
    if "imatrix" in words:
        with File("ggml-model-Q4_0.gguf") as file:
            assert file.metadata["quantize.imatrix.entries_count"] == 0
    else:
        assert digest_of_file(folder / "ggml-model-Q4_0.gguf") == GOLDEN["Q4_0"]


def test_an_importance_matrix(run, folder: Path) -> None:
    said = run("--imatrix weights.imatrix.gguf weights.gguf out.gguf IQ4_NL 1")
    assert digest_of_file(folder / "out.gguf") == GOLDEN["IQ4_NL imatrix"]
    assert "56 importance matrix entries from weights.imatrix.gguf computed on 8 chunks" in said
    assert "did not find weights for output.weight" in said


def test_which_weights_are_used(run, folder: Path) -> None:
    options = "--imatrix weights.imatrix.gguf --include-weights attn_q --include-weights ffn_up"
    assert "16 are used" in run(f"{options} weights.gguf out.gguf q4_0 1")
    options = "--imatrix weights.imatrix.gguf --exclude-weights attn"
    assert "24 are used" in run(f"{options} weights.gguf out.gguf q4_0 1")


def test_two_workers_in_a_process_of_its_own(folder: Path) -> None:
    """As a user calls it: the processes that quantise start from there."""
    command = [sys.executable, "-m", "ggpy", "quantize", "weights.gguf", "out.gguf", "q4_k_m", "2"]
    environment = {**os.environ, "PYTHONPATH": str(paths.data_dir("tools").parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert re.match(r"ggpy quantize: device: (cpu|cuda:0) \(.+\)\n", done.stderr)
    assert all(line.startswith("ggpy quantize: ") for line in done.stderr.splitlines())
    assert digest_of_file(folder / "out.gguf") == GOLDEN["Q4_K_M"]


# Lines


def test_lines_are_those_of_llama_quantize(run) -> None:
    lines = run("weights.gguf out.gguf q4_k_m 1").splitlines()
    assert lines[0] == (
        "ggpy quantize: quantizing 'weights.gguf' to 'out.gguf' as Q4_K_M using 1 threads"
    )
    assert lines[1] == (
        "[   1/  75] output.weight                        - [   256,     64,      1,      1], "
        "type =    f32, converting to q6_K .. size =     0.06 MiB ->     0.01 MiB"
    )
    assert lines[2] == (
        "[   2/  75] output_norm.weight                   - [   256,      1,      1,      1], "
        "type =    f32, size =    0.001 MiB"
    )
    assert lines[-3] == "ggpy quantize: model size  =     3.64 MiB (32.00 BPW)"
    assert lines[-2] == "ggpy quantize: quant size  =     0.56 MiB (4.94 BPW)"
    assert re.fullmatch(r"ggpy quantize: total time = +\d+\.\d\d ms", lines[-1])


def test_a_dry_run_writes_nothing_and_says_the_same(run, folder: Path) -> None:
    before = sorted(folder.iterdir())
    said = run("--dry-run weights.gguf q4_k_m")
    assert sorted(folder.iterdir()) == before
    assert "converting" not in said
    assert "-> 0.01 MiB (q6_K)" in " ".join(said.split())
    assert "quant size = 0.56 MiB (4.94 BPW)" in " ".join(said.split())
    real = run("weights.gguf out.gguf q4_k_m 1")
    assert len(re.findall("->", said)) == len(re.findall("->", real)) == 58


def test_fallbacks_are_told(run, folder: Path) -> None:
    write_case(CASES["rows of 288"], folder / "odd.gguf")
    said = run("--dry-run odd.gguf q4_k_m")
    assert "ggpy quantize: warning: blk.0.attn_k.weight                  - ncols    288" in said
    assert "WARNING: 57 of 75 tensor(s) required fallback quantization" in said


# Options


def types(path: str) -> dict[str, str]:
    with File(path) as file:
        return {name: tensor.format.name for name, tensor in file.tensors.items()}


def test_types_by_hand(run, folder: Path) -> None:
    (folder / "types.txt").write_text("attn_q=q5_1\nATTN_K=q8_0 blk.[0-3].attn_v=f16\n")
    said = run(
        "--tensor-type-file types.txt --tensor-type ffn_up=q5_0 --output-tensor-type q5_k "
        "--token-embedding-type iq4_nl weights.gguf out.gguf q4_0 1"
    )
    found = types("out.gguf")
    assert found["blk.7.attn_q.weight"] == "Q5_1"
    assert found["blk.7.attn_k.weight"] == "Q8_0"
    assert found["blk.3.attn_v.weight"] == "F16"
    assert found["blk.4.attn_v.weight"] == "Q4_0"
    assert found["blk.0.ffn_up.weight"] == "Q5_0"
    assert (found["output.weight"], found["token_embd.weight"]) == ("Q5_K", "IQ4_NL")
    assert "applying manual override: q4_0 -> q5_1" in said


def test_pure_and_left(run) -> None:
    run("--pure weights.gguf out.gguf q4_k_m 1")
    assert set(types("out.gguf").values()) == {"Q4_K", "F32"}
    run("--leave-output-tensor weights.gguf out.gguf q4_k_m 1")
    assert types("out.gguf")["output.weight"] == "F32"


def test_requantising(run, refused) -> None:
    run("weights.gguf first.gguf q8_0 1")
    assert "is in Q8_0 already" in refused("first.gguf second.gguf q4_0 1")
    run("--allow-requantize first.gguf second.gguf q4_0 1")
    assert types("second.gguf")["blk.0.attn_q.weight"] == "Q4_0"


def test_copy(run, folder: Path) -> None:
    run("weights.gguf copy.gguf COPY 1")
    assert set(types("copy.gguf").values()) == {"F32"}


def test_metadata_by_hand(run) -> None:
    options = " ".join(
        f"--override-kv {x}"
        for x in (
            "a=int:-3",
            "b=float:0.5",
            "c=bool:true",
            "d=str:x:y=z",
            "llama.block_count=int:9",
        )
    )
    run(f"{options} weights.gguf out.gguf q8_0 1")
    with File("out.gguf") as file:
        assert [file.metadata[key] for key in "abcd"] == [3, 0.5, True, "x:y=z"]
        assert [file.types[key] for key in "abcd"] == ["u32", "f32", "bool", "str"]
        assert file.metadata["llama.block_count"] == 9
        assert list(file.metadata)[-1] == "llama.block_count"
        assert file.metadata["general.file_type"] == 7
        assert file.metadata["general.quantization_version"] == 2


def test_long_names_are_shortened_as_in_llama_cpp(run, folder: Path) -> None:
    long = "ä" * 70 + ".gguf"
    (folder / "weights.imatrix.gguf").rename(folder / long)
    run(f"--imatrix {long} weights.gguf out.gguf q4_0 1")
    with File("out.gguf") as file:
        assert file.metadata["quantize.imatrix.file"] == "ä" * 63


def test_a_known_model_is_quantised_into_the_current_folder(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folder is the cache."""
    cache = folder / "cache"
    cache.mkdir()
    (folder / "weights.gguf").rename(cache / "x.gguf")
    monkeypatch.setattr(hub, "fetch", lambda model: cache / "x.gguf")
    out = run("smollm2 q4_0 1")
    assert "to 'ggml-model-Q4_0.gguf' as Q4_0" in out
    assert [path.name for path in cache.iterdir()] == ["x.gguf"]
    with File("ggml-model-Q4_0.gguf") as file:
        assert "Q4_0" in {tensor.format.name for tensor in file.tensors.values()}


def test_a_pattern_that_no_tensor_has_is_told(run) -> None:
    said = run("--dry-run --tensor-type attn_k=q8_0 --tensor-type blk.999=q8_0 weights.gguf q4_0")
    assert "warning: --tensor-type blk.999: no tensor has such a name" in said
    assert "attn_k: no tensor" not in said


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needed: ggpy quantize [options] MODEL [OUT] TYPE [THREADS]"),
        ("weights.gguf", "needed: ggpy quantize [options] MODEL [OUT] TYPE [THREADS]"),
        ("weights.gguf out.gguf", "no type follows the output out.gguf: ggpy quantize [options]"),
        ("weights.gguf q4_x", "unknown type 'q4_x': there are F32, F16"),
        ("weights.gguf iq2_xxs", "cannot quantise to 'iq2_xxs': there are F32, F16"),
        ("weights.gguf out.gguf q4_x", "unknown type 'q4_x': there are F32, F16"),
        ("weights.gguf out.gguf q4_0 many", "'many': what follows the type is a number of threads"),
        ("weights.gguf out.gguf q4_0 1 2", "'1 2': what follows the type is a number of threads"),
        ("none.gguf q4_0", "there is no file none.gguf"),
        ("weights.gguf . q4_0 1", ".: is a directory: name a file in it"),
        ("weights.gguf no/such/out.gguf q4_0 1", "No such file or directory"),
        ("weights.gguf weights.gguf q4_0 1", "input and output files are the same: weights.gguf"),
        ("weights.imatrix.gguf out.gguf q4_0 1", "general.architecture: is missing"),
        ("--imatrix weights.gguf weights.gguf out.gguf q4_0", "has no imatrix.datasets"),
        ("--imatrix none weights.gguf out.gguf q4_0", "none: cannot be read"),
        ("weights.gguf out.gguf q2_k_s 1", "needs an importance matrix"),
        ("--output-tensor-type q9 weights.gguf out.gguf q4_0", "unknown block format 'q9'"),
        ("--tensor-type attn weights.gguf out.gguf q4_0", "--tensor-type attn: say REGEX=TYPE"),
        ("--tensor-type =q8_0 weights.gguf out.gguf q4_0", "--tensor-type =q8_0: say REGEX=TYPE"),
        ("--tensor-type (=q8_0 weights.gguf out.gguf q4_0", "'(' is no expression"),
        ("--tensor-type a=iq1_s weights.gguf out.gguf q4_0", "IQ1_S cannot be quantised to"),
        ("--override-kv a=int:x weights.gguf out.gguf q4_0", "'a=int:x' is not like"),
        ("--override-kv a=list:x weights.gguf out.gguf q4_0", "'a=list:x' is not like"),
        ("--override-kv a weights.gguf out.gguf q4_0", "'a' is not like"),
        ("--override-kv a=int:99999999999 weights.gguf out.gguf q4_0", "is no u32"),
        ("--include-weights a --exclude-weights b weights.gguf out.gguf q4_0", "together"),
        ("--bench q4_9", "unknown block format 'q4_9'"),
        ("--bench q4_0 weights.gguf", "--bench takes a number of threads"),
    ],
)
def test_what_is_refused(refused, words: str, message: str) -> None:
    assert message in refused(words)


def test_a_file_that_is_there_is_replaced_only_by_a_whole_one(run, refused, folder: Path) -> None:
    (folder / "out.gguf").write_bytes(b"before")
    refused("weights.gguf out.gguf q2_k_s 1")
    assert (folder / "out.gguf").read_bytes() == b"before"
    run("weights.gguf out.gguf q8_0 1")
    assert digest_of_file(folder / "out.gguf") == GOLDEN["Q8_0"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "ended by SIGTERM"),
        ("SIGHUP", 129, "ended by SIGHUP"),
    ],
)
@pytest.mark.parametrize("seconds", [0.1, 0.5])  # while processes start; while they work
def test_a_signal_leaves_nothing(
    folder: Path, seconds: float, name: str, status: int, told: str
) -> None:
    """It comes to all processes, as from a terminal that is closed, or from `timeout`."""
    case = WEIGHTS.__class__("llama", 8, 4, 1, rows=2048)  # some seconds of work
    write_case(case, folder / "large.gguf")
    before = sorted(folder.iterdir())
    words = "quantize --device cpu large.gguf out.gguf iq3_s 2"
    command = [sys.executable, "-m", "ggpy", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(paths.data_dir("tools").parent)}
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(folder.glob("out.gguf.*.part")) and time.monotonic() < deadline:
            assert child.poll() is None, child.communicate()
            time.sleep(0.02)
        time.sleep(seconds)
        os.killpg(child.pid, getattr(signal, name))
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == status
    assert errors == f"ggpy quantize: device: cpu (as asked)\nggpy quantize: {told}\n"
    assert sorted(folder.iterdir()) == before


# Speed


def test_the_bench_prints_speeds(program, capsys, monkeypatch) -> None:
    monkeypatch.setattr(program, "BENCH_WEIGHTS", 1 << 16)
    monkeypatch.setattr(program, "BENCH_SECONDS", 0.0)
    assert program.main(["--bench", "q8_0,q4_k", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "million weights a second on 1 cores (random, float32)"
    assert lines[1].split() == ["type", "plain", "imatrix"]
    assert [line.split()[0] for line in lines[2:]] == ["q8_0", "q4_K"]
    assert all(float(x) > 0 for line in lines[2:] for x in line.split()[1:])


# Scales of rows


def test_a_scale_for_each_row(run, folder: Path, tiny_path) -> None:
    said = run(f"{tiny_path('llama')} out.gguf w8a16 1 --allow-requantize")
    assert re.search(r"blk\.0\.ffn_up\.weight .* converting to i8 \.\. size", said)
    with File(folder / "out.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].format.name == "I8"
        assert file.tensors["blk.0.ffn_up.scale"].format.name == "F32"
    assert "converting to q8_0" in run("out.gguf again.gguf q8_0 1 --allow-requantize")
    with File(folder / "again.gguf") as file:
        assert "blk.0.ffn_up.scale" not in file.tensors


def test_smoothquant(run, folder: Path, tiny_path) -> None:
    (folder / "text").write_text("The sea is blue and the sky is bluer. " * 20)
    words = "--allow-requantize --smoothquant 0.5 --calibration text --device cpu"
    run(f"{words} {tiny_path('llama')} out.gguf w8a8 1")
    run(f"{tiny_path('llama')} plain.gguf w8a8 1 --allow-requantize")
    with File(folder / "out.gguf") as file, File(folder / "plain.gguf") as plain:
        assert file.metadata["quantize.smoothquant.alpha"] == 0.5
        assert file.metadata["ggpy.activations"] == "int8"
        name = "blk.0.attn_norm.weight"
        assert bytes(file.tensors[name].data) != bytes(plain.tensors[name].data)


def test_smoothing_that_is_refused(refused, folder: Path, tiny_path) -> None:
    (folder / "text").write_text("a " * 50)
    path = tiny_path("llama")
    assert "belong together" in refused(f"--smoothquant 0.5 {path} out.gguf w8a8")
    words = "--smoothquant 0.5 --calibration text --device cpu"
    assert "is for W8A8" in refused(f"{words} {path} out.gguf q8_0")
    assert "No such file" in refused(f"{words.replace('text', 'no')} {path} out.gguf w8a8")
    wrong = words.replace("0.5", "2")
    assert "give one between 0" in refused(f"{wrong} {path} out.gguf w8a8")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_a_model_on_stdout_is_nothing_else(run, folder: Path) -> None:
    run("weights.gguf out.gguf q8_0 1")
    words = ["quantize", "weights.gguf", "/dev/stdout", "q8_0", "1"]
    done = subprocess.run([sys.executable, "-m", "ggpy", *words], capture_output=True, check=True)
    assert done.stdout == (folder / "out.gguf").read_bytes()
    assert b"total time" in done.stderr


def test_the_name_of_a_matrix_may_be_no_utf8(program: ModuleType) -> None:
    assert program.short("a\udcff") == "a\ufffd"
