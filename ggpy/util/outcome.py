"""How a program ends: its exit status, and for an error one line on stderr instead of a traceback.

A program that is asked to end, by Ctrl-C or by SIGTERM or SIGHUP, does so by an exception, so that
what it was writing goes. It knows nothing about what programs do, and imports nothing that costs
time.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, TextIO

from . import messages

INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
REFUSED = 2  # what was asked for cannot be done
FAILED = 1  # it was begun, and the machine failed at it
SIGNALS = ("SIGTERM", "SIGHUP")  # which end a program as Ctrl-C does


class Stopped(SystemExit):
    """SIGTERM or SIGHUP came; `status` is 128 + signal, which a shell would report."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)
        self.signal = signal.Signals(number).name


def ended(
    work: Callable[[], int],
    left: str = "",
    is_bug: Callable[[Exception], bool] = lambda error: False,
    program: str = "ggpy",
) -> int:
    """The exit status of a program that does `work`, which returns one when nothing goes wrong.

    A reader of stdout that stops reading (`| head`) ends it, and is no error; see `tell`. left:
    what is said after the message when the work was stopped or the machine failed, as ": nothing
    was written". is_bug: which errors are told with their traceback. program: what a message
    begins with, as "ggpy show".
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without ± and Δ
    sys.excepthook = _bug
    with stoppable():
        try:
            status = work()
            sys.stdout.flush()
        except KeyboardInterrupt:
            return _say(f"{program}: interrupted{left}", INTERRUPTED)
        except Stopped as stop:
            return _say(f"{program}: ended by {stop.signal}{left}", stop.status)
        except BrokenPipeError:
            discard(sys.stdout, sys.stderr)
            return 0
        except (ValueError, OSError, MemoryError) as error:
            _trace(error, is_bug)
            told = f"{one_line(error)}{left if isinstance(error, OSError) else ''}"
            return _say(f"{program}: error: {told}", REFUSED)
        except (RuntimeError, ArithmeticError) as error:
            _trace(error, is_bug)
            # A compiler's log keeps its lines, which matter.
            return _say(f"{program}: error: {messages.lines(str(error))}{left}", FAILED)
    return status


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Stopped, once, unless they are ignored (`nohup`)."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:  # what is cleaning up is left alone
            stopped = True
            raise Stopped(number)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread
        for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: BaseException) -> str:
    """What an error says, in one line that a terminal can show."""
    if isinstance(error, OSError) and error.strerror:
        file = f"{error.filename}: " if error.filename else ""
        return messages.one_line(f"{file}{error.strerror}")
    return messages.one_line(str(error)) or type(error).__name__


def _trace(error: Exception, is_bug: Callable[[Exception], bool]) -> None:
    if is_bug(error):
        _bug(type(error), error, error.__traceback__)


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, but for codes that a terminal obeys."""
    text = "".join(traceback.format_exception(kind, error, trace))
    _say(messages.lines(text), FAILED)


def _say(text: str, status: int) -> int:
    """The status, after a text on stderr."""
    with suppress(OSError):  # a terminal that is gone
        print(text, file=sys.stderr, flush=True)
    return status


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
