"""Embeddings and relevance between the steps of the engine: a few prompts at a time, so that the
answers under way go on in between.

Nothing here knows HTTP or the form of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model import Model
from ...runtime import embedding
from ...runtime.embedding import EUCLIDEAN
from ...runtime.embedding.prompts import checked_prompts
from ...runtime.embedding.relevance import document_prompts, ranked
from ...runtime.sequence import ContextOverflow
from ..api.prompts import Prompt, tokens_of
from ..errors import RETRY_AFTER, ApiError, overflow_error
from .worker import EngineWorker

NONE = "none"  # llama.cpp's pooling by which each token has a vector


class Vectors:
    """What a model makes of texts, apart from answers."""

    def __init__(self, model: Model, worker: EngineWorker, pooling: str | None) -> None:
        """pooling: None is the model's own."""
        self._model, self._worker, self._pooling = model, worker, pooling

    async def embed(
        self, inputs: Sequence[Prompt], norm: int = EUCLIDEAN
    ) -> list[tuple[NDArray[np.float32], int]]:
        """(vector[D], tokens) of each input, or (vectors[T, D], tokens) where the pooling is
        "none"; ApiError. norm: llama.cpp's embd_normalize, which vectors of single tokens ignore.
        """
        with _told("input"):
            prompts = await asyncio.to_thread(self._prompts, inputs)
        found: list[NDArray[np.float32]] = []
        for group in _groups(prompts, self._model.engine.n_batch):
            with _told("input"):
                found += list(await self._worker.call(partial(self._embedded, group, norm)))
        return [(vector, len(ids)) for vector, ids in zip(found, prompts, strict=True)]

    def _embedded(self, prompts: list[list[int]], norm: int) -> Sequence[NDArray[np.float32]]:
        """The vectors of a group of prompts; in the engine's thread."""
        engine = self._model.engine
        if self._pooling == NONE:
            return [x.astype(np.float32) for x in embedding.token_states(engine, prompts)]
        pooling: Any = self._pooling or embedding.pooling_of(self._model.metadata)
        if norm == EUCLIDEAN:
            return list(embedding.embed(engine, prompts, pooling))
        return list(embedding.scaled(embedding.pooled(engine, prompts, pooling), norm))

    async def relevance(self, query: str, documents: Sequence[str]) -> list[tuple[float, int]]:
        """(relevance, tokens of the prompt) of each document; ApiError."""
        model = self._model
        engine, tokenizer, metadata = model.engine, model.tokenizer, model.metadata
        scores: list[float] = []
        with _told("documents"):
            made = partial(document_prompts, engine, tokenizer, metadata, query, documents)
            prompts = await asyncio.to_thread(made)
            for some in _groups(prompts, engine.n_batch):
                work = partial(ranked, engine, tokenizer, metadata, some, len(scores))
                scores += await self._worker.call(work)
        return [(score, len(ids)) for score, ids in zip(scores, prompts, strict=True)]

    def _prompts(self, inputs: Sequence[Prompt]) -> list[list[int]]:
        """The ids of each text; errors name its place among all, not in a group."""
        ids = [tokens_of(prompt, self._model.tokenizer) for prompt in inputs]
        return checked_prompts(self._model.engine, ids, "input")


@contextmanager
def _told(field: str) -> Iterator[None]:
    """Turns errors of the runtime into ApiErrors that name a field."""
    try:
        yield
    except ContextOverflow as error:
        raise overflow_error(error.n_prompt, error.n_ctx, str(error), field) from None
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None
    except RuntimeError as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None


def _groups(prompts: Sequence[list[int]], most: int) -> Iterator[list[list[int]]]:
    """The prompts in groups of at most `most` tokens, or of one prompt."""
    group: list[list[int]] = []
    for ids in prompts:
        if group and sum(map(len, group)) + len(ids) > most:
            yield group
            group = []
        group.append(ids)
    if group:
        yield group
