"""What the APIs need of the server, as protocols: the server implements them, tests replace it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...sampling import SamplingParams


class ServedModel(Protocol):
    """The model that is served."""

    def check_model(self, name: str | None) -> None:
        """ApiError if a request for a model of this name cannot be answered."""
        ...

    def sampling_defaults(self) -> SamplingParams:
        """The parameters of requests that give none."""
        ...


class Embedder(ServedModel, Protocol):
    """Turns texts into vectors."""

    async def embed(
        self, inputs: list[str | list[int]], client: str
    ) -> list[tuple[NDArray[np.float32], int]]:
        """(vector[D], tokens) of each text or list of token ids. ApiError."""
        ...


class Reranker(ServedModel, Protocol):
    """Says how well documents answer a query."""

    async def relevance(
        self, query: str, documents: list[str], client: str
    ) -> list[tuple[float, int]]:
        """(relevance, tokens) of each document. ApiError."""
        ...
