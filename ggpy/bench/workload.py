"""A test of `ggpy bench`: prefill, decode, or both, at a context depth.

Names are those of llama-bench. The module imports nothing heavy, so --help stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cache_types import AUTO


@dataclass(frozen=True)
class Test:
    """Prefill of n_prompt tokens in steps of n_ubatch, then n_gen decode steps, at n_depth."""

    __test__ = False  # stops pytest from collecting this class as a test

    n_prompt: int
    n_gen: int
    n_depth: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq: int = 1  # sequences that run at the same time
    type_k: str = AUTO  # KV cache types
    type_v: str = AUTO
    n_cpu_moe: int = 0  # layers whose experts stay in the memory of the host

    @property
    def name(self) -> str:
        """llama-bench's name: "pp512", "tg128 @ d4096"; "tg128 x8" has 8 sequences."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (
            self.n_gen > 0
        )
        together = f" x{self.n_seq}" if self.n_seq > 1 else ""
        return "+".join(parts) + together + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def chunk(self) -> int:
        """Prefill tokens per step."""
        return min(self.n_batch, self.n_ubatch)

    @property
    def n_ctx(self) -> int:
        """Positions of a sequence, plus one for its last token."""
        return self.n_depth + max(1, self.n_prompt) + self.n_gen + 1

    @property
    def n_tokens(self) -> int:
        """Tokens that the speed of the test counts."""
        return self.n_seq * (self.n_prompt + self.n_gen)
