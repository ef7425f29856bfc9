"""Conversations: what is kept of them, and the ids that ask for the next answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ggpy.tokenizer import ChatTemplateError, Tokenizer
from ggpy.tokenizer.conversation import Conversation


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_path("llama"))


@pytest.fixture
def talk(tokenizer: Tokenizer) -> Conversation:
    assert tokenizer.chat_template
    return Conversation(tokenizer, tokenizer.chat_template, system="be brief")


def roles(talk: Conversation) -> list[str]:
    return [m["role"] for m in talk.messages]


def test_clearing_keeps_the_system_message(talk: Conversation) -> None:
    assert roles(talk) == ["system"]
    talk.say("user", "hello")
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    assert Conversation(talk.tokenizer, talk.template).messages == []


def test_only_a_last_message_of_the_role_is_taken_back(talk: Conversation) -> None:
    talk.say("user", "hello")
    assert talk.take_back("assistant") is None and roles(talk) == ["system", "user"]
    assert talk.take_back("user") == "hello" and roles(talk) == ["system"]
    talk.messages.clear()
    assert talk.take_back("user") is None


def test_the_oldest_question_is_forgotten_with_its_answer(talk: Conversation) -> None:
    for text in ("one", "two"):
        talk.say("user", text)
        talk.say("assistant", f"{text}!")
    talk.say("user", "three")
    assert talk.forget_oldest() and talk.forget_oldest()
    assert [m["content"] for m in talk.messages] == ["be brief", "three"]
    assert not talk.forget_oldest() and len(talk.messages) == 2


def test_ids_are_the_rendered_messages_with_their_special_tokens(talk: Conversation) -> None:
    talk.say("user", "hello")
    rendered = (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert talk.tokenizer.apply_chat_template(talk.messages) == rendered
    assert talk.ids() == talk.tokenizer.encode(rendered, parse_special=True)
    short = talk.tokenizer.apply_chat_template(talk.messages, add_generation_prompt=False)
    assert rendered == f"{short}<|im_start|>assistant\n"


def test_templates_get_the_texts_of_bos_and_eos(tokenizer: Tokenizer) -> None:
    hello = [{"role": "user", "content": "hello"}]
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    bos, eos = (tokenizer.text(id or 0) for id in (tokenizer.bos_id, tokenizer.eos_id))
    assert tokenizer.apply_chat_template(hello, template) == f"{bos}hello{eos}"
    with pytest.raises(ChatTemplateError, match="no"):
        tokenizer.apply_chat_template(hello, "{{ raise_exception('no') }}")
