"""Embedders and rerankers: pooling, dense matrices, the token after a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import to_gguf, weights_of
from embedder_checkpoints import DENSE, NO, YES, gemma_embedder, head, qwen3_embedder, reranker

import ggpy
from ggpy.convert import ConvertError
from ggpy.gguf import File
from ggpy.runtime.embedding.relevance import relevance

TEXT = "Hello world, this is a text"
GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "embedders" / "embedders.npz")


class GivenIds:
    """A tokenizer that encodes the prompt of a reranker as given ids: all in its first part."""

    def __init__(self, ids: list[int]) -> None:
        self._parts = iter([ids, [], []])

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return next(self._parts)


def check_vectors(path: Path, name: str) -> None:
    """The embeddings are those of transformers."""
    ids, wanted = GOLDEN[f"{name}/ids"], GOLDEN[f"{name}/vectors"]
    with ggpy.load(str(path), device="cpu", n_threads=1) as model:
        got = model.embed(ids.tolist())
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1, "not all alike"
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return qwen3_embedder(tmp_path / "embedder")


def test_the_token_behind_a_text_is_the_tokenizers(qwen3: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    out = to_gguf(qwen3, tmp_path / "x.gguf")
    with File(out) as file:
        found = dict(file.metadata)
    assert found["qwen3.pooling_type"] == 3 and found["tokenizer.ggml.add_eos_token"]
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (0, 1)
    with ggpy.load(str(out), device="cpu", n_threads=1) as model:
        theirs = Tokenizer.from_file(str(qwen3 / "tokenizer.json")).encode(TEXT).ids
        assert model.tokenizer.encode(TEXT) == theirs and theirs[-1] == 0


def test_qwen3_embedding(qwen3: Path, tmp_path: Path) -> None:
    check_vectors(to_gguf(qwen3, tmp_path / "x.gguf"), "qwen3-embedding")


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return gemma_embedder(tmp_path / "gemma")


def test_embedding_gemma_in_a_file(gemma: Path, tmp_path: Path) -> None:
    with File(to_gguf(gemma, tmp_path / "x.gguf")) as file:
        found = {k.removeprefix("gemma-embedding."): v for k, v in file.metadata.items()}
        for name, w in zip(("dense_2", "dense_3"), DENSE, strict=True):
            assert (found[f"{name}_feat_out"], found[f"{name}_feat_in"]) == w.shape
            tensor = file.tensors[f"{name}.weight"]
            np.testing.assert_array_equal(tensor.data.view("f4").reshape(w.shape), w)
    assert found["pooling_type"] == 1 and found["attention.sliding_window"] == 8


def test_embedding_gemma(gemma: Path, tmp_path: Path) -> None:
    check_vectors(to_gguf(gemma, tmp_path / "x.gguf"), "embedding-gemma")


def test_gemma_that_looks_back_only_is_refused(tmp_path: Path) -> None:
    folder = gemma_embedder(tmp_path / "gemma")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["use_bidirectional_attention"]
    path.write_text(json.dumps(config))
    with pytest.raises(ggpy.GGUFError, match="use_bidirectional_attention"):
        to_gguf(folder, tmp_path / "x.gguf")


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_has_the_rows_of_its_answers(tied: bool, tmp_path: Path) -> None:
    folder = reranker(tmp_path / "Qwen3-Reranker-tiny", tied)
    table = weights_of("qwen3")["model.embed_tokens.weight"] if tied else head()
    with File(to_gguf(folder, tmp_path / "x.gguf")) as file:
        found, tensors = dict(file.metadata), file.tensors
        got = np.array(tensors["cls.output.weight"].data).view("f4").reshape(2, 64)
    np.testing.assert_array_equal(got, table[[YES, NO]])
    assert found["qwen3.pooling_type"] == 4 and "output.weight" not in tensors
    assert list(found["qwen3.classifier.output_labels"]) == ["yes", "no"]
    assert "{document}" in found["tokenizer.chat_template.rerank"]
    with File(to_gguf(folder, tmp_path / "y.gguf", reranker=False)) as file:
        assert "cls.output.weight" not in file.tensors
        assert ("output.weight" in file.tensors) != tied


@pytest.mark.parametrize("tied", [True, False])
def test_relevance_is_that_of_yes_and_no(tied: bool, tmp_path: Path) -> None:
    name = "qwen3-reranker" if tied else "qwen3-reranker-untied"
    path = to_gguf(reranker(tmp_path / "x", tied), tmp_path / "x.gguf", reranker=True)
    with ggpy.load(str(path), device="cpu", n_threads=1, n_ctx=256) as model:
        got = [
            relevance(model.engine, GivenIds(ids), model.metadata, "a question", [TEXT])[0]
            for ids in GOLDEN[f"{name}/ids"].tolist()
        ]
    np.testing.assert_allclose(got, GOLDEN[f"{name}/yes"], rtol=1e-4)


@pytest.mark.parametrize("path", ["../other", "/etc", "..", "1_Pooling/../.."])
def test_steps_outside_the_folder(path: str, qwen3: Path, tmp_path: Path) -> None:
    listed = json.loads((qwen3 / "modules.json").read_text())
    listed[1]["path"] = path
    (qwen3 / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ConvertError, match="is not the name of a file in this folder"):
        to_gguf(qwen3, tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("key", "value"), [("bias", True), ("activation_function", "Tanh"), ("out_features", 3)]
)
def test_dense_steps_that_a_file_cannot_say(
    key: str, value: object, gemma: Path, tmp_path: Path
) -> None:
    path = gemma / "3_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConvertError, match="3_Dense"):
        to_gguf(gemma, tmp_path / "x.gguf")
