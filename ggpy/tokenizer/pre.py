r"""How each byte-pair vocabulary wants text cut into words before it merges inside them: a table,
and its lookup.

`tokenizer.ggml.pre` in a file names a row. The expressions are those that llama.cpp uses under
that name, in Oniguruma's syntax, which the `tokenizers` package reads; each cuts the pieces that
the expression before it left, and both its matches and the text between them become pieces. Where
llama.cpp approximates a model's own expression ("tekken" and "gpt-4o" leave combining marks out of
words), so does the table, because tests compare the ids. Characters that came with Unicode 16 are
the exception: llama.cpp's tables know them, the package's do not. Characters beyond ASCII are
written as \u escapes: editors and normalisation change some of them. This module knows no
vocabulary, and importing it takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..util.messages import shown

# `|\s+` at the end takes the one blank before a word that the lookahead leaves over.
_BLANKS = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_BLANKS}"
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Capitals then small letters, or capitals then perhaps small ones; other letters count as both.
_CAPITALISED = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
)
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~]"""

_DIGIT = r"\p{N}"
_DIGITS_3 = r"\p{N}{1,3}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_NEWLINE = r"[\r\n]"

_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|{_DIGITS_3}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|{_DIGIT}|{_SIGNS}|{_LINES}"
_QWEN35 = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_TEKKEN = rf"{_CAPITALISED[0]}|{_CAPITALISED[1]}|{_DIGIT}|{_SIGNS_SLASH}|{_LINES}"
_GPT4O = (
    rf"{_CAPITALISED[0]}{_ANY_CASE}?|{_CAPITALISED[1]}{_ANY_CASE}?"
    rf"|{_DIGITS_3}|{_SIGNS_SLASH}|{_LINES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
# Numbers are cut into threes from their end; what stands before a number stays with its first part.
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_TINY_AYA = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_ANY_CASE}?|{_DIGITS_3}|{_SIGNS_SLASH}|{_LINES}"
)
_EXAONE_MOE = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_BLANKS}"
)
_KANA_HAN = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
# The middle range holds blanks, which are not meant.
_HAN_HANGUL = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF&&[^\s]]+"
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001-\u3002]+"
# The letters that have a case: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, ...
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF"
    r"\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5"
    r"\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA"
    r"\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45"
    r"\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE"
    r"\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC"
    r"\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    r"\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3"
    r"\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06"
    r"\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
)
_UP_TO_SIGNS = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"


@dataclass(frozen=True)
class Pre:
    """One way to cut text into words, and the other settings that llama.cpp ties to its names."""

    names: str  # values of tokenizer.ggml.pre, separated by blanks
    splits: tuple[str, ...]  # regular expressions, applied one after the other
    ignore_merges: bool = False  # a whole word that is a token is taken as it is
    add_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise
    raw: bool = False  # tokens are UTF-8 with U+2581 for a blank, and bytes are <0x00>..<0xFF>


TABLE = (
    Pre("default", (r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    Pre(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
    ),
    Pre("dbrx smaug-bpe chatglm-bpe", (_LLAMA3,)),
    Pre("glm4 glm5", (_LLAMA3,), ignore_merges=True),
    Pre(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt"
        " olmo jais trillion granite-docling exaone4",
        (_GPT2,),
    ),
    Pre(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (_DIGIT, _GPT2),
    ),
    Pre(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"
        " bailingmoe bailingmoe2 llada-moe",
        (_QWEN2,),
    ),
    Pre("qwen35", (_QWEN35,)),
    Pre("ufakzeka", (rf"{_WORD}|{_DIGIT}|{_SIGNS}|{_LINES}",)),
    Pre(
        "minicpm5",
        (_DIGITS_3, rf"{_ANY_CASE}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}"),
        ignore_merges=True,
    ),
    Pre("laguna", (r"[^\n]+|[\n]+", _QWEN2)),
    Pre(
        "seed-coder",
        (rf"{_ANY_CASE}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
    ),
    Pre("tekken", (_TEKKEN,), ignore_merges=True, add_bos=True),
    Pre("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    Pre("tiny_aya cohere2moe", (_THREES, _TINY_AYA)),
    Pre("superbpe", (r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")),
    Pre("exaone-moe", (_EXAONE_MOE,)),
    Pre(
        "deepseek-llm",
        (_NEWLINE, _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+\z", _HAN_HANGUL, r"\p{N}+"),
    ),
    Pre("deepseek-coder", (_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _DIGIT)),
    Pre("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (_DIGITS_3, _KANA_HAN, _DEEPSEEK3)),
    Pre("falcon", (r"[\p{P}$+<=>\^~|`]+", _GPT2, _THREE_DIGITS)),
    Pre("poro-chat bloom gpt3-finnish", (_UP_TO_SIGNS,)),
    Pre("viking", (_UP_TO_SIGNS, _DIGIT)),
    # Cut at newlines by the encoder itself, because a run of them that is a token is never merged.
    Pre("gemma4", (), add_bos=True, raw=True),
)

BY_NAME = {name: row for row in TABLE for name in row.names.split()}


def lookup(name: str) -> Pre:
    """The row that `tokenizer.ggml.pre` names; ValueError lists the names that exist."""
    try:
        return BY_NAME[name]
    except KeyError:
        known = ", ".join(sorted(BY_NAME))
        raise ValueError(f"unknown pre-tokenizer {shown(name)}; known: {known}") from None
