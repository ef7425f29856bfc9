"""Attention of the sequences that have many tokens in a step: kernels that read keys and values as
halves, which a layer's pages of other types become right before.

Which sequences these are, and which pages they see, step.py says; where pages are, kv_pages.
"""

from __future__ import annotations

from dataclasses import replace

from ...device.base import Buffer
from ...kernels.attention.paged_attention import Asked, Attend
from ...kernels.attention.pages_to_f16 import HalvePages
from ...kernels.attention.prefill_attention import AttendPrompt
from .step import Batch


class Prompts:
    """For heads of one shape, whose pages are of halves or have room to become them."""

    def __init__(self, attend: Attend, halves: tuple[Buffer, Buffer] | None) -> None:
        """attend: the same for single tokens; halves: keys and values of the layer at hand."""
        self._attend = AttendPrompt(attend)
        self._halve, self._halves = HalvePages(attend.device, attend.heads), halves

    @property
    def from_tokens(self) -> int:
        """Tokens of a sequence in a step from which on this is faster."""
        return self._attend.from_tokens

    def launch(self, asked: Asked, batch: Batch) -> None:
        """Enqueue it, after what writes the step's keys and values."""
        if batch.n_halved and self._halves is not None:
            listed, n = batch.halved, batch.n_halved
            self._halve.launch(asked.pages, self._halves, listed, n, asked.window)
            asked = replace(asked, batch=batch.prompt_memory, pages=self._halves)
        self._attend.launch(asked, batch.prompt_tiles, batch.n_prompt_tiles)
