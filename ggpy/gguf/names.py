"""Names of tensors in GGUF files."""

from __future__ import annotations

import re


def layer_of(name: str) -> int | None:
    """7 for "blk.7.ffn_up.weight"; None for a tensor outside of the layers."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None
