"""The command line of `ggpy run`, in llama.cpp's words where it has them; and the options that
`ggpy imatrix` and `ggpy perplexity` share.

Nothing that takes time to import is imported here, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..cache_types import AUTO, CACHE_TYPES
from . import llama_cpp, simulated
from .parser import MODEL, Parser, Version, add_hub, add_reasoning, add_threads, natural, positive
from .sampling_options import add_all_sampling

PROGRAM = "ggpy run"
EPILOG = """\
With -p, -f or piped input there is one answer, through the model's chat template if it has one;
without, an interactive chat, whose commands /help lists. The answer goes to stdout; progress, the
device and figures go to stderr. Options of llama.cpp that have no effect here (-ngl, -fa, --mlock,
...) are accepted; -ngl 0 means the CPU.

Exit status: 0; 1 if the device fails or --check finds NaN; 2 for bad usage, a bad file, or a device
or memory that is not there; 130 after Ctrl-C."""
GEMM = (
    "on a GPU: what multiplies matrices in steps of 32 tokens and more: ggpy's kernels (auto), or "
    "cuBLAS on dequantised weights"
)

CPU_MOE, N_CPU_MOE = ("-cmoe", "--cpu-moe"), ("-ncmoe", "--n-cpu-moe")
CPU_MOE_HELP = (
    "on a GPU: keep the experts of all layers in the memory of the host, where kernels read them "
    "through the bus; for models that the GPU has no memory for"
)
ALL_LAYERS = 999  # more than any model has

GRAMMARS = ("grammar", "grammar_file", "json_schema", "json_schema_file")


def parser() -> Parser:
    """All options of `ggpy run`."""
    found = Parser(
        "run",
        "Answer a prompt, or chat, with a GGUF model.",
        usage="%(prog)s [MODEL] [-p TEXT | -f FILE] [options]",
        epilog=EPILOG,
        add_help=False,
    )
    for add in (_general, _model, _prompt, _generation, add_all_sampling):
        add(found)
    llama_cpp.add_options(found)
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options as a namespace; SystemExit 2 for what cannot be understood, 0 after --help."""
    found = parser()
    options = llama_cpp.parse(found, arguments)
    check_model(found, options)
    _check(found, options)
    return options


def unescape(text: str) -> str:
    r"""The text with \n, \r, \t, \', \", \\ and \xNN replaced, as llama.cpp does with -e."""
    known = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

    def character(match: re.Match[str]) -> str:
        code = match.group(1)
        return known[code] if code in known else chr(int(code[1:], 16))

    return re.sub(r"\\([nrt'\"\\]|x[0-7][0-9a-fA-F])", character, text)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """The options of programs that evaluate a text in chunks and look at the logits."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=MODEL)
    add("-m", "--model", dest="model_option", metavar="MODEL", help="the same")
    add("-f", "--file", metavar="FILE", help="file of the text; - is stdin")
    add("-c", "--ctx-size", type=natural, default=512, metavar="N", help="tokens of a chunk (512)")
    add("--chunks", type=int, default=-1, metavar="N", help="chunks at most (-1: all)")
    add(
        *("-b", "--batch-size"), type=natural, default=512, metavar="N",
        help="tokens of a step; a multiple of -c evaluates several chunks together (512)",
    )  # fmt: skip
    add_threads(parser)
    add("--device", default="auto", help="auto, cpu, numpy, cuda or cuda:N (auto)")
    simulated.add_option(parser)
    llama_cpp.add_options(parser)


def add_machine(group: Any) -> None:
    """The options for the device and how it computes."""
    group.add_argument(
        *("--device", "-dev"),
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, numpy, cuda or cuda:N (auto)",
    )
    simulated.add_option(group)
    add_threads(group)
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on a GPU: a token's bits never depend on the batch; prompts, and batches of more "
        "than 8 sequences, take 3 to 5 times as long",
    )
    add_products(group)
    group.add_argument(*CPU_MOE, action="store_true", help=CPU_MOE_HELP)
    group.add_argument(
        *N_CPU_MOE,
        type=natural,
        default=0,
        metavar="N",
        help="the same for the experts of the first N layers (0)",
    )


def add_products(group: Any) -> None:
    """The options for how matrices are multiplied."""
    group.add_argument(
        "--activations",
        choices=["auto", "f16", "q8_1", "q16", "q8", "f32"],
        default="auto",
        help="type of activations that are multiplied with quantised weights: f16 or q8_1 on a GPU "
        "(f16); q16, q8 or f32 on the CPU (q16)",
    )
    group.add_argument("--gemm", choices=["auto", "cublas"], default="auto", help=GEMM)


def n_cpu_moe(options: argparse.Namespace) -> int:
    """Layers whose experts stay in the memory of the host."""
    return ALL_LAYERS if options.cpu_moe else int(options.n_cpu_moe)


def add_batch_size(group: Any) -> None:
    """The option for the tokens of a step."""
    group.add_argument(
        *("-b", "--batch-size", "-ub", "--ubatch-size"),
        type=positive,
        metavar="N",
        help="tokens of a step at most (2048 on a GPU with memory for it, else 512)",
    )


def add_chat_template(group: Any) -> None:
    """The options that name a chat template."""
    group.add_argument(
        "--chat-template",
        metavar="TEMPLATE",
        help="chat template instead of the model's: a name (chatml, llama3, ...), Jinja, or a file",
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="the same, always a file")


def check_model(parser: Parser, options: argparse.Namespace) -> None:
    """SystemExit 2 where the model or its chat template is given twice; MODEL becomes `model`."""
    if options.model and options.model_flag:
        parser.error("the model is given twice: as MODEL and with -m")
    options.model = options.model or options.model_flag
    if options.model and options.hf_repo:
        parser.error("give a MODEL or -hf, not both")
    if options.hf_file:
        if not options.hf_repo:
            parser.error("--hf-file is a file of a repository: name that with -hf USER/REPO")
        options.hf_repo = f"{options.hf_repo.partition(':')[0]}:{options.hf_file}"
    if options.chat_template and options.chat_template_file:
        parser.error("give --chat-template or --chat-template-file, not both")


def add_cache_types(parser: Any) -> None:
    """The options for the types of the KV cache."""
    for letter, name in (("k", "keys"), ("v", "values")):
        parser.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default=AUTO,
            metavar="TYPE",
            help=f"type of the KV cache's {name}: {', '.join(CACHE_TYPES)} (f16; f32 on the CPU)",
        )


def _general(parser: Parser) -> None:
    group = parser.add_argument_group("general")
    group.add_argument("-h", "--help", action="help", help="show this page")
    group.add_argument("--version", action=Version, nargs=0, help="show the version")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="print more about the model and about errors"
    )
    group.add_argument("--no-perf", action="store_true", help="no figures at the end")
    group.add_argument(
        "--check", action="store_true", help="stop at NaN or infinity, and name the op that made it"
    )


def _model(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL} (the first of these)")
    group.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same")
    add_hub(group)
    add_machine(group)
    group.add_argument(
        *("-c", "--ctx-size"),
        type=natural,
        metavar="N",
        help="tokens of context (what the model was trained for, at most 4096); 0 is without that "
        "limit",
    )
    add_cache_types(group)
    add_batch_size(group)


def _prompt(parser: Parser) -> None:
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("-f", "--file", metavar="FILE", help="file of the prompt; - is stdin")
    group.add_argument("-sys", "--system-prompt", metavar="TEXT", help="system message of the chat")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        *("-cnv", "--conversation"),
        dest="chat",
        action="store_true",
        default=None,
        help="chat even if input is piped, a question in each line; -p is the first question",
    )
    mode.add_argument(
        *("-no-cnv", "--no-conversation", "--no-chat"),
        dest="chat",
        action="store_false",
        help="continue the prompt as raw text, without the chat template",
    )
    add_chat_template(group)
    group.add_argument(
        *("-e", "--escape"),
        action=argparse.BooleanOptionalAction,
        default=True,
        help=r"replace \n, \t, ... in -p, -sys, -r and --dry-sequence-breaker (yes)",
    )
    group.add_argument("--verbose-prompt", action="store_true", help="print the prompt's tokens")


def _generation(parser: Parser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        *("-n", "--predict", "--n-predict"),
        type=int,
        default=-1,
        metavar="N",
        help="tokens at most (-1: until the model ends or the context is full); 0 only evaluates "
        "the prompt",
    )
    group.add_argument(
        *("-r", "--reverse-prompt"),
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    add_reasoning(group)
    constraint = group.add_mutually_exclusive_group()
    constraint.add_argument(
        "--grammar",
        metavar="TEXT",
        help="the answer must match this grammar, in GBNF, or in Lark after a line %%llguidance {}",
    )
    constraint.add_argument("--grammar-file", metavar="FILE", help="the same, from a file")
    constraint.add_argument(
        *("-j", "--json-schema"),
        metavar="SCHEMA",
        help="the answer must be JSON that matches this schema, after reasoning if the model does; "
        "{} is any object",
    )
    constraint.add_argument(
        *("-jf", "--json-schema-file"), metavar="FILE", help="the same, from a file"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not let the model end")
    group.add_argument(
        "--context-shift",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="when the context is full: forget its oldest half and go on (no)",
    )
    group.add_argument(
        *("--keep",),
        type=int,
        default=0,
        metavar="N",
        help="--context-shift keeps the first N tokens (0); -1 is the whole prompt",
    )


def _check(parser: Parser, options: argparse.Namespace) -> None:
    if options.chat is False and options.system_prompt is not None:
        parser.error("-sys is part of a chat, which --no-chat turns off: put it into the prompt")
    if options.ignore_eos and any(getattr(options, name) is not None for name in GRAMMARS):
        parser.error("--ignore-eos leaves no token where a grammar is complete: give one of them")
    if options.predict < -2:
        parser.error(f"-n is {options.predict}: give 0 or more, or -1 for no limit")
    if options.keep < -1:
        parser.error(f"--keep is {options.keep}: give 0 or more, or -1 for the whole prompt")
