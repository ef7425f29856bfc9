"""The command-line parser of all programs, and the kinds of numbers that options take.

An error is one line, `ggpy PROGRAM: error: ...`, with exit status 2. Nothing that takes time to
import is imported here, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from math import inf
from typing import Any, NoReturn

from ..hub import known_names
from ..util.messages import one_line
from ..util.outcome import REFUSED

THREADS = "CPU threads (one for each core)"
MODEL = f"a .gguf file, or a known model: {known_names()}"  # what MODEL means in every program


class Parser(argparse.ArgumentParser):
    """The parser of `ggpy NAME`: errors in one line, no abbreviated options."""

    def __init__(self, name: str, description: str, **more: Any) -> None:
        super().__init__(
            prog=f"ggpy {name}",
            description=description,
            allow_abbrev=False,
            formatter_class=_Formatter,
            **more,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and exit with 2."""
        print(f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(REFUSED)


class Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..util.paths import version

        print(f"ggpy {version()}")
        parser.exit()


def add_hub(group: Any) -> None:
    """The options for a model of the Hugging Face hub."""
    group.add_argument(
        *("-hf", "-hfr", "--hf-repo"),
        metavar="USER/REPO[:QUANT]",
        help="a model of the Hugging Face hub",
    )
    group.add_argument("-hff", "--hf-file", metavar="FILE", help="this file of the repository")


def add_threads(group: Any) -> None:
    """The option for the threads of the CPU."""
    group.add_argument("-t", "--threads", type=threads, metavar="N", help=THREADS)


def add_reasoning(group: Any) -> None:
    """The options that limit what a model thinks before it answers."""
    group.add_argument(
        "--reasoning-budget",
        type=limit,
        default=-1,
        metavar="N",
        help="tokens of reasoning at most, then it is ended; 0: none; -1: as the model likes (-1)",
    )
    group.add_argument(
        "--reasoning-budget-message",
        default="",
        metavar="TEXT",
        help="what the model is made to say where that budget ends (nothing)",
    )


def positive(text: str) -> int:
    """A whole number of 1 or more; ArgumentTypeError."""
    return _whole(text, 1)


def threads(text: str) -> int | None:
    """A number of threads; None for -1, as llama.cpp says that it chooses; ArgumentTypeError."""
    return None if text == "-1" else positive(text)


def interval(text: str) -> float:
    """A number of seconds; infinity for -1, as llama.cpp says never; ArgumentTypeError."""
    return inf if text == "-1" else positive(text)


def limit(text: str) -> int:
    """A whole number of 0 or more, or -1 for no limit; ArgumentTypeError."""
    try:
        return -1 if text == "-1" else natural(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or -1") from None


def natural(text: str) -> int:
    """A whole number of 0 or more; ArgumentTypeError."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, and never breaks a line within a word such as --top-k."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = ("\n".join(self._split_lines(part, width)) for part in text.split("\n\n"))
        return textwrap.indent("\n\n".join(filled), indent)
