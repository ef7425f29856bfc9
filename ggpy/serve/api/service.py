"""What the APIs need of the server, as a protocol: the server implements it, tests replace it."""

from __future__ import annotations

from typing import Protocol

from ...sampling import SamplingParams


class ServedModel(Protocol):
    """The model that is served."""

    def check_model(self, name: str | None) -> None:
        """ApiError if a request for a model of this name cannot be answered."""
        ...

    def sampling_defaults(self) -> SamplingParams:
        """The parameters of requests that give none."""
        ...
