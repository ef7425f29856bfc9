"""Where stdout and stderr lead."""

from __future__ import annotations

import os
import sys


def is_stdout_stderr() -> bool:
    """Whether both lead to one terminal, pipe or file, as after 2>&1."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):  # no underlying file, closed, or None
        return False
    return os.path.samestat(out, err)
