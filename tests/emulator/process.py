"""The process that runs kernels on the CPU (host/), and the language of its commands.

What ends it (a sanitizer's report, an invalid address, an endless loop) becomes an EmulatorError
with the report.
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
    """A kernel did what CUDA forbids; the text says what, where, and in which block and thread."""


ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=3:detect_stack_use_after_return=0:"
    "allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=3",
}


class Host:
    """The process that runs kernels, and its command language."""

    def __init__(self, program: Path) -> None:
        self._alone, self._busy = threading.RLock(), False
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
        """Send a command and return its answer; EmulatorError when it fails or the process ends."""
        with self._alone:
            self._busy = True
            try:
                return self._ask(command, a, b, payload, seconds)
            finally:
                self._busy = False
                self._free()

    def free(self, address: int) -> None:
        """Free memory. The garbage collector may ask for it in the middle of a command, of this
        thread or of another: then it comes behind that.
        """
        self._freed.append(address)
        if self._alone.acquire(blocking=False):
            try:
                if not self._busy:
                    self._free()
            finally:
                self._alone.release()

    def _free(self) -> None:
        self._busy = True
        try:
            while self._freed:
                with contextlib.suppress(EmulatorError, ValueError, OSError):  # it has ended
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
        """Exactly `size` bytes of the answer; EOFError when they do not come."""
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
    """A sanitizer's report without the map of its shadow memory and the frames of this emulator."""
    report = report.split("Shadow bytes around")[0].split("SUMMARY:")[0].strip()
    lines = [
        line
        for line in report.splitlines()
        if not re.search(r"#\d+ .*(/emulator/|__libc_start|_start \()", line)
    ]
    return "\n".join(lines[:60])
