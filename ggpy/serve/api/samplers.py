"""llama.cpp's field `samplers`: the links of the sampler chain that are wanted; all others are off.

The order of the chain is llama.cpp's default whatever the order of the names. Names that no link
has are ignored, as by llama-server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...sampling import SamplingParams
from ..fields import Fields

# Name of a link -> its parameters and the values with which it does nothing.
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
}
LETTERS = dict(zip("edskypmxt", OFF, strict=True))  # of a text in place of a list
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
ALIASES |= {name.replace("_", ""): name for name in OFF}


def chosen(params: SamplingParams, body: Fields) -> SamplingParams:
    """The parameters, without the links that a body leaves out of its samplers."""
    given = body.texts("samplers")
    if "samplers" not in body:
        return params
    if isinstance(body.raw("samplers"), str):
        wanted = {LETTERS.get(letter) for letter in given[0]}
    else:
        plain = [name.lower().replace("-", "_") for name in given]
        wanted = {ALIASES.get(name, name) for name in plain}
    off: dict[str, Any] = {}
    for name, values in OFF.items():
        off |= {} if name in wanted else values
    return replace(params, **off)
