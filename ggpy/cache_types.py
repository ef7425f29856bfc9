"""The types in which keys and values may be kept, by name: so that command lines can list them.

What a type is stands in ggpy/formats; how its pages lie in memory is each backend's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
BLOCK = 32  # elements of a head that a quantised type takes together
AUTO = "auto"
ON_GPU, IN_NUMPY = "f16", "f32"  # what AUTO is there


@dataclass(frozen=True)
class CacheTypes:
    """Of keys and of values; ValueError for what is none."""

    k: str = AUTO
    v: str = AUTO

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name != AUTO and name not in CACHE_TYPES:
                known = ", ".join(CACHE_TYPES)
                raise ValueError(f"no type of keys and values is called {name!r}; known: {known}")

    def resolved(self, usual: str) -> CacheTypes:
        """With `usual` for what was left open."""
        return CacheTypes(*(usual if name == AUTO else name for name in (self.k, self.v)))

    def nbytes(self, key_size: int, value_size: int | None = None) -> int:
        """Bytes of a head's key and value at one position, of one size if only one is given; not
        for AUTO.
        """
        from .formats import by_name

        sizes = key_size, key_size if value_size is None else value_size
        types = self.k, self.v
        return sum(by_name(name).row_bytes(n) for name, n in zip(types, sizes, strict=True))

    def check_head(self, key_size: int, value_size: int | None = None) -> None:
        """ValueError where a head is no whole number of a type's blocks; of one size if only one is
        given.
        """
        sizes = key_size, key_size if value_size is None else value_size
        for option, name, size in zip(("-ctk", "-ctv"), (self.k, self.v), sizes, strict=True):
            if name.startswith("q") and size % BLOCK:
                raise ValueError(
                    f"{option} {name} keeps {BLOCK} elements of a head together, and this model's "
                    f"heads have {size}: choose f16 or bf16"
                )


USUAL = CacheTypes()
