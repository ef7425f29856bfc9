"""Declarations of the block formats for numba: how codes, scales and minimums of a block are read.

A format is declared once, by two functions of the addresses of its blocks, and every loop is made
from them: w = scale * (code - offset) + minimum, for 64 codes at a time. Formats of 32 weights give
two neighbouring blocks p and q, the others one. Nothing here knows activations.
"""

from __future__ import annotations

from .....formats.base import Format
from . import codebooks, pairs, superblocks
from .declared import Declaration as Declaration

DECLARATIONS = pairs.DECLARED | superblocks.DECLARED | codebooks.DECLARED


def declaration(format: Format) -> Declaration | None:
    """The format's declaration, or None."""
    return DECLARATIONS.get(format.name)
