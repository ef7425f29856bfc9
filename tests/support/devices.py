"""Devices for kernel tests: the GPU if there is one, and the emulator on the CPU, with and
without sanitizers.

A test opens a `kind` of KINDS. Kinds that this machine lacks are skipped with a reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulator import build
from emulator.emulated import Emulated

from ggpy.device.probe import NoGpu, probe

KINDS = ("emulator", "sanitizer", "cuda")


def open_device(kind: str, cuda: Path | None = None) -> Any:
    """Open a device, or skip the test if there is none. The caller closes an Emulated device."""
    if kind == "cuda":
        found = probe()
        if isinstance(found, NoGpu):
            pytest.skip(found.reason)
        from ggpy.device.gpu import CudaDevice

        return CudaDevice(cuda=cuda)
    reason = build.unavailable(kind == "sanitizer")
    if reason:
        pytest.skip(reason)
    return Emulated(cuda=cuda, sanitize=kind == "sanitizer")
