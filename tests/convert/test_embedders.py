"""Embedders and rerankers: pooling, dense matrices, the token behind a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import KINDS, to_gguf, weights_of, write, write_weights

import ggpy
from ggpy.convert import ConvertError
from ggpy.gguf import File

TEXT = "Hello world, this is a text"
IDENTITY = "torch.nn.modules.linear.Identity"


def bare(folder: Path, name: str) -> None:
    """Weights of a model that was saved without a head."""
    weights = {
        k.removeprefix("model."): v for k, v in weights_of(name).items() if "lm_head" not in k
    }
    write_weights(folder, weights, KINDS[name].dtype)


def modules(folder: Path, pooling: str, dense: list[np.ndarray]) -> None:
    """modules.json and the folders that it names."""
    steps = [("Transformer", "", {}), ("Pooling", "1_Pooling", {f"pooling_mode_{pooling}": True})]
    for i, w in enumerate(dense, 2):
        config = {"in_features": w.shape[1], "out_features": w.shape[0], "bias": False}
        steps.append(("Dense", f"{i}_Dense", {**config, "activation_function": IDENTITY}))
    for _, path, config in steps[1:]:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    for i, w in enumerate(dense, 2):
        write_weights(folder / f"{i}_Dense", {"linear.weight": w}, "float32")
    listed = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (kind, path, _) in enumerate(steps)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))


def end_with(folder: Path, text: str) -> None:
    """Put a token behind each text, as the post-processor says."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    id = next(x["id"] for x in content["added_tokens"] if x["content"] == text)
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": text, "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {text: {"id": text, "ids": [id], "tokens": [text]}}
    content["post_processor"] = {
        **{"type": "TemplateProcessing", "single": single, "pair": pair},
        "special_tokens": special,
    }
    path.write_text(json.dumps(content))


def hidden(folder: Path, kind: str, ids: list[int]) -> np.ndarray:
    """The hidden states [T, D] of transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor(ids)[None]).last_hidden_state[0].numpy()


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    wanted = wanted / np.linalg.norm(wanted)
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    folder = write(tmp_path / "embedder", "qwen3")
    bare(folder, "qwen3")
    modules(folder, "lasttoken", [])
    end_with(folder, "<s>")
    return folder


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
    with ggpy.load(str(to_gguf(qwen3, tmp_path / "x.gguf")), device="cpu", n_threads=1) as model:
        ids, got = model.tokenizer.encode(TEXT), model.embed([TEXT])[0]
    assert difference(got, hidden(qwen3, "Qwen3Model", ids)[-1]) < 1e-4


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    changes = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
    folder = write(tmp_path / "gemma", "gemma3", **changes)
    bare(folder, "gemma3")
    modules(folder, "mean_tokens", DENSE)
    return folder


RNG = np.random.default_rng(1)
DENSE = [RNG.standard_normal((96, 64)).astype("f4"), RNG.standard_normal((32, 96)).astype("f4")]


def test_embedding_gemma_in_a_file(gemma: Path, tmp_path: Path) -> None:
    with File(to_gguf(gemma, tmp_path / "x.gguf")) as file:
        found = {k.removeprefix("gemma-embedding."): v for k, v in file.metadata.items()}
        for name, w in zip(("dense_2", "dense_3"), DENSE, strict=True):
            assert (found[f"{name}_feat_out"], found[f"{name}_feat_in"]) == w.shape
            tensor = file.tensors[f"{name}.weight"]
            np.testing.assert_array_equal(tensor.data.view("f4").reshape(w.shape), w)
    assert found["pooling_type"] == 1 and found["attention.sliding_window"] == 8


def test_embedding_gemma(gemma: Path, tmp_path: Path) -> None:
    text = " ".join([TEXT] * 4)  # several windows
    with ggpy.load(str(to_gguf(gemma, tmp_path / "x.gguf")), device="cpu", n_threads=1) as model:
        ids, got = model.tokenizer.encode(text), model.embed([text])[0]
    mean = hidden(gemma, "Gemma3TextModel", ids).mean(axis=0)
    assert difference(got, DENSE[1] @ (DENSE[0] @ mean)) < 1e-4


def test_gemma_that_looks_back_only_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "gemma", "gemma3", architectures=["Gemma3TextModel"])
    bare(folder, "gemma3")
    with pytest.raises(ggpy.GGUFError, match="use_bidirectional_attention"):
        to_gguf(folder, tmp_path / "x.gguf")


def reranker(folder: Path) -> Path:
    """A checkpoint whose vocabulary has "yes" and "no"."""
    folder = write(folder, "qwen3")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {"yes": 490, "no": vocab.get("no", 491)}
    path.write_text(json.dumps(content))
    return folder


def test_a_reranker_has_the_rows_of_its_answers(tmp_path: Path) -> None:
    folder = reranker(tmp_path / "Qwen3-Reranker-tiny")
    no = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["no"]
    with File(to_gguf(folder, tmp_path / "x.gguf")) as file:
        found, tensors = dict(file.metadata), file.tensors
        got = np.array(tensors["cls.output.weight"].data).view("f4").reshape(2, 64)
        table = np.array(tensors["token_embd.weight"].data).view("f4").reshape(512, 64)
    np.testing.assert_array_equal(got, table[[490, no]])
    assert found["qwen3.pooling_type"] == 4 and "output.weight" not in tensors
    assert list(found["qwen3.classifier.output_labels"]) == ["yes", "no"]
    assert "{document}" in found["tokenizer.chat_template.rerank"]
    with File(to_gguf(folder, tmp_path / "y.gguf", reranker=False)) as file:
        assert "cls.output.weight" not in file.tensors


def test_relevance_is_that_of_yes_and_no(tmp_path: Path) -> None:
    from ggpy.runtime.embedding.relevance import QWEN3_RERANKER, prompt_ids, relevance

    folder = reranker(tmp_path / "x")
    with ggpy.load(str(to_gguf(folder, tmp_path / "x.gguf", reranker=True)), device="cpu",
                   n_threads=1, n_ctx=1024) as model:  # fmt: skip
        got = relevance(model.engine, model.tokenizer, model.metadata, "a question", [TEXT])
        ids = prompt_ids(model.tokenizer, QWEN3_RERANKER, "a question", TEXT)
    no = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["no"]
    x = hidden(folder, "Qwen3Model", ids)[-1] @ weights_of("qwen3")["model.embed_tokens.weight"].T
    assert np.isclose(got[0], 1 / (1 + np.exp(x[no] - x[490])), rtol=1e-4)


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
