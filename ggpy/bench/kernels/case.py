"""What `ggpy bench_kernels` measures one of: work whose bytes and operations are known.

Nothing here knows which kernels there are, or measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .operands import Operands

MODELS = ("Llama-3.1-8B", "Llama-3.2-1B", "SmolLM2-135M")
LARGE = MODELS[0]
DECODED = (1, 8)  # tokens of a decode step
PROMPT = 512
DEPTHS = (512, 4096, 16384, 32768)
EPS = 1e-5

Enqueue = Callable[[], None]


@dataclass(frozen=True)
class KernelCase:
    """One piece of work of a GPU; `prepare` makes operands and returns what enqueues it."""

    what: str  # "product", "attend"
    where: str  # the model and the matrix, or where the shape comes from
    format: str
    shape: str
    tokens: int
    nbytes: int  # that have to be read and written
    flops: int
    prepare: Callable[[Operands], Enqueue] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """What -k looks at, and what --compare knows it by."""
        parts = (self.what, self.where, self.format, self.shape, f"x{self.tokens}")
        return " ".join(part for part in parts if part)


def by_format(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """In an order that makes the operands of a format once; without repetitions."""
    unique = {case.name: case for case in cases}
    return sorted(unique.values(), key=lambda case: case.format)
