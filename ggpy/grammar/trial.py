"""Tries a grammar in a process of its own before it is compiled in this one.

llguidance bounds what a step costs, but not what compiling does: a short schema may take minutes,
or more stack than there is, and neither can be stopped from within. So `trial_child` compiles it
first, with the time and the memory it may use. The process stays for the next grammar, and is
replaced if a grammar ends it. Where the system has no such limits (Windows), the clock remains.
Nothing here knows the model's tokens.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from .errors import GrammarError, GrammarUntried, library, reason

SECONDS = 3.0  # of processor time for one grammar
MEMORY = 1 << 30  # bytes of address space
STACK = 16 << 20  # bytes, for the process's compiling thread; half of what this one's has

_CHILD = Path(__file__).with_name("trial_child.py")
_GRACE = 4.0  # the clock may show this many times the processor time, on a busy machine


class Trial:
    """A process that tries grammars, one at a time; it is started when the first one comes."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    def check(self, lark: str) -> None:
        """GrammarError where llguidance refuses the grammar, or needs too much for it;
        GrammarUntried where nothing is known.
        """
        with self._lock:
            answer = self._ask(json.dumps({"grammar": lark, "seconds": self.seconds}))
        if answer:
            raise GrammarError(answer)

    def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.communicate()

    def _ask(self, request: str) -> str:
        if self._owner != os.getpid():  # a fork: the process is that of its parent
            self._child, self._owner = None, os.getpid()
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = _start()
        child = self._child
        assert child.stdin and child.stdout
        clock = self.seconds * (_GRACE if hasattr(signal, "setitimer") else 1.0) + 1.0
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(clock, stop)
        timer.start()
        try:
            child.stdin.write(request.encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        except BaseException:  # an interrupt: the next grammar must not get the answer to this one
            self.close()
            raise
        finally:
            timer.cancel()
        if answer:
            wrong = str(json.loads(answer)["error"])
            return reason(wrong) if wrong else ""
        self.close()
        return self._ended(child.returncode, late.is_set())

    def _ended(self, status: int, late: bool) -> str:
        """What is wrong, where the process ended without an answer. late: the clock ended it."""
        if late or -status == getattr(signal, "SIGPROF", None):
            return f"the grammar takes more than {self.seconds:g} s to compile: simplify it"
        if -status == getattr(signal, "SIGKILL", None):  # by others: the system, which lacks memory
            raise GrammarUntried("the process that tries the grammar was killed: is memory short?")
        if status < 0:  # a signal: no stack is left, or no memory
            return f"the grammar is too large or too deep to compile: simplify it ({-status})"
        raise GrammarUntried(
            f"the grammar cannot be tried: the process for that ended with status {status}"
        )


def _start() -> subprocess.Popen[bytes]:
    library()
    spec = find_spec("llguidance")
    assert spec is not None and spec.origin is not None
    folder = str(Path(spec.origin).parent.parent)
    # Isolated (-I) and without site (-S): it starts sooner, and runs nothing of the user's.
    command = [sys.executable or "python3", "-I", "-S", str(_CHILD), str(MEMORY), str(STACK)]
    try:
        return subprocess.Popen(
            [*command, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k.upper() == "SYSTEMROOT"},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise GrammarUntried(f"no process could be started to try the grammar: {error}") from None
