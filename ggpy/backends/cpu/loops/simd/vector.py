"""Vectors as values in numba functions, and how an intrinsic is made.

A Vector is a numba type that LLVM keeps in registers; LLVM splits one that is wider than those of
the machine. The modules beside this one define the intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

BITS = {"u8": 8, "i16": 16, "i32": 32, "i64": 64}
I32 = ir.IntType(32)


class Vector(types.Type):
    """`lanes` numbers of one kind: "u8", "i16", "i32", "f16" or "f32"."""

    def __init__(self, kind: str, lanes: int) -> None:
        self.kind, self.lanes = kind, lanes
        super().__init__(f"{kind}x{lanes}")

    @property
    def element(self) -> ir.Type:
        """LLVM's type of one lane."""
        floats = {"f16": ir.HalfType(), "f32": ir.FloatType()}
        return floats.get(self.kind) or ir.IntType(BITS[self.kind])

    @property
    def llvm(self) -> ir.Type:
        """LLVM's type of the vector."""
        return ir.VectorType(self.element, self.lanes)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is one LLVM value."""

    def __init__(self, manager: Any, type: Vector) -> None:
        super().__init__(manager, type, type.llvm)


def op(emit: Callable[..., Any], result: Callable[..., types.Type], n: int) -> Any:
    """An intrinsic of n arguments: emit(builder, *values, *types) returns the LLVM value, and
    result(*types) its type.
    """

    def typed(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        signature = result(*arguments)(*arguments)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return emit(builder, *values, *sig.args)

        return signature, generate

    if n == 0:
        return intrinsic(lambda context: typed(()))
    if n == 1:
        return intrinsic(lambda context, a: typed((a,)))
    if n == 2:
        return intrinsic(lambda context, a, b: typed((a, b)))
    if n == 3:
        return intrinsic(lambda context, a, b, c: typed((a, b, c)))
    return intrinsic(lambda context, a, b, c, d: typed((a, b, c, d)))


def call(builder: Any, name: str, result: ir.Type, values: Sequence[Any]) -> Any:
    """A call of the LLVM intrinsic of this name."""
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def shuffled(builder: Any, a: Any, lanes: Sequence[int], b: Any = None) -> Any:
    """The lanes with these numbers, those of b counted after those of a."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, mask)


def constant(type: ir.Type, value: float | Sequence[float]) -> Any:
    """A vector of one number in all lanes, or of a number for each."""
    values = value if isinstance(value, Sequence) else [value] * type.count
    return ir.Constant(type, list(values))


def broadcast(builder: Any, value: Any, lanes: int) -> Any:
    """LLVM's vector with a number in all lanes."""
    one = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
    return shuffled(builder, builder.insert_element(one, value, I32(0)), [0] * lanes)
