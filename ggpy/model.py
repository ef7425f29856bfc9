"""A model that is loaded and ready: file, tokenizer, backend, decoder and engine in one object.

`load` is the one constructor, for programs that use the library and for the command line. The
thread that takes pieces steps the engine, until a second thread wants to at the same time; from
then on an owner thread steps it for all of them. Nothing here computes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import arch, hub
from .backends import choose
from .backends.interface import Ops
from .cache_types import AUTO, USUAL, CacheTypes
from .chat_formats import ReasoningLimit, mask_and_split
from .generate_options import GenerateKeywords, Limiter, Prompt, chosen_sampling, is_list_of_prompts
from .gguf import File
from .grammar import Grammars, kind_and_text
from .runtime import embedding
from .runtime.embedding import Pooling
from .runtime.engine import Engine, Occupied
from .runtime.runner import Runner
from .runtime.sequence import Piece, checked_length, checked_stops, follow, whole
from .runtime.sequence import Sequence as Answer
from .sampling import SamplingParams
from .sampling.keywords import SamplingKeywords
from .tokenizer import Tokenizer
from .tokenizer.templates import choose as choose_template

if TYPE_CHECKING:
    from typing import Unpack  # of Python 3.11

DEFAULT_CONTEXT = 4096  # tokens, where neither the caller nor the model asks for fewer
DEFAULT_MAX_TOKENS = 512


class Model:
    """An open model; `load` makes one.

    >>> import ggpy
    >>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
    ...     answer = "".join(map(str, model.generate("hello", max_tokens=4)))

    Its parts: `file`, `tokenizer`, `ops` (the backend), `decoder`, `engine`, `grammars`. `n_ctx`:
    the context in tokens. `n_ctx_train`: the context that the model was trained for, 0 if the file
    has none.

    Threads: any number of threads may call `generate`, `chat`, `logits` and `close` of one model at
    the same time. Each thread gets its own pieces and its own errors; up to `n_seq` texts are
    evaluated together, and more wait. Only one thread at a time may iterate one generator. `close`
    ends the generators of all threads with a RuntimeError. On a GPU the other texts of a batch may
    change the last bits of logits: `batch_invariant` of `ggpy.backends.choose` prevents that.
    """

    def __init__(
        self,
        file: File,
        tokenizer: Tokenizer,
        ops: Ops,
        *,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_seq: int = 1,
        n_positions: int | None = None,
        prefill_tokens: int | None = None,
        prefix_cache: bool = False,
        progress: Callable[[int, int], None] | None = None,
        cache_types: CacheTypes = USUAL,
        n_cpu_moe: int = 0,
    ) -> None:
        self.file, self.tokenizer, self.ops = file, tokenizer, ops
        self.n_ctx_train = arch.context_length(file)
        self.n_ctx = n_ctx or min(self.n_ctx_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        sizes: dict[str, Any] = {"n_batch": n_batch, "n_seq": n_seq, "cache_types": cache_types}
        sizes |= {"n_positions": n_positions, "n_cpu_moe": n_cpu_moe}
        self.decoder = arch.load(file, ops, self.n_ctx, progress, **sizes)
        self.engine = Engine(
            self.decoder,
            ops,
            tokenizer,
            self.n_ctx,
            self.decoder.n_batch,
            n_seq,
            n_positions=n_positions,
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
        )
        self.grammars = Grammars(tokenizer)
        self._runner: Runner | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        kind, where = self.metadata["general.architecture"], self.ops.name
        return f"<Model {self.file.path.name}: {kind}, {self.n_ctx} tokens of context, {where}>"

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata, as in `File.metadata`; long arrays of strings are sequences."""
        return self.file.metadata

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """logits[T, V] after each of ids[T]; ValueError for none, or more than the context holds.

        >>> import ggpy
        >>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
        ...     model.logits(model.tokenizer.encode("hello world")).shape
        (3, 453)
        """
        return self.engine.logits(ids)

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None
    ) -> NDArray[np.float32]:
        """Embeddings [N, D] of N texts, each of length 1: their dot products are cosines.

        >>> import ggpy
        >>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
        ...     x = model.embed(["hello", "hello world", "goodbye"])
        >>> x.shape
        (3, 64)
        >>> [f"{cosine:.2f}" for cosine in x @ x[0]]
        ['1.00', '0.15', '0.02']

        texts: one or a list, as for `generate`. pooling: which hidden states are averaged, "mean",
        "last" or "cls" (the first); None is the model's own, or "last". Errors: `embedding.embed`.
        """
        prompts = [self._ids(x) for x in (texts if is_list_of_prompts(texts) else [texts])]
        own = embedding.pooling_of(self.metadata) if pooling is None else pooling
        return embedding.embed(self.engine, prompts, own)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Iterable[str] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        context_shift: bool = False,
        n_keep: int = 0,
        params: SamplingParams | None = None,
        grammar: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        reasoning: Limiter | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[Piece, None, None]:
        """Continue a prompt, or each of a list: an iterator of pieces, one for each token.

        >>> import ggpy
        >>> model = ggpy.load("models/tiny/llama.gguf", device="cpu", n_seq=2)
        >>> text = ""
        >>> for piece in model.generate("hello", max_tokens=8, temperature=0):
        ...     text += piece.text
        >>> piece.finish_reason
        'length'

        prompt: a text or ids of tokens, or a list of these. A text gets the model's beginning
        token, and its special tokens are read as such; ids are taken as they are. The prompts of a
        list are evaluated together, up to `n_seq` of `load` at a time. The iterator yields their
        pieces as they are made, with `piece.index` for the place of the prompt in the list. It does
        not return a list of texts, so that one loop streams one prompt or many.

        >>> texts = ["", ""]
        >>> for piece in model.generate(["hello", "world"], max_tokens=8, temperature=0):
        ...     texts[piece.index] += piece.text
        >>> texts[0] == text
        True

        max_tokens: for each prompt, 512 unless given; None goes on until the model ends the text or
        the context is full.
        stop: a text or several; the answer ends before the first of them.
        logprobs: pieces have a `logprob`.
        top_logprobs: pieces have a `logprob`, and `top_logprobs` of so many tokens. Log
        probabilities are the model's own, before the sampler chain, as OpenAI's and llama.cpp's
        are. A GPU then waits for each token before the next step.
        context_shift: when the context is full, forget the older half of what follows the first
        n_keep tokens, and go on.
        params: sampling parameters; keywords (temperature=0, seed=1, ...) replace single ones.
        grammar: GBNF, llama.cpp's notation, that the whole answer must match.
        json_schema: a JSON schema instead, as a dict or as a text. What of a schema cannot be
        enforced is refused. Both need `pip install 'ggpy[grammar]'`.
        reasoning: how answers to prompts of a chat reason; `chat` takes a number.

        >>> "".join(map(str, model.generate("hello", grammar='root ::= "yes" | "no"', seed=1)))
        'no'
        >>> "".join(map(str, model.generate("hello", json_schema={"enum": [["a"]]}, seed=1)))
        '["a"]'

        >>> (piece,) = model.generate("hello", max_tokens=1, temperature=0, top_logprobs=2)
        >>> [(best.text, round(best.logprob, 2)) for best in piece.top_logprobs]
        [('h', -3.27), ('d', -3.48)]

        The call checks its arguments: ValueError for a wrong one, TypeError for an unknown one,
        ContextOverflow for a prompt that does not fit, RuntimeError after `close`. Evaluation
        starts when the first piece is asked for. The iterator raises later errors: ValueError for
        logits from which no token can be chosen, and errors of the device. An error of one prompt
        is raised when the other prompts of the list are complete. Leaving the loop, or `close` of
        the iterator, ends the generation.

        >>> model.close()
        """
        options: dict[str, Any] = {"max_tokens": checked_length(max_tokens)}
        options |= {"stop": checked_stops(stop), "logprobs": logprobs, "top_logprobs": top_logprobs}
        options |= {"context_shift": context_shift, "n_keep": n_keep}
        chosen = chosen_sampling(params, sampling)
        form = kind_and_text(grammar, json_schema)
        limit = reasoning and reasoning.fitted(form, max_tokens)
        several, sequences = is_list_of_prompts(prompt), list[Answer]()
        prompts: Any = prompt if several else [prompt]
        for i, one in enumerate(prompts):
            try:
                ids = self._ids(one)
                mask, split = mask_and_split(ids, form, limit, self.grammars.compile)
                options |= {"grammar": mask, "special": split is not None}
                sequences.append(self.engine.prepare(ids, chosen, **options))
            except ValueError as error:
                if several:
                    error.args = (f"prompt {i} of the list: {error}",)
                raise
            sequences[-1].index, sequences[-1].split = i, split
        return self._pieces(sequences)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        chat_template: str | None = None,
        reasoning_budget: int = -1,
        reasoning_budget_message: str = "",
        **options: Unpack[GenerateKeywords],
    ) -> Generator[Piece, None, None]:
        """Answer a conversation: an iterator of pieces, one for each token.

        >>> import ggpy
        >>> messages = [
        ...     {"role": "system", "content": "Be brief."},
        ...     {"role": "user", "content": "hello"},
        ... ]
        >>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
        ...     answer = "".join(map(str, model.chat(messages, max_tokens=8, temperature=0)))
        >>> messages.append({"role": "assistant", "content": answer})

        messages: dicts with "role" ("system", "user" or "assistant") and "content", the oldest
        first. The model's chat template, a Jinja program that runs in a sandbox, makes a prompt of
        them.
        chat_template: another template: a name ("chatml", "llama3", ...), Jinja, or a file.
        reasoning_budget: tokens of reasoning at most; then the model is made to say the
        reasoning_budget_message, and to answer. -1 is no limit, 0 is no reasoning.
        options: those of `generate`. A json_schema holds after reasoning, which has half of
        max_tokens at most and is in `reasoning` of the pieces; with a grammar there is none.

        Raises what `generate` raises; ValueError for messages of another form; ChatTemplateError, a
        ValueError, for a model without a template, and for a template that fails or refuses the
        messages.
        """
        template = None if chat_template is None else choose_template(chat_template)
        form = kind_and_text(options.get("grammar"), options.get("json_schema"))
        free = form is None or options.get("reasoning") is not None
        if whole("reasoning_budget", reasoning_budget, least=-1) < 0 and free:
            rendered = self.tokenizer.apply_chat_template(messages, template)
            return self.generate(self.tokenizer.encode_chat(rendered), **options)
        asked = reasoning_budget, reasoning_budget_message
        n = checked_length(options.get("max_tokens", DEFAULT_MAX_TOKENS))
        limit = ReasoningLimit.of(self.tokenizer, template, *asked).fitted(form, n)
        options["reasoning"] = limit
        return self.generate(limit.prompt(messages), **options)

    def _ids(self, prompt: Any) -> Sequence[int]:
        """The ids of one prompt; the engine checks those that were given."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True)
        if isinstance(prompt, Mapping):
            raise ValueError(f"{prompt!r:.60} is a message: give messages to chat, not to generate")
        return prompt

    def _pieces(self, sequences: list[Answer]) -> Generator[Piece, None, None]:
        """The pieces of sequences that are begun now, and that end with the generator."""
        try:
            for sequence in sequences:
                self.engine.begin(sequence)
            yield from follow(sequences, self._advance(sequences))
        finally:
            for sequence in sequences:
                self.engine.release(sequence)

    def _advance(self, sequences: list[Answer]) -> Callable[[], None]:
        """Returns a function that makes the next pieces, or waits for the thread that does."""
        wait: Callable[[], None] | None = None

        def advance() -> None:
            nonlocal wait
            if wait is None and self._runner is None:
                try:
                    self.engine.step()
                    return
                except Occupied:
                    pass
            wait = wait or self._start_runner().waiter(*sequences)
            wait()

        return advance

    def _start_runner(self) -> Runner:
        """The owner thread, from now on the only one that steps."""
        with self._starting:
            if self._runner is None:
                self._runner = Runner(self.engine)
                weakref.finalize(self, self._runner.close)  # a model is forgotten, or Python ends
            return self._runner

    def close(self) -> None:
        """End all generators with a RuntimeError and close the file; again, it does nothing."""
        self.engine.close()
        if self._runner is not None:
            self._runner.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    path: str | os.PathLike[str] | File,
    device: str | Ops = "auto",
    *,
    n_ctx: int | None = None,
    n_batch: int | None = None,
    n_seq: int = 1,
    n_positions: int | None = None,
    prefill_tokens: int | None = None,
    prefix_cache: bool = False,
    n_threads: int | None = None,
    cache_type_k: str = AUTO,
    cache_type_v: str = AUTO,
    n_cpu_moe: int = 0,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Model:
    """Open a GGUF model and put its weights on a device.

    >>> import ggpy
    >>> with ggpy.load("models/tiny/llama.gguf", device="cpu", n_ctx=64) as model:
    ...     model
    <Model llama.gguf: llama, 64 tokens of context, cpu>

    path: a path; or a known model ("smollm2"), fetched once; or a `File`, which the model closes.
    device: "auto" (a GPU if there is a usable one), "cpu", "numpy", "cuda" or "cuda:N"; or the
    result of `ggpy.backends.choose`, which has more options.
    n_ctx: tokens of context for each of n_seq sequences; None is the model's, at most 4096.
    n_batch: tokens in a step at most; None is 2048 on a GPU with room for that, else 512.
    n_seq: sequences in a step at most; more wait. n_threads: of the CPU.
    n_positions: positions of the KV cache, which all sequences share; None is n_ctx for each. When
    they run out, the youngest sequence waits and is evaluated again.
    prefill_tokens: tokens at most of a step with prompts in which other sequences go on, so that
    these keep their pace; None is n_batch.
    prefix_cache: keep the pages of ended sequences for prompts that begin alike.
    cache_type_k, cache_type_v: types of the KV cache, "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0",
    "q4_1" or "q4_0"; "auto" is f16 on a GPU and f32 on the CPU.
    n_cpu_moe: on a GPU, the experts of the first N layers stay in the host's memory (999: of all).
    tokenizer: the file's, for a caller that has it already.
    progress(done, total): is called with bytes of weights. note(message): with remarks.

    Raises FileNotFoundError for a path that does not exist, GGUFError for a damaged or unsupported
    file, HubError for a model that cannot be fetched, MemoryError when the context does not fit,
    ValueError for a device that cannot be used and for a wrong argument.
    """
    counts = {"n_ctx": n_ctx, "n_batch": n_batch, "n_seq": n_seq, "n_threads": n_threads}
    counts |= {"n_positions": n_positions, "prefill_tokens": prefill_tokens}
    for name, value in {**counts, "n_cpu_moe": n_cpu_moe}.items():
        if value is not None:
            whole(name, value, least=int(name in counts))
    cache_types = CacheTypes(cache_type_k, cache_type_v)
    file = path if isinstance(path, File) else File(hub.path_of(path))
    try:
        arch.find(file)  # first of all: another architecture's tokenizer may be unknown as well
        tokenizer = tokenizer or Tokenizer.from_gguf(file)
        file.pack_strings(tokenizer.tokens)  # which has read them
        if isinstance(device, (str, int)):  # a number, which torch takes, is refused there
            device = choose(str(device), n_threads, note)
        sizes: dict[str, Any] = {k: n for k, n in counts.items() if k != "n_threads"}
        sizes |= {"prefix_cache": prefix_cache, "n_cpu_moe": n_cpu_moe}
        model = Model(file, tokenizer, device, **sizes, progress=progress, cache_types=cache_types)
        arch.remark_offload(model.decoder.sizes, n_cpu_moe, note)
        return model
    except BaseException:
        file.close()
        raise
