"""The links whose order can be chosen: their names, as llama.cpp spells them, and what turns them
off.

`SamplingParams.samplers` holds such names. Nothing here knows what the links do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Name of a link -> its parameters and the values with which it does nothing, in llama.cpp's default
# order. There adaptive_p is no part of it; here its target alone turns it on.
OFF: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "adaptive_p": {"adaptive_target": -1.0},
}
SAMPLERS = tuple(OFF)
# All names and their letters. infill has no parameter: it is on where `samplers` names it.
LETTERS = dict(zip((*SAMPLERS, "infill"), "edskypmxtai", strict=True))
MAX_SAMPLERS = 64
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p"}
ALIASES |= {"typical_p": "typ_p"} | {name.replace("_", ""): name for name in SAMPLERS}
BY_LETTER = {letter: name for name, letter in LETTERS.items()}


def adjusts_scaled(samplers: Sequence[str]) -> bool:
    """Whether a link that changes logits comes after one that scales them."""
    after = samplers[samplers.index("temperature") :] if "temperature" in samplers else ()
    return "penalties" in after or "dry" in after


def sampler_of(name: str) -> str | None:
    """The name of LETTERS that a text means (Top-K, nucleus); None if there is none."""
    plain = name.strip().lower().replace("-", "_")
    found = ALIASES.get(plain, plain)
    return found if found in LETTERS else None


def samplers_of_names(text: str) -> tuple[str, ...]:
    """The names in a text such as "top_k;temperature"; ValueError for an unknown one."""
    names = [name for name in text.split(";") if name.strip()]
    return _known((name, sampler_of(name)) for name in names)


def samplers_of_letters(text: str) -> tuple[str, ...]:
    """The names of letters such as "kt"; ValueError for an unknown one."""
    return _known((letter, BY_LETTER.get(letter)) for letter in text)


def _known(found: Iterable[tuple[str, str | None]]) -> tuple[str, ...]:
    names: list[str] = []
    for given, name in found:
        if name is None:
            known = ", ".join(f"{name} ({letter})" for name, letter in LETTERS.items())
            raise ValueError(f"there is no sampler {given.strip()!r:.60}: give some of {known}")
        names.append(name)
    return tuple(names)
