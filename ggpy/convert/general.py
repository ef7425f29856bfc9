"""The metadata `general.*` of a file: name, size, licence, origin, and how to sample.

The gguf package guesses names from the model card and the folder, as llama.cpp's converter does.
What it gets and what it returns is checked, because cards are written by strangers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from .folder import Folder

Metadata = dict[str, tuple[str, Any]]

CARD = "README.md"
MAX_CARD = 4 << 20  # bytes
MAX_TEXT, MAX_ITEMS = 4096, 256  # of what is taken over from a card
SAMPLING = {  # key of generation_config.json -> (key below general.sampling, type)
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "temperature": ("temp", "f32"),
    "repetition_penalty": ("penalty_repeat", "f32"),
}
TYPES = {"UINT32": "u32", "INT32": "i32", "FLOAT32": "f32", "BOOL": "bool", "STRING": "str"}


class Counts(NamedTuple):
    """Numbers of weights of a model, and its number of experts."""

    all: int
    shared: int  # weights outside of experts
    expert: int = 0  # weights of one expert, in all layers
    n_expert: int = 0


def general_metadata(
    folder: Folder, config: dict[str, Any], architecture: str, counts: Counts, name: str | None
) -> Metadata:
    """Key -> (type, value) of `general.*`, in llama.cpp's order. name: instead of a guessed one."""
    import gguf

    # GGUFWriter logs that it writes a file, though it is used for its metadata only
    logging.getLogger("gguf").setLevel(logging.ERROR)
    origin = config.get("_name_or_path")
    about = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(),
        _card(folder),
        {"_name_or_path": origin} if isinstance(origin, str) else None,
        Path(folder.name),
        counts.all,
    )
    about.name = name or about.name or folder.name
    about.size_label = about.size_label or gguf.size_label(*counts)
    writer = gguf.GGUFWriter(None, architecture)
    about.set_gguf_meta_model(writer)
    values = {key: _typed(value) for key, value in writer.kv_data[0].items()}
    found: Metadata = {
        "general.architecture": ("str", architecture),
        "general.type": ("str", "model"),
        **_sampling(folder),
    }
    return {**found, **{key: typed for key, typed in values.items() if typed and key not in found}}


def _sampling(folder: Folder) -> Metadata:
    """The authors' sampling parameters; those that are no numbers are left out."""
    settings = folder.json("generation_config.json") or {}
    found: Metadata = {}
    for key, (name, kind) in SAMPLING.items():
        value = settings.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9:
            typed = int(value) if kind == "i32" else float(value)
            found[f"general.sampling.{name}"] = (kind, typed)
    return found


def _card(folder: Folder) -> dict[str, Any]:
    """The texts and lists of texts in the head of the model card; {} if it cannot be read."""
    import gguf

    path = folder.find(CARD)
    if path is None or path.stat().st_size > MAX_CARD:
        return {}
    try:
        card = gguf.Metadata.load_model_card(folder.path)
    except Exception:  # YAML has a dozen ways to fail, and the model does not depend on it
        return {}
    return {key: plain for key, value in card.items() if (plain := _plain(value)) is not None}


def _plain(value: Any) -> str | list[str] | None:
    """Text, or a short list of it; None for all else."""
    if isinstance(value, str):
        return value if value.strip() and len(value) <= MAX_TEXT else None
    if isinstance(value, list) and 0 < len(value) <= MAX_ITEMS:
        texts = [x for x in value if isinstance(x, str) and x.strip() and len(x) <= MAX_TEXT]
        return texts if len(texts) == len(value) else None
    return None


def _typed(value: Any) -> tuple[str, Any] | None:
    """(our name of its type, value) of a value of gguf's writer; None for types not used here."""
    kind = value.type.name
    if kind == "ARRAY":
        strings = all(isinstance(item, str) for item in value.value)
        return ("arr[str]", list(value.value)) if strings else None
    if kind == "STRING" and not isinstance(value.value, str):
        return None
    return (TYPES[kind], value.value) if kind in TYPES else None
