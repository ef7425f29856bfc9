"""One loaded model as the APIs see it: requests in, events out.

Renders conversations, encodes prompts, hands sequences to the engine's thread and turns their
pieces into events. Nothing here knows HTTP or the form of any API.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..chat_formats import ChatFormat, can_write, detect, reasoning_budget, with_written_calls
from ..grammar import GrammarError, GrammarUntried
from ..model import Model
from ..runtime.embedding import EUCLIDEAN
from ..runtime.sequence import ContextOverflow
from ..sampling import SamplingParams
from ..sampling.params import MASK64, without_bans
from ..sampling.reasoning import UNLIMITED
from ..tokenizer import Tokenizer
from ..tokenizer.chat import form_of
from ..tokenizer.message_form import TemplateForm
from ..tokenizer.renderer import MOST_BUSY
from ..util.messages import utf8
from .answers.answer import Answering
from .answers.constraints import ChatConstraints, limited, schemas
from .answers.merge import cancel_all
from .answers.vectors import Vectors
from .answers.worker import EngineWorker, Full, Ticket
from .api.native import Infill
from .api.prompts import Prompt, tokens_of
from .errors import RETRY_AFTER, ApiError, overflow_error
from .events import AnswerOptions, ChatRequest, Constraint
from .fields import Fields
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..sampling import ReasoningBudget, TokenMask

LONG_TEXT = 2000  # characters, or tokens, from which work on them leaves the event loop

Result = TypeVar("Result")

# Of their own: in a common pool of threads, what takes a microsecond waits for all that is slow.
_RENDERING = ThreadPoolExecutor(MOST_BUSY, "ggpy templates")
_COMPILING = ThreadPoolExecutor(1, "ggpy grammars")


class ModelService:
    """A model, its chat template and format, and the thread that runs its engine."""

    def __init__(self, model: Model, settings: ServerSettings, worker: EngineWorker) -> None:
        self.model, self.settings, self.worker = model, settings, worker
        self.tokenizer, self.engine = model.tokenizer, model.engine
        self.own_template = settings.chat_template or None  # instead of the model's
        self.template = self.own_template or model.tokenizer.chat_template
        self.format = self._chat_format()
        self._markers = self.format.control_markers(model.tokenizer)
        self.format = self.format.fitted(self._markers)
        form = _form(self.template)
        self.takes_system = form is not None and form.knows_system
        form = _form(self.own_template or self.tokenizer.tool_template or self.template)
        self._in_text = form is not None and not form.knows_calls and can_write(self.format)
        self._constraints = ChatConstraints(self.format, self._markers, self.template)
        self.infill = Infill(model.tokenizer)
        self.created = int(time.time())
        self._vectors = Vectors(model, worker, settings.pooling)

    @property
    def model_name(self) -> str:
        """The model as answers name it."""
        return (*self.settings.aliases, utf8(self.model.file.path.stem))[0]

    def sampling_defaults(self) -> SamplingParams:
        """The parameters of requests that give none."""
        return self.settings.sampling

    def check_model(self, name: str | None) -> None:
        """Any name is accepted, as llama-server does: there is one model."""

    # Answers

    async def chat_all(self, request: ChatRequest, client: str, n: int = 1) -> list[Answering]:
        """Begin n answers to a conversation; ApiError where that is impossible.

        client: who asks; clients take turns, and only requests of one client share cached pages.
        """
        request = self._checked(request)
        rendered = await self._render(request)
        ids = await self._encoded(rendered)
        opened = self.format.opens_reasoning(rendered)
        either = self._constraints.call_or_json(request, opened)
        constraint = self._constraints.of(request, opened)
        answers: list[Answering] = []
        with _all_or_none(answers):
            for options in _seeded(self._timed(request.options), n):
                parser = self.format.parser(
                    tools=schemas(request.tools) or None,
                    reasoning=request.reasoning,
                    reasoning_open=opened,
                )
                grammar = await self._chat_mask(either, constraint, request.options.constraint)
                budget = self._budget(request, opened, grammar)
                ticket = self._begin(ids, options, client, grammar, bool(self._markers), budget)
                answers.append(
                    Answering(
                        ticket,
                        options,
                        self.tokenizer,
                        parser,
                        short_ids=self.format.name == "mistral",
                        one_call=not request.parallel_tool_calls,
                    )
                )
        return answers

    async def complete_all(
        self, prompts: Sequence[Prompt], options: AnswerOptions, client: str, n: int
    ) -> list[Answering]:
        """Begin n answers for each of some texts, or ids, continued as they are; ApiError."""
        answers: list[Answering] = []
        with _all_or_none(answers):
            for prompt in prompts:
                ids = await self._ids(prompt)
                for seeded in _seeded(self._timed(options), n):
                    grammar = await self._mask(options.constraint)
                    ticket = self._begin(ids, seeded, client, grammar)
                    answers.append(Answering(ticket, seeded, self.tokenizer))
        return answers

    async def count_chat_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that a conversation becomes."""
        return len(await self._encoded(await self._render(self._checked(request))))

    async def render(self, request: ChatRequest) -> str:
        """The prompt that a conversation becomes."""
        return await self._render(self._checked(request))

    async def embed(
        self, inputs: Sequence[Prompt], client: str, norm: int = EUCLIDEAN
    ) -> list[tuple[NDArray[np.float32], int]]:
        """As `Vectors.embed`."""
        return await self._vectors.embed(inputs, norm)

    async def relevance(
        self, query: str, documents: Sequence[str], client: str
    ) -> list[tuple[float, int]]:
        """(relevance, tokens) of each document; ApiError."""
        return await self._vectors.relevance(query, documents)

    def _begin(
        self,
        ids: Sequence[int],
        options: AnswerOptions,
        client: str,
        grammar: TokenMask | None,
        special: bool = False,
        budget: ReasoningBudget | None = None,
    ) -> Ticket:
        """Hand a sequence to the engine's thread. budget: asks the grammar itself."""
        ends = () if grammar is None else self.tokenizer.end_ids
        params = without_bans(options.params, ends)
        try:
            sequence = self.engine.prepare(
                ids,
                params,
                max_tokens=options.max_tokens,
                stop=options.stop,
                logprobs=options.top_logprobs is not None,
                top_logprobs=options.top_logprobs or 0,
                client=client,
                salt=hashlib.blake2b(client.encode()).digest(),
                cache=options.cache_prompt and self.settings.cache_prompt,
                grammar=budget or grammar,
                special=special,
            )
            sequence.post_sampling = options.post_sampling
            return self.worker.submit(sequence)
        except ContextOverflow as error:
            raise context_error(error) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except (Full, RuntimeError) as error:
            raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None

    # Prompts

    async def aside(self, work: Callable[[Fields, Tokenizer], Result], body: Fields) -> Result:
        """What work returns; a long text, or list of tokens, is worked on in another thread."""
        sizes = [len(v) for v in body.values.values() if isinstance(v, (str, list))]
        return await _aside(max(sizes, default=0), work, body, self.tokenizer)

    async def _ids(self, prompt: Prompt) -> Sequence[int]:
        parts = [prompt] if isinstance(prompt, str) else prompt
        size = sum(len(part) for part in parts if isinstance(part, str))
        return await _aside(size, tokens_of, prompt, self.tokenizer)

    async def _encoded(self, rendered: str) -> list[int]:
        return await _aside(len(rendered), self.tokenizer.encode_chat, rendered)

    async def _render(self, request: ChatRequest) -> str:
        if self.template is None:
            raise ApiError(
                400,
                "this model has no chat template: start the server with --chat-template, or use "
                "/v1/completions",
            )
        messages, begun = request.messages, ""
        if request.continues:
            messages, begun = _begun(messages)
        if self._in_text:
            messages = with_written_calls(messages, self.format)
        try:
            render = partial(
                self.tokenizer.apply_chat_template,
                tools=request.tools or None,
                variables=request.template_variables,
                add_generation_prompt=request.generation_prompt or bool(begun),
            )
            rendered = await _in(_RENDERING, render, messages, self.own_template)
        except ValueError as error:  # ChatTemplateError is one
            raise ApiError(400, str(error), param="messages") from None
        if (begun and self.format.reasoning_close not in begun) or self._is_plain(request):
            rendered = self.format.without_reasoning(rendered)
        return rendered + begun

    def _is_plain(self, request: ChatRequest) -> bool:
        """Whether an answer must have no reasoning, even if the template opens it by all means."""
        return not (request.may_think and self._constraints.allow_reasoning(request))

    def _timed(self, options: AnswerOptions) -> AnswerOptions:
        """The options, with the server's limit of time where they have none."""
        if options.timeout is not None or self.settings.deadline is None:
            return options
        return replace(options, timeout=self.settings.deadline)

    def _checked(self, request: ChatRequest) -> ChatRequest:
        """The request as it is answered: without tools that may not be called, with the server's
        template variables and budget of reasoning, and with instructions where the template says
        nothing of tools.
        """
        variables: dict[str, Any] = dict(self.settings.template_variables)
        request = limited(request, self.settings)
        asked = replace(request, template_variables=variables | dict(request.template_variables))
        if request.reasoning_budget == 0 or not self._constraints.allow_reasoning(asked):
            variables["enable_thinking"] = False
        elif request.reasoning_budget > 0:
            variables.setdefault("thinking_budget", request.reasoning_budget)
        tools = () if request.tool_choice == "none" else request.tools
        messages = request.messages
        if tools and (told := self.format.instructions(tools)):
            messages = with_instructions(messages, told)
        given = request.template_variables
        variables |= given
        if "reasoning_effort" in variables:  # templates have two names for it
            variables.setdefault("reasoning_strength", variables["reasoning_effort"])
        return replace(request, messages=messages, tools=tools, template_variables=variables)

    # Constraints

    def _budget(
        self, request: ChatRequest, opened: bool, grammar: TokenMask | None
    ) -> ReasoningBudget | None:
        """What ends the reasoning of an answer; None where nothing does, or where there is none,
        because a grammar holds from the first token on.
        """
        limit, allowed = request.reasoning_budget, self._constraints.allow_reasoning(request)
        if not allowed or (limit < 0 and not request.reasoning_control):
            return None
        return reasoning_budget(
            self.format,
            self.tokenizer,
            limit if limit >= 0 else UNLIMITED,
            request.reasoning_message or "",
            opened=opened,
            mask=grammar,
        )

    async def _chat_mask(
        self, either: Constraint | None, constraint: Constraint | None, given: Constraint | None
    ) -> TokenMask | None:
        """The mask of an answer to a conversation: of `either`, if that is given and supported.
        given: what `constraint` was made of, whose errors are told in its own terms.
        """
        if either is not None:
            with suppress(ApiError):  # a tool's schema is not supported: there are no calls then
                return await self._mask(either)
        try:
            return await self._mask(constraint)
        except ApiError:
            if given is not constraint:
                await self._mask(given)
            raise

    async def _mask(self, constraint: Constraint | None) -> TokenMask | None:
        if constraint is None:
            return None
        grammars, given = self.model.grammars, (constraint.kind, constraint.text)
        try:
            known = grammars.known(*given)
            return known or await _in(_COMPILING, grammars.compile, *given)
        except GrammarUntried as error:
            raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
        except GrammarError as error:
            raise ApiError(400, str(error), param=constraint.param) from None

    # The model

    def _chat_format(self) -> ChatFormat:
        """How the model writes tool calls and reasoning."""

        def render(
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]] | None = None,
            variables: Mapping[str, Any] | None = None,
        ) -> str:
            return self.tokenizer.apply_chat_template(
                messages, self.own_template, tools=tools, variables=variables
            )

        return detect(render, self.settings.tool_format)


def _form(template: str | None) -> TemplateForm | None:
    """What a chat template wants; None where there is none, or it cannot be rendered."""
    try:
        return None if template is None else form_of(template)
    except ValueError:
        return None


async def _in(pool: Executor, work: Callable[..., Result], *args: Any) -> Result:
    """What work(*args) returns in a thread of the pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)


async def _aside(size: int, work: Callable[..., Result], *args: Any) -> Result:
    """What work(*args) returns, in another thread if its input has LONG_TEXT characters or more."""
    return work(*args) if size < LONG_TEXT else await asyncio.to_thread(work, *args)


def with_instructions(messages: Sequence[Mapping[str, Any]], told: str) -> list[Mapping[str, Any]]:
    """The messages with a text in their system message, which is the first."""
    first, *rest = messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


def _begun(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages to render, and the text of a last assistant message, which the answer goes on
    with.
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) < 2:
        return messages, ""
    return messages[:-1], last["content"] or ""


def _seeded(options: AnswerOptions, n: int) -> Iterator[AnswerOptions]:
    """The options of n answers, whose seeds differ."""
    seed = options.params.seed
    for i in range(n):
        yield options if seed < 0 or not i else _with_seed(options, (seed + i) & MASK64)


def _with_seed(options: AnswerOptions, seed: int) -> AnswerOptions:
    return replace(options, params=replace(options.params, seed=seed))


@contextmanager
def _all_or_none(answers: list[Answering]) -> Iterator[None]:
    """If one answer cannot begin, those before it are cancelled."""
    try:
        yield
    except BaseException:
        cancel_all(answers)
        raise


def context_error(error: ContextOverflow) -> ApiError:
    """A prompt that is longer than the context."""
    told = (
        f"the prompt has {error.n_prompt} tokens, and the context {error.n_ctx}: shorten it, or "
        "start the server with a larger --ctx-size"
    )
    return overflow_error(error.n_prompt, error.n_ctx, told)
