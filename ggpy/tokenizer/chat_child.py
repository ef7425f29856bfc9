"""The process in which one chat template runs: frames on stdin, frames on stdout.

`renderer` starts it as a program, isolated, so it imports nothing of ggpy. It compiles the template
and then answers requests, each in a process forked from it, so that no request sees another. The
limits of compiling and of each request are set before the template's code runs, and the operating
system enforces them: it ends the process at the time limit, and an allocation beyond the memory
limit fails. Where the system cannot fork, the process answers one request itself. It must not know
who asks.

Arguments: folders to import jinja2 and markupsafe from. A frame's header is REQUEST or ANSWER.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

OUT_OF_MEMORY = 70
REQUEST = struct.Struct(">QdQ")  # bytes that follow, seconds of processor time, bytes of memory
ANSWER = struct.Struct(">iQ")  # exit status as of subprocess, bytes that follow
OLDEST = (3, 1, 6)  # of jinja2: templates can leave the sandbox of earlier ones (CVE-2025-27516)
_NAME = "<template>"  # what jinja2 calls a template from a string, in tracebacks
_WALL = 5.0  # a request may take this many times its processor time, plus one second


def limit(seconds: float, memory: int, last: bool = True) -> None:
    """Limits the processor time (seconds) and address space (bytes) of this process.

    Time that it has used already counts, but at least half of `seconds` is left. last: the limit of
    memory is a hard one, which cannot be raised again.
    """
    try:
        import resource
        import signal
    except ImportError:  # Windows: the caller's clock is all there is
        return
    with suppress(ValueError, OSError):  # macOS, or a lower limit that is there already
        hard = memory if last else resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    signal.setitimer(signal.ITIMER_PROF, max(seconds - time.process_time(), seconds / 2, 0.01))


def unlimit() -> None:
    """Lifts a `limit` that was not the last."""
    try:
        import resource
        import signal
    except ImportError:
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def too_old() -> str:
    """What is wrong with the installed jinja2; "" if its sandbox can be trusted."""
    import jinja2

    version = getattr(jinja2, "__version__", "")  # later versions may leave it out
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not version or found >= OLDEST:
        return ""
    return f"jinja2 {version} has a hole in its sandbox: pip install 'jinja2>=3.1.6'"


def environment() -> Any:
    """Jinja as transformers sets it up for chat templates, except that a template may change lists
    and dicts, as in llama.cpp: no other request sees them.
    """
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks what was trained on: its body stays."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    made = SandboxedEnvironment(
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
        value,
        default=listed,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def listed(value: Any) -> list[Any]:
    """An iterator, as filters like `map` return, as a list; TypeError for anything else."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def join(pieces: Iterable[str], max_chars: int) -> str:
    """The text of all pieces; ValueError as soon as it has more than `max_chars` characters."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"writes more than {max_chars} characters")
        kept.append(piece)
    return "".join(kept)


def compiled(source: str, made: Any) -> tuple[Any, dict[str, Any] | None]:
    """(the template, None), or (None, {"error", "line"})."""
    try:
        return made.from_string(source), None
    except MemoryError:
        raise
    except Exception as error:
        return None, told(error)


def answer(request: dict[str, Any], template: Any) -> dict[str, Any]:
    """{"text"} of the rendered template, or {"error", "line"}."""
    try:
        pieces = template.generate(**request["variables"])
        return {"text": join(pieces, request["max_chars"])}
    except MemoryError:
        raise
    except Exception as error:
        return told(error)


def told(error: Exception) -> dict[str, Any]:
    """What is wrong, and where in the template."""
    deep = isinstance(error, RecursionError)
    return {
        "error": "calls itself too deeply" if deep else described(error),
        "line": line_of(error),
    }


def described(error: Exception) -> str:
    """The message of an error in one line, after the name of its class unless it is jinja2's."""
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


# Frames


def read_request() -> tuple[bytes, float, int] | None:
    """The next frame with its limits; None when the asker is gone."""
    header = sys.stdin.buffer.read(REQUEST.size)
    if len(header) < REQUEST.size:
        return None
    length, seconds, memory = REQUEST.unpack(header)
    body = sys.stdin.buffer.read(length)
    return (body, seconds, memory) if len(body) == length else None


def write_answer(status: int, body: bytes) -> None:
    """Writes the answer to a request as one frame."""
    sys.stdout.buffer.write(ANSWER.pack(status, len(body)) + body)
    sys.stdout.buffer.flush()


def in_a_fork(body: bytes, seconds: float, memory: int, template: Any) -> tuple[int, bytes]:
    """Exit status and answer of a process that renders one request."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            for descriptor in (reading, 0, 1):
                os.close(descriptor)
            last_moment(seconds)
            limit(seconds, memory)
            with open(writing, "wb") as file:
                file.write(json.dumps(answer(json.loads(body), template)).encode())
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY
        finally:
            os._exit(status)  # nothing to clean up, and no memory to do it with
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), data


def last_moment(seconds: float) -> None:
    """Ends this process by the clock, in case the process that should end it is gone."""
    import signal

    signal.setitimer(signal.ITIMER_REAL, _WALL * seconds + 1)


def serve(template: Any, failed: dict[str, Any] | None) -> None:
    """Answers requests until no more come; only one where the system cannot fork."""
    forks = hasattr(os, "fork")
    while request := read_request():
        if failed is not None:
            write_answer(0, json.dumps(failed).encode())
        elif forks:
            write_answer(*in_a_fork(*request, template))
        else:
            write_answer(0, json.dumps(answer(json.loads(request[0]), template)).encode())
        if not forks:
            return


def main() -> int:
    """Compile a template and answer requests; the exit status tells what no message could."""
    sys.path += sys.argv[1:]
    try:
        old = too_old()
        made = None if old else environment()
        first = read_request()
        if first is None:
            return 0
        source, seconds, memory = first
        template: Any = None
        failed: dict[str, Any] | None = {"error": old, "line": None}
        if made is not None:
            limit(seconds, memory, last=False)
            template, failed = compiled(source.decode(), made)
            unlimit()
        gc.freeze()  # so that collections in forks do not touch, and thus copy, shared pages
        serve(template, failed)
    except MemoryError:
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    status = main()
    with suppress(OSError):
        sys.stdout.buffer.flush()
    os._exit(status)  # nothing to clean up, and no memory to do it with
