"""The command line of `ggpy bench_serve`, and the load test that it asks for.

Everything here is text and numbers, so that --help costs nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from ...bench.serving import lengths
from ..parser import Parser, natural, positive

API_KEY = "LLAMA_API_KEY"  # the environment variable of llama-server
DEFAULT_URL = "http://127.0.0.1:8080"


def parser() -> Parser:
    """All options."""
    p = Parser(
        "bench_serve",
        "Measure speeds, waiting times and errors of a server under load.",
        epilog="The server is any with OpenAI's API and streaming: ggpy serve, llama-server, "
        "vLLM. Times are taken when bytes arrive. A token counts as the server's usage says, or as "
        "an event where it does not say. The exit status is 1 if a request failed.",
    )
    _add_server(p)
    _add_load(p)
    _add_requests(p)
    _add_soak(p)
    _add_output(p)
    return p


def _add_server(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("server")
    group.add_argument(
        "--url", default=DEFAULT_URL,
        help=f"http or https, host and port, and what the paths begin with ({DEFAULT_URL})",
    )  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help=f"key for the server (${API_KEY})")
    group.add_argument("--model", metavar="NAME", help="model to ask for (the first it lists)")
    group.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat",
        help="/v1/chat/completions or /v1/completions (chat)",
    )  # fmt: skip


def _add_load(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("load")
    group.add_argument("--requests", type=positive, default=100, metavar="N", help="how many (100)")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", type=positive, default=1, metavar="N",
        help="requests at the same time: one ends, the next is sent (1)",
    )  # fmt: skip
    how.add_argument(
        "--rate", type=_rate, metavar="R",
        help="requests a second on average, at random times (Poisson), whatever is still answered",
    )  # fmt: skip
    group.add_argument(
        "--warmup", type=natural, default=0, metavar="N", help="requests before that (0)"
    )
    group.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="seconds for a request (600)"
    )
    group.add_argument("--fail-fast", action="store_true", help="end at the first failure")


def _add_requests(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("requests")
    group.add_argument(
        "--input-len", type=_argument(lengths.tokens_or_file), metavar="N|A-B|FILE",
        default=lengths.DEFAULT_INPUT,
        help="tokens of a prompt, a range from which they are drawn, or a file of JSON lines with "
        '"prompt" or "messages" and perhaps "max_tokens"; other fields are sent as they are (512)',
    )  # fmt: skip
    group.add_argument(
        "--output-len", type=_argument(lengths.tokens), metavar="N|A-B",
        default=lengths.DEFAULT_OUTPUT,
        help="tokens of an answer at most, or a range; a file's max_tokens goes before (128)",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix", type=natural, default=0, metavar="N",
        help="tokens with which all prompts begin, before those of --input-len (0)",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true",
        help="answers of exactly --output-len: sends ignore_eos and min_tokens",
    )  # fmt: skip
    group.add_argument("--seed", type=natural, default=0, metavar="N", help="repeats a test (0)")
    group.add_argument("--temperature", type=float, metavar="T", help="(the server's)")
    group.add_argument("--json-schema", metavar="FILE", help="schema that answers must match")
    group.add_argument(
        "--extra", metavar="JSON", type=_object, default={},
        help="""fields for each request, as '{"cache_prompt": false}'""",
    )  # fmt: skip


def _add_soak(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("soak")
    group.add_argument(
        "--abort", type=_share, default=0.0, metavar="SHARE",
        help="share of requests whose connection is closed midway, 0 to 1 (0)",
    )  # fmt: skip
    group.add_argument(
        "--random-params", action="store_true",
        help="random sampling parameters, llama.cpp's among them, in each request",
    )  # fmt: skip


def _add_output(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("output")
    group.add_argument("--label", metavar="TEXT", default="", help="what the test is called")
    group.add_argument("--json", metavar="OUT", help="write figures and all samples")
    group.add_argument(
        "--texts", action="store_true", help="with the text of every answer in --json"
    )
    group.add_argument("--plot", metavar="OUT", help="draw the distributions (needs matplotlib)")


# Kinds of values


def _argument(read: Any) -> Any:
    """A reader whose ValueError argparse tells as it is."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _number(text: str, what: str, high: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= high or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _rate(text: str) -> float:
    return _number(text, "a number of requests a second above 0")


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds above 0")


def _share(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _number(text, "a share from 0 to 1", 1)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


# What was asked for


def without_key(words: list[str]) -> list[str]:
    """A command line that may be shown: without the key."""
    found = list(words)
    for i, word in enumerate(words):
        if word == "--api-key" and i + 1 < len(words):
            found[i + 1] = "..."
        elif word.startswith("--api-key="):
            found[i] = "--api-key=..."
    return found


def key_of(options: argparse.Namespace) -> str:
    """The key to send, "" for none."""
    return options.api_key if options.api_key is not None else os.environ.get(API_KEY, "")


def schema_of(options: argparse.Namespace) -> Any:
    """The schema of --json-schema, None without; ValueError, OSError."""
    if options.json_schema is None:
        return None
    try:
        return json.loads(Path(options.json_schema).read_bytes())
    except ValueError as error:
        raise ValueError(f"--json-schema {options.json_schema} is no JSON: {error}") from None
