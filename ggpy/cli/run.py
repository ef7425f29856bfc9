"""`ggpy run`: read the prompt, open the file, choose the device, load the model, generate, print.

This is the program in one page. Options become values here: nothing that is called sees them. Text
goes to stdout and nothing else does; remarks and figures go to stderr. Modules that take time to
import are imported when they are needed, so that --help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from .. import hub
from ..util.messages import escaped
from ..util.outcome import ended
from ..util.progress import Bar
from . import answer, chat, prompts, sampling_options
from . import options as command_line

if TYPE_CHECKING:
    from ..chat_formats import ReasoningLimit
    from ..generate_options import Form
    from ..gguf import File
    from ..model import Model
    from ..tokenizer import Tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = command_line.parse(arguments)
    return ended(
        lambda: run(options),
        is_bug=lambda error: options.verbose or is_bug(error),
        program=command_line.PROGRAM,
    )


def run(options: argparse.Namespace) -> int:
    """Do what the options say; ValueError, OSError or MemoryError where that cannot be done."""
    if not options.hf_repo:
        hub.find(options.model)  # a wrong name is told before standard input is read
    prompt = prompts.read_prompt(source(options), prompts.MAX_PROMPT)
    path = hub.fetch_from_hub(options.hf_repo) if options.hf_repo else hub.resolve(options.model)

    from .. import arch
    from ..gguf import File
    from ..tokenizer import Tokenizer

    with File(path) as file:
        arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
        tokenizer = Tokenizer.from_gguf(file)
        settings, asked = answer_settings(options, tokenizer), chat_settings(options)
        limit = reasoning_limit(options, asked, tokenizer, settings)
        if limit is not None:
            settings = replace(settings, reasoning=limit)
            asked = replace(asked, variables=limit.variables, closed=limit.closed)
        chatting = prompt is None or options.chat
        ids = [] if chatting else prompts.single(asked, tokenizer, prompt or "")
        conversation = prompts.converse(asked, tokenizer) if chatting else None
        model = load(file, tokenizer, options)
        if conversation:
            talk = chat.Chat(model.engine, conversation, settings, write)
            figures = talk.loop(prompt)
        else:
            figures = continue_text(model, ids, settings, options)
    if not options.no_perf:
        say(*figures.lines(), *answer.memory_lines(model))
    return 0


# Options as values


def source(options: argparse.Namespace) -> prompts.PromptSource:
    """Where the prompt is; escapes are replaced in -p only: a file is meant as it is."""
    text = None if options.prompt is None else spoken(options, options.prompt, "-p")
    return prompts.PromptSource(text, options.file, chat=bool(options.chat))


def chat_settings(options: argparse.Namespace) -> prompts.ChatSettings:
    """What is said about chats; OSError, PromptError, ChatTemplateError for a template."""
    if options.chat is False:
        return prompts.ChatSettings(wanted=False)
    system = options.system_prompt
    system = None if system is None else spoken(options, system, "-sys")
    return prompts.ChatSettings(options.chat, chat_template(options), system)


def chat_template(options: argparse.Namespace) -> str | None:
    """The template that the options name; OSError, PromptError, ChatTemplateError."""
    if options.chat_template_file:
        path = Path(options.chat_template_file)
        return prompts.decode(path.read_bytes(), options.chat_template_file)
    if options.chat_template:
        from ..tokenizer.templates import choose

        return choose(options.chat_template)
    return None


def answer_settings(options: argparse.Namespace, tokenizer: Tokenizer) -> answer.AnswerSettings:
    """What is said about answers; ValueError for a parameter out of range."""
    from ..grammar import Grammars
    from ..sampling import DRY_SEQUENCE_BREAKERS, SamplingParams
    from ..tokenizer.breakers import dry_breakers

    given = sampling_options.sampling(options)
    given["logit_bias"] = dict.fromkeys(tokenizer.end_ids, -inf) if options.ignore_eos else {}
    given["logit_bias"].update(options.logit_bias)
    params = SamplingParams(**given)
    if params.uses_dry:
        texts = options.dry_sequence_breaker or DRY_SEQUENCE_BREAKERS
        texts = [] if "none" in texts else [spoken(options, t, "a breaker") for t in texts]
        params = replace(params, dry_breakers=dry_breakers(texts, tokenizer))
    form, grammars = answer_form(options), Grammars(tokenizer)
    if form is not None:
        grammars.compile(*form)  # so that a mistake is told before the model is loaded
    return answer.AnswerSettings(
        params=params,
        max_tokens=options.predict if options.predict >= 0 else None,
        stop=[spoken(options, text, "-r") for text in options.reverse_prompt],
        context_shift=options.context_shift,
        keep=options.keep,
        form=form,
        compile=grammars.compile,
    )


def answer_form(options: argparse.Namespace) -> Form | None:
    """What an answer must match, if that is given; ValueError, OSError."""
    from ..grammar import kind_and_text

    grammar = prompts.argument_or_file(options.grammar, "--grammar", options.grammar_file)
    schema = prompts.argument_or_file(options.json_schema, "-j", options.json_schema_file)
    if schema is not None and "".join(schema.split()) == "{}":  # as llama.cpp reads it
        return "json_object", ""
    return kind_and_text(grammar, schema)


def reasoning_limit(
    options: argparse.Namespace,
    asked: prompts.ChatSettings,
    tokenizer: Tokenizer,
    settings: answer.AnswerSettings,
) -> ReasoningLimit | None:
    """How the answers of a chat reason, if they have a budget or a form; PromptError for a budget
    without a chat.
    """
    budget = options.reasoning_budget
    if budget < 0 and settings.form is None:
        return None
    from ..chat_formats import ReasoningLimit

    template = prompts.template_of(asked, tokenizer)
    if template is None and budget < 0:
        return None
    if template is None:
        raise prompts.PromptError(
            "--reasoning-budget needs a chat template, which says how the model writes reasoning: "
            "name one with --chat-template, or leave --no-chat away"
        )
    message = spoken(options, options.reasoning_budget_message, "--reasoning-budget-message")
    limit = ReasoningLimit.of(tokenizer, template, budget, message)
    return limit.fitted(settings.form, settings.max_tokens)


def spoken(options: argparse.Namespace, text: str, source: str) -> str:
    """A text of the command line, with escapes replaced if the options say so."""
    text = prompts.decode(text.encode("utf-8", "surrogateescape"), source)
    return command_line.unescape(text) if options.escape else text


# Work


def load(file: File, tokenizer: Tokenizer, options: argparse.Namespace) -> Model:
    """The model on its device, with a bar while that takes time."""
    from .. import arch, model
    from ..backends import choose

    kinds = options.batch_invariant, options.activations, options.gemm
    ops = choose(options.device, options.threads, note, *kinds)
    say(f"device: {ops.name} ({ops.reason})")
    if options.check:
        from ..backends.check import Checked

        ops = Checked(ops)
    started = time.perf_counter()
    n_ctx = arch.context_length(file) if options.ctx_size == 0 else options.ctx_size
    with Bar(f"loading {file.path.name}", file.nbytes / 1e6, "MB") as bar:
        loaded = model.load(
            file,
            ops,
            n_ctx=n_ctx or None,
            n_batch=options.batch_size,
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            n_cpu_moe=command_line.n_cpu_moe(options),
            tokenizer=tokenizer,
            progress=lambda done, total: bar.update(done / 1e6),
            note=note,
        )
    say(f"model: {file.path.name}, {file.nbytes / 1e6:.0f} MB in {since(started)}")
    if options.check:
        loaded.logits([tokenizer.bos_id or 0])
        note("the model's numbers are finite, and every step's will be looked at, which is slow")
    if loaded.n_ctx_train and loaded.n_ctx > loaded.n_ctx_train:
        note(f"context of {loaded.n_ctx} tokens, but the model knows {loaded.n_ctx_train}")
    if options.verbose:
        say(*details(loaded))
    return loaded


def details(model: Model) -> list[str]:
    """What -v tells about a model."""
    from ..cache_types import IN_NUMPY, ON_GPU

    kinds: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        kinds[tensor.format.name] = kinds.get(tensor.format.name, 0) + 1
    counts = ", ".join(f"{n} {name}" for name, n in kinds.items())
    usual = ON_GPU if model.ops.asynchronous else IN_NUMPY
    return [
        f"architecture: {model.file.architecture}, {model.tokenizer.n_vocab} tokens",
        f"tensors: {counts}",
        f"context: {model.n_ctx} tokens; trained for {model.n_ctx_train or 'an unknown number'}",
        f"steps: {model.engine.n_batch} tokens at most",
        *model.engine.cache.describe(usual),
        *(f"note: {escaped(warning)}" for warning in model.tokenizer.warnings),
    ]


def continue_text(
    model: Model, ids: list[int], settings: answer.AnswerSettings, options: argparse.Namespace
) -> answer.Figures:
    """Generate what follows ids and write it, with a newline at its end."""
    if options.verbose_prompt:
        say(*(f"{id:7d} {model.tokenizer.piece(id, special=True)!r}" for id in ids))
    only_prompt = settings.max_tokens == 0  # evaluated as if for one token, which is not shown
    if only_prompt:
        settings = answer.AnswerSettings(settings.params, max_tokens=1)
    sequence = settings.add(model.engine, ids)
    if options.verbose:
        say(f"seed: {sequence.sampler.seed}")
    try:
        show = (lambda text: None) if only_prompt else write
        figures = answer.stream(model.engine, sequence, show)
    finally:  # after Ctrl-C, too: text ends with a newline, which `-f` takes away again
        if sequence.n_generated and not only_prompt:
            write("\n")
    if only_prompt:
        figures.n_generated = 0
    elif sequence.finish == "context":
        note(f"the context of {model.n_ctx} tokens is full: raise -c or use --context-shift")
    return figures


def write(text: str) -> None:
    """Show a piece of an answer now."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def say(*lines: str) -> None:
    """Tell the user something that is not text of the model."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Tell the user something that was not asked for."""
    say(f"note: {message}")


def is_bug(error: Exception) -> bool:
    """Whether an error is neither the user's, nor the device's, nor of numbers that its text
    explains.
    """
    if not isinstance(error, (RuntimeError, ArithmeticError)):
        return False
    from ..backends.check import NotFinite
    from ..device import CompileError, CudaError, NvrtcMissing

    return not isinstance(error, (CompileError, CudaError, NvrtcMissing, NotFinite))


def since(started: float) -> str:
    """Seconds since a time, as a message says them."""
    return f"{time.perf_counter() - started:.2f} s"


def program() -> int:
    """`main` of a process: closed streams lead nowhere, and all are UTF-8 whatever LANG says."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (open as long as we run)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    return main()
