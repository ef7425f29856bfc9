"""llama.cpp's options without effect here, and the one line that says so."""

from __future__ import annotations

import argparse

import pytest

from ggpy.cli import llama_cpp, options
from ggpy.cli.benchmarks import bench_options


def parsed(words: str) -> argparse.Namespace:
    return options.parse(words.split())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-ngl 99", "note: no effect here: -ngl 99 (--device chooses for all layers)\n"),
        ("--n-gpu-layers all -fa", "-ngl all (--device chooses for all layers), -fa on\n"),
        ("--flash-attn off --no-mmap", "note: no effect here: --flash-attn off, --no-mmap\n"),
        ("-sm none -mg 0 --mlock --jinja", "here: -sm none, -mg 0, --mlock, --jinja\n"),
        ("--color -i -st", "note: no effect here: --color on, -i, -st\n"),
    ],
)
def test_a_line_names_them(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = parsed(f"m.gguf {words} -p hello")
    assert (found.model, found.prompt, found.device) == ("m.gguf", "hello", "auto")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith(line) and captured.err.count("\n") == 1


def test_nothing_is_said_of_what_has_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("m.gguf -cnv -n 5 -c 100").chat is True
    assert capsys.readouterr().err == ""


def test_an_option_without_its_value_leaves_the_model_alone() -> None:
    for words in ("-fa m.gguf", "m.gguf -fa", "-fa on m.gguf", "--color m.gguf -fa -n 3"):
        assert parsed(words).model == "m.gguf"


def test_minus_one_thread_is_the_default() -> None:
    assert parsed("m.gguf -t -1").threads is None
    assert parsed("m.gguf --threads 2").threads == 2


def test_a_file_of_a_repository() -> None:
    for words in ("-hf u/r:Q8_0 -hff m.gguf", "--hf-repo u/r --hf-file m.gguf"):
        assert parsed(words).hf_repo == "u/r:m.gguf"


def test_no_layers_on_the_gpu_is_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("-ngl 0", "--gpu-layers 0 --device cpu", "-ngl 00"):
        assert parsed(words).device == "cpu"
        assert capsys.readouterr().err == (
            "note: -ngl 0: the model runs on the CPU, as with --device cpu\n"
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-ngl 0 --device cuda", "-ngl 0 means the CPU, and --device says cuda: give one"),
        ("-ngl many", "-ngl many: give a number of layers; here 0 means the CPU"),
        ("-mg 1", "-mg 1: choose the GPU with --device cuda:1"),
        ("-ngl", "expected one argument"),
        ("--rope-scale 2", "unrecognized arguments: --rope-scale"),
        ("-sysf f", "unrecognized arguments: -sysf"),
        ("-hft x", "unrecognized arguments: -hft"),
    ],
)
def test_what_would_matter_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parsed(words)
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.err.count("\n") == 1
    assert captured.err.startswith("ggpy run: error: ") and message in captured.err


def test_those_of_llama_bench(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "m.gguf", "-ngl", "99", "-fa", "1", "-mmp", "0", "-nkvo", "0", "-p", "8"]
    found = llama_cpp.parse(bench_options.parser(), words)
    assert (found.models, found.n_prompt, found.device) == ([(False, "m.gguf")], [8], "auto")
    line = "note: no effect here: -ngl 99 (--device chooses for all layers), -fa 1, -mmp 0, -nkvo 0"
    assert capsys.readouterr().err == line + "\n"
    assert llama_cpp.parse(bench_options.parser(), ["-ngl", "0"]).device == "cpu"


def test_the_help_does_not_list_them() -> None:
    text = options.parser().format_help()
    assert "--mlock" in text  # as an example of what is accepted
    assert "--no-mmap" not in text and "--n-gpu-layers" not in text
