"""Older GPUs that a newer one can be used as: `--as sm_80`, or GGPY_AS=sm_80 for any program.

Kernels are chosen, and compiled to PTX, for the older architecture; the driver compiles the PTX for
the GPU at hand. So every line that owners of such a GPU run is run, with its shared memory and its
launch features; the speed of memory and the number of SMs stay those of the GPU. Only names and
sizes: which GPU there is, is the business of `device.probe`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

VARIABLE = "GGPY_AS"
SHARED_BYTES = {  # architecture -> bytes of shared memory that a CTA may have
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
}


def asked() -> str | None:
    """The architecture that the environment asks for."""
    return os.environ.get(VARIABLE) or None


def ask(arch: str | None) -> None:
    """Ask for an architecture, None being the GPU's own, here and in processes started later."""
    if arch is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = arch


def add_option(parser: Any) -> None:
    """Give an argparse parser, or a group of one, the option --as."""
    parser.add_argument(
        "--as",
        action=_As,
        dest="simulated",
        choices=list(SHARED_BYTES),
        metavar="ARCH",
        help=f"use the GPU as if it were an older one: {', '.join(SHARED_BYTES)}",
    )


class _As(argparse.Action):
    """Asks for the architecture."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        ask(values)
        setattr(namespace, self.dest, values)
