"""Options of llama.cpp that have no effect here: accepted, and named in one line on stderr.

With them a command line that was written for llama.cpp runs as it stands. An option of llama.cpp
that would change the output is not among them, and stays an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
MAIN_GPU = ("-mg", "--main-gpu")
SWITCHES = ("on", "off", "auto", "0", "1")  # what may follow an option of OPTIONAL
OPTIONAL = (("-fa", "--flash-attn"), ("-co", "--color"))
WITH_VALUE = (
    *(("-sm", "--split-mode"), ("-ts", "--tensor-split"), ("-tb", "--threads-batch")),
    *(("--numa",), ("--prio",), ("--poll",), ("-np", "--parallel"), ("-fit", "--fit")),
    *(("-dt", "--defrag-thold"), ("-lv", "--verbosity", "--log-verbosity")),
)
FLAGS = (
    *(("--mmap",), ("--no-mmap",), ("--mlock",), ("-nr", "--no-repack"), ("--no-host",)),
    *(("-kvo", "--kv-offload"), ("-nkvo", "--no-kv-offload"), ("--no-op-offload",)),
    *(("--swa-full",), ("-cb", "--cont-batching"), ("--warmup",), ("--no-warmup",), ("--perf",)),
    *(("-i", "--interactive"), ("-if", "--interactive-first"), ("-mli", "--multiline-input")),
    *(("-st", "--single-turn"), ("--simple-io",), ("--jinja",), ("--log-disable",)),
    *(("--display-prompt",), ("--no-display-prompt",)),
    *(("--embeddings", "--embedding"), ("--rerank", "--reranking")),
)
OF_SERVER = (
    *(("--cache-reuse",), ("-cram", "--cache-ram"), ("--threads-http",)),
    *(("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), ("-sps", "--slot-prompt-similarity")),
    *(("-cms", "--checkpoint-min-step"), ("--prio-batch",), ("--poll-batch",), ("--keep",)),
    *(("-C", "--cpu-mask"), ("-Cr", "--cpu-range"), ("--cpu-strict",), ("--cpu-strict-batch",)),
    *(("-Cb", "--cpu-mask-batch"), ("-Crb", "--cpu-range-batch"), ("-lm", "--load-mode")),
    *(("-lzm", "--lazy-mode"), ("-fitt", "--fit-target"), ("-fitc", "--fit-ctx")),
    *(("--log-file",), ("--log-colors",)),
)
FLAGS_OF_SERVER = (
    *(("-kvu", "--kv-unified"), ("-no-kvu", "--no-kv-unified")),
    *(("--no-context-shift",), ("--no-mmproj", "--no-mmproj-auto"), ("--mmproj-auto",)),
    *(("-nocb", "--no-cont-batching"), ("--cache-idle-slots",), ("--no-cache-idle-slots",)),
    *(("--no-perf",), ("--repack",), ("--op-offload",), ("--check-tensors",), ("--props",)),
    *(("-bs", "--backend-sampling"), ("--webui",), ("--no-ui-mcp-proxy", "--no-webui-mcp-proxy")),
    *(("-no-ag", "--no-agent"), ("--no-models-autoload",), ("--no-log-jsonl",)),
    *(("--log-prefix", "--no-log-prefix"), ("--log-timestamps", "--no-log-timestamps")),
)
# llama-bench gives a value to what is a flag elsewhere.
OF_BENCH = (("-mmp", "--mmap"), ("-nkvo", "--no-kv-offload"))
SHORT = re.compile(r"-[a-zA-Z]{2,6}")
HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}


def add_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Give a parser the options of llama-cli and its kin that have no effect here, but for those
    that the program has itself.
    """
    _add_shared(parser, without)
    for names in FLAGS:
        if not set(names) & set(without):
            parser.add_argument(*names, action=_Unused, nargs=0, **HIDDEN)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of llama-server that have no effect here."""
    add_options(parser, without=["--parallel", "--warmup", "--no-warmup"])
    for names in OF_SERVER:
        parser.add_argument(*names, action=_Unused, **HIDDEN)
    for names in FLAGS_OF_SERVER:
        parser.add_argument(*names, action=_Unused, nargs=0, **HIDDEN)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of llama-bench that have no effect here."""
    _add_shared(parser)
    for names in OF_BENCH:
        parser.add_argument(*names, action=_Unused, **HIDDEN)


def _add_shared(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    parser.add_argument(*GPU_LAYERS, action=_GpuLayers, **HIDDEN)
    parser.add_argument(*MAIN_GPU, action=_MainGpu, **HIDDEN)
    for names in (*OPTIONAL, *WITH_VALUE):
        if set(names) & set(without):
            continue
        parser.add_argument(*names, action=_Unused, **HIDDEN)


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options as a namespace, whose `device` is the CPU's after `-ngl 0`; SystemExit.

    Prints a line on stderr if options without effect were given.
    """
    words = sys.argv[1:] if arguments is None else arguments
    _refuse_unknown(parser, words)
    options = parser.parse_args(_with_values(words))
    unused = getattr(options, "unused", [])
    if getattr(options, "gpu_layers", None) == "0":
        if options.device not in ("auto", "cpu", "numpy"):
            parser.error(f"-ngl 0 means the CPU, and --device says {options.device}: give one")
        options.device = "cpu" if options.device == "auto" else options.device
        print("note: -ngl 0: the model runs on the CPU, as with --device cpu", file=sys.stderr)
    elif getattr(options, "gpu_layers", None) is not None:
        unused = [f"-ngl {options.gpu_layers} (--device chooses for all layers)", *unused]
    if unused:
        print(f"note: no effect here: {', '.join(unused)}", file=sys.stderr)
    return options


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse a short option of llama.cpp that is none here: argparse would take -hft for -h, and
    -sysf for -s with the value ysf.
    """
    known = {name for action in parser._actions for name in action.option_strings}
    end = list(words).index("--") if "--" in words else len(words)
    for word in words[:end]:
        if SHORT.fullmatch(word) and word not in known:
            parser.error(f"unrecognized arguments: {word}")


def _with_values(words: Sequence[str]) -> list[str]:
    """The words, with "on" after each option of OPTIONAL that has no value: -fa, --color."""
    names = [name for both in OPTIONAL for name in both]
    found: list[str] = []
    for i, word in enumerate(words):
        found.append(word)
        if word in names and (i + 1 == len(words) or words[i + 1] not in SWITCHES):
            found.append("on")
    return found


class _Unused(argparse.Action):
    """Adds the option, as it was given, to `unused`."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        given = " ".join([option_string or "", *([values] if isinstance(values, str) else [])])
        namespace.unused = [*getattr(namespace, "unused", []), given]


class _GpuLayers(argparse.Action):
    """Keeps the number, or "auto" or "all"."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if not (values.isdecimal() or values in ("-1", "auto", "all")):
            parser.error(f"{option_string} {values}: give a number of layers; here 0 means the CPU")
        namespace.gpu_layers = str(int(values)) if values.isdecimal() else values


class _MainGpu(argparse.Action):
    """Refuses any GPU but the first, which is the default here too."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if values != "0":
            parser.error(f"{option_string} {values}: choose the GPU with --device cuda:{values}")
        namespace.unused = [*getattr(namespace, "unused", []), f"{option_string} 0"]


OF_LLAMA_CPP = (_Unused, _GpuLayers, _MainGpu)  # the actions of this module
