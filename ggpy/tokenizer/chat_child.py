"""The process in which one chat template runs: a request on stdin, an answer on stdout, both JSON.

`chat` starts it as a program, isolated, so it imports nothing of ggpy. What it may use is set
before the template is read, and enforced by the system: the kernel ends it at the time limit, an
allocation beyond the memory limit fails. It must not know who asks.

Arguments: seconds of processor time, bytes of address space, folders to import jinja2 and
markupsafe from.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

OUT_OF_MEMORY = 70
OLDEST = (3, 1, 6)  # jinja2: earlier sandboxes let templates out (CVE-2025-27516)
_NAME = "<template>"  # what jinja2 calls a template from a string, in tracebacks


def limit(seconds: float, memory: int) -> None:
    """Bound what this process may use; starting it counts, but leaves at least half of the time."""
    try:
        import resource
        import signal
    except ImportError:  # Windows: the caller's clock is all there is
        return
    with suppress(ValueError, OSError):  # macOS, or a lower limit that is there already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, max(seconds - time.process_time(), seconds / 2, 0.01))


def too_old() -> str:
    """What is wrong with the jinja2 that is installed; empty if it can be trusted."""
    import jinja2

    version = getattr(jinja2, "__version__", "")  # which later ones may leave out
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not version or found >= OLDEST:
        return ""
    return f"jinja2 {version} has a hole in its sandbox: pip install 'jinja2>=3.1.6'"


def environment() -> Any:
    """Jinja as transformers sets it up for chat templates."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks what was trained on: its body stays."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = time.strftime
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def join(pieces: Iterable[str], max_chars: int) -> str:
    """The text of all pieces; ValueError as soon as it has more than `max_chars` characters."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"writes more than {max_chars} characters")
        kept.append(piece)
    return "".join(kept)


def answer(request: dict[str, Any], made: Any) -> dict[str, Any]:
    """{"text"} of the rendered template, or {"error", "line"}."""
    try:
        template = made.from_string(request["template"])
        pieces = template.generate(**request["variables"])
        return {"text": join(pieces, request["max_chars"])}
    except MemoryError:
        raise
    except RecursionError as error:
        return {"error": "calls itself too deeply", "line": line_of(error)}
    except Exception as error:
        return {"error": described(error), "line": line_of(error)}


def described(error: Exception) -> str:
    """One line: jinja2's own errors speak for themselves, Python's need their kind."""
    message = " ".join(str(getattr(error, "message", None) or error)[:4000].split())[:500]
    own = type(error).__module__.startswith("jinja2") or type(error) is ValueError
    return message if own and message else f"{type(error).__name__}: {message}"


def line_of(error: BaseException) -> int | None:
    """The template's line: a syntax error knows it, else the innermost frame in the template."""
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main(write: Callable[[bytes], object]) -> int:
    """Answer one request; the exit status tells what no message could."""
    seconds, memory, *folders = sys.argv[1:]
    sys.path += folders
    try:
        if old := too_old():
            write(json.dumps({"error": old, "line": None}).encode())
            return 0
        made = environment()
        request = json.loads(sys.stdin.buffer.read())
        limit(float(seconds), int(memory))
        write(json.dumps(answer(request, made)).encode())
    except MemoryError:
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    status = main(sys.stdout.buffer.write)
    sys.stdout.buffer.flush()
    os._exit(status)  # nothing to clean up, and no memory to do it with
