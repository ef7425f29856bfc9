"""`ggpy completion`: scripts that shells accept, and what they complete."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ggpy.__main__ import programs
from ggpy.cli.completion import SHELLS
from ggpy.hub import KNOWN
from tools import completion

MODELS = {model.name for model in KNOWN}


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    return str(request.param)


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def write(shell: str) -> Path:
        assert completion.main([shell]) == 0
        path = tmp_path / f"ggpy.{shell}"
        path.write_text(capsys.readouterr().out, encoding="utf-8")
        return path

    return write


def test_a_shell_reads_its_script(shell: str, script) -> None:
    done = subprocess.run([shell, "-n", str(script(shell))], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("name", sorted(SHELLS))
def test_all_programs_and_options_are_in_it(name: str, script) -> None:
    text = script(name).read_text(encoding="utf-8")
    assert all(program in text for program in programs())
    for option in ("logit-bias", "kl-divergence-base", "allow-requantize", "rounds", "force"):
        assert option in text
    assert "n-gpu-layers" not in text  # accepted, but of no use


def complete(shell: str, script: Path, line: str, folder: Path) -> set[str]:
    """What a shell offers for the last word of a line."""
    if shell == "bash":
        words = line.split(" ")
        code = (
            f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); "
            f"COMP_CWORD={len(words) - 1}; _ggpy; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        command = ["bash", "--norc", "-c", code]
    else:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C {line!r}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize("name", ["bash", "fish"])
def test_what_is_offered(name: str, script, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}")
    path = script(name)
    folder = tmp_path / "here"
    folder.mkdir()
    for file in ("small one.gguf", "other.gguf"):
        (folder / file).touch()

    def offered(line: str) -> set[str]:
        return complete(name, path, line, folder)

    assert offered("ggpy sho") == {"show"}
    assert offered("ggpy help qu") == {"quantize"}
    assert {"run", "show", "pull", "help", "make_tiny"} <= offered("ggpy ")
    assert offered("ggpy run --ge") == {"--gemm"}
    assert offered("ggpy run --gemm ") == {"auto", "cublas"}
    assert offered("ggpy run --device n") == {"numpy"}
    assert offered("ggpy perplexity --cache-type-k q8") == {"q8_0"}
    assert offered("ggpy bench -ctk q8") == {"q8_0"}
    assert offered("ggpy show sm") == {"smollm2", "small one.gguf"}
    assert offered("ggpy show --j") == {"--json"}
    assert offered("ggpy run -m oth") == {"other.gguf"}
    assert offered("ggpy rm ") == MODELS
    assert offered("ggpy run -n ") == offered("ggpy list ") == set()
    assert offered("ggpy convert --type q4_k_") >= {"q4_k_m", "q4_k_s"}  # fish adds Q4_K_M
    assert offered("ggpy completion z") == {"zsh"}
    assert offered("ggpy serve --api-k") == {"--api-key", "--api-key-file"}
    assert offered("ggpy serve sm") == {"smollm2", "small one.gguf"}
    assert offered("ggpy serve --pooling ") == {"cls", "last", "mean", "none"}
    assert offered("ggpy serve --ssl-key-file oth") == {"other.gguf"}
    assert offered("ggpy bench_serve --endpoint ") == {"chat", "completions"}
    assert offered("ggpy bench_serve --input-len oth") == {"other.gguf"}


def test_zsh_describes_options(script) -> None:
    text = script("zsh").read_text(encoding="utf-8")
    assert "'*--gemm[" in text and ":gemm:(auto cublas)'" in text
    assert "a line %llguidance {}]" in text
    assert "'*-m[a .gguf file, or a known model\\: " in text
    assert f"MODEL: _ggpy_words_and_files {' '.join(m.name for m in KNOWN)}'" in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        completion.main(["tcsh"])
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("ggpy completion: error: ")
    assert "invalid choice: 'tcsh'" in told and told.count("\n") == 1
