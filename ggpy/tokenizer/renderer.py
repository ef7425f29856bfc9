"""The processes that render chat templates: started once for a template, asked for every prompt.

Starting Python and Jinja takes 60 ms, a request to a running process 2. Each process has one
template; one whose request exceeded a limit is ended, and the next request starts another. This
module must not know messages: a request is bytes of JSON.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from .chat_child import ANSWER, REQUEST

MOST_IDLE = 4  # processes that wait for requests
MOST_BUSY = 4  # requests at the same time

_CHILD = Path(__file__).with_name("chat_child.py")
_GRACE = 4.0  # the clock may show this many times the processor time, on a busy machine


class RendererError(Exception):
    """No process could be started, or it was not done in time."""


class Renderer:
    """A pool of processes with templates; `ask` may be called by several threads."""

    def __init__(self) -> None:
        self._idle: deque[_TemplateProcess] = deque()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_BUSY)
        self._owner = os.getpid()

    def ask(self, template: str, request: bytes, seconds: float, memory: int) -> tuple[int, bytes]:
        """Exit status and answer of rendering a request, as `chat_child` gives them.

        A request may use `seconds` of processor time and `memory` bytes of address space.
        RendererError if no process can be started, or if this one is not done in time.
        """
        with self._places:
            process = self._take(template) or _TemplateProcess(template, seconds, memory)
            status, answer = process.ask(request, seconds, memory)
            if status == 0 and process.stays:
                self._give(process)
            else:
                process.close()
            return status, answer

    def close(self) -> None:
        """End the processes that wait; later requests start others."""
        with self._lock:
            processes, self._idle = self._idle, deque()
        for process in processes:
            process.close()

    def _take(self, template: str) -> _TemplateProcess | None:
        with self._lock:
            if self._owner != os.getpid():  # a fork: the processes are those of its parent
                self._idle, self._owner = deque(), os.getpid()
            for process in self._idle:
                if process.template == template and process.is_alive:
                    self._idle.remove(process)
                    return process
        return None

    def _give(self, process: _TemplateProcess) -> None:
        with self._lock:
            self._idle.append(process)
            oldest = self._idle.popleft() if len(self._idle) > MOST_IDLE else None
        if oldest is not None:
            oldest.close()


class _TemplateProcess:
    """A process that has compiled one template."""

    def __init__(self, template: str, seconds: float, memory: int) -> None:
        self.template = template
        self.stays = hasattr(os, "fork")
        self._process = _started()
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        source = template.encode("utf-8", "replace")
        self._opening = REQUEST.pack(len(source), seconds, memory) + source

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, request: bytes, seconds: float, memory: int) -> tuple[int, bytes]:
        """Exit status and answer of one request; RendererError when it takes too long."""
        # Where processor time is limited, the clock is a second line; elsewhere it is the only one.
        clock = seconds * (_GRACE if hasattr(signal, "setitimer") else 1.0) + 1.0
        late = threading.Event()

        def stop() -> None:
            late.set()
            _kill(self._process)

        timer = threading.Timer(clock, stop)
        timer.daemon = True
        timer.start()
        try:
            answer = self._exchange(REQUEST.pack(len(request), seconds, memory) + request)
        finally:
            timer.cancel()
        if late.is_set():
            self.close()
            raise RendererError(f"was not done after {clock:g} s")
        if answer is None:
            self.close()
            return self._process.returncode, b""
        return answer

    def _exchange(self, frame: bytes) -> tuple[int, bytes] | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(OSError):  # a process that ended says by its status why
            stdin.write(self._opening + frame)
            stdin.flush()
        self._opening = b""
        header = stdout.read(ANSWER.size)
        if len(header) < ANSWER.size:
            return None
        status, length = ANSWER.unpack(header)
        body = stdout.read(length)
        return (status, body) if len(body) == length else None

    def close(self) -> None:
        """End it and wait for its end."""
        self._end()


def _started() -> subprocess.Popen[bytes]:
    # Isolated (-I) and without site (-S): it starts sooner, and runs nothing of the user's.
    command = [sys.executable or "python3", "-I", "-S", str(_CHILD), *_library_folders()]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise RendererError(f"no process could be started to render it: {error}") from None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if owner == os.getpid():
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and those that it forked."""
    if process.poll() is not None:
        return
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _environment() -> dict[str, str]:
    """No variable, so that templates learn nothing about the user; Windows needs SYSTEMROOT."""
    return {k: v for k, v in os.environ.items() if os.name == "nt" and k.upper() == "SYSTEMROOT"}


def _library_folders() -> list[str]:
    """Where the packages are that the child needs, without importing them here."""
    folders = []
    for package in ("jinja2", "markupsafe"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise RendererError(f"rendering it needs {package}: pip install {package}")
        folders.append(str(Path(spec.origin).parent.parent))
    return folders
