"""Converted tokenizers: the ids of the libraries that made them, and what is said about tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ADDED, N_VOCAB, TEMPLATE, bpe, pieces, spm, write_tokenizer
from small_vocab import TEXTS

from ggpy.convert.folder import ConvertError, Folder
from ggpy.convert.pretokenizer import CHECK_TEXT, cuts, digests, of_row, pre_name
from ggpy.convert.special import special_metadata, verify
from ggpy.convert.vocabulary import read_tokens
from ggpy.gguf import File
from ggpy.tokenizer import Tokenizer, TokenType
from ggpy.tokenizer.pre import BY_NAME, TABLE, lookup

ROWS = [row.names.split()[0] for row in TABLE if not row.raw]
Metadata = dict[str, Any]


def converted(folder: Path, config: dict[str, Any] | None = None) -> Metadata:
    """The metadata of a folder's tokenizer."""
    warnings: list[str] = []
    tokens = read_tokens(Folder(folder), N_VOCAB)
    more = special_metadata(Folder(folder), config or {}, tokens, warnings)
    found = {**tokens.metadata(), **more}
    verify(found, tokens, warnings)
    assert warnings == []
    return {key.removeprefix("tokenizer.ggml."): value for key, (_, value) in found.items()}


def tokenizer_of(found: Metadata) -> Tokenizer:
    plain = {
        k if k.startswith("tokenizer.") else f"tokenizer.ggml.{k}": v for k, v in found.items()
    }
    return Tokenizer(plain)


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_bytes())
    change(content)
    (folder / name).write_text(json.dumps(content))


# Ids


@pytest.mark.parametrize("pre", ROWS)
def test_byte_level_ids_are_those_of_tokenizers(pre: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    write_tokenizer(tmp_path, "bpe", pre)
    found = converted(tmp_path)
    # Another name of the same row, or of one that cuts alike, is as good.
    assert lookup(found["pre"]).splits == lookup(pre).splits
    assert lookup(found["pre"]).ignore_merges == lookup(pre).ignore_merges
    ours, theirs = tokenizer_of(found), Library.from_str(bpe(pre).decode())
    for text in (*TEXTS, f"a{ADDED} b <s> c</s>", CHECK_TEXT):
        assert ours.encode(text, parse_special=True) == theirs.encode(text).ids


@pytest.mark.parametrize("kind", ["spm", "bare spm"])
def test_sentencepiece_ids_are_its_own(kind: str, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    write_tokenizer(tmp_path, kind, "")
    found = converted(tmp_path)
    assert found.get("add_space_prefix", True) is (kind == "spm")
    theirs = SentencePieceProcessor(model_proto=spm(kind == "spm"))
    ours = tokenizer_of(found)
    for text in TEXTS:
        if "\0" not in text:
            assert ours.encode(text, add_special=False) == theirs.encode(text)


def test_pieces_with_merges_give_the_ids_of_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    write_tokenizer(tmp_path, "pieces", "")
    found = converted(tmp_path)
    assert found["model"] == "llama" and found["scores"][300] <= 0
    ours, theirs = tokenizer_of(found), Library.from_str(pieces().decode())
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids


def test_ids_that_differ_are_told(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    tokens = read_tokens(Folder(tmp_path), N_VOCAB)
    tokens.pre = "gpt-2"
    warnings: list[str] = []
    verify({**tokens.metadata()}, tokens, warnings)
    assert len(warnings) == 1 and "differ from those of the checkpoint's own" in warnings[0]


# Pre-tokenizers


def test_the_rows_of_the_table_are_told_apart() -> None:
    found: dict[str, str] = {}
    for row in TABLE:
        key = f"{cuts(of_row(row))}{row.ignore_merges}"
        if not row.raw:
            other = found.setdefault(key, row.names)
            assert lookup(other.split()[0]).splits == row.splits, f"{other} and {row.names}"


def test_digests_name_rows_that_there_are() -> None:
    assert set(digests().values()) <= BY_NAME.keys()
    assert all(len(digest) == 16 for digest in digests())


def test_a_real_vocabulary_is_known_by_its_digest(smollm2: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    with File(smollm2) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        merges = [tuple(x.split(" ")) for x in file.metadata["tokenizer.ggml.merges"]]
    library = Library(models.BPE({text: id for id, text in enumerate(tokens)}, merges))
    library.pre_tokenizer = of_row(lookup("refact"))  # cuts as SmolLM does, in the same row
    assert pre_name(library, False, "x") == "smollm"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["pre_tokenizer"]["pretokenizers"].pop(0),
        lambda c: c["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True),
        lambda c: c.update(pre_tokenizer=None),
        lambda c: c["model"].update(ignore_merges=True),
    ],
)
def test_unknown_cuts_are_refused(change: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    edit(tmp_path, "tokenizer.json", change)
    with pytest.raises(ConvertError, match="no pre-tokenizer of GGUF cuts words as this one"):
        converted(tmp_path)


# What is said about tokens


def test_types_and_padding(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "llama-bpe")
    found = converted(tmp_path)
    tokens, types = found["tokens"], found["token_type"]
    assert len(tokens) == len(types) == N_VOCAB
    assert [types[tokens.index(x)] for x in ("<s>", "<|im_end|>")] == [TokenType.CONTROL] * 2
    assert types[tokens.index(ADDED)] == TokenType.USER_DEFINED
    assert tokens[-1] == f"[PAD{N_VOCAB - 1}]" and types[-1] == TokenType.UNUSED
    assert found["bos_token_id"] == 0 and found["eos_token_id"] == 1
    assert found["add_bos_token"] is True and found["add_eos_token"] is False


def test_sentencepiece_types(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "spm", "")
    (tmp_path / "added_tokens.json").write_text('{"<extra>": 505, "<far>": 9999}')
    found = converted(tmp_path, {"pad_token_id": 3})
    types = np.array(found["token_type"])
    assert types[:3].tolist() == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    assert (types == TokenType.BYTE).sum() == 256
    assert [found["tokens"][i] for i in (500, 505)] == [ADDED, "<extra>"]
    assert (types[[500, 505]] == TokenType.USER_DEFINED).all()
    assert types[501] == TokenType.CONTROL and found["scores"][500] == -1000
    named = {k: found[f"{k}_token_id"] for k in ("bos", "eos", "unknown", "padding")}
    assert named == {"bos": 1, "eos": 2, "unknown": 0, "padding": 3}


@pytest.mark.parametrize("kind", ["spm", "bare spm"])
@pytest.mark.parametrize("given", [True, False])
def test_a_blank_before_text_can_be_overruled(kind: str, given: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, kind, "")
    edit(tmp_path, "tokenizer_config.json", lambda c: c.update(add_prefix_space=given))
    assert converted(tmp_path).get("add_space_prefix", True) is given


def test_added_tokens_that_look_special_are_control(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    extra = [{"id": 490 + i, "content": text, "special": False}
             for i, text in enumerate(("<|x|>", "<unused7>", "\u2581zwei", "<pad>"))]  # fmt: skip
    edit(tmp_path, "tokenizer.json", lambda c: c["added_tokens"].extend(
        {**e, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for e in extra))  # fmt: skip
    found = converted(tmp_path)
    control, user = int(TokenType.CONTROL), int(TokenType.USER_DEFINED)
    assert found["token_type"][490:494] == [control, control, user, control]
    assert found["tokens"][492] == " zwei"  # as llama.cpp wants user-defined blanks


def test_merges_as_pairs_and_as_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    pairs = json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["merges"]
    assert isinstance(pairs[0], list)
    as_pairs = converted(tmp_path)["merges"]
    edit(tmp_path, "tokenizer.json",
         lambda c: c["model"].update(merges=[" ".join(p) for p in pairs]))  # fmt: skip
    assert converted(tmp_path)["merges"] == as_pairs == [" ".join(p) for p in pairs]


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("config", {"tokenizer.chat_template": TEMPLATE}),
        ("jinja", {"tokenizer.chat_template": "J"}),
        ("json", {"tokenizer.chat_template": "O"}),
        ("none", {}),
        ("list", {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T",
                  "tokenizer.chat_templates": ["tool_use"]}),
    ],
)  # fmt: skip
def test_chat_templates(where: str, wanted: Metadata, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    if where != "config":
        edit(tmp_path, "tokenizer_config.json", lambda c: c.pop("chat_template"))
    if where in ("jinja", "json"):
        (tmp_path / "chat_template.json").write_text('{"chat_template": "O"}')
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text("J")
    if where == "list":
        both = [{"name": "default", "template": "D"}, {"name": "tool use", "template": "T"}]
        edit(tmp_path, "tokenizer_config.json", lambda c: c.update(chat_template=both))
    found = converted(tmp_path)
    assert {k: v for k, v in found.items() if "template" in k} == wanted


def test_special_ids_fall_back_on_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    (tmp_path / "tokenizer_config.json").unlink()
    found = converted(tmp_path, {"bos_token_id": 2, "eos_token_id": [1, 2], "pad_token_id": None})
    assert found["bos_token_id"] == 2
    assert not {"eos_token_id", "padding_token_id"} & found.keys()


def test_what_ends_a_turn_of_muse_glimmer_is_eot(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    entry = {"id": 490, "content": "<|eot|>", "special": True, "single_word": False}
    entry |= {"lstrip": False, "rstrip": False, "normalized": False}
    edit(tmp_path, "tokenizer.json", lambda c: c["added_tokens"].append(entry))
    found = converted(tmp_path, {"model_type": "muse_glimmer"})
    assert found["eot_token_id"] == 490 and 490 in tokenizer_of(found).end_ids
    assert "eot_token_id" not in converted(tmp_path)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_other_ends_of_an_answer_are_eot_and_eom(where: str, tmp_path: Path) -> None:
    """As GLM's <|user|> and <|observation|>; <|im_end|> is known by its text."""
    write_tokenizer(tmp_path, "bpe", "llama-bpe")
    settings = {"eos_token_id": [1, 2, 300, 9999, 301]}
    if where == "generation_config.json":
        (tmp_path / where).write_text(json.dumps(settings))
    found = converted(tmp_path, settings if where == "config.json" else None)
    assert (found["eos_token_id"], found["eot_token_id"], found["eom_token_id"]) == (1, 300, 301)
    assert {1, 2, 300, 301} <= tokenizer_of(found).end_ids


def test_suppressed_tokens_are_kept(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    settings = {"suppress_tokens": [301, 300, 301, 9999, -1, "x", True]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert tokenizer_of(converted(tmp_path)).suppressed_ids == {300, 301}
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": null}')
    assert "suppress_tokens" not in converted(tmp_path)


def test_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    warnings: list[str] = []
    tokens = read_tokens(Folder(tmp_path), N_VOCAB)
    found = special_metadata(Folder(tmp_path), {"mask_token_id": 9999}, tokens, warnings)
    assert "tokenizer.ggml.mask_token_id" not in found
    assert warnings == ["mask token 9999 is outside the vocabulary: left out"]


# Damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].update(type="Unigram"), "of type 'Unigram' is not supported"),
        (lambda c: c.update(model=3), "of type 3 is not supported"),
        (lambda c: c.update(model={}), "tokenizers cannot use it"),
        (lambda c: c.update(version="x"), "tokenizers cannot use it|known"),
        (lambda c: c["model"]["vocab"].update(x=600), "'x' has the id 600, config.json says"),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), "normalizer .* is not supported"),
        (lambda c: c["added_tokens"].append({"id": 600, "content": "x"}), "tokenizers cannot|600"),
    ],
)
def test_a_tokenizer_that_cannot_be_kept(change: Any, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe", "qwen2")
    edit(tmp_path, "tokenizer.json", change)
    with pytest.raises(ConvertError, match=message) as raised:
        converted(tmp_path)
        pytest.skip("this version of tokenizers accepts it")
    assert "\n" not in str(raised.value)


def test_sentencepiece_that_normalises_is_refused(tmp_path: Path) -> None:
    import io

    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["some words for it"] * 9), model_writer=model, vocab_size=30,
        model_type="bpe", minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(ConvertError, match="a tokenizer that normalises is not supported"):
        converted(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        converted(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 99)
    with pytest.raises(ConvertError, match="sentencepiece cannot read it"):
        converted(tmp_path)
    write_tokenizer(tmp_path, "spm", "")
    (tmp_path / "added_tokens.json").write_text('{"a": "b"}')
    with pytest.raises(ConvertError, match="'a' has the id 'b'"):
        converted(tmp_path)
