"""Text to token ids and back, from what a GGUF file says about its vocabulary and from nothing
else.

A `Tokenizer` cuts special tokens out of the text (`special`), encodes the rest by one of two
libraries (`spm`, `bpe`), and turns ids into bytes by a table of its own (`stream` makes text of
them). `chat` renders messages into a prompt. Nothing here knows tensors, architectures or
sampling.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..gguf import File, GGUFError
from .bpe import BpeEncoder, RawBpeEncoder, byte_alphabet
from .chat import ChatTemplateError, checked_messages, checked_variables, form_of, render
from .special import Splitter, mark
from .spm import SpmEncoder
from .stream import StreamDecoder
from .tool_schemas import simpler_tools
from .vocab import TokenType, Vocabulary, read_vocabulary

__all__ = ["ChatTemplateError", "StreamDecoder", "TokenType", "Tokenizer"]

_SURROGATES = re.compile("[\ud800-\udfff]")  # what undecodable input leaves in a str
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_HIDDEN = (TokenType.UNDEFINED, TokenType.UNUSED)  # never shown, as in llama.cpp
_AS_WRITTEN = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)


class Tokenizer:
    """The tokenizer of one file: text to ids, ids to text, messages to a prompt.

    >>> import ggpy
    >>> tokenizer = ggpy.Tokenizer.from_gguf("models/tiny/llama.gguf")
    >>> tokenizer
    <Tokenizer SentencePiece, 453 tokens, with a chat template>
    >>> tokenizer.encode("hello world")
    [1, 287, 296]
    >>> tokenizer.decode([287, 296])
    'hello world'
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    '<|im_start|>user\\nhello<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, metadata: Mapping[str, Any], path: str = "") -> None:
        """Builds it from the metadata of a file; GGUFError says what is missing or wrong in it."""
        self._vocab = read_vocabulary(metadata, path)
        self.end_ids = mark(self._vocab)
        self.suppressed_ids = frozenset(self._vocab.suppressed) - self.end_ids
        self._splitter = Splitter(self._vocab)
        try:
            self._encoder = _encoder(self._vocab)
        except GGUFError as error:
            raise GGUFError(f"{path}: {error}" if path else str(error)) from None
        self._vocab.forget_tables()
        self._pieces = _PieceTable(self, False), _PieceTable(self, True)

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | File) -> Tokenizer:
        """The tokenizer of a file, given as a path or already open."""
        if isinstance(source, (str, os.PathLike)):
            with File(source) as file:
                return cls(file.metadata, str(file.path))
        return cls(source.metadata, str(getattr(source, "path", "")))

    def __repr__(self) -> str:
        kind = "SentencePiece" if self._vocab.pre is None else "BPE"
        chat = "with a chat template" if self.chat_template else "without a chat template"
        return f"<Tokenizer {kind}, {self.n_vocab} tokens, {chat}>"

    @property
    def n_vocab(self) -> int:
        """How many tokens there are: ids run from 0 to n_vocab - 1."""
        return len(self._vocab.tokens)

    @property
    def tokens(self) -> Sequence[str]:
        """The tokens as the file writes them: see `text`."""
        return self._vocab.tokens

    @property
    def bos_id(self) -> int | None:
        """The token before text, if there is one."""
        return self._vocab.named.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The token after text, if there is one; `end_ids` has all that end an answer."""
        return self._vocab.named.get("eos")

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that ends an answer in a conversation, or else `eos_id`."""
        return self._vocab.named.get("eot", self.eos_id)

    @property
    def infill_ids(self) -> dict[str, int]:
        """The vocabulary's tokens for filling in the middle, by role: "pre", "suf", "mid", "pad",
        "rep" (before the name of a repository) and "sep" (before the name of a file).
        """
        named = self._vocab.named.items()
        return {name[4:]: id for name, id in named if name.startswith("fim_")}

    @property
    def add_bos(self) -> bool:
        """Whether text to be continued begins with `bos_id`."""
        return self._vocab.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether encoded text ends with `eos_id`."""
        return self._vocab.add_eos

    @property
    def chat_template(self) -> str | None:
        """The file's Jinja template for conversations, if it has one."""
        return self._vocab.chat_template

    @property
    def tool_template(self) -> str | None:
        """The template for conversations with tools, if the file has a separate one."""
        return self._vocab.tool_template

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is doubtful about the vocabulary, a sentence each."""
        return tuple(self._vocab.warnings)

    def text(self, id: int) -> str:
        """The token as the file writes it, "\u0120the" or "\u2581the"; "" if there is none."""
        return self._vocab.tokens[self._checked(id)]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, with BOS and EOS around it where the file wants them (`add_special`).

        `parse_special` reads control tokens in the text ("<|im_end|>") as such; user-defined ones
        always are. A text that begins with BOS itself gets a second one, as in llama.cpp:
        `encode_chat` adds none to it.
        """
        ids = [self._vocab.named["bos"]] if add_special and self.add_bos else []
        for part in self._splitter.split(_SURROGATES.sub("\ufffd", text), parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encoder.encode(part)
        if add_special and self.add_eos:
            ids.append(self._vocab.named["eos"])
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for messages as text, for `encode_chat`; ChatTemplateError, ValueError.

        messages: dicts with "role" ("system", "developer", "user", "assistant", "tool") and
        "content", and of an assistant "tool_calls" and "reasoning_content", in OpenAI's form.
        chat_template: Jinja; None is the model's own, or with tools its own for tools, if it has
        one. It runs in a process of its own, with bounds.
        add_generation_prompt: end where the model's answer begins.
        tools: in OpenAI's form, with simpler schemas where the template refuses them.
        variables: further ones of the template, like enable_thinking.
        """
        template = self.chat_template if chat_template is None else chat_template
        if chat_template is None and tools and self._vocab.tool_template:
            template = self._vocab.tool_template
        if template is None:
            raise ChatTemplateError(
                "this model has none: give chat_template, "
                "or continue a text with generate, which needs none"
            )
        named = self._vocab.named
        bos, eos = (self.text(named[name]) if name in named else "" for name in ("bos", "eos"))
        adapted = form_of(template).adapted(checked_messages(messages))
        write = partial(
            render,
            template,
            adapted,
            bos=bos,
            eos=eos,
            add_generation_prompt=add_generation_prompt,
            variables=checked_variables(variables),
        )
        try:
            return write(tools=tools)
        except ChatTemplateError as error:
            if not error.refused or not tools or (simpler := simpler_tools(tools)) == list(tools):
                raise
            with suppress(ChatTemplateError):
                return write(tools=simpler)
            raise

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template: special tokens are read, and BOS is there once."""
        ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self._vocab.named["bos"])
        return ids

    def piece(self, id: int, special: bool = False) -> bytes:
        """The bytes that a token adds to text; control and unknown ones have some for `special`."""
        text = self._vocab.tokens[self._checked(id)]
        kind = int(self._vocab.types[id])  # numpy compares its own integers with an enum slowly
        if kind in _HIDDEN or (not special and kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
            return b""
        if kind in _AS_WRITTEN:
            return text.encode()
        if kind == TokenType.BYTE and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        if self._vocab.escapes_blanks:
            return text.replace("\u2581", " ").encode()
        return _bytes_of(text)

    def pieces(self, special: bool = False) -> Mapping[int, bytes]:
        """`piece` by id, each computed once: for callers that look up every generated token."""
        return self._pieces[special]

    def decode(self, ids: Iterable[int], special: bool = False, continues: bool = False) -> str:
        """The text of `ids`; `special` writes control and unknown tokens out.

        The blank that encoding put before the first word is taken away, unless the text
        `continues` another.
        """
        text = b"".join([self.piece(id, special) for id in ids])
        if self._vocab.add_space_prefix and not continues:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def stream(self, special: bool = False, continues: bool = True) -> StreamDecoder:
        """A decoder that takes ids one by one; an answer continues its prompt, so blanks stay."""
        drop_blank = self._vocab.add_space_prefix and not continues
        return StreamDecoder(self._pieces[special].__getitem__, drop_blank)

    def _checked(self, id: int) -> int:
        if not 0 <= id < self.n_vocab:
            last = self.n_vocab - 1
            raise ValueError(f"token id {id} is not in the vocabulary: ids are 0 to {last}")
        return id


class _PieceTable(dict[int, bytes]):
    """The bytes of tokens by id, each computed when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        super().__init__()
        self._tokenizer, self._special = tokenizer, special

    def __missing__(self, id: int) -> bytes:
        self[id] = piece = self._tokenizer.piece(id, self._special)
        return piece


def _encoder(vocab: Vocabulary) -> SpmEncoder | BpeEncoder:
    """The encoder of text between special tokens; this call imports its library."""
    if vocab.pre is None:
        return SpmEncoder(vocab)
    return (RawBpeEncoder if vocab.pre.raw else BpeEncoder)(vocab)


def _bytes_of(text: str) -> bytes:
    """Bytes of a token in GPT-2's alphabet; characters outside it stand for themselves."""
    alphabet = byte_alphabet()
    if alphabet.keys() >= set(text):
        return bytes([alphabet[char] for char in text])
    return b"".join(
        bytes((alphabet[char],)) if char in alphabet else char.encode() for char in text
    )
