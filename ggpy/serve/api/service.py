"""What the APIs need of the server, as a protocol: the server implements it, tests replace it."""

from __future__ import annotations

from typing import Protocol

from ...sampling import SamplingParams
from ...tokenizer import Tokenizer


class ServedModel(Protocol):
    """The model that is served."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, which texts in logit_bias and dry_sequence_breakers need."""
        ...

    def check_model(self, name: str | None) -> None:
        """ApiError if a request for a model of this name cannot be answered."""
        ...

    def sampling_defaults(self) -> SamplingParams:
        """The parameters of requests that give none."""
        ...
