"""What all command lines share: errors in one line, numbers, and help that keeps words whole."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from ggpy.cli import options
from ggpy.cli.parser import Parser, natural, number_or_auto, positive


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("007", 7), ("999999999", 999999999)])
def test_whole_numbers(text: str, number: int) -> None:
    assert positive(text) == natural(text) == number


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "", " 1", "1e3", "٣", "9999999999"])
@pytest.mark.parametrize(("kind", "least"), [(positive, 1), (natural, 0)])
def test_what_is_no_whole_number_is_refused(kind, least: int, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)
    assert str(caught.value) == f"{text!r} is not a whole number of {least} or more"


def test_zero_and_less_by_one_leave_the_number_to_the_program() -> None:
    assert [number_or_auto(text) for text in ("0", "-1", "2")] == [None, None, 2]


@pytest.mark.parametrize("text", ["abc", "0.5", "-3"])
def test_the_number_of_threads_is_told_the_same_whatever_is_wrong(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(["-t", text] if text[0] != "-" else [f"-t={text}"])
    told = capsys.readouterr().err
    assert "-t/--threads: " in told and "is not a whole number of 1 or more" in told


def test_zero_may_be_allowed() -> None:
    assert natural("0") == 0
    with pytest.raises(argparse.ArgumentTypeError):
        positive("0")


def test_an_error_is_one_line_that_a_terminal_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("show", "Show.")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--no\x1b[2J\nsuch"])
    assert end.value.code == 2
    line = r"ggpy show: error: unrecognized arguments: --no\x1b[2J such (see ggpy show --help)"
    assert capsys.readouterr().err == line + "\n"


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("show", "Show.")
    parser.add_argument("--json", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args(["--js"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_that_nobody_can_read(option: str) -> None:
    words = [sys.executable, "-m", "ggpy.run", option]
    with open("/dev/full", "w") as full:
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "ggpy run: error: No space left on device\n"
    assert (result.returncode, result.stderr) == (2, told)


def test_help_keeps_words_and_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    word = "ggml-model-TYPE.gguf"
    parser = Parser("x", "Do.", epilog=f"The name of the file is {word}.\n\nSecond part.")
    parser.add_argument("--long", help=f"the file that is made is {word} in the folder")
    text = parser.format_help()
    assert text.count(word) == 2 and max(map(len, text.splitlines())) <= 40
    assert text.endswith(f"{word}.\n\nSecond part.\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m.gguf", "--temprature", "1"], "--temprature 1 (did you mean --temperature? see "),
        (["--ctx-sise=5"], "arguments: --ctx-sise=5 (did you mean --ctx-size? see "),
        (["--nothing-like-it"], "arguments: --nothing-like-it (see "),
        (["m.gguf", ""], "arguments: (see "),
        (["--temp", "x"], "--temp/--temperature: 'x' is not a number (see "),
        (["-n", "1.5"], "--n-predict: '1.5' is not a whole number (see "),
        (["m.gguf", "hello", "you"], "hello you (the prompt is -p TEXT: see ggpy run --help)"),
        (["--tempp=1"], "--tempp=1 (did you mean --temp? see ggpy run --help)"),
        (["-hff", "x.gguf"], "name that with -hf USER/REPO"),
    ],
)
def test_a_wrong_option_is_told_with_what_may_be_meant(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(words)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("value", ["---", "--", "---\ntitle: x", "- a", "-*-", "-5", "-"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_value_may_begin_with_dashes(value: str, joined: bool) -> None:
    """As in llama.cpp: `-p` takes a text that begins with a line of dashes."""
    parser = Parser("run", "Run.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("-p", "--prompt")
    words = [f"-p={value}"] if joined else ["-p", value]
    for parse in (parser.parse_args, parser.parse_intermixed_args):
        found = parse([*words, "m.gguf"])
        assert (found.prompt, found.model) == (value, "m.gguf")


def test_an_option_is_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("run", "Run.")
    parser.add_argument("-p")
    parser.add_argument("-n")
    with pytest.raises(SystemExit):
        parser.parse_args(["-p", "-n", "5"])
    assert "argument -p: expected one argument" in capsys.readouterr().err
