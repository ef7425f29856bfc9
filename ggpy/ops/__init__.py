"""Backends: `choose` is the one place that decides which machine computes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .interface import Ops


def choose(
    device: str = "auto", n_threads: int | None = None, note: Callable[[str], None] | None = None
) -> Ops:
    """The ops for "auto", "cpu", "cuda" or "cuda:N"; ValueError when that device cannot be had.

    n_threads: of the CPU's matrix products; None is a modest number. note: gets one-line remarks
    for the user.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        raise ValueError(
            f"device {device!r} needs a GPU backend, which this installation does not have: use cpu"
        )
    from .reference import Reference

    reason = "as asked" if device == "cpu" else "this installation has no GPU backend"
    return Reference(n_threads, reason=reason, note=note or (lambda message: None))
