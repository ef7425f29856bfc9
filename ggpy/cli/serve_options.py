"""The command line of `ggpy serve`, in llama-server's words; each option may also be given as a
variable LLAMA_ARG_*.

Nothing that takes time to import is imported here, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from . import llama_cpp
from .options import (
    add_batch_size,
    add_cache_types,
    add_chat_template,
    add_machine,
    check_model,
)
from .parser import (
    MODEL,
    NUMBERS,
    Parser,
    Version,
    add_hub,
    add_reasoning,
    interval,
    natural,
    number_or_auto,
    positive,
)
from .sampling_options import add_sampling

PROGRAM = "ggpy serve"
EPILOG = """\
The server binds to 127.0.0.1 unless --host says otherwise. Its page is at http://HOST:PORT/. An
option that is not given is read from the environment: LLAMA_ARG_ and its long name in capitals, as
LLAMA_ARG_CTX_SIZE; the command line wins. Options of llama-server that have no effect here are
accepted.

SIGTERM, SIGHUP or Ctrl-C lets running requests end (--drain); a second one ends them, a third the
process.

Exit status: 0 after one of these signals; 1 if the engine fails; 2 for bad usage, a bad file, a
port that is taken, or a device or memory that is not there; 130 after a third signal."""
# llama.cpp's variables whose names are not those of the options.
VARIABLES = {
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_ARG_N_PREDICT": "--predict",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_NO_UI": "--no-ui",
    "LLAMA_ARG_NO_WEBUI": "--no-ui",
    "LLAMA_ARG_HF_REPO": "--hf-repo",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget",
    "LLAMA_ARG_THINK_BUDGET_MESSAGE": "--reasoning-budget-message",
    "LLAMA_ARG_STATIC_PATH": "--ui",
    "LLAMA_API_KEY": "--api-key",
}

# Options, as they are named in the namespace, that take the place of others.
ALTERNATIVES = {
    "model": ("model_flag", "hf_repo", "hf_file"),
    "model_flag": ("hf_repo", "hf_file"),
    "hf_repo": ("model_flag", "hf_file"),
    "hf_file": ("model_flag",),
    "chat_template": ("chat_template_file",),
    "chat_template_file": ("chat_template",),
}
ON = ("1", "true", "on", "yes", "enabled")
OFF = ("0", "false", "off", "no", "disabled")


def parser() -> Parser:
    """All options of `ggpy serve`."""
    found = Parser(
        "serve",
        "Serve a model over HTTP, with OpenAI's endpoints and a page.",
        usage="%(prog)s [MODEL] [options]",
        epilog=EPILOG,
        add_help=False,
    )
    for add in (_general, _model, _http, _scheduler, _chat, _sampling):
        add(found)
    llama_cpp.add_server_options(found)
    return found


def parse(
    arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The options as a namespace; SystemExit 2 for what cannot be understood, 0 after --help."""
    found = parser()
    values = _from_environment(found, environment)
    found.set_defaults(**values)
    options = llama_cpp.parse(found, arguments)
    _leave_out(options, values)
    check_model(found, options)
    _check(found, options)
    return options


def _from_environment(found: Parser, environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of LLAMA_ARG_* by the names of options in the namespace; `unused` has variables
    without effect.
    """
    actions = {name: a for a in found._actions for name in a.option_strings}
    values: dict[str, Any] = {}
    no_effect = argparse.Namespace(unused=[])
    for variable, text in environment.items():
        if variable in ("LLAMA_ARG_UI", "LLAMA_ARG_WEBUI") and text.lower() in (*ON, *OFF):
            values["no_ui"] = text.lower() in OFF  # llama-server's switch; a folder is --ui's
            continue
        if variable in VARIABLES:
            option = VARIABLES[variable]
        elif variable.startswith("LLAMA_ARG_"):
            option = "--" + variable.removeprefix("LLAMA_ARG_").lower().replace("_", "-")
        else:
            continue
        if not text:
            continue
        if option not in actions:
            no_effect.unused.append(variable)
            continue
        action = actions[option]
        if isinstance(action, llama_cpp.OF_LLAMA_CPP):
            action(found, no_effect, [] if action.nargs == 0 else text, variable)
            continue
        value = _value(found, action, variable, text)
        negated = isinstance(action, argparse.BooleanOptionalAction) and option[:5] == "--no-"
        values[action.dest] = not value if negated else value
    return {**values, **vars(no_effect)}


def _leave_out(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Forget a model or a chat template of the environment where the command line names another."""
    given = {n for n in ALTERNATIVES if getattr(options, n) not in (None, values.get(n))}
    for name in given:
        for other in ALTERNATIVES[name]:
            if other not in given:
                setattr(options, other, None)


def _value(found: Parser, action: argparse.Action, variable: str, text: str) -> Any:
    """The value of a variable, as the option would read it."""
    if action.nargs == 0:
        if text.lower() not in (*ON, *OFF):
            found.error(f"{variable} is {text!r}: give 1 or 0")
        return text.lower() in ON
    try:
        value = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        found.error(f"{variable}: {error}")
    except ValueError:
        kind = getattr(action.type, "__name__", "")
        found.error(f"{variable}: {text!r} is not {NUMBERS.get(kind, 'understood')}")
    if action.choices is not None and value not in action.choices:
        found.error(f"{variable} is {text!r}: choose from {', '.join(map(str, action.choices))}")
    return value


def _general(parser: Parser) -> None:
    group = parser.add_argument_group("general")
    group.add_argument("-h", "--help", action="help", help="show this page")
    group.add_argument("--version", action=Version, nargs=0, help="show the version")
    group.add_argument(
        *("-v", "--verbose", "--log-verbose"),
        action="store_true",
        help="print more about errors; answers have a field __verbose",
    )


def _model(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("model", metavar="MODEL", nargs="?", help=f"{MODEL} (the first of these)")
    add("-m", "--model", dest="model_flag", metavar="MODEL", help="the same")
    add_hub(group)
    add(
        *("-a", "--alias"),
        metavar="NAME",
        help="the model's name in answers (its file's name); further names follow after commas",
    )
    add("--tags", metavar="LIST", help="what /v1/models says of it, with commas between")
    add_machine(group)
    add_cache_types(group)


def _http(parser: Parser) -> None:
    group = parser.add_argument_group("HTTP")
    add = group.add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address, or a .sock file; several with commas between (127.0.0.1)",
    )
    add("--port", type=natural, default=8080, metavar="PORT", help="0 takes a free one (8080)")
    add(
        "--api-prefix",
        default="",
        metavar="/X",
        help="what all paths begin with, without / at the end",
    )
    add("--api-key", metavar="KEY", help="key that clients must send; several with commas between")
    add("--api-key-file", metavar="FILE", help="file of keys, one in a line")
    add("--cors-origins", default="*", metavar="LIST", help="origins whose pages may ask (*)")
    add(
        *("-to", "--timeout"),
        type=positive,
        default=600,
        metavar="S",
        help="seconds that a client may take to send a request, or to read what is sent (600)",
    )
    add(
        "--sse-ping-interval",
        type=interval,
        default=30,
        metavar="S",
        help="seconds after which a stream without news sends a comment (30); -1: never",
    )
    add(
        "--drain",
        type=natural,
        default=30,
        metavar="S",
        help="seconds that requests may go on after SIGTERM or Ctrl-C (30)",
    )
    add("--ssl-key-file", metavar="FILE", help="private key, for https")
    add("--ssl-cert-file", metavar="FILE", help="its certificate")
    add("--metrics", action="store_true", help="answer /metrics, for Prometheus")
    add("--slots", action=argparse.BooleanOptionalAction, default=True, help="answer /slots (yes)")
    add("--no-ui", "--no-webui", dest="no_ui", action="store_true", help="no page")
    add("--ui", "--path", dest="ui", metavar="DIR", help="another page, from this folder")


def _scheduler(parser: Parser) -> None:
    group = parser.add_argument_group("batching and KV cache")
    add = group.add_argument
    add(
        *("-np", "--parallel"),
        type=number_or_auto,
        metavar="N",
        help="answers at the same time (64 on a GPU, 4 on the CPU); more wait",
    )
    add(
        *("-c", "--ctx-size"),
        type=natural,
        default=0,
        metavar="N",
        help="positions of the KV cache, which all answers share (0: what the model was trained "
        "for, at most 16384 on the CPU; half of it, and so on, until it fits into memory)",
    )
    add("--ctx-seq", type=positive, metavar="N", help="positions of one answer at most (-c)")
    add_batch_size(group)
    add(
        "--prefill-tokens",
        type=positive,
        metavar="N",
        help="tokens of a step that reads prompts while answers go on (512; 128 on the CPU)",
    )
    add(
        "--queue",
        type=natural,
        default=1024,
        metavar="N",
        help="answers that may wait beside those that run; more get 503 (1024)",
    )
    add(
        "--cache-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep pages of prompts for later requests that begin alike (yes)",
    )
    add(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU: evaluate prompts and answers of several sizes before the first request, "
        "which then is not slower than later ones (yes)",
    )
    add("--deadline", type=positive, metavar="S", help="seconds for an answer at most (no limit)")


def _chat(parser: Parser) -> None:
    group = parser.add_argument_group("chat")
    add = group.add_argument
    add_chat_template(group)
    add(
        *("--chat-template-kwargs",),
        metavar="JSON",
        help="""variables of the template, as '{"enable_thinking": false}'""",
    )
    add(
        "--tool-format",
        metavar="NAME",
        help="how the model calls tools, if its template misleads: hermes, mistral, llama3, ...; a "
        "wrong NAME lists all",
    )
    add(
        "--reasoning-format",
        choices=["auto", "none", "deepseek", "deepseek-legacy"],
        default="auto",
        help="none leaves reasoning in the text; the others put it into reasoning_content (auto)",
    )
    add_reasoning(group)
    add(
        *("-rea", "--reasoning"),
        choices=["on", "off", "auto"],
        default="auto",
        help="whether the template is asked for reasoning (auto: as it likes)",
    )
    add(
        "--reasoning-effort",
        default="default",
        metavar="LEVEL",
        help="given to the template: low, medium, high, ... (default: the template's own)",
    )
    add(
        "-n",
        "--predict",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="tokens of an answer at most, where a request gives none (-1: no limit)",
    )
    add(
        "--pooling",
        choices=["mean", "last", "cls", "none"],
        metavar="KIND",
        help="of embeddings (the model's); none is a vector for each token, from /embeddings",
    )


def _sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling of requests that give nothing else")
    add_sampling(group)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if bool(options.ssl_key_file) != bool(options.ssl_cert_file):
        parser.error("https needs both --ssl-key-file and --ssl-cert-file")
    if options.port > 65535:
        parser.error(f"--port is {options.port}: give 0 to 65535")
    if options.api_prefix and not options.api_prefix.startswith("/"):
        parser.error(f"--api-prefix is {options.api_prefix!r}: it must begin with /")
