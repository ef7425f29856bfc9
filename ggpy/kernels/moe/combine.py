"""Launches cuda/moe/combine.cu: what stands between and after the products of experts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...device.base import Device
from ..address import Address, address
from ..struct_asserts import struct_asserts
from .route import MAX_USED

THREADS = 64  # of a CTA: with a token alone, more SMs take part
COLUMNS = 4  # of a thread
RESIDENT_CTAS = {False: 16, True: 6}  # of `combine` on an SM, without and with biases
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}


class CombineArgs(ctypes.Structure):
    """struct CombineArgs of cuda/moe/combine.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "y", "bias", "ids", "weights", "row_of")),
        *((name, ctypes.c_uint64) for name in ("shared", "strength")),
        *((name, ctypes.c_int) for name in ("n_tokens", "columns", "n_used")),
    )


ASSERTS = struct_asserts(CombineArgs)


@dataclass(frozen=True)
class ExpertOutputs:
    """What `combine` adds up: f32 y[T * n_used, columns] and bias[n_expert, columns] of the chosen
    experts, int ids and f32 weights [T * n_used], int row_of[T * n_used] of a sorted step, and f32
    shared[T, columns] times strength[T].
    """

    y: Address
    ids: Address
    weights: Address
    bias: Address | None = None
    row_of: Address | None = None
    shared: Address | None = None
    strength: Address | None = None


class Combine:
    """The elementwise kernels of experts; weighs_input: whose weights multiply what they take."""

    def __init__(self, device: Device, weighs_input: bool = False) -> None:
        self.device = device
        names = ["expert_glu", "combine<false>", "combine<true>"]
        defines = {"WEIGHS_INPUT": 1} if weighs_input else {}
        found = device.kernels("moe/combine.cu", names, defines=defines, extra_source=ASSERTS)
        self._glu, self._combine, self._combine_with_biases = found

    def glu(
        self,
        parts: tuple[Address, Address],
        biases: tuple[Address | None, Address | None],
        ids: Address,
        pair_of: Address | None,
        h: Address,
        n_rows: int,
        columns: int,
        activation: str,
        weights: Address | None = None,
    ) -> None:
        """Enqueue f16 h[n_rows, columns] of gate and up, f32, and their biases [n_expert, columns].

        pair_of: int [n_rows] of a sorted step; None: row r is of pair r. weights: f32 [n_rows] of
        the pairs, if they multiply what experts take.
        """
        args = (*parts, *biases, ids, pair_of, h, columns, ACTIVATIONS[activation], weights)
        self._glu.launch(_grid(columns, n_rows), THREADS, args, pdl=True)

    def launch(
        self, x: Address, o: ExpertOutputs, n_tokens: int, n_used: int, columns: int
    ) -> None:
        """Enqueue x += the outputs of the experts of each token; x is f32 [n_tokens, columns].
        ValueError for more than MAX_USED experts of a token.
        """
        if n_used > MAX_USED:
            raise ValueError(f"{n_used} experts of a token, {MAX_USED} are the most")
        memory = x, o.y, o.bias, o.ids, o.weights, o.row_of, o.shared, o.strength
        args = CombineArgs(*map(address, memory), n_tokens, columns, n_used)
        kernel = self._combine if o.bias is None else self._combine_with_biases
        ctas, rows = _grid(columns, n_tokens)
        resident = RESIDENT_CTAS[o.bias is not None] * self.device.sm_count
        kernel.launch((ctas, min(rows, max(1, resident // ctas))), THREADS, (args,), pdl=True)


def _grid(columns: int, rows: int) -> tuple[int, int]:
    if columns % COLUMNS:
        raise ValueError(f"rows of {columns} columns: a multiple of {COLUMNS} is needed")
    return -(-columns // (THREADS * COLUMNS)), rows
