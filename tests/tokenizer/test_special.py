"""Which tokens end an answer, and how special tokens are cut out of text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_vocab

from ggpy.tokenizer import Tokenizer, TokenType

KEY = "tokenizer.ggml."
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def with_tokens(texts: dict[str, int], **fields: Any) -> tuple[Tokenizer, dict[str, int]]:
    """A byte-level vocabulary with these tokens and types added, and where they stand."""
    metadata = small_vocab.byte_level("gpt-2")
    tokens = metadata[KEY + "tokens"]
    ids = {text: len(tokens) + number for number, text in enumerate(texts)}
    metadata[KEY + "tokens"] = [*tokens, *texts]
    metadata[KEY + "token_type"] = np.array([*metadata[KEY + "token_type"], *texts.values()])
    metadata |= {KEY + name: ids[value] for name, value in fields.items() if name != "name"}
    metadata["general.name"] = fields.get("name", "")
    return Tokenizer(metadata), ids


NORMAL, CONTROL, USER = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED


@pytest.mark.parametrize(
    "text", ["<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "[EOS]", "<eos>", DEEPSEEK_END]
)
def test_known_texts_end_an_answer_and_are_control_tokens(text: str) -> None:
    tokenizer, ids = with_tokens({text: NORMAL})
    assert ids[text] in tokenizer.end_ids
    assert tokenizer.piece(ids[text]) == b""
    assert tokenizer.piece(ids[text], special=True) == text.encode()
    assert ids[text] not in tokenizer.encode(text)
    assert tokenizer.encode(text, add_special=False, parse_special=True) == [ids[text]]


def test_named_ids_end_an_answer() -> None:
    texts = {"<A>": CONTROL, "<B>": CONTROL, "<C>": CONTROL, "<D>": CONTROL}
    tokenizer, ids = with_tokens(
        texts, eos_token_id="<A>", eot_token_id="<B>", eom_token_id="<C>", padding_token_id="<D>"
    )
    # <|im_end|> and </s> are in the small vocabulary
    assert tokenizer.end_ids == {ids["<A>"], ids["<B>"], ids["<C>"], 1, 2}


def test_fill_in_the_middle_separators_end_an_answer() -> None:
    texts = {"<|fim_pad|>": NORMAL, "<|file_sep|>": NORMAL, "<|fim_prefix|>": NORMAL}
    tokenizer, ids = with_tokens(texts)
    assert {ids["<|fim_pad|>"], ids["<|file_sep|>"]} <= tokenizer.end_ids
    assert ids["<|fim_prefix|>"] not in tokenizer.end_ids
    assert tokenizer.piece(ids["<|fim_prefix|>"]) == b""


def test_fill_in_the_middle_tokens_have_roles() -> None:
    deepseek = ["<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>"]
    tokenizer, ids = with_tokens(
        dict.fromkeys([*deepseek, "<mid>", "<|repo_name|>"], CONTROL), fim_mid_token_id="<mid>"
    )
    roles = {"pre": deepseek[0], "suf": deepseek[1], "mid": "<mid>", "rep": "<|repo_name|>"}
    assert tokenizer.infill_ids == {role: ids[text] for role, text in roles.items()}


def test_end_of_a_part_is_no_end_where_calls_and_returns_exist() -> None:
    harmony = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}
    tokenizer, ids = with_tokens(harmony | {"<|channel|>": CONTROL})
    assert ids["<|end|>"] not in tokenizer.end_ids
    assert {ids["<|return|>"], ids["<|call|>"]} <= tokenizer.end_ids
    assert tokenizer.piece(ids["<|end|>"]) == b"<|end|>"
    assert tokenizer.piece(ids["<|channel|>"]) == b"<|channel|>"
    tokenizer, ids = with_tokens({"<|end|>": CONTROL})
    assert ids["<|end|>"] in tokenizer.end_ids


def test_an_html_tag_of_gemma4_is_no_end() -> None:
    tag = small_vocab.byte_level("gpt-2")[KEY + "tokens"].index("</s>")
    assert tag in with_tokens({"<eos>": CONTROL}, eos_token_id="<eos>")[0].end_ids
    texts = {"<|tool_response>": CONTROL, "<eos>": CONTROL}
    tokenizer, ids = with_tokens(texts, eos_token_id="<eos>")
    assert set(ids.values()) <= tokenizer.end_ids and tag not in tokenizer.end_ids
    assert tag not in tokenizer.encode("</s>", parse_special=True)


def test_control_tokens_are_text_unless_asked_for() -> None:
    tokenizer, ids = with_tokens({"<ctl>": CONTROL, "<user>": USER})
    text = "a<ctl>b<user>c"
    plain = tokenizer.encode(text)
    assert ids["<ctl>"] not in plain and ids["<user>"] in plain
    assert tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert [id for id in parsed if id in ids.values()] == [ids["<ctl>"], ids["<user>"]]
    assert tokenizer.decode(parsed) == "ab<user>c"
    assert tokenizer.decode(parsed, special=True) == text


def test_the_longest_token_is_cut_out_first_wherever_it_stands() -> None:
    tokenizer, ids = with_tokens({"~ab": USER, "b~cd": USER, "~~": USER})
    assert tokenizer.encode("~ab~cd") == [*tokenizer.encode("~a"), ids["b~cd"]]
    assert tokenizer.encode("~ab~~") == [ids["~ab"], ids["~~"]]


def test_phi3_swallows_blanks_after_special_tokens() -> None:
    texts = {"<|user|>": CONTROL, "<|endoftext|>": CONTROL}
    text = "<|user|> \n a<|endoftext|> b</s> c"
    tokenizer, ids = with_tokens(texts, name="Phi-3 mini")
    stripped = tokenizer.encode(text, parse_special=True)
    a, b, c = (tokenizer.encode(part) for part in ("a", " b", "c"))
    assert stripped == [ids["<|user|>"], *a, ids["<|endoftext|>"], *b, 1, *c]
    other = with_tokens(texts, name="Llama")[0]
    assert other.decode(other.encode(text, parse_special=True), special=True) == text


def test_a_rendered_chat_has_bos_once() -> None:
    metadata = small_vocab.byte_level("llama-bpe")
    tokenizer = Tokenizer(metadata)
    expected = [tokenizer.bos_id, *tokenizer.encode("hi", add_special=False)]
    assert tokenizer.encode_chat("hi") == tokenizer.encode_chat("<s>hi") == expected
    assert tokenizer.encode("<s>hi", parse_special=True) == [tokenizer.bos_id, *expected]
    bare = Tokenizer(metadata | {KEY + "add_bos_token": False})
    assert bare.encode_chat("hi") == expected[1:]
    assert bare.encode_chat("<s>hi") == expected
