"""Inputs and outputs of planning: a step's class, a product to compute, and its launches.

A product is y[T, N] = x[T, K] W[N, K]^T for one to four matrices with the same x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ....kernels.gemm.gemm import Epilogue
from ....kernels.layout.pack import PLAIN
from ..arrays import Matrix


class NormIn(Enum):
    """Where the norm of a product's input is computed."""

    NONE = "-"
    PROLOGUE = "prologue"  # by the product
    KERNEL = "kernel"
    DEFERRED = "deferred"  # by the previous product, up to a factor per token
    SHARED = "shared"  # by the kernel that ran for an earlier product of the same x, or made x


class StepClass(NamedTuple):
    """The properties of a step that decide which kernels run."""

    n_tokens: int
    n_rows: int  # rows whose logits are wanted
    decode: bool  # each token is the only one of its sequence
    all_rows: bool  # the wanted rows are all tokens, in order
    fused: bool = True  # no probe reads the outputs of single ops


@dataclass(frozen=True)
class Problem:
    """A product, or a part of one, for a single launch."""

    weights: Sequence[Matrix]
    n_tokens: int
    epilogue: Epilogue
    norm: bool = False  # x is not yet normalised
    # weights may be rounded to f16, and the order of sums may depend on the number of tokens
    prefill: bool = False
    out_layout: int = PLAIN
    whole: bool = True  # `weights` are all weights of the product


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One launch of a GEMM or GEMV kernel. inner: the GEMM that follows a conversion of weights to
    f16 tiles.
    """

    kernel: str
    part: slice  # which weights of the product
    inner: LaunchPlan | None = None


@dataclass(frozen=True, eq=False)
class ProductPlan:
    """How a product is computed.

    x_layout: the layout in which its kernels take x. leaves_factors: the norm's kernel stores the
    factor of each token, so that later norms may be deferred.
    """

    launches: tuple[LaunchPlan, ...]
    epilogue: Epilogue
    n_tokens: int
    x_layout: int = PLAIN
    norm: NormIn = NormIn.NONE
    leaves_factors: bool = False

    @property
    def takes_bias(self) -> bool:
        """Whether the epilogue ADD adds a bias, too."""
        return all(launch.kernel == "gemm_decode" for launch in self.launches)
