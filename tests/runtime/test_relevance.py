"""Relevance of documents: rerankers with a classifier as llama.cpp writes them, and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import ggpy
from ggpy.runtime.embedding.relevance import (
    QWEN3_RERANKER,
    TEMPLATE,
    can_rank,
    prompt_ids,
    relevance,
)

QUERY, DOCUMENTS = "the capital", ["Paris is the capital.", "no", "yes, " * 30, "a b c"]
LABELS = "qwen3.classifier.output_labels"


@pytest.fixture(scope="module")
def reranker(tiny_path, tmp_path_factory) -> Callable[..., Path]:
    """The tiny qwen3 in float32, with "yes" and "no" as tokens, and more keys and tensors."""

    def make(keys: dict[str, Any], **tensors: np.ndarray) -> Path:
        keys = {"qwen3.context_length": 512, **keys}
        reader = gguf.GGUFReader(tiny_path("qwen3"))
        path = tmp_path_factory.mktemp("reranker") / "qwen3.gguf"
        writer = gguf.GGUFWriter(path, "qwen3")
        fields = {key: field for key, field in reader.fields.items() if key[:5] != "GGUF."}
        del fields["general.architecture"]
        for key, field in fields.items():
            kind, value = field.types[0], field.contents()
            if key == "tokenizer.ggml.merges":
                value = value[:-2]
            if key == "tokenizer.ggml.tokens":
                value[351:353] = ["yes", "no"]  # which the last merges made
            if key == "tokenizer.ggml.token_type":
                value[351:353] = [4, 4]  # user-defined: found wherever they are written
            if key not in keys:
                writer.add_key_value(key, value, kind, sub_type=field.types[-1])
        for key, value in keys.items():
            add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
            add[type(value)](key, value)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, values)
        for name, values in tensors.items():
            writer.add_tensor(name.replace("_", "."), values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


RANKS = {"qwen3.pooling_type": 4, LABELS: ["yes", "no"], TEMPLATE: QWEN3_RERANKER}


def rows_of_yes_and_no(path: Path) -> np.ndarray:
    with ggpy.File(path) as file:
        return file.tensors["token_embd.weight"].dequantize()[[351, 352]]


@pytest.fixture(scope="module")
def plain(reranker) -> Path:
    """Without a classifier; its name says what it is."""
    return reranker({"general.name": "Tiny Reranker 0.6B"})


@pytest.fixture(scope="module")
def converted(reranker, plain) -> Path:
    """With the classifier that llama.cpp's converter makes of two rows of the tied head."""
    return reranker(RANKS, cls_output_weight=rows_of_yes_and_no(plain))


def ranked(path: Path, documents: list[str] = DOCUMENTS, **options: Any) -> list[float]:
    with ggpy.load(path, device="cpu", n_threads=1, **options) as model:
        found = relevance(model.engine, model.tokenizer, model.metadata, QUERY, documents)
        assert model.engine.cache.n_free == model.engine.cache.n_pages
    return found


def test_a_classifier_of_two_rows_gives_what_the_logits_give(plain, converted):
    a, b = ranked(plain), ranked(converted)
    assert len(a) == len(DOCUMENTS) == len(set(a)) and all(0 < x < 1 for x in a)
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_is_the_probability_of_yes_against_no(plain):
    with ggpy.load(plain, device="cpu", n_threads=1) as model:
        ids = prompt_ids(model.tokenizer, QWEN3_RERANKER, QUERY, DOCUMENTS[0])
        yes, no = model.logits(ids)[-1, [351, 352]].tolist()
    assert ranked(plain, DOCUMENTS[:1]) == pytest.approx([1 / (1 + np.exp(no - yes))])


@pytest.mark.parametrize("options", [{"n_batch": 16}, {"n_seq": 4}])
def test_steps_change_nothing(plain, converted, options):
    for path in (plain, converted):
        expected = [ranked(path, [d])[0] for d in DOCUMENTS]
        np.testing.assert_allclose(ranked(path, **options), expected, atol=1e-5)


def test_the_label_yes_says_which_class_counts(reranker, converted):
    rows = rows_of_yes_and_no(converted)
    swapped = reranker(RANKS | {LABELS: ["no", "yes"]}, cls_output_weight=rows[::-1])
    expected = ranked(converted)
    np.testing.assert_allclose(ranked(swapped), expected, atol=1e-6)


def test_a_classifier_of_one_row_is_the_difference_of_two(reranker, converted):
    yes, no = rows_of_yes_and_no(converted)
    keys = RANKS | {LABELS: ["relevant"]}
    expected = ranked(converted)
    single = ranked(reranker(keys, cls_output_weight=(yes - no)[None]))
    np.testing.assert_allclose(single, expected, atol=1e-5)


def test_llama_cpp_gives_the_same(converted):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    from oracle import Oracle

    theirs = Oracle(converted, 512, pooling="rank").rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(ranked(converted), theirs, atol=1e-5)


# Prompts


def test_special_tokens_of_documents_are_text(plain):
    with ggpy.load(plain, device="cpu", n_threads=1) as model:
        encode = model.tokenizer.encode
        usual = prompt_ids(model.tokenizer, QWEN3_RERANKER, QUERY, "a")
        ids = prompt_ids(model.tokenizer, QWEN3_RERANKER, QUERY, "<|im_end|>")
    assert [usual.count(id) for id in (354, 355)] == [3, 2] == [ids.count(id) for id in (354, 355)]
    whole = QWEN3_RERANKER.replace("{query}", QUERY).replace("{document}", "a")
    assert usual == encode(whole, add_special=False, parse_special=True)


def test_placeholders_in_texts_stay(plain):
    with ggpy.load(plain, device="cpu", n_threads=1) as model:
        ids = prompt_ids(model.tokenizer, QWEN3_RERANKER, "{document}", "{query}")
        assert "<Query>: {document}\n<Document>: {query}" in model.tokenizer.decode(ids)


def test_a_prompt_of_the_file_comes_first(reranker, plain):
    keys = {"general.name": "x", TEMPLATE: "<|im_start|>{query}: {document}<|im_end|>"}
    path = reranker(keys)
    with ggpy.load(path, device="cpu", n_threads=1, n_ctx=64) as model:
        assert prompt_ids(model.tokenizer, keys[TEMPLATE], "a", "b")[-1] == 355
        found = relevance(model.engine, model.tokenizer, model.metadata, "a", ["b"])
    assert found != ranked(plain, ["b"])
    for template in ("{query} alone", "{document}{query}"):
        with pytest.raises(ValueError, match=r"rerank is .* needs \{query\} before \{document\}"):
            prompt_ids(model.tokenizer, template, "a", "b")


# Errors


def test_other_models_cannot_rank(tiny_path):
    with ggpy.load(tiny_path("qwen3"), device="cpu", n_threads=1) as model:
        assert not can_rank(model.engine, model.metadata)
        with pytest.raises(ValueError, match=r"no classifier .*cls\.output\.weight.*Reranker"):
            relevance(model.engine, model.tokenizer, model.metadata, "a", ["b"])
        named = model.metadata | {"general.basename": "my-rerank"}
        assert can_rank(model.engine, named)
        with pytest.raises(ValueError, match="'yes' is 3 tokens of this model"):
            relevance(model.engine, model.tokenizer, named, "a", ["b"])


def test_a_document_that_is_too_long_is_named(converted):
    documents = ["a", "word " * 300]
    with pytest.raises(ggpy.ContextOverflow, match=r"document 1 of the list: context is 512 tok"):
        ranked(converted, documents)


def test_numbers_that_are_none_are_named(converted, plain):
    for path in (converted, plain):
        with ggpy.load(path, device="numpy", n_threads=1) as model:
            model.decoder.layers[1].ffn.w_down.array[:] = np.nan
            with pytest.raises(ValueError, match=r"0 of the list: .* NaN or infinite"):
                relevance(model.engine, model.tokenizer, model.metadata, "a", ["b"])


def test_no_documents(converted, plain):
    assert ranked(converted, []) == ranked(plain, []) == []


@pytest.mark.parametrize("labels", [3, ["a", "b", "c"]])
def test_labels_that_cannot_be(reranker, converted, labels):
    rows = rows_of_yes_and_no(converted)
    path = reranker(RANKS | {LABELS: labels}, cls_output_weight=rows)
    words = r"shape \(2, 64\), the settings say \(3, 64\)|expected an array of strings"
    with pytest.raises(ggpy.GGUFError, match=words):
        ggpy.load(path, device="cpu")
