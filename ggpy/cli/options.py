"""The command line of `ggpy run`: what may be said, in llama.cpp's words where it has them; and the
part that programs share which read a text with a model.

Nothing that costs is imported here, so that `--help` answers at once. The defaults of sampling are
those of `sampling.SamplingParams`: a flag that is not given is not passed on, and a test compares
what the help says.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from ..cache_types import AUTO, CACHE_TYPES
from ..util import simulated

PROGRAM = "ggpy run"
DESCRIPTION = """\
Answer a prompt, or chat, with a GGUF model. Text goes to stdout; progress, the device and figures
go to stderr. With -p, -f or piped input there is one answer, through the model's chat template if
it has one; without, an interactive chat. Exit status: 0; 1 when the device fails or --check finds
NaN; 2 for bad usage, a bad file, or a device or memory that is not there; 130 when interrupted."""

# Flags, name in SamplingParams, type, default as the help shows it, meaning.
SAMPLING: tuple[tuple[tuple[str, ...], str, Any, str, str], ...] = (
    (("-s", "--seed"), "seed", int, "-1", "seed of the draws; -1 is a random one"),
    (("--temp", "--temperature"), "temperature", float, "0.8", "temperature; 0 is greedy"),
    (("--top-k",), "top_k", int, "40", "keep the K best tokens; 0 is all"),
    (("--top-p",), "top_p", float, "0.95", "keep the best tokens that hold this much; 1 is off"),
    (("--min-p",), "min_p", float, "0.05", "keep tokens this probable relative to the best"),
    (("--typical", "--typical-p"), "typical_p", float, "1.0", "locally typical sampling; 1 is off"),
    (("--top-n-sigma", "--top-nsigma"), "top_n_sigma", float, "-1.0", "keep tokens within N sigma"),
    (("--xtc-probability",), "xtc_probability", float, "0.0", "how often XTC applies"),
    (("--xtc-threshold",), "xtc_threshold", float, "0.1", "XTC drops choices above, but the last"),
    (("--dynatemp-range",), "dynatemp_range", float, "0.0", "temperature +- this, by entropy"),
    (("--dynatemp-exp",), "dynatemp_exponent", float, "1.0", "exponent of the entropy"),
    (
        ("--repeat-last-n",),
        "repeat_last_n",
        int,
        "64",
        "tokens that penalties look back; -1 is all",
    ),
    (("--repeat-penalty",), "repeat_penalty", float, "1.0", "divides repeated tokens' logits"),
    (("--presence-penalty",), "presence_penalty", float, "0.0", "taken off repeated tokens"),
    (("--frequency-penalty",), "frequency_penalty", float, "0.0", "the same, for each repetition"),
    (("--dry-multiplier",), "dry_multiplier", float, "0.0", "strength of DRY; 0 is off"),
    (("--dry-base",), "dry_base", float, "1.75", "growth with each repeated token"),
    (("--dry-allowed-length",), "dry_allowed_length", int, "2", "tokens that may be repeated"),
    (("--dry-penalty-last-n",), "dry_penalty_last_n", int, "64", "tokens that DRY looks back"),
)


class Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"ggpy: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options as a namespace; SystemExit 2 for what cannot be understood, 0 after --help."""
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        usage="%(prog)s [MODEL] [-p TEXT | -f FILE] [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for add in (_general, _model, _prompt, _generation, _sampling):
        add(parser)
    options = parser.parse_args(arguments)
    if options.model and options.model_flag:
        parser.error("the model is given twice: as MODEL and with -m")
    options.model = options.model or options.model_flag
    _check(parser, options)
    return options


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by their names in SamplingParams."""
    names = (name for _, name, *_ in SAMPLING)
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def unescape(text: str) -> str:
    r"""The text with \n, \r, \t, \', \", \\ and \xNN replaced, as llama.cpp does with -e."""
    known = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match.group(1)
        return known[code] if code in known else chr(int(code[1:], 16))

    return re.sub(r"\\([nrt'\"\\]|x[0-7][0-9a-fA-F])", character, text)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Which model reads which text, in which chunks: of the programs that only look at logits."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a .gguf file, or a name from models/README.md")
    add("-m", "--model", dest="model_option", metavar="MODEL", help="the same")
    add("-f", "--file", metavar="FILE", help="the text; - is stdin")
    add("-c", "--ctx-size", type=int, default=512, metavar="N", help="tokens in a chunk (512)")
    add("--chunks", type=int, default=-1, metavar="N", help="chunks at most (-1: all)")
    add(
        *("-b", "--batch-size"), type=int, default=512, metavar="N",
        help="tokens in a step; a multiple of -c evaluates several chunks together (512)",
    )  # fmt: skip
    add("-t", "--threads", type=int, metavar="N", help="threads of the CPU")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    simulated.add_option(parser)


def _general(parser: Parser) -> None:
    group = parser.add_argument_group("general")
    group.add_argument("-h", "--help", action="help", help="show this page")
    group.add_argument("--version", action=_Version, nargs=0, help="show the version")
    group.add_argument("-v", "--verbose", action="store_true", help="say more, and whole errors")
    group.add_argument("--no-perf", action="store_true", help="no figures at the end")
    group.add_argument(
        "--check", action="store_true", help="stop at NaN or infinity, and say where it comes from"
    )


def _model(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("model", metavar="MODEL", nargs="?", help="a .gguf file, or a known name")
    group.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same")
    group.add_argument(
        "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help="from the Hugging Face hub"
    )
    group.add_argument(
        "--device", "-dev", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N"
    )
    simulated.add_option(group)
    group.add_argument("-t", "--threads", type=_positive, metavar="N", help="threads of the CPU")
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on a GPU: the same bits whatever else is in a step; prompts and batches of more than "
        "8 sequences are 3 to 5 times slower",
    )
    group.add_argument(
        "--activations",
        choices=["f16", "q8_1"],
        default="f16",
        help="on a GPU: what quantised weights are multiplied with (f16); q8_1 is 8 bits",
    )
    group.add_argument(
        "--gemm",
        choices=["auto", "cublas"],
        default="auto",
        help="on a GPU: what multiplies 32 tokens and more: our kernels (auto), or dequantised "
        "weights and cuBLAS",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=_natural,
        metavar="N",
        help="tokens of context (the model's, at most 4096; 0 is the model's)",
    )
    for letter, name in (("k", "keys"), ("v", "values")):
        group.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default=AUTO,
            help=f"how {name} are kept (f16; f32 on the CPU)",
        )
    group.add_argument(
        "-b",
        "--batch-size",
        "-ub",
        "--ubatch-size",
        type=_positive,
        metavar="N",
        help="tokens evaluated together at most (2048 on a GPU with room for that, else 512)",
    )


def _prompt(parser: Parser) -> None:
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="answer this")
    source.add_argument("-f", "--file", metavar="FILE", help="answer this file; - is stdin")
    group.add_argument("-sys", "--system-prompt", metavar="TEXT", help="system message of the chat")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "-cnv",
        "--conversation",
        dest="chat",
        action="store_true",
        default=None,
        help="chat line by line, even if input is piped; -p is the first message",
    )
    mode.add_argument(
        "-no-cnv",
        "--no-conversation",
        "--no-chat",
        dest="chat",
        action="store_false",
        help="continue the raw text, without the chat template",
    )
    group.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help="instead of the model's own: a name (chatml, llama3, ...), Jinja, or a file",
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="the same, certainly a file")
    group.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=r"\n, \t, ... in -p, -sys, -r and breakers are special characters (yes)",
    )
    group.add_argument("--verbose-prompt", action="store_true", help="show the prompt's tokens")


def _generation(parser: Parser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="tokens at most (-1: until the model or the context ends); 0: only the prompt",
    )
    group.add_argument(
        "-r",
        "--reverse-prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="never let the model end")
    group.add_argument(
        "--context-shift",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="forget the oldest half when the context is full (no)",
    )
    group.add_argument(
        "--keep", type=int, default=0, metavar="N", help="first tokens never forgotten; -1 is all"
    )


def _sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling (defaults in brackets)")
    for flags, name, kind, default, meaning in SAMPLING:
        group.add_argument(
            *flags,
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{meaning} ({default})",
        )
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        metavar="TEXT",
        help='DRY sees no repetition across this, instead of \\n : " *; may be repeated; or none',
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID+BIAS",
        help="add to a token's logit: 15043+1, 15043-1, or 15043-inf; may be repeated",
    )


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if options.model and options.hf_repo:
        parser.error("give a MODEL or -hf, not both")
    if options.chat_template and options.chat_template_file:
        parser.error("give --chat-template or --chat-template-file, not both")
    if options.chat is False and options.system_prompt is not None:
        parser.error("-sys is part of a chat, which --no-chat turns off: put it into the prompt")
    if options.predict < -2:
        parser.error(f"-n is {options.predict}: give 0 or more, or -1 for no limit")
    if options.keep < -1:
        parser.error(f"--keep is {options.keep}: give 0 or more, or -1 for the whole prompt")


def _positive(text: str) -> int:
    if (number := _natural(text)) == 0:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def _natural(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})([+-](?:\d+\.?\d*(?:e[+-]?\d+)?|inf))", text, re.IGNORECASE)
    if not match or match.group(2).lower() == "+inf":
        raise argparse.ArgumentTypeError(f"{text!r} is not like 15043+1, 15043-1 or 15043-inf")
    return int(match.group(1)), float(match.group(2))


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..util.paths import version

        print(f"ggpy {version()}")
        parser.exit()
