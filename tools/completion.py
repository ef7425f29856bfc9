"""`ggpy completion SHELL`: print a script that makes a shell complete ggpy's command lines.

    source <(ggpy completion bash)        # in ~/.bashrc
    source <(ggpy completion zsh)         # in ~/.zshrc, after compinit
    ggpy completion fish | source         # in ~/.config/fish/config.fish

The script is written from the parsers of all programs. Print it again after an update of ggpy.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator

from ggpy.__main__ import IN_PACKAGE, described
from ggpy.cli import options as run_options
from ggpy.cli.completion import SHELLS, CommandLine, command_line
from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parser().parse_args(argv)
    return ended(lambda: show(options.shell), program="ggpy completion")


def parser() -> Parser:
    found = Parser(
        "completion",
        "Print a script that makes a shell complete ggpy's command lines.",
        epilog="To use it: source <(ggpy completion bash), or the same with zsh after compinit, or "
        "ggpy completion fish | source.",
    )
    found.add_argument("shell", metavar="SHELL", choices=list(SHELLS), help=", ".join(SHELLS))
    return found


def show(shell: str) -> int:
    """Print the script."""
    for line in SHELLS[shell](list(programs())):
        print(line)
    return 0


def programs() -> Iterator[CommandLine]:
    """All programs with their options, those of users first."""
    for found in sorted(described(), key=lambda one: one.for_developers):
        yield command_line(found.name, found.purpose, parser_of(found.name, str(found.path)))


def parser_of(name: str, path: str) -> argparse.ArgumentParser:
    """The parser of a program: what the function `parser` of its file returns."""
    make = run_options.parser if name in IN_PACKAGE else runpy.run_path(path)["parser"]
    made = make()
    assert isinstance(made, argparse.ArgumentParser)
    return made


if __name__ == "__main__":
    sys.exit(main())
