"""What one line of `ggpy bench` measures: a prompt, generation, or both, at a depth.

Names are llama-bench's. Plain numbers, so that --help costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cache_types import AUTO


@dataclass(frozen=True)
class Test:
    """n_prompt tokens in steps of n_ubatch, then n_gen steps, after n_depth tokens of context."""

    __test__ = False  # pytest takes a class of this name for one of its own

    n_prompt: int
    n_gen: int
    n_depth: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq: int = 1  # sequences that do it at the same time
    type_k: str = AUTO  # of keys and of values
    type_v: str = AUTO

    @property
    def name(self) -> str:
        """As llama-bench writes it: "pp512", "tg128 @ d4096"; "tg128 x8" is of 8 sequences."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (
            self.n_gen > 0
        )
        together = f" x{self.n_seq}" if self.n_seq > 1 else ""
        return "+".join(parts) + together + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def chunk(self) -> int:
        """Tokens of a prompt in one step."""
        return min(self.n_batch, self.n_ubatch)

    @property
    def n_ctx(self) -> int:
        """Positions that a sequence takes, and one more for its last token."""
        return self.n_depth + max(1, self.n_prompt) + self.n_gen + 1

    @property
    def n_tokens(self) -> int:
        """Tokens that its speed counts."""
        return self.n_seq * (self.n_prompt + self.n_gen)
