"""`ggpy PROGRAM ...`: runs a program of the package, or one of the folder tools.

Programs are found, not listed: a file in tools/ is one. The first line of its docstring says what
it does, `ggpy NAME ...`: DESCRIPTION, and whether it is "(for developers)".
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .util.messages import escaped
from .util.outcome import REFUSED, ended
from .util.paths import data_dir, version

IN_PACKAGE = ("run",)  # modules of this package
FOR_DEVELOPERS = " (for developers)"


class Program(NamedTuple):
    """A program's name, its file, and what it does."""

    name: str
    path: Path
    purpose: str
    for_developers: bool


def programs() -> dict[str, Path]:
    """Programs by name, with their files."""
    package = {name: Path(__file__).with_name(f"{name}.py") for name in IN_PACKAGE}
    tools = {path.stem: path for path in sorted(data_dir("tools").glob("*.py"))}
    return {**package, **{n: p for n, p in tools.items() if not n.startswith("_")}}


def described() -> Iterator[Program]:
    """All programs with what the first line of each says."""
    for name, path in programs().items():
        with path.open(encoding="utf-8") as file:
            call, _, purpose = file.readline().strip('" \n').partition(": ")
        yield Program(name, path, purpose.rstrip("."), call.endswith(FOR_DEVELOPERS))


def usage() -> str:
    """What `ggpy --help` prints."""
    found = list(described())
    width = max(len(program.name) for program in found)
    lines = ["usage: ggpy PROGRAM [options]"]
    for title, for_developers in (("programs:", False), ("programs for developers of ggpy:", True)):
        lines += ["", title]
        lines += [
            f"  {program.name:{width}}  {program.purpose}"
            for program in found
            if program.for_developers is for_developers
        ]
    lines += ["", "`ggpy help PROGRAM` or `ggpy PROGRAM --help` shows a program's options."]
    return "\n".join(lines)


def show(text: str) -> int:
    """Print a text; the exit status."""
    print(text)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run `ggpy`; its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        print(usage(), file=sys.stderr)
        return REFUSED
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    if words[0] in ("-h", "--help"):
        return ended(lambda: show(usage()))
    if words[0] == "--version":
        return ended(lambda: show(f"ggpy {version()}"))
    return start(words[0], words[1:])


def unknown(name: str) -> str:
    """What is wrong with a word that is no program, and what to do."""
    from difflib import get_close_matches

    shown = escaped(name)
    if name.startswith("-"):
        hint = f"a program comes first, as in `ggpy run {shown}`"
    elif name.endswith(".gguf"):
        hint = f"`ggpy run {shown}` runs a model"
    else:
        near = get_close_matches(name, programs(), 1)
        hint = f"did you mean {near[0]}?" if near else "it must be the name of a program"
    return f"unknown program '{shown}': {hint} (`ggpy --help` lists the programs)"


def start(name: str, arguments: list[str]) -> int:
    """Run a program as the process's own; its exit status, unless it exits itself."""
    path = programs().get(name)
    if path is None:
        print(f"ggpy: error: {unknown(name)}", file=sys.stderr)
        return REFUSED
    sys.argv = [f"ggpy {name}", *arguments]
    if name in IN_PACKAGE:
        runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
