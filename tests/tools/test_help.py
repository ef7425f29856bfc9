"""`ggpy PROGRAM --help` is answered at once: nothing that costs time to import is imported."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ggpy.__main__ import programs, usage
from ggpy.util import paths

WORKSHOP = {"diff_backends", "make_benchmarks", "make_tiny", "record_gpu"}
COSTLY = {"cuda.core", "jinja2", "matplotlib", "numpy", "sentencepiece", "tokenizers"}


@pytest.mark.parametrize("name", sorted(programs().keys() - WORKSHOP))
def test_help_is_cheap(name: str) -> None:
    code = (
        f"import sys; from ggpy.__main__ import main\n"
        f"try: main([{name!r}, '--help'])\n"
        f"except SystemExit as error: print(error.code, {COSTLY!r} & set(sys.modules))"
    )
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=paths.data_dir("tools").parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.startswith(f"usage: ggpy {name} ")
    assert result.stdout.splitlines()[-1] == "0 set()"
    assert time.perf_counter() - start < 3  # 0.1 s where nothing else runs


def test_each_is_listed_with_what_it_does() -> None:
    lines = [line.split(maxsplit=1) for line in usage().splitlines() if line.startswith("  ")]
    assert [line[0] for line in lines] == [*programs()]
    assert all(len(line[1].split()) > 3 for line in lines)
    assert ["convert", "make a GGUF file of a Hugging Face checkpoint, in any type"] in lines
