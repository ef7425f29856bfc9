"""A benchmark case of `ggpy bench_kernels`: work with a known number of bytes and operations.

Nothing here depends on the kernels, or measures anything.
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
    """One piece of GPU work. `prepare` makes its operands and returns a function that
    enqueues it.
    """

    what: str  # "product", "attend"
    where: str  # model and matrix, or origin of the shape
    format: str
    shape: str
    tokens: int
    nbytes: int  # bytes that must be read and written
    flops: int
    prepare: Callable[[Operands], Enqueue] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name that -k matches and that --compare uses as key."""
        parts = (self.what, self.where, self.format, self.shape, f"x{self.tokens}")
        return " ".join(part for part in parts if part)


def by_format(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """Unique cases sorted by format, so that the operands of a format are made once."""
    unique = {case.name: case for case in cases}
    return sorted(unique.values(), key=lambda case: case.format)
