"""`ggpy embed`: its vectors against the library's, and llama-embedding's forms."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import ggpy

CPU = ["--device", "cpu", "-t", "1"]
TEXTS = ["hello", "hello world", "goodbye to all of them"]


@pytest.fixture
def run(program, tiny_path, capsys):
    """What the program prints about texts when all goes well."""

    def printed(*words: object, architecture: str = "llama") -> str:
        assert program.main([*CPU, str(tiny_path(architecture)), *map(str, words)]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def vectors(tiny_path) -> np.ndarray:
    with ggpy.load(tiny_path("llama"), device="cpu", n_threads=1) as model:
        return model.embed(TEXTS)


def test_the_table(run, vectors):
    lines = run(*TEXTS).splitlines()
    for i, vector in enumerate(vectors):
        assert lines[i].startswith(f"embedding {i}: ")
        np.testing.assert_allclose(_numbers(lines[i]), vector[:16], atol=1e-6)
    assert lines[3:6] == ["", "cosine similarity matrix:", ""]
    assert lines[6].split() == ["hello", "hello", "goodby"]
    assert [line[21:] for line in lines[7:]] == ["hello", "hello worl", "goodbye to"]
    found = [[float(x) for x in line[:20].split()] for line in lines[7:]]
    np.testing.assert_allclose(found, vectors @ vectors.T, atol=0.006)


def test_of_one_text_all_values(run, vectors):
    """With as many threads as ggpy chooses."""
    (line,) = run("-t", "-1", TEXTS[0]).splitlines()
    np.testing.assert_allclose(_numbers(line), vectors[0], atol=1e-6)


def _numbers(line: str) -> list[float]:
    return [float(x) for x in line.partition(": ")[2].split()]


def test_formats(run, vectors):
    array = json.loads(run("--embd-output-format", "array", *TEXTS))
    both = json.loads(run("--embd-output-format", "json+", *TEXTS))
    plain = json.loads(run("--embd-output-format", "json", *TEXTS))
    raw = np.loadtxt(io.StringIO(run("--embd-output-format", "raw", *TEXTS)))
    np.testing.assert_allclose(array, vectors, atol=1e-6)
    np.testing.assert_array_equal([x["embedding"] for x in plain["data"]], array)
    np.testing.assert_array_equal(raw, array)
    np.testing.assert_allclose(both.pop("cosineSimilarity"), vectors @ vectors.T, atol=0.006)
    assert both == plain and [x["index"] for x in plain["data"]] == [0, 1, 2]


def test_a_file_for_numpy(run, vectors, tmp_path, tiny_path):
    out = tmp_path / "x.npy"
    assert run("-o", out, *TEXTS) == ""
    found = np.load(out)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, vectors, atol=1e-6)
    line = run("--embd-output-format", "json", *TEXTS)
    assert run("--embd-output-format", "json", "-o", tmp_path / "x.json", *TEXTS) == ""
    assert (tmp_path / "x.json").read_text() == line
    run("--pooling", "none", "-o", out, *TEXTS)
    with ggpy.load(tiny_path("llama"), device="cpu", n_threads=1) as model:
        n = sum(len(model.tokenizer.encode(text)) for text in TEXTS)
    assert np.load(out).shape == (n, vectors.shape[1])


@pytest.mark.parametrize(
    ("words", "kind"), [((), "float32"), (("--embd-output-format", "raw"), "text")]
)
def test_what_a_file_holds_is_said(program, tiny_path, tmp_path, capsys, words, kind):
    out = str(tmp_path / "out")
    assert program.main([*CPU, str(tiny_path("llama")), *words, "-o", out, "a"]) == 0
    assert f"{out}: {kind} " in capsys.readouterr().err


def test_many_texts_may_be_longer_than_a_prompt(program, monkeypatch, tmp_path):
    monkeypatch.setattr("ggpy.cli.prompts.MAX_PROMPT", 16)
    (tmp_path / "x.txt").write_text("a line\n" * 9)
    options = program.parser().parse_args(["-f", str(tmp_path / "x.txt")])
    assert program.read_texts(options) == ["a line"] * 9


@pytest.mark.parametrize(("norm", "size"), [(-1, None), (0, 32760), (1, 1), (2, 1)])
def test_norms(run, vectors, norm, size):
    x = np.array(json.loads(run("--embd-output-format", "array", "--embd-normalize", norm, *TEXTS)))
    np.testing.assert_allclose(x / np.linalg.norm(x, axis=1, keepdims=True), vectors, atol=1e-3)
    sizes = {0: np.abs(x).max(axis=1), 1: np.abs(x).sum(axis=1), 2: np.linalg.norm(x, axis=1)}
    if size is None:
        assert (np.abs(sizes[2] - 1) > 0.1).all()
    else:
        np.testing.assert_allclose(sizes[norm], size, rtol=1e-5)


def test_where_texts_come_from(run, program, tiny_path, tmp_path, monkeypatch, capsys):
    wanted, lines = run(*TEXTS), "\n".join(TEXTS) + "\n\n"
    path = tmp_path / "texts"
    path.write_text(lines)
    assert run("-f", path) == run("-p", lines) == wanted
    assert run("-p", "##".join(TEXTS), "--embd-separator", "##") == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert run() == wanted
    assert program.main([*CPU, "-m", str(tiny_path("llama")), *TEXTS]) == 0
    assert capsys.readouterr().out == wanted


def test_many_texts_share_steps(run, monkeypatch):
    steps: list[int] = []
    hidden = ggpy.arch.Decoder.hidden

    def counted(decoder, step):
        steps.append(int(step.sequences.max()) + 1)
        return hidden(decoder, step)

    monkeypatch.setattr(ggpy.arch.Decoder, "hidden", counted)
    run("--embd-output-format", "raw", *(TEXTS * 5))
    assert sum(steps) == 15 and len(steps) <= 6


def test_relevance(program, tmp_path, capsys, monkeypatch, tiny_path):
    """Each query's documents, in their order; the scores are `relevance`'s."""
    from ggpy.runtime.embedding import relevance as module

    asked = []

    def scores(engine, tokenizer, metadata, query, documents):
        asked.append((query, documents))
        return [len(document) / 10 for document in documents]

    monkeypatch.setattr(module, "relevance", scores)
    words = [*CPU, str(tiny_path("qwen3")), "--pooling", "rank", "a\tbc", "a\tb", "d\te"]
    assert program.main(words) == 0
    assert asked == [("a", ["bc", "b"]), ("d", ["e"])]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"rerank score {i}: {x:8.3f}" for i, x in enumerate((0.2, 0.1, 0.1))]


@pytest.mark.parametrize(
    ("architecture", "words", "message"),
    [
        ("llama", ["a", "-p", "b"], "texts are given twice"),
        ("llama", ["-p", "\n\n"], "no text: give TEXT"),
        ("llama", ["-p", "a", "--embd-separator", ""], "--embd-separator is empty"),
        ("llama", ["a", "--embd-normalize", "-2"], "--embd-normalize is -2: give -1 or more"),
        ("llama", ["-c", "8", "one two three " * 4], "raise n_ctx (-c)"),
        ("gemma-embedding", ["-b", "4", "one two three " * 4], "a step is 4 tokens, the text has"),
        ("llama", ["--pooling", "rank", "a\tb"], "this model cannot rank documents"),
        ("qwen3", ["--pooling", "rank", "a"], "text 0 is not a query and a document"),
        ("qwen3", ["--pooling", "rank", "a\tb", "-o", "x.npy"], "leave -o and formats away"),
    ],
)
def test_what_is_refused(refused, tiny_path, architecture: str, words: list[str], message: str):
    assert message in refused(*CPU, tiny_path(architecture), *words)
    assert not Path("x.npy").exists()


def test_no_model(refused):
    assert "no model: name one" in refused()
