"""C++ that does not compile unless a struct lies in memory as its mirror in Python does.

A launch copies the bytes of a ctypes structure, or of a numpy record, into a C++ struct that is
declared in cuda/ under the same name, with fields of the same names. The asserts here compare the
sizes of the two, and the offset and the size of every field. Wrappers give them to the compiler
after the kernel's source (`extra_source`); they add no machine code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np

from ..formats.base import HAS_OFFSETOF

Field = tuple[str, int, int]  # name, offset, size, both in bytes

# offsetof is defined for structs without a base; NVRTC and g++ extend it to all of these.
_PRAGMAS = """#ifdef __CUDACC_RTC__
#pragma nv_diag_suppress 1427
#else
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif"""


def struct_asserts(*structures: type[ctypes.Structure]) -> str:
    """Asserts of the structures, of their bases and of the structures that they contain."""
    found: dict[type[ctypes.Structure], None] = {}
    for structure in structures:
        found.update(dict.fromkeys(_with_parts(structure)))
    return _asserts((s.__name__, ctypes.sizeof(s), _own_fields(s)) for s in found)


def record_asserts(struct: str, dtype: np.dtype) -> str:
    """Asserts of the C++ struct that mirrors a record of this dtype."""
    fields = [(name, entry[1], entry[0].itemsize) for name, entry in (dtype.fields or {}).items()]
    return _asserts([(struct, dtype.itemsize, fields)])


def _with_parts(structure: type[ctypes.Structure]) -> Iterator[type[ctypes.Structure]]:
    for base in reversed(structure.__mro__):
        for _, kind, *_ in vars(base).get("_fields_", ()):
            while issubclass(kind, ctypes.Array):
                kind = kind._type_
            if issubclass(kind, ctypes.Structure):
                yield from _with_parts(kind)
        if "_fields_" in vars(base):
            yield base


def _own_fields(structure: type[ctypes.Structure]) -> list[Field]:
    """The fields of a structure without those of its bases, which have their own asserts."""
    names = [field[0] for field in vars(structure)["_fields_"]]
    return [(n, getattr(structure, n).offset, getattr(structure, n).size) for n in names]


def _asserts(structs: Iterable[tuple[str, int, list[Field]]]) -> str:
    sizes, offsets = [], []
    for struct, size, fields in structs:
        sizes.append(f"sizeof({struct}) == {size}")
        sizes += [f"sizeof({struct}::{name}) == {size}" for name, _, size in fields]
        offsets += [f"__builtin_offsetof({struct}, {name}) == {at}" for name, at, _ in fields]
    sizes, offsets = ([f'static_assert({c}, "{c}");' for c in some] for some in (sizes, offsets))
    return "\n".join([_PRAGMAS, *sizes, HAS_OFFSETOF, *offsets, "#endif"])
