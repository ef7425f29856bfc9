"""`ggpy PROGRAM ...`: runs a program of the package, or one of the folder tools.

Programs are found, not listed: a file in tools/ is one, and its first line says what it does.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

from .util.outcome import ended
from .util.paths import data_dir, version

IN_PACKAGE = ("run",)  # modules of this package


def programs() -> dict[str, Path]:
    """Programs by name, with their files."""
    package = {name: Path(__file__).with_name(f"{name}.py") for name in IN_PACKAGE}
    tools = {path.stem: path for path in sorted(data_dir("tools").glob("*.py"))}
    return {**package, **{n: p for n, p in tools.items() if not n.startswith("_")}}


def purpose(path: Path) -> str:
    """The first sentence of a program's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0]
    if sentence.startswith("`"):
        return sentence.partition(": ")[2]
    return sentence[:1].lower() + sentence[1:]


def usage() -> str:
    """What `ggpy --help` prints."""
    lines = ["usage: ggpy PROGRAM [options]", "", "programs:"]
    found = programs()
    width = max(map(len, found))
    lines += [f"  {name:{width}} {purpose(path).rstrip('.')}" for name, path in found.items()]
    return "\n".join([*lines, "", "ggpy PROGRAM --help tells more."])


def answer(question: str) -> int:
    """Print what --version or --help asks for."""
    print(f"ggpy {version()}" if question == "--version" else usage())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run `ggpy`; its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        print(usage(), file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "--version"):
        return ended(lambda: answer(words[0]))
    name, rest = words[0], words[1:]
    path = programs().get(name)
    if path is None:
        known = ", ".join(programs())
        print(f"ggpy: error: unknown program {name}; there are: {known}", file=sys.stderr)
        return 2
    sys.argv = [f"ggpy {name}", *rest]
    if name in IN_PACKAGE:
        runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
