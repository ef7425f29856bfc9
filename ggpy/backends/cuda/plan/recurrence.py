"""Chooses the kernels that compute the recurrence of a gated delta net."""

from __future__ import annotations

from enum import Enum

from ....kernels.delta.delta import CHUNK
from ....kernels.delta.delta_chunks import has_chunks
from ....kernels.delta.delta_decode import cluster_of
from ...interface import Recurrent
from ..delta.states import shape_of
from .problem import StepClass


class Recurrence(Enum):
    """How the tokens of a step are computed."""

    DECODE = "decode"  # one token per sequence; one kernel computes all between the products
    CHUNKS = "chunks"  # whole chunks of a sequence at once, on tensor cores
    SCAN = "scan"  # token after token


def recurrence_of(spec: Recurrent, s: StepClass, arch: str, is_prefill: bool) -> Recurrence:
    """Chooses the recurrence. The bits of chunks depend on where they begin, and so on how a prompt
    is divided into steps. is_prefill: such differences are allowed.
    """
    shape = shape_of(spec)
    if s.decode and s.fused and cluster_of(shape, arch):
        return Recurrence.DECODE
    chunked = is_prefill and s.n_tokens >= CHUNK and has_chunks(shape, arch)
    return Recurrence.CHUNKS if chunked else Recurrence.SCAN
