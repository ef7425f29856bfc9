"""Older GPUs that a newer GPU can be used as: GGPY_AS=sm_80 for any program.

Kernels are selected, and compiled to PTX, for the older architecture, and the driver compiles the
PTX for the actual GPU. So exactly the code that an owner of the older GPU runs is run, within its
shared memory and launch features; memory bandwidth and the number of SMs stay those of the actual
GPU. Only names and sizes are here: `device.probe` finds GPUs, and `cli.simulated` is the option.
"""

from __future__ import annotations

import os

VARIABLE = "GGPY_AS"
SHARED_BYTES = {  # architecture -> maximum bytes of shared memory of a CTA
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
}


def asked() -> str | None:
    """Returns the architecture that the environment asks for."""
    return os.environ.get(VARIABLE) or None


def ask(arch: str | None) -> None:
    """Asks for an architecture, in this process and its children; None is the GPU's own."""
    if arch is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = arch
