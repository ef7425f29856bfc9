"""The process that runs kernels on the CPU (host/), and the protocol of its commands.

If the process ends (a sanitizer's report, an invalid address, an endless loop), a command raises
EmulatorError with the report.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path

from ggpy.device.base import CudaError


class EmulatorError(CudaError):
    """A kernel did what CUDA forbids. The message says what, where, and in which CTA and thread."""


ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=3:detect_stack_use_after_return=0:"
    "allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=3",
}


class Host:
    """The process that runs kernels, and its command protocol."""

    def __init__(self, program: Path) -> None:
        self._lock, self._busy = threading.RLock(), False
        self._freed: deque[int] = deque()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=1 << 16,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(
        self, command: str, a: int = 0, b: int = 0, payload: bytes = b"", seconds: float = 60
    ) -> bytes:
        """Send a command and return its answer. Raises EmulatorError if the command fails."""
        with self._lock:
            self._busy = True
            try:
                return self._ask(command, a, b, payload, seconds)
            finally:
                self._busy = False
                self._free()

    def free(self, address: int) -> None:
        """Free memory.

        The garbage collector may call this during a command of any thread. The memory is then freed
        after that command.
        """
        self._freed.append(address)
        if self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    self._free()
            finally:
                self._lock.release()

    def _free(self) -> None:
        self._busy = True
        try:
            while self._freed:
                with contextlib.suppress(EmulatorError, ValueError, OSError):  # process has ended
                    self._ask("F", self._freed.popleft())
        finally:
            self._busy = False

    def _ask(
        self, command: str, a: int = 0, b: int = 0, payload: bytes = b"", seconds: float = 60
    ) -> bytes:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(struct.pack("<4Q", ord(command), a, b, len(payload)))
            self._process.stdin.write(payload)
            self._process.stdin.flush()
            failed, size = struct.unpack("<2Q", self._read(16, seconds))
            answer = self._read(size, seconds)
        except (BrokenPipeError, EOFError):
            raise EmulatorError(self._obituary()) from None
        if failed:
            raise EmulatorError(answer.decode(errors="replace"))
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _read(self, size: int, seconds: float) -> bytes:
        """Read exactly `size` bytes of the answer. Raises EOFError if they do not arrive."""
        pipe, data = self._process.stdout, b""
        assert pipe
        while len(data) < size:
            ready = select.select([pipe], [], [], seconds)[0]
            chunk = os.read(pipe.fileno(), size - len(data)) if ready else b""
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _obituary(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        report = self._errors.read().decode(errors="replace").strip()
        return _digest(report) or f"the emulator's process ended with {self._process.returncode}"


def _digest(report: str) -> str:
    """A sanitizer's report without the shadow memory map and the stack frames of the emulator."""
    report = report.split("Shadow bytes around")[0].split("SUMMARY:")[0].strip()
    lines = [
        line
        for line in report.splitlines()
        if not re.search(r"#\d+ .*(/emulator/|__libc_start|_start \()", line)
    ]
    return "\n".join(lines[:60])
