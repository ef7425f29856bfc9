"""Relevance: how well documents answer a query, scored by a reranker.

A reranker reads the query and one document in a fixed prompt. Its classifier then scores the hidden
state of the last token; in a file without a classifier, the logits of "yes" and "no" give the
score. Nothing here knows who asks, or in which order documents are returned.

Letters: D width, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...backends.interface import Step
from ...backends.numpy.functions import softmax
from . import RANK, pooling_type, sums
from .prompts import F32, Ids, checked_prompts, evaluate, last_token

if TYPE_CHECKING:
    from ..engine import Engine

TEMPLATE = "tokenizer.chat_template.rerank"  # the key of a file's own prompt
QUERY, DOCUMENT = "{query}", "{document}"

# Qwen3-Reranker's, as its model card and the files that llama.cpp converts have it.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {QUERY}\n<Document>: {DOCUMENT}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
YES, NO = "yes", "no"


class Encoder(Protocol):
    """The part of a tokenizer that relevance needs."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> Ids:
        """The ids of a text."""


def can_rank(engine: Engine, metadata: Mapping[str, Any]) -> bool:
    """Whether the model is a reranker: it has a classifier, or its file has a reranker's pooling
    type, name, or prompt.
    """
    names = [metadata.get(f"general.{key}") for key in ("name", "basename")]
    return (
        engine.decoder.classifier is not None
        or pooling_type(metadata) == RANK
        or TEMPLATE in metadata
        or any("rerank" in str(name).lower() for name in names)
    )


def relevance(
    engine: Engine,
    tokenizer: Encoder,
    metadata: Mapping[str, Any],
    query: str,
    documents: Sequence[str],
) -> list[float]:
    """The relevance of each document to the query, 0 to 1, in the order of the documents.

    Errors: see `document_prompts` and `ranked`.
    """
    prompts = document_prompts(engine, tokenizer, metadata, query, documents)
    return ranked(engine, tokenizer, metadata, prompts)


def document_prompts(
    engine: Engine,
    tokenizer: Encoder,
    metadata: Mapping[str, Any],
    query: str,
    documents: Sequence[str],
) -> list[Ids]:
    """The prompt of the query with each document.

    The query and the documents are plain text: special tokens in them are not parsed. ValueError
    for a model that is no reranker; ContextOverflow, a ValueError, for a document that does not fit
    in the context together with the query and the prompt.
    """
    if not can_rank(engine, metadata):
        raise ValueError(
            "this model cannot rank documents: it has no classifier (cls.output.weight), and "
            "neither its pooling type nor its name is a reranker's: load one, as Qwen3-Reranker"
        )
    template = str(metadata.get(TEMPLATE, QWEN3_RERANKER))
    texts = [prompt_ids(tokenizer, template, query, document) for document in documents]
    return checked_prompts(engine, texts, "document")


def ranked(
    engine: Engine,
    tokenizer: Encoder,
    metadata: Mapping[str, Any],
    prompts: Sequence[Ids],
    first: int = 0,
) -> list[float]:
    """The relevance, 0 to 1, for each of the prompts, which `document_prompts` made.

    Any thread may call this. first: the index of the first prompt's document, for error messages.
    ValueError for a score that is NaN or infinite; RuntimeError after `close`.
    """
    classifier = engine.decoder.classifier
    if classifier is None:
        scores = _yes_and_no(engine, tokenizer, prompts)
    else:
        scores = _classified(engine, classifier, _yes_class(metadata), prompts)
    return [float(p) for p in _finite(scores, first)]


def prompt_ids(tokenizer: Encoder, template: str, query: str, document: str) -> Ids:
    """The prompt of a query and a document; ValueError for a template without a place for either.

    Special tokens are parsed only in the template, before the line of the query and after the
    document.
    """
    start, end = template.find(QUERY), template.find(DOCUMENT)
    if not 0 <= start < end:
        raise ValueError(f"{TEMPLATE} is {template!r:.60}: it needs {QUERY} before {DOCUMENT}")
    line = template.rfind("\n", 0, start) + 1
    before, between = template[line:start], template[start + len(QUERY) : end]
    parts = [
        (template[:line], True),
        (before + query + between + document, False),
        (template[end + len(DOCUMENT) :], True),
    ]
    return [
        id for text, special in parts for id in tokenizer.encode(text, False, parse_special=special)
    ]


def _classified(engine: Engine, classifier: F32, yes: int, prompts: Sequence[Ids]) -> F32:
    """The probability of class `yes` by classifier[C, D]. A single class is compared with a score
    of 0.
    """
    x = sums(engine, prompts, last_token)
    scores = (x @ classifier.T).astype(np.float32)
    if len(classifier) == 1:
        scores, yes = np.hstack([scores, np.zeros_like(scores)]), 0
    return softmax(scores, None)[:, yes]


def _yes_class(metadata: Mapping[str, Any]) -> int:
    """The index of the class of relevant documents: the class with the label "yes", or the
    first.
    """
    labels = metadata.get(f"{metadata.get('general.architecture')}.classifier.output_labels", [])
    return labels.index(YES) if YES in labels else 0


def _yes_and_no(engine: Engine, tokenizer: Encoder, prompts: Sequence[Ids]) -> F32:
    """The probability of "yes" where "no" is the only alternative."""
    ids = [_single(tokenizer, text) for text in (YES, NO)]
    scores = np.zeros((len(prompts), 2), np.float32)

    def run(step: Step) -> F32:
        logits: F32 = engine.ops.read(engine.decoder.run(step))
        return logits

    def take(i: int, logits: F32) -> None:
        for row in logits:
            scores[i] = row[ids]

    evaluate(engine, prompts, last_token, run, take)
    return softmax(scores, None)[:, 0]


def _single(tokenizer: Encoder, text: str) -> int:
    """The one token that encodes a text; ValueError if there are more."""
    ids = tokenizer.encode(text, False)
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens of this model: it cannot rank documents")
    return ids[0]


def _finite(scores: F32, first: int) -> F32:
    for i in np.flatnonzero(~np.isfinite(scores)):
        raise ValueError(
            f"document {first + i} of the list: its score is NaN or infinite; "
            "`ggpy run --check` finds the op where that begins"
        )
    return scores
