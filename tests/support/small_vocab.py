"""Three small vocabularies and the texts to try them on, made by rule so that only the expected
ids are stored.

Byte-pair merges are all pairs of bytes that meet where two characters of the texts do: a split
shows in the ids wherever it keeps such a pair apart. Ranks come from a checksum, so they follow no
pattern.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np

TEXTS = (
    *("", " ", "  ", "   a", "   1  22", "\n", "\r\n", "\n\n\n", " \n \n", "\t\ttab\tin\tbetween "),
    "a \u00a0b\u2003c\u3000d\u2028e\u0085f",
    "trailing blanks   ",
    "Hello world",
    "Hello, World! How's it going? I'LL SEE; we'Ve they'd don'T 'sure 'tis o'clock",
    "it's 'S 'LL' ''s 's't",
    "'tisn't d'oh 'twas Ankara'da Ali'sinde 'mars 'respite 'velvet 'llama 'dada",
    "x'\u017f y'\u212a",
    *("1", "12", "123", "1234", "12345678901234567890", " 1 22 333 4444 55555"),
    "3.14159e-10 0x1F 1,234,567 v2.0.1",
    "\u0661\u0662\u0663\u0664\u0665 \u216b\u00bd\u00b2 \uff11\uff12\uff13\uff14",
    "unmergeable unmergeables Unmergeable",
    "CamelCaseXMLHttpRequest iPhone McDonald's HTML5",
    "snake_case __init__ $PATH `tick` a^b ~c |d| <e> f=g+h",
    "\u00c9cole \u00e9COLE a\u00c9b \u00dcber\u00dcBER \u01c5\u01c5",
    "e\u0301cole cafe\u0301s \u0938\u094d\u0915\u0942\u0932 \u0e01\u0e33\u0e25\u0e31\u0e07",
    "\u0645\u064e\u062f\u0652\u0631\u064e\u0633\u0629 \u1781\u17d2\u1789\u17bb\u17c6",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f\u3001\u30ab\u30bf\u30ab\u3002",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "abc\u4e2ddef\u56fd123\u65e5\u672c4",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\U00010400\U00010428 \U0001e900x \U00020000\U0002a6df",
    "\u200b\u200d\ufeff\u00ad\x00\x01\x7f\ue000",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\r\n",
    "for(int i=0;i<10;++i){ a[i]+=b[i]; } // ok",
    '{"key": [1, 2.5, null], "k2": "v\\n"}',
    "https://example.com/a/b?c=d&e=%20f#g user@mail.org",
    "/usr/bin/env\n/ /\n//comment/\n",
    "...!!!???\n\n--- *** ===>",
    "\u2026\u201cquoted\u201d \u2018single\u2019 \u00ab\u00bb \u2014 \u2013",
    "\u20ac100 \u00a35 $3 \u00b1\u00d7\u00f7 \u2200x\u2208A \u2192",
    "a . b , c ? d ! e\n 'f' \"g\"",
    "\u0391\u03b2\u03b3 \u0414\u0430 \u0531\u0580 \u10d2\u10d4 \u05e9\u05dc\u05d5\u05dd \u13a0",
    "end\u3002\u0964\u06d4\u060c(x)|y",
    "a\u0300\u0301\u0302\u0303 \u0300\u0301x",
    "  \n  x  \r\n\r y\n",
    "\u3000\u3000\u5168\u89d2 \uff41\uff42\uff23\uff01\uff1f~",
    "\u2581lower\u2581one eighth\u2581 block",
)
# Texts in which special tokens are read; SPECIALS has their types (GGUF's numbers).
SPECIAL_TEXTS = (
    *("<s>", "<s><s> a</s>", "x <|im_end|> y\n<|im_end|>\n", "<tool><tool>x<tool >", " <tool>  z"),
    *("a<unk>b", "<|im_end|", "<<s>>", "</s>\n\n</s>"),
)
SPECIALS = {"<s>": 3, "</s>": 3, "<|im_end|>": 3, "<tool>": 4, "<tool>x": 4, "\n\n": 4}
_TOOLS = {text: kind for text, kind in SPECIALS.items() if text != "\n\n"}
_WHOLE_WORDS = ("unmergeable", " unmergeables", "Unmergeable")
_LEFT_OUT = "\0\u4f60"  # characters that are spelled in bytes; llama.cpp's C strings hold no zero
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _shuffled(items: set[Any]) -> list[Any]:
    return sorted(items, key=lambda item: (crc32(repr(item).encode()), item))


def alphabet() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def spell(text: str) -> str:
    """`text` in GPT-2's characters."""
    letters = alphabet()
    return "".join(letters[byte] for byte in text.encode())


def _metadata(model: str, tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    fields = {
        "model": model,
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary that names this pre-tokenizer."""
    meetings = {
        (spell(left)[-1], spell(right)[0]) for text in TEXTS for left, right in pairwise(text)
    }
    merges = [" ".join(pair) for pair in _shuffled(meetings)]
    words = [spell(word) for word in _WHOLE_WORDS]
    tokens = [*_TOOLS, *alphabet(), *(merge.replace(" ", "") for merge in merges), *words]
    types = [*_TOOLS.values(), *[1] * (len(tokens) - len(_TOOLS))]
    return _metadata("gpt2", tokens, types, pre=pre, merges=merges)


def _words(blank: str) -> set[str]:
    """Pairs and threes of characters in the texts, blanks written as `blank`, newlines left out."""
    lines = [line.replace(" ", blank) for text in TEXTS for line in text.split("\n")]
    return {
        line[at : at + size]
        for line in lines
        for size in (2, 3)
        for at in range(len(line) - size + 1)
    }


def gemma4() -> dict[str, Any]:
    """Metadata of a BPE vocabulary over characters, with bytes to fall back to."""
    pairs = {word for word in _words("\u2581") if len(word) == 2}
    merges = [f"{pair[0]} {pair[1]}" for pair in _shuffled(pairs)]
    letters = sorted({char for pair in pairs for char in pair}.difference(_LEFT_OUT) | {"\n"})
    merges = [merge for merge in merges if set(merge.split(" ")) <= set(letters)]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<unk>", *SPECIALS, *_BYTE_TOKENS, *letters, *words]
    types = [2, *SPECIALS.values(), *[6] * 256, *[1] * (len(letters) + len(words))]
    types[tokens.index("\n\n")] = 1
    return _metadata("gemma4", tokens, types, merges=merges)


def sentencepiece(space_prefix: bool) -> dict[str, Any]:
    """Metadata of a sentencepiece vocabulary in which longer pieces mostly score higher."""
    words = _shuffled(_words("\u2581"))
    letters = sorted({char for word in words for char in word}.difference(_LEFT_OUT))
    words = [word for word in words if set(word) <= set(letters)]
    tokens = ["<unk>", *SPECIALS, *_BYTE_TOKENS, *letters, *words]
    types = [2, *SPECIALS.values(), *[6] * 256, *[1] * (len(letters) + len(words))]
    ranks = [crc32(token.encode()) % 1000 - 1000 * len(token) for token in tokens]
    scores = -np.array(ranks, np.float32) - 4000
    more = {"scores": scores, "unknown_token_id": 0, "add_space_prefix": space_prefix}
    return _metadata("llama", tokens, types, **more)
