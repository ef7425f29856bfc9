"""The name that llama.cpp gives to the pre-tokenizer of a checkpoint's byte-level BPE.

It is found in two ways: by a digest of the ids of one text, for the vocabularies in llama.cpp's
table; for the many others by the words that the pre-tokenizer cuts texts into, compared with those
of each row of `tokenizer.pre`. A pre-tokenizer that equals no row is refused: a wrong one would
cost quality without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..tokenizer.pre import TABLE, Pre
from ..util.messages import escaped, one_line
from .folder import ConvertError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# The text whose ids are compared: blanks, emojis, numbers, scripts, signs, contractions.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal)"
    " \U0001f636\u200d\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999"
    " 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785"
    "\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= "
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438"
    " ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure?"
    " 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
# llama.cpp's names and, for each, the first 16 hex digits of sha256 of str(ids); only of
# pre-tokenizers that can be run here.
_DIGESTS = (
    "chatglm-bpe b6e8e1518dc4305b 81d72c7348a9f0eb, "
    "glm4 a1336059768a55c9 9ca2dd618e8afaf0 cdf5f35325780597, minerva-7b 1431a23e583c9743, "
    "hunyuan 7e57df22b1fe23a7, hunyuan-dense bba3b3366b646dbd, hy_v4 e6ddf9c6686791c1, "
    "falcon-h1 a6b57017d60e6edb 60476e1243776c4f 3eda48b4c4dc7de7 48f8e02c0359c0bb, "
    "qwen2 d4540891389ea895 e636dc30a262dcc0, qwen35 1444df51289cfa80 d30d75d9059f1aa2, "
    "grok-2 66b8d4e19ab16c3b, jina-v2-de b3d1dd861f1d4c5c 27949a2493fc4a9f, "
    "gpt-2 0fe1cf6eda062318 3ce83efda5659b07, lfm2 9e454714343b69b9 169bf0296a13c4d9, "
    "gemma4 846deafc5b0fa786, llama-bpe 0ef9807a4087ebef, deepseek-llm 049ecf7629871e30, "
    "deepseek-coder 347715f544604f91, falcon 8aeee3860c56296a, falcon3 9d032fcbd5501f4a, "
    "olmo b6dc8df998e1cfbd, starcoder 35d91631860c815f, stablelm2 32d85c31273f8019, "
    "refact 6221ad2852e85ce9, command-r 9c2227e4dd922002, dbrx a8594e3edff7c29c, "
    "jina-v2-es 171aeeedd6fb548d, jina-v5-nano a023e9fdc5a11f03, smaug-bpe c136ed14d01c2745, "
    "poro-chat c7ea5862a53e4272, viking 7fc505bd3104ca10, jais b53802fb28e26d64, "
    "codeshell 7b3e7548e4308f52, tekken 63b97e4253352e6f, smollm 855059429035d75a, "
    "bloom 3c30d3ad1d6b6420, gpt3-finnish bc01ce58980e1db4, exaone 4e2b24cc4770243d, "
    "phi-2 fcace8b9cac38ce8, gigachat ad851be1dba641f2, megrez d4c8f286ea6b520b, "
    "deepseek-v3 877081d19cf6996e, deepseek-r1-qwen b3f499bb4255f8ca, "
    "gpt-4o ccc2ef013c104be7, trillion 1994ffd01900cfb3, bailingmoe 96a5f08be6259352, "
    "llama4 d353350c764d8c3b, pixtral 0e9433cbbb161f89, seed-coder d5f1dd6f980fec56, "
    "a.x-4.0 b0a6b1c0bd5998eb, midm-2.0 f6791d196f87ce6b, exaone4 2085e1638f6c377a, "
    "mellum a1e163ecab2e718a, modern-bert a0b64b4385f12366, bailingmoe2 9b1be57e70d20d95, "
    "granite-docling 53e325976a6e1423, minimax-m2 f4f37b6c8eb9ea29, kormo 4a2e2abae11ca2b8, "
    "solar-open 16389f0a1f51ee53, joyai-llm b4b8ca1f9769494f, kanana2 e4d54df1ebc1f2b9, "
    "f2llmv2 862f827721df9560, talkie f728162c1315c26e, minicpm5 36f3066e97b7f399, "
    "exaone-moe 6c81ce329e080288, mellum2 9dcf830ee9990cdb, laguna 972da7b59cec44d1, "
    "ufakzeka 653660222fb704f6"
)

# Texts on which the rows of the table differ.
PROBES = (
    CHECK_TEXT,
    "it's IT'S o'clock 'tis don'T x'\u017f ''s 'LLama a'sb",
    "12345678 1 22 \u0661\u0662\u0663\u0664 \u216b\u00bd\u00b2 v2.0.1  a1b   22 3\u4e2d4",
    "a  b\t\tc \n d\r\n\r\n e\u3000f \u00a0g   ",
    "CamelCaseXML \u00c9COLE\u00e9cole \u01c5x \u0414\u0430D\u03b1 \u05e9\u05dcx",
    "cafe\u0301s a\u0300\u0301 \u0300x \u0e01\u0e33",
    "\u0938\u094d\u0915\u0942\u0932 \u0645\u064e\u062f\u0652\u0631",
    "foo/bar//baz\n/ /\n! //\n...\n\n",
    'a.b,c?d!e (f)|g~h`i $j+k<l>=m^n "o" \u00abp\u00bb \u2026\u3002\uff0c\u0964 _q__r',
    "\u4f60\u597d\u3053\u3093\u306b\u30ab\u30bf\ud55c\uad6d abc\u4e2ddef \uff41\uff22\uff01\u3001x",
    "\U00010400\U00010428 \U0001e900x \U00020000 \u20ac100 \u00b1\u00d7 \U0001f1e9\u2764\ufe0f",
    "line one\nline two\n\n\nthree  \n x(y",
)


@cache
def digests() -> dict[str, str]:
    """Digest -> name."""
    rows = (row.split(" ") for row in _DIGESTS.split(", "))
    return {digest: name for name, *found in rows for digest in found}


@contextmanager
def refused(path: object) -> Iterator[None]:
    """Turns every error of the package into a ConvertError.

    A panic of its Rust code is a BaseException, not an Exception.
    """
    try:
        yield
    except (ConvertError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = one_line(str(error), 500)
        raise ConvertError(f"{path}: tokenizers cannot use it: {reason}") from None


def pre_name(tokenizer: Tokenizer, ignore_merges: bool, path: object) -> str:
    """The name for tokenizer.ggml.pre; ConvertError if no row of the table cuts the same words."""
    ids = tokenizer.encode(CHECK_TEXT).ids
    if name := digests().get(sha256(str(ids).encode()).hexdigest()[:16]):
        return name
    wanted = cuts(tokenizer.pre_tokenizer)
    for row in TABLE:
        if row.raw or row.ignore_merges != ignore_merges:
            continue
        if wanted == cuts(of_row(row)):
            return row.names.split()[0]
    raise ConvertError(
        f"{path}: no pre-tokenizer of GGUF cuts words as this one does, so ids would differ"
        f" (ignore_merges: {str(ignore_merges).lower()}): {escaped(tokenizer.pre_tokenizer)}"
    )


def of_row(row: Pre) -> PreTokenizer:
    """A row of the table in the library's terms."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in row.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def cuts(pre_tokenizer: PreTokenizer | None, texts: Iterable[str] = PROBES) -> list[list[str]]:
    """The words of each text; [] without a pre-tokenizer."""
    if pre_tokenizer is None:
        return []
    return [[word for word, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]
