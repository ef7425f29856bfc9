"""`ggpy --help` and `ggpy PROGRAM --help`: answered at once, in plain words."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from ggpy.__main__ import described, main, programs, usage
from ggpy.hub import known_names
from ggpy.util import paths

COSTLY = {"cuda.core", "gguf", "jinja2", "matplotlib", "numpy", "prompt_toolkit", "tokenizers"}
DEVELOPERS = {
    *("bench_kernels", "diff_backends", "make_benchmarks"),
    *("make_synthetic", "make_tiny", "record_gpu"),
}


def help_of(name: str) -> subprocess.CompletedProcess[str]:
    """What a program prints, and last a line with its status and costly modules."""
    code = (
        f"import sys; from ggpy.__main__ import main\n"
        f"try: main([{name!r}, '--help'])\n"
        f"except SystemExit as error: print(error.code, {COSTLY!r} & set(sys.modules))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=paths.data_dir("tools").parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize("name", sorted(programs()))
def test_help_is_cheap_and_plain(name: str) -> None:
    start = time.perf_counter()
    text = help_of(name).stdout
    assert time.perf_counter() - start < 3  # 0.1 s where nothing else runs
    assert text.startswith(f"usage: ggpy {name}")
    assert text.splitlines()[-1] == "0 set()"
    assert "README" not in text and ".py" not in text
    purpose = next(program.purpose for program in described() if program.name == name)
    assert f"\n\n{purpose[0].upper()}{purpose[1:]}.\n\n" in text


@pytest.mark.parametrize("name", ["run", "show", "quantize", "bench", "perplexity", "imatrix"])
def test_help_names_the_known_models(name: str) -> None:
    assert known_names() in " ".join(help_of(name).stdout.split())


def test_quantize_names_its_types() -> None:
    from ggpy.quantization.mix import BY_ROW, MIXES

    words = re.findall(r"[\w-]+", help_of("quantize").stdout)
    assert {*MIXES, *BY_ROW, "COPY"} <= set(words)


def test_programs_for_developers_stand_apart() -> None:
    text = usage()
    first, second = text.split("programs for developers of ggpy:\n")
    assert re.findall(r"^  (\w+)", second, re.M) == sorted(DEVELOPERS)
    assert set(re.findall(r"^  (\w+)", first, re.M)) == programs().keys() - DEVELOPERS
    assert max(map(len, text.splitlines())) <= 90


def test_what_each_does_is_a_plain_line() -> None:
    for program in described():
        assert re.fullmatch(r"[a-z][^:]+[^:.]", program.purpose), program
        assert len(program.purpose.split()) > 3


def test_ggpy_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["--help"], ["-h"], ["help", "--help"]):
        assert main(words) == 0
        assert capsys.readouterr().out == usage() + "\n"
    with pytest.raises(SystemExit) as end:
        main(["help", "show"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: ggpy show ")
    assert main(["help", "nonsense"]) == 2
    assert "unknown program 'nonsense'" in capsys.readouterr().err
