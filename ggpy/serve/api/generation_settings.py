"""llama.cpp's generation_settings: the options of an answer as /completion, /props and /slots say
them.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from ...sampling import SamplingParams
from ..events import AnswerOptions
from .options import NAMES


def settings_of(options: AnswerOptions) -> dict[str, Any]:
    """The options of an answer."""
    n = -1 if options.max_tokens is None else options.max_tokens
    constraint = options.constraint
    return {
        **sampling_of(options.params),
        "n_predict": n,
        "max_tokens": n,
        "stop": list(options.stop),
        "n_probs": options.top_logprobs or 0,
        "post_sampling_probs": options.post_sampling,
        "n_indent": options.min_indent,
        "t_max_predict_ms": round(1e3 * options.line_timeout) if options.line_timeout else -1,
        "cache_prompt": options.cache_prompt,
        "grammar": "" if constraint is None else constraint.text,
    }


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    """The parameters of sampling, and the links of the sampler chain in their order."""
    biases = [
        {"token": id, "bias": bias if isfinite(bias) else None}  # JSON has no infinity
        for id, bias in params.logit_bias.items()
    ]
    return {
        **{name: getattr(params, name) for name in NAMES},
        "logit_bias": biases,
        "samplers": list(params.samplers),
    }
