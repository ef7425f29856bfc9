"""Importance matrices: llama-imatrix's numbers, its files both ways, and files that are none.

golden/llama.imatrix, llama-old.imatrix and phi3.imatrix are llama-imatrix's, of models/tiny with
all weights in float32, and of golden/text.txt:

    llama-imatrix -m MODEL -f text.txt -c 64 -b 64 --chunks 4 -fa off -ctk f32 -ctv f32 -o FILE

the first two with --process-output, the second with --output-format dat.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from ggpy.backends.numpy.backend import Reference
from ggpy.backends.observe import ObservedOps
from ggpy.evaluate.perplexity import chunks_of
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.gguf.writer import Slot, Writer
from ggpy.quantization.importance import (
    Collector,
    Entry,
    ImportanceMatrix,
    read,
    write_dat,
    write_gguf,
)
from ggpy.runtime.evaluator import Evaluator
from ggpy.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA, LLAMA_DAT, PHI3 = (GOLDEN / f"{n}.imatrix" for n in ("llama", "llama-old", "phi3"))
F32 = by_name("F32")

# What llama-imatrix makes of the first twice, and of the second and the first: sums are exact.
JOINED = "2bde7c2395f27ddfe979af2c78e25d856e7a6adfeb90331f1e59a448d589ba24"


def collect(path: Path, with_output: bool, n_batch: int = 64) -> ImportanceMatrix:
    collector = Collector(with_output)
    with File(path) as file:
        text = (GOLDEN / "text.txt").read_text(encoding="utf-8")
        chunks = chunks_of(text, Tokenizer.from_gguf(file), 64, 4)
        ops = ObservedOps(Reference(1), collector.see)
        for _ in Evaluator(file, ops, 64, n_batch, whole=True).logits(chunks):
            pass
    return collector.matrix(["text.txt"], 64)


@pytest.mark.parametrize(("name", "golden"), [("llama", LLAMA), ("phi3", PHI3)])
def test_it_collects_what_llama_imatrix_does(name: str, golden: Path, tiny_path) -> None:
    """Fused tensors too; llama.cpp adds up in float32."""
    found, expected = collect(tiny_path(name), golden is LLAMA), read(golden)
    assert found.entries.keys() == expected.entries.keys()
    assert ("output.weight" in found.entries) == (golden is LLAMA)
    assert (found.n_chunks, found.chunk_size) == (expected.n_chunks, expected.chunk_size) == (4, 64)
    for name, entry in expected.entries.items():
        assert (found.entries[name].counts == entry.counts).all()
        assert entry.counts.tolist() == [256]
        np.testing.assert_allclose(found.entries[name].sums, entry.sums, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("n_batch", [17, 63, 256])
def test_steps_do_not_show(n_batch: int, tiny_path) -> None:
    """Parts of chunks, and several chunks in a step; the last step may have a single token."""
    whole, parts = collect(tiny_path("llama"), True), collect(tiny_path("llama"), True, n_batch)
    for name, entry in whole.entries.items():
        np.testing.assert_allclose(parts.entries[name].sums, entry.sums, rtol=1e-5)
        assert parts.entries[name].counts == entry.counts


def test_files_written_again_are_the_same(tmp_path: Path) -> None:
    write_gguf(tmp_path / "again.gguf", read(LLAMA))
    assert (tmp_path / "again.gguf").read_bytes() == LLAMA.read_bytes()
    write_dat(tmp_path / "again.dat", read(LLAMA_DAT, 64))
    assert (tmp_path / "again.dat").read_bytes() == LLAMA_DAT.read_bytes()
    write_dat(tmp_path / "other.dat", read(LLAMA))
    assert (tmp_path / "other.dat").read_bytes() == LLAMA_DAT.read_bytes()


def test_both_formats_say_the_same() -> None:
    """The older one has means alone, so that they are rounded once more."""
    new, old = read(LLAMA), read(LLAMA_DAT)
    assert new.datasets == old.datasets == ["text.txt"]
    assert new.n_chunks == old.n_chunks == 4
    for name, values in new.weights().items():
        np.testing.assert_allclose(old.weights()[name], values, rtol=1e-6)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_matrices_are_joined_as_llama_imatrix_does(tmp_path: Path) -> None:
    for first in (LLAMA, LLAMA_DAT):
        found = ImportanceMatrix(chunk_size=64)
        found.add(read(first, 64))
        found.add(read(LLAMA))
        write_gguf(tmp_path / "joined.gguf", found)
        assert digest(tmp_path / "joined.gguf") == JOINED
    assert (found.n_chunks, found.datasets) == (8, ["text.txt", "text.txt"])
    assert read(LLAMA).entries["output.weight"].counts == [256]  # it was not changed


def test_matrices_of_different_models_are_not_joined() -> None:
    found = read(LLAMA)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_k\.weight has 64 columns here and 5 there"):
        other = {"blk.0.attn_k.weight": Entry(np.ones((1, 5), np.float32), np.array([1]))}
        found.add(ImportanceMatrix(other))


def test_means_of_experts() -> None:
    """An expert that nothing was seen of counts as 1, as in llama-quantize."""
    sums = np.array([[2, 4], [6, 8], [7, 7]], np.float32)
    found = ImportanceMatrix({"x": Entry(sums, np.array([2, 4, 0]))})
    assert found.weights()["x"].tolist() == [1, 2, 1.5, 2, 1, 1]


def test_only_layers_and_the_output_are_collected() -> None:
    collector = Collector()
    for name in ("token_embd.weight", "output.weight", "blk.0.attn_q.weight"):
        collector.see(name, np.full((3, 2), 2, np.float32))
    found = collector.matrix([], 512)
    assert list(found.entries) == ["blk.0.attn_q.weight"]
    assert found.entries["blk.0.attn_q.weight"].sums.tolist() == [[12, 12]]
    with pytest.raises(ArithmeticError, match=r"what meets blk\.1\.ffn_up\.weight is NaN"):
        collector.see("blk.1.ffn_up.weight", np.array([[np.inf]], np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1])
def test_bad_numbers_are_refused(value: float) -> None:
    found = read(LLAMA)
    found.entries["blk.0.attn_k.weight"].sums[0, 3] = value
    with pytest.raises(ValueError, match=r"NaN, infinity or a negative .* blk.0.attn_k.weight"):
        found.weights()


# Files that are none


def test_missing_and_foreign_files(tmp_path: Path, tiny_path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: cannot be read: No such file"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"llama.gguf: has no imatrix.datasets"):
        read(tiny_path("llama"))
    (tmp_path / "text").write_text("It was a dark and stormy night.")
    with pytest.raises(ValueError, match=r"this is no importance matrix, or it is truncated"):
        read(tmp_path / "text")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="ends at byte 0, 4 bytes are needed from 0 on"):
        read(tmp_path / "empty")
    (tmp_path / "none").write_bytes(struct.pack("<i", 0))
    with pytest.raises(ValueError, match="holds no importance matrix"):
        read(tmp_path / "none")


def test_every_truncation_of_the_older_format_is_refused(tmp_path: Path) -> None:
    data, path = LLAMA_DAT.read_bytes(), tmp_path / "cut.dat"
    end = data.rindex(struct.pack("<i", 4) + struct.pack("<i", len("text.txt")))
    for size in [*range(0, 200), *range(end - 50, len(data))]:
        path.write_bytes(data[:size])
        if size == end:  # files of llama.cpp's early days end here
            assert read(path).n_chunks == 0
        elif size == end + 4:
            assert (read(path).n_chunks, read(path).datasets) == (4, [])
        else:
            with pytest.raises(ValueError, match="truncated"):
                read(path)


def test_lengths_that_lie_are_refused(tmp_path: Path) -> None:
    for head in ((1, -5), (1, 2**31 - 1), (2**31 - 1, 1)):
        (tmp_path / "bad.dat").write_bytes(struct.pack("<ii", *head) + bytes(64))
        with pytest.raises(ValueError, match="truncated"):
            read(tmp_path / "bad.dat")


def write(path: Path, arrays: dict[str, np.ndarray], **changed) -> Path:
    metadata = {
        "imatrix.datasets": ("arr[str]", ["x"]),
        "imatrix.chunk_count": ("u32", 1),
        "imatrix.chunk_size": ("u32", 512),
    }
    metadata |= {f"imatrix.{key}": value for key, value in changed.items()}
    slots = [Slot(name, array.shape, F32) for name, array in arrays.items()]
    with Writer(path, metadata, slots) as out:
        for array in arrays.values():
            out.write(array.astype("<f4"))
    return path


def test_entries_that_are_no_entries(tmp_path: Path) -> None:
    path, sums = tmp_path / "bad.gguf", np.ones(6)
    with pytest.raises(ValueError, match="a has no counts, or they are not F32"):
        read(write(path, {"a.in_sum2": sums}))
    with pytest.raises(ValueError, match="a has 6 sums and 4 counts that do not fit"):
        read(write(path, {"a.in_sum2": sums, "a.counts": np.ones(4)}))
    with pytest.raises(ValueError, match="do not fit"):
        read(write(path, {"a.in_sum2": sums, "a.counts": np.array([np.nan])}))
    with pytest.raises(ValueError, match="holds no importance matrix"):
        read(write(path, {}))
    with pytest.raises(ValueError, match="is no such"):
        read(write(path, {"a.in_sum2": sums, "a.counts": np.ones(1)}, chunk_size=("str", "512")))


def test_experts_are_seen_each_by_itself(tiny_path, tmp_path: Path) -> None:
    """The counts of an expert's tokens, in files too; those of all are tokens times chosen."""
    collector = Collector()
    with File(tiny_path("gpt-oss")) as file:
        text = (GOLDEN / "text.txt").read_text(encoding="utf-8")
        chunks = chunks_of(text, Tokenizer.from_gguf(file), 64, 4)
        ops = ObservedOps(Reference(1), collector.see, collector.see_experts)
        for _ in Evaluator(file, ops, 64, 64, whole=True).logits(chunks):
            pass
    write_gguf(tmp_path / "experts.gguf", collector.matrix(["text.txt"], 64))
    entries = read(tmp_path / "experts.gguf").entries
    gate, down = (entries[f"blk.1.ffn_{x}_exps.weight"] for x in ("gate", "down"))
    assert gate.sums.shape == (8, 64) and down.sums.shape == (8, 32)
    assert gate.counts.tolist() == down.counts.tolist() and gate.counts.sum() == 2 * 256
    assert len(set(gate.counts)) > 2, "all experts are chosen equally often"
    router = entries["blk.1.ffn_gate_inp.weight"]
    np.testing.assert_allclose(gate.sums.sum(0), 2 * router.sums[0], rtol=1e-4)
