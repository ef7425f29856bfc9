"""The options of sampling, which `ggpy run` and `ggpy serve` share.

The defaults are those of `sampling.SamplingParams`: a flag that is not given is not passed on, and
a test compares the defaults that the help states. Nothing here takes time to import.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

# Flags, name in SamplingParams, type, default as the help shows it, meaning.
SAMPLING: tuple[tuple[tuple[str, ...], str, Any, str, str], ...] = (
    (("-s", "--seed"), "seed", int, "-1", "seed of the random numbers; -1 chooses one at random"),
    (("--temp", "--temperature"), "temperature", float, "0.8", "temperature; 0 is greedy"),
    (("--top-k",), "top_k", int, "40", "keep the N most probable tokens; 0 keeps all"),
    (("--top-p",), "top_p", float, "0.95", "keep the best tokens, until their sum is P; 1 is off"),
    (("--min-p",), "min_p", float, "0.05", "keep tokens of at least P times the best one's p"),
    (("--typical", "--typical-p"), "typical_p", float, "1.0", "locally typical sampling; 1 is off"),
    (
        *(("--top-n-sigma", "--top-nsigma"), "top_n_sigma", float, "-1.0"),
        "keep logits within N standard deviations of the best; -1 is off",
    ),
    (("--xtc-probability",), "xtc_probability", float, "0.0", "how often XTC applies; 0 is off"),
    (
        *(("--xtc-threshold",), "xtc_threshold", float, "0.1"),
        "XTC removes all tokens of at least P but the least probable of them",
    ),
    (
        *(("--dynatemp-range",), "dynatemp_range", float, "0.0"),
        "the temperature varies by +-N with the entropy; 0 is off",
    ),
    (("--dynatemp-exp",), "dynatemp_exponent", float, "1.0", "exponent of that entropy"),
    (
        *(("--repeat-last-n",), "repeat_last_n", int, "64"),
        "penalties look at the last N tokens; -1 is all",
    ),
    (
        *(("--repeat-penalty",), "repeat_penalty", float, "1.0"),
        "divide the logits of repeated tokens by N; 1 is off",
    ),
    (
        *(("--presence-penalty",), "presence_penalty", float, "0.0"),
        "subtract N from the logits of repeated tokens",
    ),
    (
        *(("--frequency-penalty",), "frequency_penalty", float, "0.0"),
        "subtract N from them for each repetition",
    ),
    (
        *(("--dry-multiplier",), "dry_multiplier", float, "0.0"),
        "strength of DRY, which penalises repeated sequences; 0 is off",
    ),
    (("--dry-base",), "dry_base", float, "1.75", "DRY grows by this factor with each token"),
    (
        *(("--dry-allowed-length",), "dry_allowed_length", int, "2"),
        "DRY allows repeated sequences of N tokens",
    ),
    (
        *(("--dry-penalty-last-n",), "dry_penalty_last_n", int, "64"),
        "DRY looks at the last N tokens; -1 is all",
    ),
    (("--min-keep",), "min_keep", int, "0", "filters of probability keep N tokens or more"),
    (
        *(("--mirostat",), "mirostat", int, "0"),
        "Mirostat 1 or 2 keeps the surprise of tokens even; only --temp and -l act beside it; 0 is "
        "off",
    ),
    (("--mirostat-lr",), "mirostat_eta", float, "0.1", "learning rate of Mirostat"),
    (("--mirostat-ent",), "mirostat_tau", float, "5.0", "bits of surprise that it aims at"),
    (
        *(("--adaptive-target",), "adaptive_target", float, "-1.0"),
        "adaptive-p prefers tokens of this probability; less than 0 is off",
    ),
    (
        *(("--adaptive-decay",), "adaptive_decay", float, "0.9"),
        "how much the mean that it corrects depends on earlier tokens, 0 to 0.99",
    ),
)


def add_sampling(group: Any) -> None:
    """The options of SAMPLING, and the order of samplers, without a default: what is not given is
    not in the namespace.
    """
    for flags, name, kind, default, meaning in SAMPLING:
        group.add_argument(
            *flags,
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar="P" if name in ("top_p", "min_p", "xtc_threshold") else "N",
            help=f"{meaning} ({default})",
        )
    group.add_argument(
        "--samplers",
        type=_names,
        default=argparse.SUPPRESS,
        metavar="NAMES",
        help="samplers in the order in which they act, with semicolons between them; others are "
        "off (penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature;adaptive_p); "
        "infill, which fills in the middle, is the only one that is not among them",
    )
    group.add_argument(
        *("--sampler-seq", "--sampling-seq"),
        dest="samplers",
        type=_letters,
        default=argparse.SUPPRESS,
        metavar="LETTERS",
        help="the same with a letter for each (edskypmxta, and i)",
    )


def add_all_sampling(parser: Any) -> None:
    """The group of options of sampling, with those that need a tokenizer."""
    group = parser.add_argument_group("sampling (defaults in brackets)")
    add_sampling(group)
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        metavar="TEXT",
        help="no sequence of DRY goes across TEXT; may be repeated; none: no breaker "
        r'(\n : " *)',
    )
    group.add_argument(
        *("-l", "--logit-bias"),
        action="append",
        type=_bias,
        default=[],
        metavar="ID+BIAS",
        help="add to a token's logit: 15043+1, 15043-1, or 15043-inf; may be repeated",
    )


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by their names in SamplingParams."""
    names = [*(name for _, name, *_ in SAMPLING), "samplers"]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _names(text: str) -> tuple[str, ...]:
    from ..sampling.order import samplers_of_names

    return _understood(samplers_of_names, text)


def _letters(text: str) -> tuple[str, ...]:
    from ..sampling.order import samplers_of_letters

    return _understood(samplers_of_letters, text)


def _understood(read: Callable[[str], tuple[str, ...]], text: str) -> tuple[str, ...]:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*(?:e[+-]?\d+)?|inf))", text, re.IGNORECASE)
    if not match or match.group(2).lower() == "+inf":
        raise argparse.ArgumentTypeError(f"{text!r} is not like 15043+1, 15043-1 or 15043-inf")
    return int(match.group(1)), float(match.group(2))
