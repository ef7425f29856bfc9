"""What the name of a tensor in a GGUF file says."""

from __future__ import annotations

import re


def layer_of(name: str) -> int | None:
    """7 for "blk.7.ffn_up.weight"; None for what is in no layer."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None
