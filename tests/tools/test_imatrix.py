"""`ggpy imatrix`: its file, lines and refusals; the numbers are in tests/test_importance.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggpy.quantization.importance import read

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TEXT = GOLDEN / "text.txt"
QUICK = ["--device", "cpu", "-t", "1", "-c", "64", "--chunks", "4"]


def test_a_file_as_llama_imatrix_makes_it(program, tiny_path, tmp_path, capsys) -> None:
    out = tmp_path / "imatrix.gguf"
    words = [tiny_path("llama"), "-f", TEXT, "-o", out, "--process-output", *QUICK]
    assert program.main(list(map(str, words))) == 0
    found, expected = read(out), read(GOLDEN / "llama.imatrix")
    assert found.datasets == [str(TEXT)]
    assert found.weights().keys() == expected.weights().keys()
    for name, values in expected.weights().items():
        np.testing.assert_allclose(found.weights()[name], values, rtol=2e-4)
    said = capsys.readouterr()
    # llama-imatrix: [1]1975.2036,[2]1526.9222,[3]1537.7206,[4]1449.3979
    assert re.match(r"\[1\]1975\.\d{4},\[2\]1526\.\d{4},\[3\]1537\.\d{4},\[4\]1449\.", said.out)
    assert "Final estimate: PPL = 1449." in said.out
    assert "computing over 4 chunks of 64 tokens" in said.err
    assert f"stored 15 entries of 4 chunks in {out}" in said.err


def test_the_older_format_and_joining(program, tmp_path) -> None:
    golden, out = GOLDEN / "llama.imatrix", tmp_path / "both.dat"
    words = ["--in-file", golden, "--in-file", golden, "-c", "64", "-o", out]
    assert program.main([*map(str, words), "--output-format", "dat"]) == 0
    found = read(out, 64)
    assert (found.n_chunks, found.datasets) == (8, ["text.txt"])
    for name, values in read(golden).weights().items():
        np.testing.assert_allclose(found.weights()[name], values, rtol=1e-6)


def test_joining_keeps_the_tokens_of_a_chunk(program, tmp_path, capsys) -> None:
    golden, out = GOLDEN / "llama.imatrix", tmp_path / "both.gguf"
    words = ["--in-file", golden, "--in-file", golden, "-o", out]  # without -c
    assert program.main(list(map(str, words))) == 0
    found, one = read(out), read(golden)
    assert (found.n_chunks, found.chunk_size) == (2 * one.n_chunks, one.chunk_size)
    assert f"of {2 * one.n_chunks} chunks" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
@pytest.mark.parametrize("where", ["pipe", "file"])
def test_a_matrix_on_stdout_is_nothing_else(where: str, tiny_path, tmp_path) -> None:
    words = [str(tiny_path("llama")), "-f", str(TEXT), "-o", "/dev/stdout", *QUICK]
    command = [sys.executable, "-m", "ggpy", "imatrix", *words]
    out = tmp_path / "out.gguf"
    with out.open("wb") as stream:
        target = stream if where == "file" else subprocess.PIPE
        done = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, check=True)
    if where == "pipe":
        out.write_bytes(done.stdout)
    assert read(out).n_chunks == 4
    assert b"Final estimate" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8 elsewhere")
def test_the_name_of_a_text_may_be_no_utf8(program, tiny_path, tmp_path) -> None:
    text = tmp_path / os.fsdecode(b"a\xff.txt")
    text.write_bytes(Path(TEXT).read_bytes())
    words = [tiny_path("llama"), "-f", text, "-o", tmp_path / "out.gguf", *QUICK]
    assert program.main(list(map(str, words))) == 0
    assert read(tmp_path / "out.gguf").datasets == [str(tmp_path / "a\ufffd.txt")]


def test_collecting_goes_on_from_a_file(program, tiny_path, tmp_path) -> None:
    golden, out = GOLDEN / "phi3.imatrix", tmp_path / "more.gguf"
    words = [tiny_path("phi3"), "-f", TEXT, "--in-file", golden, "-o", out, *QUICK]
    assert program.main(list(map(str, words))) == 0
    found = read(out)
    assert (found.n_chunks, found.datasets) == (8, ["text.txt", str(TEXT)])
    for name, entry in read(golden).entries.items():
        np.testing.assert_allclose(found.entries[name].sums, 2 * entry.sums, rtol=2e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "no text: name a file with -f FILE (- is stdin), or matrices to combine with --in-file",
        ),
        (["-f", "text"], "no model: name one with -m MODEL"),
        (["m.gguf", "-f", "text", "--chunks", "0"], "--chunks 0: give 1 or more"),
        (["m.gguf", "-f", "text", "-o", "no/such/x.gguf"], "there is no folder no/such"),
        (["m.gguf", "-f", "text", "-o", "."], ".: is a directory: name a file in it"),
        (["--in-file", "none.gguf"], "none.gguf: cannot be read: No such file"),
        (["LLAMA", "-f", "none.txt"], "none.txt: No such file or directory"),
        (["LLAMA", "-f", "TEXT", "-c", "9999"], "a context of 9999 tokens needs a text of"),
    ],
)
def test_what_is_refused(refused, tiny_path, words, message) -> None:
    named = {"LLAMA": tiny_path("llama"), "TEXT": TEXT}
    assert message in refused(*(named.get(word, word) for word in words))


def test_a_model_that_computes_nan_ends_with_1(program, overflowing, tmp_path, capsys) -> None:
    out = tmp_path / "imatrix.gguf"
    assert program.main([str(overflowing), "-f", str(TEXT), "-o", str(out), *QUICK]) == 1
    assert "what meets blk." in capsys.readouterr().err
    assert not out.exists()
