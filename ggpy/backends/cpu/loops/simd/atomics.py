"""Atomic operations on int64 words that several threads change, sequentially consistent."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vector import call, op

I64 = ir.IntType(64)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


def _got(builder: Any, address: Any, *_: Any) -> Any:
    return builder.load_atomic(_word(builder, address), "seq_cst", 8)


def _put(builder: Any, address: Any, value: Any, *_: Any) -> Any:
    builder.store_atomic(value, _word(builder, address), "seq_cst", 8)
    return I64(0)


def _added(builder: Any, address: Any, value: Any, *_: Any) -> Any:
    return builder.atomic_rmw("add", _word(builder, address), value, "seq_cst")


def _exchanged(builder: Any, address: Any, old: Any, new: Any, *_: Any) -> Any:
    pair = builder.cmpxchg(_word(builder, address), old, new, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), I64)


def _copied(builder: Any, to: Any, source: Any, nbytes: Any, *_: Any) -> Any:
    byte = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(
        builder, builder.inttoptr(to, byte), builder.inttoptr(source, byte), nbytes, 1, align=1
    )
    return I64(0)


def _relax(builder: Any) -> Any:
    if platform.machine() in ("x86_64", "AMD64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif platform.machine() in ("aarch64", "arm64"):
        call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.IntType(32)(1)])
    return I64(0)


def _number(*_: Any) -> Any:
    return types.int64


got = op(_got, _number, 1)
put = op(_put, _number, 2)
added = op(_added, _number, 2)
exchanged = op(_exchanged, _number, 3)  # 1 if the word was `old` and is `new` now
copied = op(_copied, _number, 3)
relax = op(_relax, _number, 0)  # tells the core that this is a spin loop
