"""Rerankers that are saved as language models: Qwen3-Reranker answers "yes" or "no".

Its classifier is the two rows of the output matrix that score these tokens. No setting of such a
folder says that it is a reranker: its name or its model card does, or an option of the converter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arch.hugging_face import Transform
from ...runtime.embedding.relevance import NO, QWEN3_RERANKER, TEMPLATE, YES
from ..folder import ConvertError, Folder
from ..general import CARD, MAX_CARD
from ..vocabulary import Tokens

Metadata = dict[str, tuple[str, Any]]

NAME = "qwen3-reranker"
CLASSIFIER = "cls.output.weight"
RANK = 4  # gguf.PoolingType
SETTINGS: Metadata = {  # below the architecture's name
    "pooling_type": ("u32", RANK),
    "classifier.output_labels": ("arr[str]", [YES, NO]),
}
PROMPT: Metadata = {
    "tokenizer.chat_templates": ("arr[str]", [TEMPLATE.rpartition(".")[2]]),
    TEMPLATE: ("str", QWEN3_RERANKER),
}


def is_reranker(folder: Folder, config: dict[str, Any]) -> bool:
    """Whether a folder's name, its origin or a heading of its card is Qwen3-Reranker's."""
    names = (folder.name, str(config.get("_name_or_path", "")))
    if any(NAME in name.lower() for name in names):
        return True
    path = folder.find(CARD)
    if path is None or path.stat().st_size > MAX_CARD:
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    return any(line.startswith("#") and NAME in line for line in lines)


def answer_rows(tokens: Tokens, folder: Folder) -> Transform:
    """The rows of the output matrix [V, D] that score "yes" and "no".

    ConvertError if one of the words is not a token.
    """
    missing = [text for text in (YES, NO) if text not in tokens.texts]
    if missing:
        raise ConvertError(
            f"{folder.path}: a reranker needs {missing[0]!r} as one token, and there is none"
        )
    rows = [tokens.texts.index(text) for text in (YES, NO)]
    return Transform(rows=np.array(rows, np.intp), n_rows=len(tokens.texts))
