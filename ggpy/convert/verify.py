"""Whether a converted tokenizer gives the ids that the checkpoint's own gives: a few texts, both
ways. What differs is told, not refused: a rare text may not be worth a model.
"""

from __future__ import annotations

from typing import Any

from ..tokenizer import Tokenizer
from .pretokenizer import PROBES
from .vocabulary import Tokens


def verify(metadata: dict[str, tuple[str, Any]], tokens: Tokens, warnings: list[str]) -> None:
    """Adds a warning for the first text with other ids; GGUFError if there is no tokenizer."""
    tokenizer = Tokenizer({key: value for key, (_, value) in metadata.items()})
    warnings += tokenizer.warnings
    if tokens.encode is None:
        return
    for text in PROBES:
        theirs = tokens.encode(text)
        ours = tokenizer.encode(text, add_special=False)
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            warnings.append(
                f"ids of {text[:30]!r} differ from those of the checkpoint's own tokenizer,"
                f" from number {at + 1} of {len(theirs)} on"
            )
            return
