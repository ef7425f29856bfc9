"""How a program ends: its exit status, and for an error one line on stderr instead of a traceback.

A program that is asked to end, by Ctrl-C or by SIGTERM or SIGHUP, does so by an exception, so that
files it has not completed are removed. This module knows nothing about what programs do, and
imports nothing that takes time.
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
FAILED = 1  # the work had begun, and the machine failed
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
    """Calls `work`, which returns an exit status, and turns exceptions into messages and statuses.

    A reader of stdout that stops reading (`| head`) ends the work, and is no error; see `tell`.
    left: follows the message when the work was stopped or the machine failed, as ": nothing was
    written". is_bug: which errors are printed with their traceback. program: the beginning of a
    message, as "ggpy show".
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the program, as with `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
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
        if not stopped:  # a second signal must not interrupt the cleaning up
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
    """Prints a traceback as Python does, with control codes escaped."""
    text = "".join(traceback.format_exception(kind, error, trace))
    _say(messages.lines(text), FAILED)


def _say(text: str, status: int) -> int:
    """Prints a text to stderr; returns the status."""
    with suppress(OSError):  # a terminal that is gone
        print(text, file=sys.stderr, flush=True)
    return status


def tell(text: str) -> None:
    """Prints how far the work is; the work goes on when nobody reads stdout any more (`| head`)."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def discard(*streams: TextIO) -> None:
    """Leads streams to os.devnull, so that flushing them at exit does not fail on a closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
