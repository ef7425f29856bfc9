"""What the kernels of a gated delta net share (cuda/delta/delta.cuh): sizes and arguments."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..address import Address, address
from ..layout.pack import PLAIN, UNIT

LANES = 8  # of a column of a matrix
CHUNK = 64  # tokens
ROW = 32  # columns of a matrix are as long as a multiple of this
MAX_SIZE = 256  # elements of a head


class DeltaArgs(ctypes.Structure):
    """struct DeltaArgs of cuda/delta/delta.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("sequences", "first", "pages")),
        *((name, ctypes.c_uint64) for name in ("conv_state", "matrices", "projected")),
        *((name, ctypes.c_uint64) for name in ("beta", "alpha", "taps_of", "a", "dt")),
        *((name, ctypes.c_uint64) for name in ("u", "decay", "solved", "o")),
        *((name, ctypes.c_uint64) for name in ("gate", "norm", "out")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("n_k_head", "n_v_head", "size")),
        *(
            (name, ctypes.c_int)
            for name in ("n_tokens", "n_sequences", "tiled", "order", "chunked")
        ),
    )


@dataclass(frozen=True)
class DeltaShape:
    """Sizes: key heads, value heads, elements of a head, taps of the convolution."""

    n_k_head: int
    n_v_head: int
    size: int
    taps: int

    @property
    def problem(self) -> str:
        """What no kernel computes; empty if all is well."""
        if self.size > MAX_SIZE or self.size % 4:
            return f"states of {self.size} rows (multiples of 4 up to {MAX_SIZE} are)"
        return ""

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.n_k_head + self.n_v_head) * self.size

    @property
    def quads(self) -> int:
        """QUADS of delta_scan."""
        return -(-self.size // ROW)

    @property
    def packs(self) -> bool:
        """Whether the output can be packed: there are no padding columns."""
        return self.n_v_head * self.size % UNIT == 0

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution's part of a state."""
        return 4 * (self.taps - 1) * self.channels

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices of a state."""
        return 4 * self.n_v_head * self.size * ROW * self.quads


@dataclass(frozen=True)
class DeltaStep:
    """The sequences of a step: int sequences[n_tokens], first[n_sequences + 1], and pages
    [n_sequences, 2].
    """

    sequences: Address
    first: Address
    pages: Address
    n_tokens: int
    n_sequences: int


@dataclass(frozen=True)
class DeltaWeights:
    """f32 vectors of a layer: taps[C * taps], a[Hv], dt[Hv], and the norm[S] with its eps."""

    taps: Address
    a: Address
    dt: Address
    norm: Address
    eps: float
    tiled: bool


@dataclass(frozen=True)
class DeltaBuffers:
    """Activations: f32 projected[T, C], gate[T, Hv*S], beta[T, Hv], alpha[T, Hv], u[T, C], decay[T,
    Hv, 2], o[T, Hv*S]; f16 out[T, Hv*S], in rows or packed in `order`. Chunks overwrite `projected`
    and `decay`.
    """

    projected: Address
    gate: Address
    beta: Address
    alpha: Address
    u: Address
    decay: Address
    o: Address
    out: Address
    order: int = PLAIN


def args_of(
    shape: DeltaShape,
    step: DeltaStep,
    state: tuple[Address, Address],
    weights: DeltaWeights,
    buffers: DeltaBuffers,
    chunked: bool = False,
) -> DeltaArgs:
    """What all kernels take; state: the layer's parts for convolution and matrices. chunked: whole
    chunks of sequences are DeltaChunks'. ValueError for an output that cannot be packed.
    """
    s, b, w = shape, buffers, weights
    if b.order != PLAIN and not s.packs:
        raise ValueError(f"{s.n_v_head} heads of {s.size} elements cannot be packed")
    memory = (
        *(step.sequences, step.first, step.pages, *state, b.projected, b.beta, b.alpha),
        *(w.taps, w.a, w.dt, b.u, b.decay, b.projected, b.o, b.gate, w.norm, b.out),
    )
    sizes = s.n_k_head, s.n_v_head, s.size, step.n_tokens, step.n_sequences
    return DeltaArgs(*map(address, memory), w.eps, *sizes, int(w.tiled), b.order, int(chunked))
