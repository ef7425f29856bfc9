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
from ..util.outcome import REFUSED, ended

THREADS = "CPU threads (one for each core)"
MODEL = f"a .gguf file, or a known model: {known_names()}"  # what MODEL means in every program


_NO_NUMBER = re.compile(r"invalid (int|float) value: (.*)")  # argparse's words
NUMBERS = {"int": "a whole number", "float": "a number"}  # by the name of an option's type
_NO_OPTION = re.compile(r"-(?!-?\w|$)")  # begins a word that is not like the name of an option
_UNKNOWN = "unrecognized arguments: "


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
        told = one_line(_NO_NUMBER.sub(lambda m: f"{m[2]} is not {NUMBERS[m[1]]}", message))
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        hint = self._hint(unknown[0]) if unknown else ""
        print(f"{self.prog}: error: {told} ({hint}see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(REFUSED)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but a value may begin with a dash where no option does, as in `-r ---`."""
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            option = self._option_string_actions.get(words[-1]) if words else None
            if option is not None and option.nargs is None and _NO_OPTION.match(word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse's, which before Python 3.13 loses the value of `-r=--`."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def print_help(self, file: Any = None) -> None:
        """Print the help; SystemExit 2 with one line where stdout takes nothing."""
        self.say(self.format_help().rstrip("\n"))

    def say(self, text: str) -> None:
        """Print what was asked for instead of work; SystemExit 2 where stdout takes nothing."""
        if status := ended(lambda: print(text) or 0, program=self.prog):
            self.exit(status)

    def _hint(self, word: str) -> str:
        """What may have been meant by a word that is unknown."""
        if not word.startswith("-"):
            return "the prompt is -p TEXT: " if "--prompt" in self._option_string_actions else ""
        near = self._nearest(word)
        return f"did you mean {near}? " if near else ""

    def _nearest(self, word: str) -> str | None:
        """The long option that --help shows and that is most like the word."""
        from difflib import get_close_matches

        visible = (a.option_strings for a in self._actions if a.help != argparse.SUPPRESS)
        known = [name for names in visible for name in names if name.startswith("--")]
        return next(iter(get_close_matches(word.partition("=")[0], known, 1, 0.8)), None)


class Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: Any, *_: object) -> None:
        from ..util.paths import version

        parser.say(f"ggpy {version()}")
        parser.exit()


def add_hub(group: Any) -> None:
    """The options for a model of the Hugging Face hub."""
    group.add_argument(
        *("-hf", "-hfr", "--hf-repo"),
        metavar="USER/REPO[:QUANT]",
        help="a model of the Hugging Face hub",
    )
    group.add_argument("-hff", "--hf-file", metavar="FILE", help="this file of the repository")


def add_threads(group: Any, **others: Any) -> None:
    """The option for the threads of the CPU. others: for argparse, instead of the usual `type`."""
    given = {"type": number_or_auto, **others}
    group.add_argument("-t", "--threads", metavar="N", help=THREADS, **given)


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


def number_or_auto(text: str) -> int | None:
    """A number, of threads or of answers; None for 0 and -1, by which llama.cpp says that it
    chooses; ArgumentTypeError.
    """
    return None if text in ("-1", "0") else positive(text)


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
