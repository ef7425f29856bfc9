"""Launches cuda/delta/delta_net.cu: a gated delta net between its products."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...device.base import Device, Kernel
from ..address import Address, address
from ..struct_asserts import struct_asserts

LANES, COLUMNS = 8, 16
ROW = 32  # columns of a matrix are as long as a multiple of this
MAX_SIZE = 256  # elements of a head


class DeltaArgs(ctypes.Structure):
    """struct DeltaArgs of cuda/delta/delta_net.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("sequences", "first", "pages")),
        *((name, ctypes.c_uint64) for name in ("conv_state", "matrices", "projected")),
        *((name, ctypes.c_uint64) for name in ("beta", "alpha", "taps_of", "a", "dt")),
        *((name, ctypes.c_uint64) for name in ("u", "decay", "o", "gate", "norm", "out")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("n_k_head", "n_v_head", "size", "taps", "tiled")),
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
    Hv, 2], o[T, Hv*S]; f16 out[T, Hv*S].
    """

    projected: Address
    gate: Address
    beta: Address
    alpha: Address
    u: Address
    decay: Address
    o: Address
    out: Address


class DeltaNet:
    """The kernels of one shape."""

    def __init__(self, device: Device, shape: DeltaShape) -> None:
        """ValueError for what no kernel computes."""
        if shape.problem:
            raise ValueError(shape.problem)
        self.shape = shape
        names = ["delta_conv", f"delta_scan<{shape.quads}>", "delta_norm"]
        found: list[Kernel] = device.kernels("delta/delta_net.cu", names, extra_source=ASSERTS)
        self._conv, self._scan, self._norm = found

    def launch(
        self,
        step: DeltaStep,
        state: tuple[Address, Address],
        weights: DeltaWeights,
        buffers: DeltaBuffers,
    ) -> None:
        """Enqueue u, o and out; state: the layer's parts for convolution and matrices."""
        s, b, w = self.shape, buffers, weights
        memory = (
            *(step.sequences, step.first, step.pages, *state, b.projected, b.beta, b.alpha),
            *(w.taps, w.a, w.dt, b.u, b.decay, b.o, b.gate, w.norm, b.out),
        )
        sizes = s.n_k_head, s.n_v_head, s.size, s.taps, int(w.tiled)
        args = (DeltaArgs(*map(address, memory), w.eps, *sizes),)
        threads, n = -(-s.size // 32) * 32, step.n_tokens
        self._conv.launch((2 * s.n_k_head + s.n_v_head, n), threads, args, pdl=True)
        blocks = s.n_v_head * -(-s.size // COLUMNS)
        self._scan.launch((blocks, step.n_sequences), COLUMNS * LANES, args, pdl=True)
        self._norm.launch((s.n_v_head, n), threads, args, pdl=True)
