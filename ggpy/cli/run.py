"""`ggpy run`: open the file, take its tokenizer, choose the ops, load the architecture onto them,
generate, print.

This is the program in one page. Text goes to stdout and nothing else does; what the user should
know besides goes to stderr. What costs time to import is imported when it is needed, so that --help
and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from .. import hub
from ..util.messages import escaped
from ..util.outcome import ended
from ..util.progress import Bar
from . import answer, chat, prompts
from . import options as command_line

if TYPE_CHECKING:
    from ..backends.interface import Ops
    from ..gguf import File
    from ..model import Model
    from ..tokenizer import Tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = command_line.parse(arguments)
    return ended(lambda: run(options), is_bug=lambda error: options.verbose or is_bug(error))


def run(options: argparse.Namespace) -> int:
    """Do what the options say; ValueError, OSError or MemoryError where that cannot be done."""
    if not options.hf_repo:
        hub.find(options.model)  # a wrong name is told before standard input is read
    prompt = prompts.read_prompt(options)
    path = hub.fetch_from_hub(options.hf_repo) if options.hf_repo else hub.resolve(options.model)

    from .. import arch
    from ..backends import choose
    from ..gguf import File
    from ..tokenizer import Tokenizer

    with File(path) as file:
        arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
        tokenizer = Tokenizer.from_gguf(file)
        settings = answer.settings(options, tokenizer)
        chatting = prompt is None or options.chat
        ids = [] if chatting else prompts.single(options, tokenizer, prompt or "")
        conversation = prompts.converse(options, tokenizer) if chatting else None
        kinds = options.batch_invariant, options.activations, options.gemm
        ops = choose(options.device, options.threads, note, *kinds)
        model = load(file, tokenizer, ops, options)
        if conversation:
            talk = chat.Chat(model.engine, conversation, settings, write)
            figures = talk.loop(prompt)
        else:
            figures = continue_text(model, ids, settings, options)
    if not options.no_perf:
        say(*figures.lines(), *answer.memory_lines(ops))
    return 0


def load(file: File, tokenizer: Tokenizer, ops: Ops, options: argparse.Namespace) -> Model:
    """The model on its device, with a bar while that takes time."""
    from .. import arch
    from ..cache_types import CacheTypes
    from ..model import Model

    n_ctx = arch.context_length(file) if options.ctx_size == 0 else options.ctx_size
    say(f"device: {ops.name} ({ops.reason})")
    if options.check:
        from ..backends.check import Checked

        ops = Checked(ops)
    started = time.perf_counter()
    with Bar(f"loading {file.path.name}", file.nbytes / 1e6, "MB") as bar:
        model = Model(
            file,
            tokenizer,
            ops,
            n_ctx=n_ctx or None,
            n_batch=options.batch_size,
            cache_types=CacheTypes(options.cache_type_k, options.cache_type_v),
            progress=lambda done, total: bar.update(done / 1e6),
        )
    say(f"model: {file.path.name}, {file.nbytes / 1e6:.0f} MB in {_since(started)}")
    if options.check:
        model.logits([tokenizer.bos_id or 0])
        note("the model's numbers are finite, and every step's will be looked at, which is slow")
    if model.n_ctx_train and model.n_ctx > model.n_ctx_train:
        note(f"context of {model.n_ctx} tokens, but the model knows {model.n_ctx_train}")
    if options.verbose:
        say(*details(model))
    return model


def details(model: Model) -> list[str]:
    """What -v tells about a model."""
    from ..cache_types import IN_NUMPY, ON_GPU

    kinds: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        kinds[tensor.format.name] = kinds.get(tensor.format.name, 0) + 1
    counts = ", ".join(f"{n} {name}" for name, n in kinds.items())
    cache = model.decoder.cache_shape(1)
    kept = cache.types.resolved(ON_GPU if model.ops.asynchronous else IN_NUMPY)
    cached = cache.n_layer * cache.n_head_kv * kept.nbytes(cache.head_size)
    return [
        f"architecture: {model.file.architecture}, {model.tokenizer.n_vocab} tokens",
        f"tensors: {counts}",
        f"context: {model.n_ctx} tokens; trained for {model.n_ctx_train or 'an unknown number'}",
        f"steps: {model.engine.n_batch} tokens at most",
        f"keys and values: {kept.k} and {kept.v}, {cached} bytes for each position of the context",
        *(f"note: {escaped(warning)}" for warning in model.tokenizer.warnings),
    ]


def continue_text(
    model: Model, ids: list[int], settings: answer.Settings, options: argparse.Namespace
) -> answer.Figures:
    """Generate what follows ids and write it."""
    if options.verbose_prompt:
        say(*(f"{id:7d} {model.tokenizer.piece(id, special=True)!r}" for id in ids))
    only_prompt = settings.max_tokens == 0  # evaluated as if for one token, which is not shown
    if only_prompt:
        settings = answer.Settings(settings.params, max_tokens=1)
    sequence = settings.add(model.engine, ids)
    if options.verbose:
        say(f"seed: {sequence.sampler.seed}")
    figures = answer.stream(model.engine, sequence, (lambda text: None) if only_prompt else write)
    if sys.stdout.isatty() and not only_prompt:
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


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.2f} s"


def program() -> int:
    """`main` of a process: closed streams lead nowhere, and all are UTF-8 whatever LANG says."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (open as long as we run)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    return main()
