"""`ggpy perplexity`: its figures against llama.cpp's and against plain formulas, and its output.

What llama.cpp finds is in tests/golden/perplexity.json; make_perplexity.py beside it wrote that.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ggpy
from ggpy.backends.numpy.backend import Reference
from ggpy.evaluate import perplexity as p
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.runtime.evaluator import Evaluator, n_scored
from ggpy.tokenizer import Tokenizer
from ggpy.util import paths

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TEXT = GOLDEN / "text.txt"
CPU = ["--device", "cpu", "-t", "1"]
QUICK = [*CPU, "-c", "64", "--chunks", "4"]


Run = Callable[..., str]


@pytest.fixture
def run(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> Run:
    """What the program prints when all goes well."""

    def printed(*words: object) -> str:
        assert program.main(list(map(str, words))) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return printed


def final(out: str) -> tuple[float, float]:
    found = re.fullmatch(
        r"Final estimate: PPL = (\d+\.\d{4}) \+/- (\d+\.\d{5})", out.split("\n")[1]
    )
    assert found, out
    return float(found[1]), float(found[2])


def running(out: str) -> list[float]:
    """Perplexities after each chunk; their numbers count up from 1."""
    found = re.findall(r"\[(\d+)\](\d+\.\d{4}),", out)
    assert [int(i) for i, _ in found] == [*range(1, len(found) + 1)]
    return [float(x) for _, x in found]


def column(table: str, name: str) -> dict[str, str]:
    """The cells of a markdown table's column, by type."""
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    assert {len(line) for line in lines} == {len(lines[0])}
    at = lines[0].index(name)
    return {line[0]: line[at] for line in lines[2:]}


# Against llama.cpp


def test_smollm2_is_what_llama_cpp_finds(smollm2: Path, run: Run) -> None:
    golden = json.loads((GOLDEN / "perplexity.json").read_text(encoding="utf-8"))
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == golden["text_sha256"]
    out = run(smollm2, "-f", TEXT, *CPU, "-c", golden["n_ctx"])
    exact, rounded = golden["float32"], golden["as_it_is"]
    assert running(out) == pytest.approx(exact["perplexity"], rel=1e-3)
    assert running(out) == pytest.approx(rounded["perplexity"], rel=1e-2)
    assert final(out) == pytest.approx((exact["perplexity"][-1], exact["error"]), rel=1e-3)


def test_smollm2_diverges_more_the_fewer_bits_there_are(smollm2: Path, run: Run) -> None:
    words = ["-f", TEXT, *CPU, "-c", "128", "--chunks", "2", "--types", "q8_0,q2_k"]
    out = run("-m", smollm2, *words)
    kl = {name: float(x.split(" ±")[0]) for name, x in column(out, "KL divergence").items() if x}
    assert 0 < kl["Q8_0"] < kl["Q2_K"] / 8
    top = {name: float(x.split()[0]) for name, x in column(out, "same top p").items() if x}
    assert 100 >= top["Q8_0"] > top["Q2_K"] > 0
    assert column(out, "matrices") == {
        "as it is": "", "Q8_0": "211 of 211", "Q2_K": "30 of 211"
    }  # fmt: skip


# Against plain formulas, on tiny models


def test_types_of_keys_and_values(tiny_path: Callable[[str], Path], run: Run) -> None:
    words = [tiny_path("qwen3"), "-f", TEXT, *QUICK]
    usual, same = run(*words), run(*words, "--cache-type-k", "f32", "-ctv", "f32")
    assert same == usual
    fewer = run(*words, "-ctk", "q4_0", "--cache-type-v", "q4_1")
    assert final(fewer)[0] != final(usual)[0]
    assert final(fewer)[0] == pytest.approx(final(usual)[0], rel=0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_the_second_half_of_each_chunk_counts(
    architecture: str, tiny_path: Callable[[str], Path], run: Run
) -> None:
    """Through `Model.logits`, a chunk at a time; llama and gemma3 have a beginning token."""
    out = run(tiny_path(architecture), "-f", TEXT, *QUICK)
    with ggpy.load(tiny_path(architecture), device="cpu", n_ctx=64, n_threads=1) as model:
        ids = model.tokenizer.encode(TEXT.read_text(encoding="utf-8").rstrip("\n"))
        nll: list[float] = []
        expected = []
        for start in range(0, 256, 64):
            chunk = ids[start : start + 64]
            first = [model.tokenizer.bos_id] if model.tokenizer.add_bos else chunk[:1]
            logits = model.logits([*first, *chunk[1:]]).astype(np.float64)
            for i in range(32, 63):
                nll.append(np.log(np.exp(logits[i]).sum()) - logits[i, chunk[i + 1]])
            expected.append(np.exp(np.mean(nll)))
    assert running(out) == pytest.approx(expected, rel=1e-5)
    value, error = final(out)
    assert value == pytest.approx(expected[-1], rel=1e-5)
    assert error == pytest.approx(value * np.std(nll) / np.sqrt(len(nll) - 1), rel=1e-4)


@pytest.mark.parametrize("n_batch", [1, 7, 32, 64, 128, 200, 1000])
def test_steps_and_chunks_together_change_nothing(
    n_batch: int, tiny_path: Callable[[str], Path]
) -> None:
    with File(tiny_path("gemma3")) as file:
        chunks = p.chunks_of(TEXT.read_text(encoding="utf-8"), Tokenizer.from_gguf(file), 64, 5)
        one = Evaluator(file, Reference(1), 64, 64)
        many = Evaluator(file, Reference(1), 64, n_batch)
        assert many.n_seq == max(1, n_batch // 64)
        alone, together = list(one.logits(chunks)), list(many.logits(chunks))
    assert [x.shape for x in together] == [(31, one.n_vocab)] * 5
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-4)


def test_the_end_of_the_last_line_is_no_token(tiny_path: Callable[[str], Path]) -> None:
    with File(tiny_path("qwen2")) as file:
        tokenizer = Tokenizer.from_gguf(file)
        n = len(tokenizer.encode("hello world\n"))
        with pytest.raises(ValueError, match=rf"needs a text of 200, it has {n - 1}:"):
            p.chunks_of("hello world\n", tokenizer, 100)


def test_odd_contexts_score_what_llama_cpp_scores() -> None:
    for n_ctx in (3, 4, 5, 64, 65):
        chunk = np.arange(n_ctx, dtype=np.int32)
        assert p.targets(chunk).tolist() == [*range(n_ctx // 2 + 1, n_ctx)]
        assert len(p.targets(chunk)) == n_scored(n_ctx)


def test_comparison_by_the_definition() -> None:
    rng = np.random.default_rng(1)
    logits, base = (rng.normal(0, 3, (40, 50)).astype(np.float32) for _ in range(2))
    wanted = rng.integers(0, 50, 40).astype(np.int32)
    q, b = (
        np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1)[:, None] for x in (logits, base)
    )
    found, rows = p.compare(logits, base, wanted), np.arange(40)
    np.testing.assert_allclose(found["nll"], -np.log(q[rows, wanted]), rtol=1e-9)
    np.testing.assert_allclose(found["nll_base"], -np.log(b[rows, wanted]), rtol=1e-9)
    np.testing.assert_allclose(found["kl"], (b * np.log(b / q)).sum(1), rtol=1e-9)
    np.testing.assert_allclose(found["p_diff"], q[rows, wanted] - b[rows, wanted], atol=1e-12)
    assert found["same_top"].tolist() == (q.argmax(1) == b.argmax(1)).tolist()
    np.testing.assert_allclose(p.score(logits, wanted), found["nll"], rtol=1e-12)
    ratio = p.log_ratio(found)
    assert np.exp(ratio.value) == pytest.approx(
        p.perplexity(found["nll"]).value / p.perplexity(found["nll_base"]).value
    )
    # the error of a difference, through variances and covariance as llama-perplexity has it
    a, c = found["nll"], found["nll_base"]
    together = a.var() + c.var() - 2 * (np.mean(a * c) - a.mean() * c.mean())
    assert ratio.error == pytest.approx(np.sqrt(together / 39), rel=1e-6)
    here, there = p.perplexity(a), p.perplexity(c)
    covariance = (np.mean(a * c) - a.mean() * c.mean()) / 39 * here.value * there.value
    difference = p.difference(found)
    assert difference.value == pytest.approx(here.value - there.value)
    expected = np.sqrt(here.error**2 + there.error**2 - 2 * covariance)
    assert difference.error == pytest.approx(expected, rel=1e-6)
    assert p.rms(found["p_diff"]).value == pytest.approx(np.sqrt(np.mean(found["p_diff"] ** 2)))


def test_logits_far_apart_overflow_nothing() -> None:
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)
    wanted = np.array([1], np.int32)
    assert p.score(logits, wanted) == 2e4
    assert p.compare(logits, logits, wanted)["kl"] == 0


# Files of logits


def test_a_run_compared_with_itself(
    tiny_path: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    base = tmp_path / "logits.npy"
    saving = run(tiny_path("llama"), "-f", TEXT, *QUICK, "--kl-divergence-base", base)
    assert saving == run(tiny_path("llama"), "-f", TEXT, *QUICK)
    assert [x.name for x in tmp_path.iterdir()] == ["logits.npy"]
    records = np.load(base, mmap_mode="r")
    assert records["ids"].shape == (4, 64) and records["logits"].shape == (4, 31, 453)
    assert records["logits"].dtype == np.float32
    out = run(tiny_path("llama"), *CPU, "--kl-divergence-base", base, "--kl-divergence")
    value, _ = final(saving)
    said = re.search(r"^Mean PPL\(base\) {16}: ( *\d+\.\d{6}) ± ", out, re.M)
    assert said and float(said[1]) == pytest.approx(value, abs=1e-4)
    assert "Mean    KLD:   0.000000 ±   0.000000" in out
    assert "Maximum KLD:   0.000000" in out and "Median  KLD:   0.000000" in out
    assert "99.0%   KLD:   0.000000" in out and "RMS Δp    :  0.000 ± 0.000 %" in out
    assert "Same top p: 100.000 ± 0.000 %" in out
    assert "Mean PPL(Q)/PPL(base)         :   1.000000 ±   0.000000" in out
    lines = out.splitlines()
    assert [line[:4] for line in lines[1:5]] == ["   1", "   2", "   3", "   4"]
    assert lines[4].count("±") == 5


def test_a_model_compared_with_another(
    tiny_path: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    """The figures printed are those of the table over types, for the same two models."""
    base = tmp_path / "logits.npy"
    words = ["-f", TEXT, *QUICK, "--types", "q8_0,q4_0", "--kl-divergence-base", base]
    out = run(tiny_path("qwen3"), *words)
    kl = column(out, "KL divergence")
    assert column(out, "PPL")["as it is"].startswith(f"{p_of(base):.4f}")
    assert 0 < float(kl["Q8_0"].split()[0]) < 0.01 < float(kl["Q4_0"].split()[0])
    assert base.is_file()
    with File(tiny_path("qwen3")) as file:
        changed = p.Requantized(file, by_name("Q4_0"))
        model = Evaluator(changed, Reference(1), 64)
        records = p.open_base(base)
        logits = model.logits(np.array(records["ids"]))
        parts = [
            p.compare(x, r["logits"], p.targets(r["ids"]))
            for x, r in zip(logits, records, strict=True)
        ]
    assert float(kl["Q4_0"].split()[0]) == pytest.approx(
        np.concatenate(parts)["kl"].mean(), abs=1e-6
    )


def p_of(base: Path) -> float:
    """The perplexity that a file's logits say."""
    records = p.open_base(base)
    nll = [p.score(r["logits"], p.targets(r["ids"])) for r in records]
    return p.perplexity(np.concatenate(nll)).value


def test_what_is_no_file_of_logits(
    tiny_path: Callable[[str], Path], tmp_path: Path, refused: Run, run: Run
) -> None:
    words = [tiny_path("llama"), *CPU, "--kl-divergence", "--kl-divergence-base"]
    np.save(tmp_path / "other.npy", np.zeros((3, 4), np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "text.npy").write_text("logits", encoding="utf-8")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("other.npy", "objects.npy", "several.npz", "text.npy", "empty.npy"):
        assert "holds no logits" in refused(*words, tmp_path / name), name
    assert "No such file" in refused(*words, tmp_path / "none.npy")
    base = tmp_path / "logits.npy"
    run(tiny_path("llama"), "-f", TEXT, *QUICK, "--kl-divergence-base", base)
    base.write_bytes(base.read_bytes()[:-1000])
    assert "holds no logits" in refused(*words, base)


def test_another_vocabulary_is_refused(
    tiny_path: Callable[[str], Path], tmp_path: Path, program: ModuleType, run: Run, capsys: Any
) -> None:
    base = tmp_path / "logits.npy"
    run(tiny_path("llama"), "-f", TEXT, *QUICK, "--kl-divergence-base", base)
    words = [str(tiny_path("qwen2")), *CPU, "--kl-divergence", "--kl-divergence-base", str(base)]
    assert program.main(words) == 2
    assert "of a vocabulary of 453 ids, the model has" in capsys.readouterr().err


def test_an_interrupted_run_leaves_no_file(tmp_path: Path) -> None:
    def broken():
        yield np.zeros((31, 9), np.float32)
        raise RuntimeError

    chunks = np.zeros((2, 64), np.int32)
    with pytest.raises(RuntimeError):
        list(p.saved(tmp_path / "logits.npy", chunks, 9, broken()))
    assert not list(tmp_path.iterdir())


def test_logits_that_do_not_fit_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ValueError, match=r"x\.npy: needs 25 MB, 1 MB are free there: lower"):
        next(p.saved(tmp_path / "x.npy", np.zeros((2, 64), np.int32), 10**5, iter([])))
    with pytest.raises(ValueError, match="more than 2 GB a chunk: lower -c"):
        p.base_dtype(32768, 262144)


# Types


def test_requantised_matrices_are_those_that_fit(tiny_path: Callable[[str], Path]) -> None:
    with File(tiny_path("llama")) as file:
        changed = p.Requantized(file, by_name("Q5_1"))
        assert changed.n_quantized == changed.n_matrices
        for name, tensor in file.tensors.items():
            if len(tensor.shape) == 1:
                assert changed.tensors[name] is tensor
                continue
            expected = ggpy.quantize(tensor.dequantize(), "Q5_1")
            assert np.array_equal(changed.tensors[name].data, expected)
            assert changed.tensors[name].shape == tensor.shape
        same = p.Requantized(file, by_name("Q4_0")).tensors["blk.0.ffn_down.weight"]
        assert same is file.tensors["blk.0.ffn_down.weight"]  # it was that type already


def test_large_matrices_are_quantised_in_slabs(
    tiny_path: Callable[[str], Path], monkeypatch
) -> None:
    monkeypatch.setattr("ggpy.quantization.workers.SLAB", 1000)
    with File(tiny_path("llama")) as file:
        table = file.tensors["token_embd.weight"]
        expected = ggpy.quantize(table.dequantize(), "Q4_1")
        changed = p.Requantized(file, by_name("Q4_1"))
        assert np.array_equal(changed.tensors[table.name].data, expected)


def test_a_picture_of_quality_against_size(
    tiny_path: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    pytest.importorskip("matplotlib")
    from ggpy.bench.kernels.plot_types import Quality, draw

    path = tmp_path / "types.png"
    words = [tiny_path("llama"), "-f", TEXT, *QUICK, "--types", "q8_0,q4_0"]
    assert run(*words, "--plot", path) == run(*words)
    assert path.read_bytes().startswith(b"\x89PNG")
    one = Quality("as it is", "", 4.5, 10**8, (12.0, 0.1))
    two = Quality("Q2_K", "3 of 9", 2.5, 6 * 10**7, (15.0, 0.1), (0.2, 0.01), 0.8)
    assert draw([one, two], str(path)) == 3, "two perplexities and a divergence"


# What cannot be done


def test_what_cannot_be_done(
    tiny_path: Callable[[str], Path], tmp_path: Path, refused: Run
) -> None:
    model, short = tiny_path("llama"), tmp_path / "short.txt"
    short.write_text("hello world\n", encoding="utf-8")
    assert "no model: name one with -m MODEL" in refused("-f", TEXT)
    assert "no text: name a file with -f FILE" in refused(model)
    said = refused(model, "-f", short, *QUICK)
    assert "needs a text of 128, it has" in said and said.endswith("give a longer text")
    assert "has none to score: give -c 3" in refused(model, "-f", TEXT, *CPU, "-c", "2")
    assert "give -b 1 or more" in refused(model, "-f", TEXT, *QUICK, "-b", "0")
    assert "--plot draws a table over types" in refused(model, "-f", TEXT, "--plot", "x.png")
    assert "--chunks 0" in refused(model, "-f", TEXT, *CPU, "--chunks", "0")
    assert "No such file" in refused(model, "-f", tmp_path / "none", *CPU)
    f16 = refused(model, "-f", TEXT, *QUICK, "--activations", "f16")
    assert "--activations f16 is nothing for the CPU: it has q16, q8" in f16
    assert "name it with --kl-divergence-base" in refused(model, "--kl-divergence")
    assert "no matrix has rows" in refused(model, "-f", TEXT, *QUICK, "--types", "q8_0,q4_k")
    assert "cannot quantise to 'q9'" in refused(model, "-f", TEXT, *QUICK, "--types", "q9")
    assert "cannot quantise to 'i8'" in refused(model, "-f", TEXT, *QUICK, "--types", "i8")


def test_logits_that_are_no_numbers_end_it(
    overflowing: Path, program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([str(overflowing), "-f", str(TEXT), *QUICK]) == 1
    assert "logits of chunk 1 are NaN or infinite" in capsys.readouterr().err


def test_stdin_is_read(tiny_path: Callable[[str], Path], run: Run) -> None:
    words = [sys.executable, "-m", "ggpy", "perplexity", tiny_path("llama"), "-f", "-", *QUICK]
    found = subprocess.run(
        list(map(str, words)), cwd=paths.data_dir("tools").parent,
        input=TEXT.read_bytes(), capture_output=True, check=True,
    )  # fmt: skip
    assert found.stdout.decode() == run(tiny_path("llama"), "-f", TEXT, *QUICK)
