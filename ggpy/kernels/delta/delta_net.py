"""Launches cuda/delta/delta_net.cu: a gated delta net between its products, and what its other
kernels share: sizes, arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.pack import PLAIN, UNIT
from ..struct_asserts import struct_asserts

LANES, COLUMNS = 8, 16
HEADS, CONV_TOKENS = 8, 4  # of a CTA of delta_conv
ROW = 32  # columns of a matrix are as long as a multiple of this
MAX_SIZE = 256  # elements of a head


class DeltaArgs(ctypes.Structure):
    """struct DeltaArgs of cuda/delta/delta.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("sequences", "first", "pages")),
        *((name, ctypes.c_uint64) for name in ("conv_state", "matrices", "projected")),
        *((name, ctypes.c_uint64) for name in ("beta", "alpha", "taps_of", "a", "dt")),
        *((name, ctypes.c_uint64) for name in ("u", "decay", "o", "gate", "norm", "out")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("n_k_head", "n_v_head", "size")),
        *((name, ctypes.c_int) for name in ("n_tokens", "tiled", "order")),
    )


ASSERTS = struct_asserts(DeltaArgs)


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
    Hv, 2], o[T, Hv*S]; f16 out[T, Hv*S], in rows or packed in `order`.
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
) -> DeltaArgs:
    """What all kernels take; state: the layer's parts for convolution and matrices."""
    s, b, w = shape, buffers, weights
    if b.order != PLAIN and not s.packs:
        raise ValueError(f"{s.n_v_head} heads of {s.size} elements cannot be packed")
    memory = (
        *(step.sequences, step.first, step.pages, *state, b.projected, b.beta, b.alpha),
        *(w.taps, w.a, w.dt, b.u, b.decay, b.o, b.gate, w.norm, b.out),
    )
    sizes = s.n_k_head, s.n_v_head, s.size, step.n_tokens
    return DeltaArgs(*map(address, memory), w.eps, *sizes, int(w.tiled), b.order)


class DeltaNet:
    """The kernels of one shape for steps of any number of tokens."""

    def __init__(self, device: Device, shape: DeltaShape) -> None:
        """ValueError for what no kernel computes."""
        if shape.problem:
            raise ValueError(shape.problem)
        self.shape = shape
        names = [f"delta_conv<{shape.quads}, {shape.taps}>", f"delta_scan<{shape.quads}>"]
        names.append(f"delta_norm<{shape.quads}>")
        found: list[Kernel] = device.kernels("delta/delta_net.cu", names, extra_source=ASSERTS)
        self._conv, self._scan, self._norm = found

    def launch(
        self,
        step: DeltaStep,
        state: tuple[Address, Address],
        weights: DeltaWeights,
        buffers: DeltaBuffers,
    ) -> None:
        """Enqueue u, o and out; see args_of."""
        s, n = self.shape, step.n_tokens
        args = (args_of(s, step, state, weights, buffers),)
        heads = -(-(2 * s.n_k_head + s.n_v_head) // HEADS)
        self._conv.launch((heads, -(-n // CONV_TOKENS)), HEADS * 32, args, pdl=True)
        blocks = s.n_v_head * -(-s.size // COLUMNS)
        self._scan.launch((blocks, step.n_sequences), COLUMNS * LANES, args, pdl=True)
        self._norm.launch((-(-s.n_v_head // HEADS), n), HEADS * 32, args, pdl=True)
