"""Scripts that make a shell complete `ggpy PROGRAM --option VALUE`, written from the parsers.

A script is static: it holds the options of all programs, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..cache_types import CACHE_TYPES
from ..hub import KNOWN
from ..quantization.names import TABLE

# Metavars that stand for files and folders.
FILES = {
    *("MODEL", "FILE", "FOLDER", "DIR", "CHECKPOINT", "OUT", "PATH"),
    *("OLD.json", "NEW.json", "FILE.npy"),
}
DEVICES = ("auto", "cpu", "numpy", "cuda")
MODELS = tuple(model.name for model in KNOWN)


class Value(NamedTuple):
    """What an option takes, or what stands without one: some known words, files or not."""

    name: str
    words: tuple[str, ...]
    files: bool


class Option(NamedTuple):
    """An option with all its names; `value` is None for a flag."""

    names: tuple[str, ...]
    meaning: str
    value: Value | None


class CommandLine(NamedTuple):
    """What a program takes: its options, and what stands without one."""

    name: str
    purpose: str
    options: list[Option]
    value: Value


def command_line(name: str, purpose: str, parser: argparse.ArgumentParser) -> CommandLine:
    """What a parser says of a program."""
    options: list[Option] = []
    values: list[Value] = []
    for action in parser._actions:
        if not action.option_strings:
            values.append(_value(action))
        elif action.help != argparse.SUPPRESS:
            value = None if action.nargs == 0 else _value(action)
            meaning = (action.help or "").replace("%%", "%")  # argparse formats its help
            options.append(Option(tuple(action.option_strings), meaning, value))
    words = tuple(dict.fromkeys(word for value in values for word in value.words))
    return CommandLine(
        name, purpose, options, Value("argument", words, any(v.files for v in values))
    )


def _value(action: argparse.Action) -> Value:
    """What an action takes, by its choices, its destination and its metavar."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    kinds = set(name.replace("[", "").replace("]", "").replace("|", " ").split())
    words = tuple(map(str, action.choices or ()))
    if action.dest.startswith("device"):
        words = DEVICES
    elif action.dest.startswith("cache_type"):
        words = CACHE_TYPES
    elif "TYPE" in kinds:
        words = (*TABLE, *(name.lower() for name in TABLE))
    if "MODEL" in kinds or action.dest == "names":
        words = (*MODELS, *words)
    return Value(name, words, bool(kinds & FILES))


# bash


def bash(programs: Sequence[CommandLine]) -> Iterator[str]:
    """The lines for bash: source <(ggpy completion bash)."""
    yield "# Completion of ggpy in bash: source <(ggpy completion bash)"
    yield "_ggpy() {"
    yield "    local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}"
    yield "    local words= files="
    yield "    case $COMP_CWORD:${COMP_WORDS[1]} in"
    yield f"    1:*) words={_lines([p.name for p in programs] + ['help'])} ;;"
    yield f"    2:help) words={_lines([p.name for p in programs])} ;;"
    for found in programs:
        yield f"    *:{found.name})"
        yield "        case $before in"
        for option in found.options:
            if option.value:
                yield f"        {'|'.join(option.names)}) {_bash_value(option.value)} ;;"
        names = [name for option in found.options for name in option.names]
        yield f"        *) if [[ $word == -* ]]; then words={_lines(names)}"
        yield f"           else {_bash_value(found.value)}; fi ;;"
        yield "        esac ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "    if [[ -n $files ]]; then"
    yield "        compopt -o filenames 2>/dev/null"
    yield '        COMPREPLY+=($(compgen -f -- "$word"))'
    yield "    fi"
    yield "}"
    yield "complete -F _ggpy ggpy"


def _bash_value(value: Value) -> str:
    parts = [f"words={_lines(value.words)}"] if value.words else []
    return "; ".join([*parts, *(["files=yes"] if value.files else [])]) or ":"


def _lines(words: Sequence[str]) -> str:
    """Words as a word of bash, a line each."""
    return "$'" + "\\n".join(words) + "'"


# zsh


def zsh(programs: Sequence[CommandLine]) -> Iterator[str]:
    """The lines for zsh: source <(ggpy completion zsh), or a file _ggpy in $fpath."""
    yield "#compdef ggpy"
    yield "# Completion of ggpy in zsh: source <(ggpy completion zsh)"
    yield "_ggpy() {"
    yield "    local -a programs=("
    for found in programs:
        yield f"        {_quoted(f'{found.name}:{found.purpose}')}"
    yield "    )"
    yield "    if (( CURRENT == 2 )) || [[ $CURRENT == 3 && $words[2] == help ]]; then"
    yield "        _describe program programs"
    yield "        return"
    yield "    fi"
    yield "    local name=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $name in"
    for found in programs:
        yield f"    {found.name}) _arguments \\"
        for option in found.options:
            for name in option.names:
                meaning = option.meaning.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
                value = _zsh_value(option.value) if option.value else ""
                yield f"        {_quoted(f'*{name}[{meaning}]{value}')} \\"
        yield f"        {_quoted('*' + _zsh_value(found.value))} ;;"
    yield "    esac"
    yield "}"
    yield "_ggpy_words_and_files() {"
    yield '    compadd -- "$@"'
    yield "    _files"
    yield "}"
    yield "compdef _ggpy ggpy"


def _zsh_value(value: Value) -> str:
    """ ":message:action" of _arguments; an action of a space completes nothing."""
    message = value.name.replace(":", "\\:")
    words = " ".join(value.words)
    if value.files and words:
        return f":{message}: _ggpy_words_and_files {words}"
    return f":{message}:{'_files' if value.files else f'({words})' if words else ' '}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# fish


def fish(programs: Sequence[CommandLine]) -> Iterator[str]:
    """The lines for fish: ggpy completion fish | source."""
    yield "# Completion of ggpy in fish: ggpy completion fish | source"
    yield "function __ggpy_runs"
    yield "    set -l words (commandline -opc)"
    yield '    test (count $words) -ge 2; and test "$words[2]" = $argv[1]'
    yield "end"
    yield "complete -c ggpy -e"
    yield "complete -c ggpy -f"
    for found in programs:
        first = f"-n __fish_use_subcommand -a {found.name} -d {_fish(found.purpose)}"
        yield f"complete -c ggpy {first}"
        yield f"complete -c ggpy -n '__ggpy_runs help' -a {found.name}"
        runs = f"complete -c ggpy -n '__ggpy_runs {found.name}'"
        if found.value.words or found.value.files:
            yield f"{runs}{_fish_value(found.value)}"
        for option in found.options:
            names = "".join(map(_fish_name, option.names))
            value = f" -r{_fish_value(option.value)}" if option.value else ""
            yield f"{runs}{names}{value} -d {_fish(option.meaning)}"
    yield "complete -c ggpy -n __fish_use_subcommand -a help -d 'show help'"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f" -l {name[2:]}"
    return f" -s {name[1:]}" if len(name) == 2 else f" -o {name[1:]}"


def _fish_value(value: Value) -> str:
    words = f" -a {_fish(' '.join(value.words))}" if value.words else ""
    return words + (" -F" if value.files else " -f")


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[CommandLine]], Iterator[str]]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
