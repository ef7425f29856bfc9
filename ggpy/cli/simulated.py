"""The option --as, which uses the GPU as if it were an older one (ggpy/util/simulated.py)."""

from __future__ import annotations

import argparse
from typing import Any

from ..util.simulated import SHARED_BYTES, ask


def add_option(parser: Any) -> None:
    """Adds --as to an argparse parser, or to a group of one."""
    parser.add_argument(
        "--as",
        action=_As,
        dest="simulated",
        choices=list(SHARED_BYTES),
        metavar="ARCH",
        help=f"use the GPU as if it were an older one: {', '.join(SHARED_BYTES)}",
    )


class _As(argparse.Action):
    """Asks for the architecture as soon as the option is read."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        ask(values)
        setattr(namespace, self.dest, values)
