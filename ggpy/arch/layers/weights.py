"""The weights of one layer by name, from which its parts are built. Knows no kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...backends.interface import Norm, Weight


@dataclass(frozen=True)
class LayerWeights:
    """Weights by their names below a prefix ("blk.0."); the file need not have all of them."""

    all: Mapping[str, Weight]
    prefix: str
    eps: float  # of norms
    centred: bool = False  # norms are layer norms

    def __getitem__(self, name: str) -> Weight:
        return self.all[self.prefix + name]

    def get(self, name: str) -> Weight | None:
        """None where the file has no such tensor."""
        return self.all.get(self.prefix + name)

    def norm(self, stem: str, eps: float | None = None) -> Norm:
        """The norm with stem "attn_norm" has attn_norm.weight, and attn_norm.bias if it exists.

        eps: None is that of the other norms.
        """
        bias = self.get(stem + ".bias")
        own = self.eps if eps is None else eps
        return Norm(self[stem + ".weight"], own, bias, self.centred)

    def get_norm(self, stem: str, eps: float | None = None) -> Norm | None:
        """None where the file has no such norm."""
        return None if self.get(stem + ".weight") is None else self.norm(stem, eps)
