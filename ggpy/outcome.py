"""How a program ends: its exit status, and for an error one line on stderr instead of a traceback.

It knows nothing about what programs do, and imports nothing that costs time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
REFUSED = 2  # what was asked for cannot be done
FAILED = 1  # it was begun, and the machine failed at it


def ended(work: Callable[[], int]) -> int:
    """The exit status of a program that does `work`, which returns one when nothing goes wrong.

    A reader of stdout that stops reading (`| head`) ends it, and is no error; see `tell`.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without ± and Δ
    try:
        status = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("ggpy: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        return 0
    except (ValueError, OSError, MemoryError) as error:
        return _said(error, REFUSED)
    except (RuntimeError, ArithmeticError) as error:
        return _said(error, FAILED)
    return status


def _said(error: Exception, status: int) -> int:
    """The status; a compiler's log keeps its lines, which matter."""
    print(f"ggpy: error: {error if status == FAILED else one_line(error)}", file=sys.stderr)
    return status


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def tell(text: str) -> None:
    """Print how far the work is: it goes on when nobody reads that any more (`| head`)."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def discard(*streams: TextIO) -> None:
    """Let nothing go to a pipe that nobody reads, not even when Python closes its files."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
