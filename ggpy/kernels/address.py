"""Addresses inside parameter structures, where a buffer cannot stand for itself."""

from __future__ import annotations

from ..device.base import Buffer, Ptr

Address = Buffer | Ptr


def address(memory: Address | None) -> int:
    """The pointer; None is null."""
    if memory is None:
        return 0
    return memory.address if isinstance(memory, Buffer) else memory.ptr
